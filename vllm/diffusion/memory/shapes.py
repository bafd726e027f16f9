# SPDX-License-Identifier: Apache-2.0
"""Rows and memory that a request takes while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.diffusion.core.pages import in_whole_pages


@dataclass(frozen=True)
class Demand:
    """Rows and memory that a request takes while it runs.

    Attributes:
        length: positions of its sequence.
        sample_positions: most positions sampled in one step.
        num_sequences: 2 with guidance, which runs the sequence twice.
        keeps_cache: whether the keys and values of all positions are kept, in every sequence.
        window: most positions that most of its forwards compute, as keys and values of the others
            are kept; None where every forward may compute all.
        first: positions of its first forward; None for all.
        host_layers: number of layers whose kept keys and values lie in host memory.
        spare: positions, besides its own, for requests that read its prompt's keys and values.
        reads_prompt: whether it reads the prompt of another request, which counts what both keep.
        unit: granularity, in positions, at which a forward can be cut; None if forwards cannot be
            cut. With a unit, pages are not counted here.
        once: whether it has only one forward.
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
        """Rows of the first forward."""
        if self.reads_prompt:
            return self.steady_rows
        return (self.first or self.length) * self.num_sequences

    def largest_rows(self, row_budget: int) -> int:
        """Rows of the largest forward; one that can be cut has at most `row_budget`."""
        rows = self.steady_rows if self.reads_prompt else self.length * self.num_sequences
        return rows if self.unit is None else min(rows, max(row_budget // self.unit, 1) * self.unit)

    @property
    def steady_rows(self) -> int:
        """Most rows in most steps."""
        return (self.window or self.length) * self.num_sequences

    @property
    def shared_rows(self) -> int:
        """Most rows in every step shared with others.

        Half of them for a request with a single forward: while it takes part in a step, another one
        may wait for the step behind, so that a device need not wait for whoever comes next.
        """
        return -(-self.steady_rows // 2) if self.once else self.steady_rows

    @property
    def sample_rows(self) -> int:
        return self.sample_positions * self.num_sequences

    @property
    def cached_positions(self) -> int:
        """Positions of the pages that it takes of the store; 0 if these are counted elsewhere."""
        if not self.keeps_cache or self.unit is not None or self.reads_prompt:
            return 0
        return in_whole_pages(self.length) * self.num_sequences + self.spare
