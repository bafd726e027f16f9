# SPDX-License-Identifier: Apache-2.0
"""Which requests wait and why: the waiting line, and the groups of a prompt."""

import time
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.engine.scheduler.gates import AdmissionGate
from vllm.diffusion.engine.scheduler.likelihood_calls import LONGEST_WAIT_S, LikelihoodCalls
from vllm.diffusion.engine.scheduler.prompt_groups import PromptGroups
from vllm.diffusion.engine.scheduler.request_state import RequestState, WaitsFor
from vllm.diffusion.engine.scheduler.waiting import MAX_OVERTAKEN, MAX_PASSED, WaitingLine
from vllm.diffusion.memory import Demand
from vllm.diffusion.request.likelihood import ScoreRequest

LIMIT = 100  # positions of all running requests
NEVER = 1000  # positions of a request that never fits


class Room:
    """Admission that counts positions."""

    def obstacle(self, running: list[Demand], new: Demand, **_: Any) -> str | None:
        return None if sum(d.length for d in [*running, new]) <= LIMIT else "rows"

    def check(self, new: Demand) -> Demand:
        if new.length >= NEVER:
            raise ActivationBudgetError(new.length, 2, 1, NEVER - 1)
        return new


ROOM: Any = Room()


class Closed(AdmissionGate):
    """A gate that keeps its requests waiting until it is opened."""

    def __init__(self, reason: WaitsFor | None = None) -> None:
        self.reason, self.is_open = reason, False

    def waits_for(self, item: RequestState) -> WaitsFor | None:
        return None if self.is_open else self.reason

    def reserve(self, item: RequestState) -> bool:
        return self.is_open


def waiting(
    length: int, *gates: AdmissionGate, alone: bool = False, priority: int = 0
) -> RequestState:
    params: Any = SimpleNamespace(force_single_batch=alone, priority=priority)
    request: Any = SimpleNamespace(request_id="same")
    return RequestState(request, params, Demand(length, 1), gates)


def line_of(*items: RequestState, max_running: int = 64) -> WaitingLine:
    line = WaitingLine(max_running)
    for item in items:
        line.append(item)
    return line


def started(line: WaitingLine, *running: RequestState) -> list[RequestState]:
    """Return the requests that start, given the running ones; none may be refused."""
    together = list(running)
    for item, error in line.admit(together, ROOM):
        assert error is None
        together.append(item)
    return together[len(running) :]


def test_of_two_equal_requests_the_one_that_is_meant_leaves() -> None:
    """Removal compares by identity, because the same request may be sent twice."""
    first = waiting(10)
    second = RequestState(first.request, first.params, first.demand)
    assert first != second
    line = line_of(first, second)
    line.remove(second)
    assert [item is first for item in line.requests] == [True]


def test_thousands_leave_one_after_the_other() -> None:
    """A client with many answers disconnects, and each removal takes the same time."""
    first = waiting(10)
    items = [RequestState(first.request, first.params, first.demand) for _ in range(20_000)]
    line, begun = line_of(*items), time.monotonic()
    for left, item in enumerate(reversed(items[12:]), 1):
        line.remove(item)
        assert len(line) == len(items) - left
    assert line.requests == items[:12]
    assert line.by_id == {first.req_id: items[:12]}
    assert started(line) == items[:10] and line.by_id == {first.req_id: items[10:12]}
    assert time.monotonic() - begun < 120  # seconds; only a hang exceeds this


def test_requests_start_in_order_while_they_fit() -> None:
    items = [waiting(40) for _ in range(4)]
    line = line_of(*items)
    assert started(line) == items[:2]
    assert list(line.requests) == items[2:]
    assert started(line, items[0]) == [items[2]]


def test_who_waits_for_something_else_is_not_overtaken() -> None:
    """A gated request does not count as overtaken, however many requests start before it."""
    gate = Closed("prompt")
    others = [waiting(1, gate) for _ in range(MAX_PASSED + 1)]
    line = line_of(*others, waiting(2))
    for _ in range(MAX_OVERTAKEN + 1):
        line.append(waiting(2))
        who = started(line)
        assert who and not any(item in others for item in who)
    gate.is_open = True
    assert started(line) == others


def test_gates_are_prepared_once_a_step_before_anybody_starts() -> None:
    """Only gates of waiting requests are prepared, and not after their request has left."""
    seen: list[Any] = []

    class Seen(AdmissionGate):
        def prepare(self, item: RequestState) -> None:
            seen.append(item)

    first, second, gone = waiting(1, Seen()), waiting(1, Seen()), waiting(1, Seen())
    line = line_of(waiting(1), first, second, gone)
    line.remove(gone)
    for item, _ in line.admit([], ROOM):
        seen.append(item.demand)
    assert seen[:2] == [first, second] and len(seen) == 5
    assert not started(line) and len(seen) == 5


