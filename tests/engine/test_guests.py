# SPDX-License-Identifier: Apache-2.0
"""Guests: steps without them enter none of their functions, and a new one enters by one door."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_prompt
from tests.engine.harness import Request, running
from vllm.diffusion.engine.scheduler.long_step_policy import SpeedEstimate
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.worker.status import status_of
from vllm.diffusion.memory import Admission, Demand

GUESTS = {
    "gates",
    "likelihood_calls",
    "long_step_policy",
    "paging",
    "prompt_groups",
    "trajectories",
}
PLAIN = {"gen_length": 16, "block_length": 8, "steps": 8, "ignore_eos": True}


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (Request(random_prompt(8), PLAIN), set()),
        (Request(random_prompt(200), PLAIN), {"long_step_policy"}),
    ],
    ids=["plain", "long"],
)
def test_steps_enter_the_guests_of_their_requests_alone(
    parameters: Request,
    wanted: set[str],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guests of a request run from its first step to its end, also if long steps are sliced."""
    entered: list[set[str]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered[-1].add(str(frame.f_globals.get("__name__")).rpartition(".")[2])

    # The estimate does not depend on this machine.
    monkeypatch.setattr(SpeedEstimate, "learn", lambda *_: None)
    with running(checkpoint("mha")) as engine:
        scheduler, planner = engine.scheduler, engine.runner.planner
        assert scheduler.long_steps is None and scheduler.paging is None
        seconds = [Admission(planner).seconds_of(Demand(rows, 16), rows) for rows in (24, 216)]
        engine.cut_steps(sum(seconds) / 2)
        engine.ask(parameters)  # now the scheduler has the size of the memory
        for name in ("schedule", "update_from_output"):
            method = getattr(scheduler, name)

            def traced(*arguments: Any, method: Any = method, **named: Any) -> Any:
                entered.append(set())
                sys.setprofile(note)
                try:
                    return method(*arguments, **named)
                finally:
                    sys.setprofile(None)

            monkeypatch.setattr(scheduler, name, traced)
        engine.ask(parameters)
    assert len(entered) >= 16
    seen = set().union(*entered[1:-1]) & GUESTS
    assert seen == wanted


class RowCount(StepGuest):
    """Counts the rows of all collected steps and of the requests that have ended."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.num_rows = self.num_started = self.num_removed = 0

    def started(self, canvas: Any, new: Any) -> None:
        self.num_started += 1

    def collected(self, step: Any, candidates: Any, outcomes: Any) -> None:
        self.num_rows += step.batch.num_rows

    def removed(self, req_id: str) -> None:
        self.num_removed += 1

    def status(self) -> dict[str, Any]:
        return {"rows": self.num_rows, "started": self.num_started, "ended": self.num_removed}


def test_a_step_guest_sees_every_step_and_reports_in_the_status(
    checkpoint: Callable[[str], Path],
) -> None:
    with running(checkpoint("mha")) as engine:
        runner = engine.runner
        assert "rows" not in status_of(runner)
        assert runner.join(RowCount) is runner.join(RowCount)
        engine.ask(*(Request(random_prompt(n), PLAIN) for n in (8, 20)))
        assert engine.is_idle()
        actual = status_of(runner)
        assert (actual["rows"], actual["started"], actual["ended"]) == (8 * (24 + 36), 2, 2)
