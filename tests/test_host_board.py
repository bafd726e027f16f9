# SPDX-License-Identifier: Apache-2.0
"""Ranks exchange numbers in shared memory, and stay in step when one of them fails."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from vllm.diffusion.core.errors import RankError, RankMemoryError
from vllm.diffusion.engine.worker.agreement import Agreement
from vllm.diffusion.memory import PoolExhaustedError
from vllm.diffusion.parallel.host_board import FAILED, NO_MEMORY, HostBoard


class Ranks:
    """Collectives that only record their calls."""

    can_reset = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def stop_waiting(self) -> None:
        self.calls.append("stop")

    def reset(self) -> None:
        self.calls.append("anew")


@pytest.fixture
def boards(tmp_path: Path) -> list[HostBoard]:
    path = tmp_path / "board"
    path.write_bytes(bytes(HostBoard.SIZE))
    return [HostBoard(str(path), rank, 2) for rank in range(2)]


def on_both(*work: Callable[[], Any]) -> list[Any]:
    """Run a function per rank, each in its own thread, and return the results."""
    with ThreadPoolExecutor(2) as pool:
        return [future.result(20) for future in [pool.submit(run) for run in work]]


def test_numbers_of_all_ranks_arrive_in_order(boards: list[HostBoard]) -> None:
    def tell(board: HostBoard) -> list[Any]:
        return [list(board.exchange(10 * turn + board.rank)) for turn in range(300)]

    wanted = [[10 * turn, 10 * turn + 1] for turn in range(300)]
    assert on_both(*(lambda b=board: tell(b) for board in boards)) == [wanted, wanted]


def test_a_failure_is_seen_before_the_others_come(boards: list[HostBoard]) -> None:
    first, second = boards

    def wait() -> int:
        while not first.failure_of_others():
            pass
        actual = first.failure_of_others()
        first.exchange(FAILED)
        return actual

    assert on_both(wait, lambda: second.exchange(NO_MEMORY))[0] == NO_MEMORY
    assert first.failure_of_others() == 0


@pytest.mark.parametrize(
    ("errors", "kinds"),
    [
        ((None, None), (None, None)),
        ((None, ValueError("a")), (RankError, ValueError)),
        ((PoolExhaustedError("x", 2, 1), None), (PoolExhaustedError, RankMemoryError)),
        ((PoolExhaustedError("x", 2, 1), ValueError("b")), (RankError, ValueError)),
    ],
)
def test_ranks_agree_on_what_failed(
    boards: list[HostBoard], errors: tuple[Any, Any], kinds: tuple[Any, Any]
) -> None:
    ranks = [Ranks(), Ranks()]
    agreements = [Agreement(r, board=b) for r, b in zip(ranks, boards, strict=True)]
    for _ in range(3):
        actual = on_both(
            lambda: agreements[0].reach(errors[0]), lambda: agreements[1].reach(errors[1])
        )
        assert tuple(None if f is None else type(f) for f in actual) == kinds
    has_failed = any(errors)
    for rank, error in zip(ranks, errors, strict=True):
        assert rank.calls == 3 * (["stop"] * (error is not None) + ["anew"] * has_failed)


def test_a_rank_that_asks_for_a_number_hears_of_a_failure(boards: list[HostBoard]) -> None:
    ranks = [Ranks(), Ranks()]
    asking, failing = (Agreement(r, board=b) for r, b in zip(ranks, boards, strict=True))
    assert on_both(lambda: asking.all_reduce_max(7), lambda: failing.all_reduce_max(9)) == [9, 9]

    def ask() -> Any:
        try:
            return asking.all_reduce_max(7)
        except RankError as error:
            return asking.reach(error)

    actual = on_both(ask, lambda: failing.reach(ValueError("a")))
    assert [type(error) for error in actual] == [RankError, ValueError]


def test_one_rank_keeps_its_own_error() -> None:
    error = ValueError("a")
    assert Agreement().reach(error) is error
    assert Agreement().reach(None) is None
    with pytest.raises(ValueError, match="a"):
        Agreement(Ranks()).reach(error)  # other ranks wait without a board


@pytest.mark.parametrize(("code", "kind"), [(FAILED, RankError), (NO_MEMORY, RankMemoryError)])
def test_nobody_waits_for_a_rank_that_has_failed(
    boards: list[HostBoard], code: int, kind: type[RankError]
) -> None:
    first, second = boards
    never, done = mock.Mock(), mock.Mock()
    never.is_completed.return_value, done.is_completed.return_value = False, True

    def wait() -> None:
        first.wait(done)
        with pytest.raises(kind):
            first.wait(never)
        first.exchange(0)

    on_both(wait, lambda: second.exchange(code))
    done.wait.assert_called_once()
    never.wait.assert_not_called()