def test_at_most_so_many_run() -> None:
    items = [waiting(1) for _ in range(4)]
    assert started(line_of(*items, max_running=3)) == items[:3]


def test_one_that_never_fits_is_taken_out_with_the_reason() -> None:
    giant, small = waiting(NEVER), waiting(1)
    line = line_of(giant, small)
    actual = list(line.admit([], ROOM))
    assert [item for item, _ in actual] == [giant, small]
    assert isinstance(actual[0][1], ActivationBudgetError) and actual[1][1] is None
    assert not line.requests


@pytest.mark.parametrize("alone", [True, False])
def test_who_runs_alone_shares_with_nobody(alone: bool) -> None:
    runs, comes = waiting(1, alone=not alone), waiting(1, alone=alone)
    assert started(line_of(comes), runs) == []
    assert started(line_of(comes)) == [comes]


def test_a_large_one_is_overtaken_only_so_often() -> None:
    runs, large = waiting(50), waiting(80)
    small = [waiting(1) for _ in range(2 * MAX_OVERTAKEN)]
    line = line_of(large, *small)
    assert started(line, runs) == small[:MAX_OVERTAKEN]
    assert started(line, runs) == []
    assert started(line) == [large, *small[MAX_OVERTAKEN:]]


def test_only_so_many_that_do_not_fit_are_looked_past() -> None:
    runs, small = waiting(50), waiting(1)
    assert started(line_of(*(waiting(80) for _ in range(MAX_PASSED - 1)), small), runs) == [small]
    assert started(line_of(*(waiting(80) for _ in range(MAX_PASSED)), small), runs) == []


def test_those_of_a_lower_number_stand_before_all_others() -> None:
    items = [waiting(60, priority=number) for number in (0, 1, 0, -1)]
    assert list(line_of(*items).requests) == [items[3], items[0], items[2], items[1]]


def query(group: str = "", size: int = 1) -> Any:
    score = ScoreRequest((0,), ((1,),), group=group, group_size=size)
    return SimpleNamespace(params=SimpleNamespace(score=score))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nobody_starts_before_all_are_there() -> None:
    calls, items = LikelihoodCalls(Clock()), [query("a", 3) for _ in range(3)]
    for number, item in enumerate(items):
        assert calls.arrived(item)
        assert calls.waits_for(items[0]) == ("call" if number < 2 else None)


def test_others_do_not_wait() -> None:
    calls, other = LikelihoodCalls(Clock()), SimpleNamespace(params=SimpleNamespace(score=None))
    calls.arrived(query("a", 2))
    for item in (query("b", 1), query(), other):
        assert not calls.arrived(item)


def test_those_that_never_come_are_not_waited_for() -> None:
    clock = Clock()
    calls, item = LikelihoodCalls(clock), query("a", 2)
    calls.arrived(item)
    assert calls.waits_for(item)
    clock.now = LONGEST_WAIT_S
    assert not calls.waits_for(item)
    assert not calls.waits_for(query("a", 2)), "late ones wait for nobody"


def test_what_a_request_waits_for_is_noted() -> None:
    running = [waiting(60)]
    items = [waiting(50), waiting(10, Closed("prompt")), waiting(10, alone=True)]
    items.append(waiting(30, Closed()))
    line = line_of(*items)
    assert not list(line.admit(running, ROOM))
    assert [item.waits_for for item in items] == ["rows", "prompt", "others", "memory"]
    full = WaitingLine(max_running=1)
    full.append(item := waiting(1))
    assert not list(full.admit(running, ROOM))
    assert item.waits_for == "requests"
    behind = line_of(*(waiting(90) for _ in range(MAX_PASSED)), last := waiting(1))
    assert not list(behind.admit(running, ROOM))
    assert last.waits_for == "order"
    line.append(urgent := waiting(90, priority=-1))
    urgent.num_overtaken = MAX_OVERTAKEN
    assert not list(line.admit(running, ROOM))
    assert [item.waits_for for item in line.requests] == ["rows", *["order"] * 4]


# ---- prompt groups: who computes the first forward pass, and who counts the cached pages ----


PROMPT = [3] * (2 * PAGE_SIZE + 10)


