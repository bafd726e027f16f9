# SPDX-License-Identifier: Apache-2.0
"""What a request takes while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.diffusion.pages import in_whole_pages


@dataclass(frozen=True)
class Demand:
    """What a request takes while it runs.

    Attributes:
        length: positions of its sequence.
        sample_positions: of these, positions that are sampled in one step, at most.
        num_sequences: 2 with guidance, which runs the sequence twice.
        keeps_cache: it keeps the keys and values of all its positions, in every sequence.
        window: positions that most of its forwards compute, at most, because those of the others
            are kept; None where every forward may compute all.
        first: positions of its first forward; None where these are all.
        host_layers: of so many layers its kept keys and values lie in host memory.
        spare: positions, besides its own, for requests that read its prompt's keys and values.
        reads_prompt: it reads the prompt's of another one, which counts what both keep.
        unit: its forwards may be computed in parts that are multiples of so many positions, and
            its pages are not counted here; None where neither is so.
        once: it has one forward.
    """

    length: int
    sample_positions: int
    num_sequences: int = 1
    keeps_cache: bool = False
    window: int | None = None
    first: int | None = None
    unit: int | None = None
    host_layers: int = 0
    spare: int = 0
    reads_prompt: bool = False
    once: bool = False

    @property
    def first_rows(self) -> int:
        """Rows of its first forward."""
        if self.reads_prompt:
            return self.steady_rows
        return (self.first or self.length) * self.num_sequences

    def largest_rows(self, row_budget: int) -> int:
        """Rows of its largest forward, where those that can be cut have so many at most."""
        rows = self.steady_rows if self.reads_prompt else self.length * self.num_sequences
        return rows if self.unit is None else min(rows, max(row_budget // self.unit, 1) * self.unit)

    @property
    def steady_rows(self) -> int:
        """Rows that it has in most steps, at most."""
        return (self.window or self.length) * self.num_sequences

    @property
    def shared_rows(self) -> int:
        """Rows of every shared step that it takes, at most.

        Half of them where it has one forward: for while it takes part in a step, another one may
        wait for the step behind, so that a device need not wait for whoever comes next.
        """
        return -(-self.steady_rows // 2) if self.once else self.steady_rows

    @property
    def sample_rows(self) -> int:
        return self.sample_positions * self.num_sequences

    @property
    def cached_positions(self) -> int:
        """Positions of the pages that it takes of what is shared here."""
        if not self.keeps_cache or self.unit is not None or self.reads_prompt:
            return 0
        return in_whole_pages(self.length) * self.num_sequences + self.spare
