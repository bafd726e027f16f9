# SPDX-License-Identifier: Apache-2.0
"""Windows: the positions that a request's next forward computes, given its cached keys.

A decoding rule states the positions that it works on. All positions before them take part in the
forward, too: their keys are cached or computed again.

    positions   0 ........ kept ........ first ====== stop ...... length
                [0, kept): keys that earlier forwards stored
                                         [first, stop): the window, which this forward computes

A window is cut, that is, made shorter, if the step has too few rows for it or the request too few
pages. Later forwards then compute the other positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core.pages import in_whole_pages
from vllm.diffusion.engine.scheduler.turns import NextForward
from vllm.diffusion.engine.worker.reuse import ALL_ROWS, windows_of
from vllm.diffusion.request.visibility import Forward

if TYPE_CHECKING:
    from vllm.diffusion.memory import KeptSequence
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.visibility import Visibility, WindowPart


class Window(NamedTuple):
    """Positions of a sequence that a forward computes, and the keys that they read.

    Attributes:
        forward: the forward as `visibility` describes it.
        first, stop: positions that are computed, half-open.
        reads_kept: whether the rows read keys that the forward does not compute.
        parts: the positions grouped by the keys that they attend to, in order; only the last part
            is sampled.
    """

    forward: Forward
    first: int
    stop: int
    reads_kept: bool
    parts: tuple[WindowPart, ...]

    @classmethod
    def of(cls, forward: Forward, visibility: Visibility) -> Window:
        first, stop = forward.window.start, forward.window.stop
        reads_kept = forward.num_keys > stop - first
        return cls(forward, first, stop, reads_kept, visibility.parts(forward))

    @property
    def num_rows(self) -> int:
        """Number of rows of one sequence; with guidance a request computes two sequences."""
        return self.stop - self.first


class ForwardWindow:
    """The window of a request's next forward, and its cached keys and values.

    Args:
        prompt_length: positions before the canvas.
        length: positions of a sequence.

    Attributes:
        visibility: which positions attend to which.
        cache: cached keys and values; if the scheduler assigns pages, only the pages assigned so
            far. None without a cache.
        room: maximum rows of the next forward.
        num_sequences: number of sequences that are computed: 1, or 2 with guidance.
        reads_prompt: whether the prompt's keys and values are in pages of another request.
        kept_starts: per sequence, index of its position 0 among the cached positions.
        context: None, because no other item of a step computes keys of this request.
    """

    context = None

    def __init__(
        self,
        params: DiffusionParams,
        visibility: Visibility,
        prompt_length: int,
        length: int,
    ) -> None:
        self.cache: KeptSequence | None = None
        self.room = ALL_ROWS
        self.reads_prompt = False
        self.num_sequences = 2 if params.cfg_scale > 0 else 1
        self.kept_starts = (0, in_whole_pages(length))[: self.num_sequences]
        self._length, self._num_frozen = length, max(prompt_length - params.logit_shift, 0)
        self.visibility = visibility
        self._may_have_fp8 = params.has_fp8_attention(length)
        self._windows = windows_of(params, visibility, prompt_length, length)
        # A forward that has begun and writes to pages of the request.
        self._in_flight: Forward | None = None
        # Rows of the next forward's target. It rarely changes, so the values below are cached.
        self._target = (0, 0)
        self._uncut: Window | None = None  # window of the next forward if nothing cuts it
        self._most_rows = ALL_ROWS  # rows of the next forward that have pages, if it can be cut
        self.size: NextForward | None = None  # size of the next forward

    @property
    def has_fp8_attention(self) -> bool:
        """Whether the next forward computes all positions with fp8 attention."""
        return self._may_have_fp8 and self._next().num_rows == self._length

    @property
    def num_kept(self) -> int:
        """Number of positions, from 0, whose keys and values are cached."""
        return self._windows.kept

    @property
    def least_committed(self) -> int:
        """Number of committed positions below which `computed` has no effect."""
        return self._windows.least_committed

    @property
    def num_places(self) -> int:
        """Number of slots for cached positions, including the gap between two sequences."""
        return self.kept_starts[-1] + self._length

    @property
    def frozen_positions(self) -> tuple[range, ...]:
        """Cached positions that no forward writes once the prompt is frozen."""
        return tuple(range(start, start + self._num_frozen) for start in self.kept_starts)

    @property
    def is_in_flight(self) -> bool:
        """Whether a forward has begun and is not committed."""
        return self._in_flight is not None

    def set_range(self, rows: tuple[int, int], *, is_causal: bool = False) -> None:
        """Set the rule's rows, as (first, last + 1), and the kind of the next forward."""
        if rows != self._target or is_causal != self._windows.is_causal:
            self._target, self._windows.is_causal = rows, is_causal
            self.reset()

    def reset(self) -> None:
        """Invalidate the cached window of the next forward."""
        self._uncut = self.size = None

    def next_rows(self) -> int:
        """Rows of the next forward if nothing cuts it; with guidance the window counts twice."""
        return self._next().num_rows * self.num_sequences

    def next_size(self, rows: int) -> NextForward:
        """Sizes of the next forward, which has `rows` rows if nothing cuts it."""
        unit = self._windows.unit
        if unit is not None:
            if rows > self._most_rows:  # count only rows that have pages for their keys and values
                rows = self._most_rows // unit * unit
            self.size = NextForward(rows, keeps=True, unit=unit)
        else:
            is_window = rows < self._length * self.num_sequences
            self.size = NextForward(rows, keeps=self.cache is not None, is_window=is_window)
        return self.size

    def _next(self) -> Window:
        if self._uncut is None:
            self._uncut = Window.of(self._windows.next(self._target), self.visibility)
            if self._windows.unit is not None:
                self._most_rows = 0 if self.cache is None else self.cache.length - self.num_kept
        return self._uncut

    def of(self, rows: tuple[int, int]) -> Window | None:
        """Return the window of a forward that a rule may choose next; None if it must be cut."""
        window = Window.of(self._windows.next(rows), self.visibility)
        has_pages = self.cache is None or window.stop <= self.cache.length
        return window if window.stop == rows[1] and has_pages else None

    def begin(self) -> Window:
        """Begin the next forward: return its window, cut to the available rows and pages."""
        window, room = self._next(), min(self.room, self._most_rows)
        if window.stop - window.first > room:
            window = Window.of(self._windows.next(self._target, room), self.visibility)
        self._in_flight = window.forward
        return window

    def end(self) -> Forward | None:
        """End the current forward; return None if its pages no longer belong to the request."""
        ended, self._in_flight = self._in_flight, None
        return ended

    def computed(self, forward: Forward, committed: int) -> None:
        """Record a finished forward; its first `committed` positions never change again."""
        self._windows.computed(forward, committed)
        self.reset()

    def read_prompt(self, cache: KeptSequence) -> None:
        """Use the prompt's keys and values from another request's first forward."""
        self.cache, self.reads_prompt = cache, True
        self._windows.computed(Forward(range(self._length)), self._length)

    def invalidate(self) -> None:
        """Make the next forward ignore cached keys and values; the pages stay assigned."""
        self._windows.invalidate()
        self.reset()
        self.reads_prompt = False

    def assign(self, cache: KeptSequence | None, num_kept: int | None) -> None:
        """Replace the pages of the request.

        Args:
            cache: the pages; None if there are none.
            num_kept: positions from 0 whose keys and values the pages hold; None if the pages
                extend the previous ones.
        """
        self.cache = cache
        self.reset()
        if num_kept is not None:
            self._windows.keep(num_kept)
            # The current forward writes to the previous pages.
            self._in_flight = None
