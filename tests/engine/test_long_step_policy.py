# SPDX-License-Identifier: Apache-2.0
"""Which requests are long, whose slice is next, and how long and short requests share time."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.diffusion.config import Settings
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.engine.long_steps import LongStepReport, PausedStep
from vllm.diffusion.engine.scheduler.long_step_policy import LongStepPolicy
from vllm.diffusion.engine.scheduler.request_state import RequestState
from vllm.diffusion.memory import Demand

STEP_S, SHORT_S = 1.0, 0.004  # predicted seconds of a long step and of a short step


class Prediction:
    """A prediction in which every row of a step takes a millisecond."""

    row_budget = 100

    def seconds_of(self, demand: Demand, rows: int) -> float:
        return rows / 1000


PREDICTION: Any = Prediction()


def request(name: str, rows: int, **demand: Any) -> RequestState:
    step_slice: Any = SimpleNamespace(request_id=name)
    params: Any = SimpleNamespace(cache="none", priority=None)
    return RequestState(step_slice, params, Demand(rows, 1, **demand))


class Device:
    """A device, and a scheduler that only divides time.

    Args:
        factor: real seconds of the device per predicted second.
        lag: engine steps until the scheduler receives the time of a slice, as from a GPU.

    Attributes:
        waits_s: extra seconds of the next slice.
    """

    def __init__(self, factor: float = 1.0, lag: int = 0, **settings: float) -> None:
        self.long_steps = LongStepPolicy(Settings(**settings))
        self.now = self.long_s = self.waits_s = 0.0
        self.slices: list[str] = []
        self.paused: PausedStep | None = None
        self._factor, self._unheard = factor, [(0.0, 0.0, 0)] * lag
        self._left = {"a": STEP_S, "b": STEP_S}
        self._heard_at = 0.0

    def step(self, long: list[RequestState], *, short_s: float = 0.0) -> None:
        """Run one step of the engine in which short requests take `short_s` seconds."""
        step_slice = self.long_steps.next_slice(long, PREDICTION, is_shared=short_s > 0)
        self.now += short_s
        ended, self.paused = (0.0, 0.0, 0), None
        if step_slice is not None:
            seconds = min(step_slice.seconds, self._left[step_slice.req_id])
            taken, self.waits_s = self._factor * seconds + self.waits_s, 0.0
            self.now, self.long_s = self.now + taken, self.long_s + taken
            self.slices.append(step_slice.req_id)
            ended = seconds, taken, 1
            self._left[step_slice.req_id] = (self._left[step_slice.req_id] - seconds) or STEP_S
            self.paused = (
                None
                if self._left[step_slice.req_id] == STEP_S
                else PausedStep(step_slice.req_id, 1)
            )
        elif self.slices and self._left[self.slices[-1]] < STEP_S:
            self.paused = PausedStep(self.slices[-1], 1)
        self._unheard.append(ended)
        report = LongStepReport(self.paused, *self._unheard.pop(0))
        self.long_steps.learn(report, self.now - self._heard_at, long, PREDICTION)
        self._heard_at = self.now


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("factor", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_long_step_policy_have_their_share_beside_short_ones(
    share: float, factor: float, lag: int
) -> None:
    device = Device(factor, lag, long_share=share)
    while device.now < 20.0:
        device.step([request("a", 1000)], short_s=SHORT_S)
    assert device.long_s / device.now == pytest.approx(share, rel=0.1)


def test_a_long_request_alone_has_everything() -> None:
    device = Device(long_share=0.1)
    while device.now < 5.0:
        device.step([request("a", 1000)])
    assert device.long_s == pytest.approx(device.now)


@pytest.mark.parametrize("factor", [0.2, 3.0])
def test_slices_are_half_a_pause_once_the_pace_is_known(factor: float) -> None:
    device = Device(factor, longest_pause_ms=80.0)
    for _ in range(100):
        device.step([request("a", 1000)])
    before = device.now
    device.step([request("a", 1000)])
    assert device.now - before == pytest.approx(0.04, rel=0.1)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_slices", [0, 1, 100])
def test_a_slice_that_waited_for_a_kernel_makes_no_other_shorter(num_slices: int, lag: int) -> None:
    device, long = Device(lag=lag, longest_pause_ms=80.0), [request("a", 1000)]
    for _ in range(num_slices):
        device.step(long)
    device.waits_s = 5.0
    for _ in range(2):
        device.step(long)
    for _ in range(10):
        before = device.now
        device.step(long)
        assert device.now - before == pytest.approx(0.04)


def test_a_newcomer_runs_before_the_next_slice_of_who_was_alone() -> None:
    """A request that ran alone for long owes a pause of at most two slices, and then its share."""
    device = Device(long_share=0.5)
    for _ in range(100):
        device.step([request("a", 1000)])
    count, before = len(device.slices), device.now
    while len(device.slices) == count:
        device.step([request("a", 1000)], short_s=SHORT_S)
    assert 0.19 < device.now - before - 0.05 < 0.22


def test_several_long_requests_take_their_steps_in_turn() -> None:
    """A step that has begun goes on, whichever request comes first meanwhile."""
    device = Device()
    turns = [request("a", 1000), request("b", 1000)]
    for _ in range(100):
        begun = len(device.slices)
        device.step(turns)
        if len(device.slices) > begun and device.paused is None:
            turns.reverse()
    runs = "".join(device.slices).replace("a" * 20, "A").replace("b" * 20, "B")
    assert runs in ("ABABA", "AB" * 2 + "A")


def test_long_is_whose_next_step_takes_longer_than_a_pause() -> None:
    """A request is long by the rows of its next step and the speed, or if its step has begun."""
    device = Device(3.0)
    window = request("window", 90, num_sequences=2, window=20)
    running = {r.req_id: r for r in (request("a", 500), request("short", 90), window)}
    assert device.long_steps.long(running, PREDICTION) == ["a", "window"]
    window.next_rows = 40
    assert device.long_steps.long(running, PREDICTION) == ["a"]
    for _ in range(10):
        device.step([running["a"]])
    assert device.long_steps.long(running, PREDICTION) == ["a", "short", "window"]
    running["a"].next_rows = 1
    assert device.long_steps.long(running, PREDICTION)[0] == "a"


def test_steps_are_shared_only_while_a_request_may_be_long() -> None:
    """Steps are shared from the start of a possibly long request to the report of its end."""
    device, short, long = Device(), request("short", 90), request("a", 1000)
    long_steps = device.long_steps
    long_steps.started(short, PREDICTION)
    assert long_steps.is_idle
    long_steps.started(long, PREDICTION)
    assert not long_steps.is_idle
    running = {"short": short, "a": long}
    rows, decided = long_steps.divide(running, set(), PREDICTION, of_all, is_paused=False)
    assert rows == {"short": 90, "a": 1000} and decided.next_slice is not None
    assert decided.req_ids == ("a",)
    device.step([])  # the step has ended, and the long request has left
    assert long_steps.is_idle


def of_all(turns: Mapping[str, RequestState]) -> dict[str, int]:
    return {req_id: item.next_rows for req_id, item in turns.items()}


def test_a_part_that_the_row_budget_holds_is_taken_of_what_can_be_cut() -> None:
    step_slice = Device().long_steps.next_slice(
        [request("a", 960, unit=32)], PREDICTION, is_shared=False
    )
    assert step_slice is not None and step_slice.rows == 96


@pytest.mark.parametrize(
    "wrong",
    [
        *({"long_share": value} for value in (-0.1, 1, "half", True, None, float("nan"))),
        *({"longest_pause_ms": value} for value in (-1, 0.5, 1e9, "100", False)),
        {"weighs_guesses": "no"},
    ],
    ids=str,
)
def test_settings_out_of_range_stop_the_start(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ServerConfigError, match=f"dllm settings: {name}: given .*; wanted"):
        Settings.of(wrong)
    assert Settings.of({"long_share": 0, "longest_pause_ms": 0}).longest_pause_s == 0
