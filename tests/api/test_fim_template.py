# SPDX-License-Identifier: Apache-2.0
"""Prompts with the tokens of a tokenizer for fill-in-the-middle."""

from typing import Any

import pytest

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.editing.fim_template import in_template


class Tokenizer:
    """A tokenizer with some special tokens; all other names are unknown."""

    def __init__(self, *names: str, unknown: int | None = None) -> None:
        self._ids = {name: 100 + at for at, name in enumerate(names)}
        self.unk_token_id = unknown

    def convert_tokens_to_ids(self, names: list[str]) -> list[int | None]:
        return [self._ids.get(name, self.unk_token_id) for name in names]


QWEN = Tokenizer("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("a(", "<|fim_prefix|>a(<|fim_suffix|>)\n<|fim_middle|>"),
        (["a", ""], [f"<|fim_prefix|>{p}<|fim_suffix|>)\n<|fim_middle|>" for p in ("a", "")]),
    ],
)
def test_the_gap_comes_last(prompt: Any, wanted: Any) -> None:
    assert in_template(prompt, ")\n", QWEN) == wanted


def test_other_names_of_the_tokens() -> None:
    tokenizer = Tokenizer("<fim_prefix>", "<fim_middle>", "<fim_suffix>", unknown=0)
    assert in_template("a", "b", tokenizer) == "<fim_prefix>a<fim_suffix>b<fim_middle>"


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "message"),
    [
        (
            "a",
            Tokenizer("<|fim_prefix|>"),
            "fim_template: given True; wanted a tokenizer with <",
        ),
        ("a", Tokenizer("<fim_prefix>", unknown=3), "fim_template: given True; wanted a tokenizer"),
        ([1, 2], QWEN, "prompt: given [1, 2]; wanted a text with fim_template"),
    ],
)
def test_refusals(prompt: Any, tokenizer: Tokenizer, message: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        in_template(prompt, "b", tokenizer)
    assert str(error.value).startswith(message)
