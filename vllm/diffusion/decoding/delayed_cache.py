# SPDX-License-Identifier: Apache-2.0
"""Which keys and values d3LLM keeps (arXiv:2601.07568): those of blocks complete for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.decoding.pipelined import Block
    from vllm.diffusion.params import DiffusionParams


class DelayedCache:
    """Keys and values of the first positions are kept, more of them as blocks grow old.

    A block is kept from the forward that comes `cache_delay_iter` steps after its completion was
    seen. Until then its tokens are new to the others, so whole sequences are computed; so they
    are in every `refresh_interval`-th step.

    The published cache can hold rows twice when blocks become complete together; here it always
    holds the rows before `num_kept`.

    Attributes:
        num_kept: positions whose keys and values are not computed again, but for a refresh.
    """

    def __init__(self, params: DiffusionParams) -> None:
        self._delay = params.cache_delay_iter
        self._refresh_interval = params.refresh_interval
        self._looks_past_waiting = params.logit_shift > 0  # as the reference does for Dream
        self.num_kept = 0

    def first_row(self, blocks: Sequence[Block], step: int) -> int:
        """First position that the forward of `step` (from 1) computes; it goes to the end."""
        kept_before = self.num_kept
        grown_old = self._grown_old(blocks, step)
        if grown_old:
            # Their rows are computed once more, for the last time.
            self.num_kept = grown_old[-1].end
            return kept_before
        is_settling = any(
            b.num_masked == 0 and b.done_at is not None and not b.is_cached for b in blocks
        )
        return 0 if is_settling or step % self._refresh_interval == 0 else kept_before

    def _grown_old(self, blocks: Sequence[Block], step: int) -> list[Block]:
        """Blocks to keep from now on. Notes when blocks were first seen complete."""
        found = []
        for block in blocks:
            if block.end <= self.num_kept:
                continue
            if block.num_masked > 0:
                break
            if block.done_at is None:
                block.done_at = step
            if step - block.done_at < self._delay:
                if not self._looks_past_waiting:
                    break
            elif not block.is_cached:
                block.is_cached = True
                found.append(block)
        return found
