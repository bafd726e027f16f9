# SPDX-License-Identifier: Apache-2.0
"""Verification of a written checkpoint: the share of questions that it answers right."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, cast

import torch

from tiny_model.checkpoint import load_weights, read_config
from tiny_model.progress import progress
from tiny_model.tokenizer import load_tokenizer, prompts_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from tiny_model.conversations import Conversation
    from tiny_model.family import Family, Network
    from tiny_model.settings import DecodingSetting


class Verifier:
    """A checkpoint read back from disk, ready to answer."""

    def __init__(self, directory: Path, family: Family) -> None:
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(directory)
        config = read_config(directory)
        network = family.network(config)
        load_weights(directory, network)
        self._decode = family.decode
        self._network = cast("Network", network.eval())
        self._mask_id, *self._end_ids = self._tokenizer.convert_tokens_to_ids(
            [getattr(family.special_tokens, name) for name in ("mask", "eos", "eot")]
        )

    def answers(self, conversations: Sequence[Conversation], setting: DecodingSetting) -> list[str]:
        """Answer the conversations; conversations of the same length are decoded as a batch."""
        prompts = prompts_of(self._tokenizer, conversations)
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            by_length[len(prompt)].append(index)
        answers = [""] * len(prompts)
        num_forwards = setting.steps * len(by_length)
        with progress(None, f"verify canvas {setting.canvas}", num_forwards) as bar:
            for length, indices in by_length.items():
                rows = torch.tensor([prompts[index] for index in indices])
                filled = self._decode(
                    self._network, rows, self._mask_id, setting, lambda _: bar.update()
                )
                for index, row in zip(indices, filled, strict=True):
                    answers[index] = self._text(row[length:])
        return answers

    def _text(self, canvas: Tensor) -> str:
        """Return the text of the tokens before the first end token, as a server returns it."""
        ids: list[int] = canvas.tolist()
        end = next((i for i, token in enumerate(ids) if token in self._end_ids), len(ids))
        return cast("str", self._tokenizer.decode(ids[:end], skip_special_tokens=True))
