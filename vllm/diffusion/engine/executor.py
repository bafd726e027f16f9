# SPDX-License-Identifier: Apache-2.0
"""Upstream's multiprocess executor, adapted to ranks that divide rows."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class RanksExecutor(MultiprocExecutor):
    """Runs one process per rank, including ranks that divide rows.

    Upstream counts ranks that divide rows as a kind of parallelism of its own. Steps are equal on
    all ranks, so only the first rank returns results.
    """

    def _get_parallel_sizes(self) -> tuple[int, int, int]:
        tensor, pipeline, _ = super()._get_parallel_sizes()
        return tensor, pipeline, self.world_size // (tensor * pipeline)

    def _is_driver_worker(self, rank: int) -> bool:
        return rank == 0

    def _get_output_rank(self) -> int:
        return 0
