# SPDX-License-Identifier: Apache-2.0
"""Tokenizers whose released files name a class in the checkpoint's own repository."""

from __future__ import annotations

from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from vllm.diffusion.models.config import DiffusionConfig


class DreamTokenizer(Qwen2Tokenizer):
    """Dream's tokenizer: Qwen2's byte-level BPE after NFC, with more special tokens.

    Released checkpoints have `vocab.json` and `merges.txt` but no `tokenizer.json`. Their
    `tokenizer_config.json` lists their special tokens and names this class.
    """


def register() -> None:
    """Register our tokenizer classes, with and without `trust_remote_code`.

    transformers requires a configuration class for a tokenizer. It prefers a registered class over
    the checkpoint's own code only if the checkpoint's configuration class has no tokenizer of its
    own. So the base class is registered, whose name no checkpoint has.
    """
    AutoTokenizer.register(DiffusionConfig, tokenizer_class=DreamTokenizer, exist_ok=True)