@dataclass(frozen=True)
class Params:
    """The parameters that prompt groups read."""

    num_answers: int = 3
    cache: str = "frozen"
    gen_length: int = 20
    cfg_scale: float = 0.0
    mask_id: int = 9
    logit_shift: int = 0
    seed: int = field(default_factory=count().__next__)


def item(
    name: str,
    groups: PromptGroups,
    prompt: list[int] = PROMPT,
    *,
    skips_prefixes: bool = False,
    **params: Any,
) -> RequestState:
    """Return a waiting request, by default for one of three answers."""
    length = len(prompt) + 20
    request: Any = SimpleNamespace(
        request_id=name,
        prompt_token_ids=prompt,
        num_prompt_tokens=len(prompt),
        skip_reading_prefix_cache=skips_prefixes,
    )
    settings: Any = Params(**params)
    made = RequestState(request, settings, Demand(length, 20, keeps_cache=True, window=20))
    made.gates = (groups,) if groups.arrived(made) else ()
    return made


def start(waiting: list[RequestState]) -> list[tuple[str, str | None]]:
    """Return the requests that start now, in order, each with the request whose prompt it reads."""
    for one in waiting:
        for gate in one.gates:
            gate.prepare(one)
    started = []
    for one in waiting:
        if not any(gate.waits_for(one) for gate in one.gates):
            for gate in one.gates:
                gate.started(one)
            started.append((one.req_id, one.prompt_of))
    return started


def test_one_computes_the_prompt_and_the_others_wait_for_it() -> None:
    groups = PromptGroups()
    a, b, c, d = (item(name, groups) for name in "abcd")
    others = [item("e", groups, PROMPT[1:]), item("f", groups, num_answers=1)]
    others += [item("g", groups, [9, *PROMPT]), item("h", groups, cache="dual")]
    assert start([a, b, c, *others]) == [(name, None) for name in "aefgh"]
    assert a.demand.cached_positions == (3 + 2 * 1) * PAGE_SIZE  # and one page of each other answer
    assert [o.demand.spare for o in others] == [2 * PAGE_SIZE, 0, 0, 0]
    assert start([b, c]) == []
    a.num_forwards = 1
    assert start([b, c, d]) == [("b", "a"), ("c", "a")]  # `a` reserved pages for two answers
    assert (b.demand.cached_positions, b.demand.largest_rows(10**6)) == (0, 20)
    counted = a.demand
    groups.left(a)
    assert (b.demand, c.demand.cached_positions) == (counted, 0)
    groups.left(b)
    assert c.demand == counted
    groups.left(c)
    assert start([d]) == [("d", None)]


def test_an_aborted_request_leaves_its_prompt_to_the_next() -> None:
    groups = PromptGroups()
    a, b, c = (item(name, groups) for name in "abc")
    assert start([a]) == [("a", None)]
    groups.left(a)
    groups.left(c)  # is still waiting
    assert start([b]) == [("b", None)]
    assert b.demand.spare == 2 * PAGE_SIZE


def test_guidance_and_shifted_logits_need_more_room_of_their_own() -> None:
    groups = PromptGroups()
    shifted = item("a", groups, [3] * 2 * PAGE_SIZE, logit_shift=1)
    assert shifted.demand.spare == 2 * 2 * PAGE_SIZE  # with the page of the row before the canvas
    straight = item("b", groups, [3] * 2 * PAGE_SIZE)
    assert straight.demand.spare == 2 * PAGE_SIZE


@pytest.mark.parametrize("cache", ["none", "exact", "dual"])
def test_other_caches_wait_for_the_first_forward_and_keep_no_room(cache: str) -> None:
    groups = PromptGroups()
    a, b, c = (item(name, groups, cache=cache) for name in "abc")
    counted = a.demand
    assert start([a, b, c]) == [("a", None)]
    a.num_forwards = 1
    assert start([b]) == [("b", "a")]
    b.num_forwards = 1
    groups.left(a)
    assert start([c]) == [("c", "b")]  # `b` has the rows that it shared with `a`
    assert [one.demand for one in (a, b, c)] == [counted] * 3


def test_who_has_nothing_to_share_does_not_wait() -> None:
    groups = PromptGroups()
    few = [item(name, groups, PROMPT[:60], cache="none") for name in "ab"]
    unread = [item(name, groups, cache="exact", skips_prefixes=True) for name in "cd"]
    writing = [item(name, groups, PROMPT[:60], cache="dual") for name in "ef"]
    everybody = [*few, *unread, *writing]
    assert start(everybody) == [(one.req_id, None) for one in everybody]
