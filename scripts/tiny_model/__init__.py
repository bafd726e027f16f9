# SPDX-License-Identifier: Apache-2.0
"""Parts of `make_tiny_model.py`, which trains a tiny checkpoint of a released model family.

Without torch:

- `facts.py`, `forms.py`: facts that the model is taught, and answers in a given form.
- `conversations.py`: how questions are asked: frames, turns, system lines.
- `family.py`: the interface of a model family.
- `settings.py`: all numbers of the recipe.
- `cache.py`: the manifest, which states whether a directory is complete and made by these sources.

With torch:

- `llada.py`, `dream.py`, `llada_moe.py`, `llada2.py`, `llada21.py`, `llada22.py`, `sdar.py`,
  `fast_dllm.py`, `nemotron.py`, `idlm.py`, `diffusion_gemma.py`: the families, each with its
  configuration, network and chat template.
- `decoder.py`: the transformer that all families except LLaDA share.
- `layers.py`: parts that all networks share.
- `tokenizer.py`: files of a byte-level BPE tokenizer.
- `training.py`: masked-diffusion training, the same for every family.
- `moves.py`: answers with missing and additional tokens.
- `decoding.py`: the families' own decoding loops, which verify the result.
- `verification.py`: the share of right answers of a written checkpoint.
- `checkpoint.py`: safetensors shards and JSON files of a checkpoint directory.
- `making.py`: writes a whole checkpoint directory.
"""
