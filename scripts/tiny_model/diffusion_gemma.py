# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of DiffusionGemma (Google DeepMind 2026), without a network to train.

Configuration keys follow the released 26B-A4B. The chat template has its turns of text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiny_model.family import CheckpointFormat, SpecialTokens

if TYPE_CHECKING:
    from tiny_model.family import TokenIds

SPECIAL_TOKENS = SpecialTokens(
    bos="<bos>",
    eos="<eos>",
    mask="<mask>",  # a token of the vocabulary that canvases do not contain
    others=("<pad>", "<|turn>"),
    eot="<turn|>",
    names_mask=False,
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn>' + message['role'].replace('assistant', 'model') + '\n' }}"
    "{{ message['content'] + '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)


def config(tokens: TokenIds) -> dict[str, Any]:
    """Return the contents of config.json; the keys of the text model are at its top level."""
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "bos_token_id": tokens.bos,
        "canvas_length": 256,
        "eos_token_id": tokens.eos,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 262144,
        "model_type": "diffusion_gemma",
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True,
        "vocab_size": tokens.vocab_size,
    }


FORMAT = CheckpointFormat(
    name="diffusion-gemma",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    config=config,
    lists_eot=True,
)
