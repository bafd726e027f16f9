# SPDX-License-Identifier: Apache-2.0
"""Items of a step: the next forwards of requests, and items that step guests add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vllm.diffusion.decoding import DecodingRule, ForwardTarget, ScorePick
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.guided.joint import Joint
    from vllm.diffusion.memory import KeptSequence
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import RowEdits


# What a step packs and samples.
BatchItem: TypeAlias = "Canvas | ExtraItem"


class ExtraWindow(NamedTuple):
    """The pages and sequences of an extra item, in the form of `ForwardWindow`.

    Attributes:
        cache: pages of the item; None without a cache.
        kept_starts, num_sequences: as for the request.
        has_fp8_attention: False, because only steps of one item have fp8 attention.
        context: another item of the step that computes the last keys before this item's window, in
            rows before its tail (`ForwardTarget.tail_start`). They are stored in the pages of both.
            None for no such item.
    """

    cache: KeptSequence | None
    kept_starts: tuple[int, ...]
    num_sequences: int
    has_fp8_attention: bool = False
    context: BatchItem | None = None


class ExtraItem(ABC):
    """Another state of a request, which a step packs like a request of its own.

    The members are those of a `Canvas` that packing and sampling read.

    Args:
        canvas: the request.
        rule: decoding rule of the state.
        target: target of the forward.
        positions: the positions that are computed.
    """

    pick: ScorePick | None = None
    adjust_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    num_extra_draws = 0
    wants_logprobs = False

    def __init__(
        self, canvas: Canvas, rule: DecodingRule, target: ForwardTarget, positions: Window
    ) -> None:
        self.canvas, self.rule, self.positions = canvas, rule, positions
        self._target = target
        self.window = ExtraWindow(None, canvas.window.kept_starts, canvas.window.num_sequences)
        self.req_id, self.params = canvas.req_id, canvas.params
        self.prompt_length, self.num_steps = canvas.prompt_length, canvas.num_steps

    @property
    def num_rows(self) -> int:
        """Number of rows of the forward."""
        return self.positions.num_rows * self.window.num_sequences

    @property
    @abstractmethod
    def sequences(self) -> tuple[Array, ...]:
        """The tokens [T] of each sequence."""

    def next_forward(self) -> tuple[ForwardTarget, Window]:
        return self._target, self.positions

    def token_ids(self, positions: Array) -> Array | None:
        """Return no tokens to be scored."""
        return None

    def joints(self, target: ForwardTarget) -> list[Joint]:
        return []

    def edits(self, positions: Array) -> RowEdits | None:
        return None

    def draws(self, positions: Array) -> Array | None:
        """Return no random numbers for commits."""
        return None
