# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel ranks as threads of one process, behind a real scheduler."""

import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.engine.harness import Engine, running
from vllm.diffusion.config import Settings
from vllm.diffusion.engine import planning as sizes
from vllm.diffusion.engine.worker.agreement import Agreement
from vllm.diffusion.engine.worker.run_ahead import StepLimits
from vllm.diffusion.engine.worker.runner import DiffusionModelRunner
from vllm.diffusion.engine.worker.step_loop import StepLoop
from vllm.diffusion.memory import activation_pool
from vllm.diffusion.parallel.groups import Ranks

WAIT_S = 60.0


def cannot_fail() -> Agreement:
    """Return an agreement of ranks that cannot continue after one of them has failed."""
    return Agreement(mock.Mock(can_reset=False))


class ThreadExchange:
    """The place where each thread leaves a value for the other threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.left: list[Any] = [None] * size


class ThreadPeers:
    """A `RankGroup` of threads.

    All threads meet in every call; a missing one breaks the barrier.
    """

    def __init__(self, rank: int, exchange_point: ThreadExchange) -> None:
        self.rank, self.size, self._exchange_point = rank, len(exchange_point.left), exchange_point
        self.num_exchanges = 0

    def _swap(self, mine: Any) -> list[Any]:
        exchange_point = self._exchange_point
        exchange_point.left[self.rank] = mine
        exchange_point.barrier.wait()
        values = list(exchange_point.left)
        exchange_point.barrier.wait()
        return values

    def exchange(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        self.num_exchanges += 1
        assert given.is_contiguous() and out.is_contiguous()
        pieces = [parts[self.rank] for parts in self._swap(given.clone().split(list(sent)))]
        assert [len(piece) for piece in pieces] == list(received)
        torch.cat(pieces, out=out)

    def gather(self, given: Tensor) -> Tensor:
        return torch.stack(self._swap(given.clone()))

    def broadcast(self, tensor: Tensor) -> Tensor:
        theirs = self._swap(tensor.clone())[0]
        assert theirs.shape == tensor.shape
        return tensor.copy_(theirs)

    def all_reduce_min(self, number: int) -> int:
        return min(self._swap(number))

    def join_board(self) -> None:
        """Do nothing, because a thread cannot fail alone."""


class Ranked:
    """The loops and runners of all ranks in place of one. The results of the first rank count."""

    def __init__(self, runner: DiffusionModelRunner, size: int) -> None:
        exchange_point = ThreadExchange(size)
        self.peers = [ThreadPeers(rank, exchange_point) for rank in range(size)]
        self.runners = [self._another(runner, Ranks(sequence=peers)) for peers in self.peers]
        self._loops = [StepLoop(r, cannot_fail(), limits=StepLimits(256)) for r in self.runners]
        self._threads = ThreadPoolExecutor(size)

    @staticmethod
    def _another(runner: DiffusionModelRunner, ranks: Ranks) -> DiffusionModelRunner:
        pool = activation_pool(runner.pool.budget_bytes, runner.device, use_vmm=False)
        planner = copy(runner.planner)
        return DiffusionModelRunner(
            runner.model, planner, pool, runner.device, agreement=cannot_fail(), ranks=ranks
        )

    def execute(self, message: Any) -> Any:
        copies = [pickle.loads(pickle.dumps(message)) for _ in self._loops]
        outputs = list(self._threads.map(StepLoop.execute, self._loops, copies))
        for output in outputs[1:]:
            results = {r: result.new_token_ids for r, result in output.results.items()}
            assert results == {r: x.new_token_ids for r, x in outputs[0].results.items()}
            assert output.launched == outputs[0].launched
        return outputs[0]

    @property
    def canvases(self) -> dict[str, Any]:
        return self.runners[0].canvases

    @property
    def num_exchanges(self) -> int:
        return self.peers[0].num_exchanges

    def are_idle(self) -> bool:
        """Return whether no rank holds canvases, frames or memory outside of its pages."""
        return not any(
            r.canvases or r.pool.has_frame or r.pool.used_bytes > r.caches.reserved_bytes
            for r in self.runners
        )


def fail_once(worker: Any, error: str) -> None:
    """Make the second rank fail in a layer of the next step, while the first one waits for it."""
    from vllm.diffusion.memory import PoolExhaustedError

    runner = worker.worker.model_runner
    if worker.worker.rank != 1:
        return
    layer = runner.model.layers[1]
    stage = layer.mlp_stage

    def fail(*_: Any) -> None:
        layer.mlp_stage = stage
        raise PoolExhaustedError("x", 2, 1) if error == "memory" else RuntimeError("it broke")

    layer.mlp_stage = SimpleNamespace(feed_forward=fail)


@contextmanager
def ranked(
    folder: Path, size: int, min_tokens: int = 0, **settings: Any
) -> Iterator[tuple[Engine, Ranked]]:
    """Start an engine that divides steps of at least `min_tokens` rows over threads."""
    division = Settings(sequence_parallel_size=size, sequence_parallel_min_tokens=min_tokens)
    with (
        mock.patch.object(sizes, "settings_of", lambda _: division),
        running(folder, **settings) as engine,
    ):
        worker = engine.core.model_executor.driver_worker.worker
        loop, runner = worker.loop, worker.model_runner
        ranks = Ranked(runner, size)
        worker.loop = worker.model_runner = ranks
        yield engine, ranks
        worker.loop, worker.model_runner = loop, runner
