# SPDX-License-Identifier: Apache-2.0
"""Reuse of keys and values: decides which positions a forward computes.

Without a cache every forward computes all positions. Approximate and frozen caches keep keys and
values of all positions, exact caches keep keys and values of final positions.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from vllm.diffusion.core import envs
from vllm.diffusion.request.visibility import BlockCausal, Forward

if TYPE_CHECKING:
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.visibility import Visibility

ALL_ROWS = sys.maxsize


class Windows(ABC):
    """Decides which positions the forwards of one request compute.

    Attributes:
        kept: number of positions from 0 whose keys and values are cached.
        unit: granularity, in rows, at which a forward can be cut; None if it cannot be cut.
        least_committed: number of committed positions below which `computed` has no effect; callers
            may then skip it.
        is_causal: `ForwardTarget.is_causal` of the rule's next forward.
    """

    is_causal = False
    kept: int = 0
    unit: int | None = None
    least_committed: int = ALL_ROWS

    @abstractmethod
    def next(self, rows: tuple[int, int], room: int = ALL_ROWS) -> Forward:
        """Return the next forward if the rule works on positions `rows`.

        The forward serves the rule only if it reaches the end of `rows`. Otherwise it computes keys
        and values that the rule's forward will read, and another forward follows.

        Args:
            rows: first position and last + 1.
            room: maximum rows of the forward, at least a unit; ignored if the forward cannot be
                cut.
        """

    def computed(self, forward: Forward, committed: int) -> None:  # noqa: B027 (few use it)
        """Record a finished forward.

        Args:
            forward: the forward, as returned by `next`.
            committed: number of positions from 0 whose tokens, as the forward read them, never
                change again.
        """

    def keep(self, num_kept: int) -> None:
        """Set the number of positions from 0 whose keys and values are cached."""
        self.kept = num_kept

    def invalidate(self) -> None:  # noqa: B027 (few classes use it)
        """Make the next forward compute all positions, because the weights have changed."""


class Whole(Windows):
    """Windows without a cache: every forward computes all keys that the rule's rows attend to.

    Args:
        visibility: which positions attend to which.
        length: number of positions of the sequence.
    """

    def __init__(self, visibility: Visibility, length: int) -> None:
        self._sees_all = visibility.block_length == 0
        self._length = length

    def next(self, rows: tuple[int, int], room: int = ALL_ROWS) -> Forward:
        end = self._length if self._sees_all else rows[1]
        return Forward(range(end), is_causal=self.is_causal)


class Approximate(Windows):
    """Windows with cached keys and values of all positions; outside the rows they may be outdated.

    Args:
        length: number of positions of the sequence.
        logit_shift: number of rows before a position that predict its token.
    """

    def __init__(self, length: int, logit_shift: int) -> None:
        self.kept = length
        self._shift = logit_shift

    def next(self, rows: tuple[int, int], room: int = ALL_ROWS) -> Forward:
        return Forward(range(max(rows[0] - self._shift, 0), rows[1]), self.kept)


class Frozen(Windows):
    """Windows that cache the prompt's keys and values after the first forward on the whole prompt.

    This is the first forward, unless the prompt has masks to fill. Later forwards compute the
    canvas, and also the row before it if that row predicts the first token of the canvas.

    Args:
        prompt_length: number of positions before the canvas.
        length: number of positions of prompt and canvas.
        logit_shift: number of rows before a position that predict its token.
    """

    def __init__(self, prompt_length: int, length: int, logit_shift: int) -> None:
        self.kept, self.least_committed = length, prompt_length
        self._canvas_start = max(prompt_length - logit_shift, 0)
        self._start = 0  # first position of the next forward

    def next(self, rows: tuple[int, int], room: int = ALL_ROWS) -> Forward:
        return Forward(range(self._start, self.kept), self.kept)

    def computed(self, forward: Forward, committed: int) -> None:
        if committed >= self.least_committed:
            self._start = self._canvas_start

    def invalidate(self) -> None:
        self._start = 0


class Exact(Windows):
    """Windows that cache keys and values of whole blocks once they are final.

    A forward starts at the end of the cached positions. So the prompt, a finished block, and
    positions whose pages were taken away are all computed in the same way: together with the rule's
    rows, or before them in parts of whole blocks. A causal context is cached up to any position. It
    is computed before the block that is denoised, or together with it. The block's own keys are
    not cached.

    Args:
        visibility: blocks of the request.
        unit: as in `Windows`.
        fuses: whether a finished block may be computed together with the next one.
    """

    def __init__(self, visibility: Visibility, unit: int, *, fuses: bool) -> None:
        self._visibility = visibility
        self.unit, self.least_committed = unit, visibility.next_final(0)
        self._fuses = fuses

    def next(self, rows: tuple[int, int], room: int = ALL_ROWS) -> Forward:
        (start, end), kept = rows, self.kept
        is_apart = kept < start and not (self._fuses or self.is_causal)
        if is_apart:
            end = start
        if end - kept > room:
            end = self._visibility.cut(kept, room)
            if kept < start:  # no row of the rule is cached before it has been sampled
                end = min(end, start)
        return Forward(range(kept, end), kept, is_causal=self.is_causal or end <= start)

    def computed(self, forward: Forward, committed: int) -> None:
        ended = forward._replace(committed=committed)
        self.keep(max(self.kept, self._visibility.final(ended).stop))

    def keep(self, num_kept: int) -> None:
        self.kept = num_kept
        self.least_committed = self._visibility.next_final(num_kept)

    def invalidate(self) -> None:
        self.keep(0)


def windows_of(
    params: DiffusionParams, visibility: Visibility, prompt_length: int, length: int
) -> Windows:
    """Return the windows of a request of `length` positions, which begin with its prompt.

    Raises:
        ValueError: an exact cache for a family whose keys are never final.
    """
    if params.cache == "none":
        return Whole(visibility, length)
    if params.cache == "frozen":
        return Frozen(prompt_length, length, params.logit_shift)
    if params.cache != "exact":
        return Approximate(length, params.logit_shift)
    if visibility.block_length == 0:
        raise ValueError(f"cache: given exact; wanted a block-causal family, not {visibility}")
    fuses = isinstance(visibility, BlockCausal) and envs.fuses_commits()
    fuses = fuses or params.is_open or params.settles_late
    return Exact(visibility, params.unit_of_cuts(length), fuses=fuses)
