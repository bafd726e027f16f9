# SPDX-License-Identifier: Apache-2.0
"""Upstream's multiprocess executor, adapted to ranks that divide rows."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class RanksExecutor(MultiprocExecutor):
    """Runs a process for every rank; upstream counts those that divide rows as another kind.

    Steps are equal on all ranks, so the first one speaks for them.
    """

    def _get_parallel_sizes(self) -> tuple[int, int, int]:
        tensor, pipeline, _ = super()._get_parallel_sizes()
        return tensor, pipeline, self.world_size // (tensor * pipeline)

    def _is_driver_worker(self, rank: int) -> bool:
        return rank == 0

    def _get_output_rank(self) -> int:
        return 0
