# SPDX-License-Identifier: Apache-2.0
"""Tokenizer files of a tiny model: byte-level BPE whose merges are learnt from the facts.

The alphabet holds all 256 bytes, so any text round-trips; a word of the facts is one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny_model.checkpoint import write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from tiny_model.conversations import Conversation
    from tiny_model.family import SpecialTokens

# Runs of line feeds, words and numbers with their leading space, punctuation, other white space.
_PIECES = Regex(r"\n+| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s")
# More than the facts can use, so merging continues until every word is one token.
_MAX_VOCAB_SIZE = 16384


def train_tokenizer(texts: Iterable[str], special_tokens: SpecialTokens) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `special_tokens` after the ordinary tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MAX_VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(special_tokens.in_order()))
    return tokenizer


def write_tokenizer(
    directory: Path,
    tokenizer: Tokenizer,
    special_tokens: SpecialTokens,
    chat_template: str,
    max_length: int = 4096,
) -> None:
    """Write the three files that `AutoTokenizer.from_pretrained` reads.

    transformers warns about texts of more than `max_length` tokens.
    """
    named = {
        "bos_token": special_tokens.bos,
        "eos_token": special_tokens.eos,
        "mask_token": special_tokens.mask if special_tokens.names_mask else None,
        "pad_token": special_tokens.eos,
    }
    roles = {role: token for role, token in named.items() if token is not None}
    settings: dict[str, Any] = {
        **roles,
        "additional_special_tokens": [
            token for token in special_tokens.in_order() if token not in roles.values()
        ],
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", settings)
    write_json(directory / "special_tokens_map.json", roles)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `directory`, with the class that its files name."""
    from transformers import PreTrainedTokenizerFast

    # AutoTokenizer would read config.json first, and warn about an unknown model type.
    return cast("PreTrainedTokenizerBase", PreTrainedTokenizerFast.from_pretrained(directory))


def first_of_word(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return for each token the first token that is the same word: [V] int64.

    Words are equal if they differ only in case and a space before them. A token that is not a word
    of letters or digits is mapped to itself.
    """
    first: dict[str, int] = {}
    words = (tokenizer.decode([token]).strip().lower() for token in range(len(tokenizer)))
    return torch.tensor(
        [
            first.setdefault(word, token) if word.isalnum() else token
            for token, word in enumerate(words)
        ]
    )


def prompts_of(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation]
) -> list[list[int]]:
    """Return the token ids of the conversations, with the generation prompt.

    A plain conversation has only the ids of its question. The beginning of an answer that is on the
    canvas from the start counts as prompt.
    """
    texts = [
        conversation.question
        if conversation.is_plain
        else tokenizer.apply_chat_template(
            list(conversation.messages), add_generation_prompt=True, tokenize=False
        )
        for conversation in conversations
    ]
    begun = [conversation.begun for conversation in conversations]
    ids, begun_ids = (
        cast("list[list[int]]", tokenizer(part, add_special_tokens=False)["input_ids"])
        for part in (texts, begun)
    )
    return [prompt + beginning for prompt, beginning in zip(ids, begun_ids, strict=True)]
