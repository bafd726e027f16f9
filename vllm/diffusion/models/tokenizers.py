# SPDX-License-Identifier: Apache-2.0
"""Tokenizers whose released files name a class of their own repository."""

from __future__ import annotations

from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from vllm.diffusion.models.config import DiffusionConfig


class DreamTokenizer(Qwen2Tokenizer):
    """Dream's tokenizer: Qwen2's byte-level BPE after NFC, with more special tokens.

    Released checkpoints have `vocab.json` and `merges.txt` but no `tokenizer.json`, list their
    special tokens in `tokenizer_config.json`, and name this class there.
    """


def register() -> None:
    """Make transformers find our classes by name, with and without `trust_remote_code`.

    transformers requires a configuration class for a tokenizer. It prefers a registered class to
    the checkpoint's own code only where the checkpoint's configuration class has no tokenizer of
    its own, so the base class is given, whose name no checkpoint has.
    """
    AutoTokenizer.register(DiffusionConfig, tokenizer_class=DreamTokenizer, exist_ok=True)
