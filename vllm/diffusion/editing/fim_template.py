# SPDX-License-Identifier: Apache-2.0
"""Prompts that contain the text before and after a gap, for models that read no suffix."""

from __future__ import annotations

from typing import Any

from vllm.diffusion.core.errors import InvalidParameterError

# Names of the tokens before the prefix, the suffix and the gap, as tokenizers have them.
_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)


def in_template(prompt: Any, suffix: str, tokenizer: Any) -> str | list[str]:
    """Return prompts in the order prefix, suffix, middle, so that the answer fills the gap.

    Raises:
        InvalidParameterError: the tokenizer has no such tokens, or a prompt is not a text.
    """
    names = next((names for names in _TOKENS if _has_all(names, tokenizer)), None)
    if names is None:
        wanted = f"wanted a tokenizer with {', '.join(_TOKENS[0][:-1])} and {_TOKENS[0][-1]}"
        raise InvalidParameterError("fim_template", True, wanted)
    if isinstance(prompt, list) and all(isinstance(one, str) for one in prompt):
        return [_joined(names, one, suffix) for one in prompt]
    if not isinstance(prompt, str):
        raise InvalidParameterError("prompt", prompt, "wanted a text with fim_template")
    return _joined(names, prompt, suffix)


def _joined(names: tuple[str, ...], prompt: str, suffix: str) -> str:
    before_prefix, before_suffix, before_gap = names
    return f"{before_prefix}{prompt}{before_suffix}{suffix}{before_gap}"


def _has_all(names: tuple[str, ...], tokenizer: Any) -> bool:
    ids = tokenizer.convert_tokens_to_ids(list(names))
    return not {None, tokenizer.unk_token_id} & set(ids)
