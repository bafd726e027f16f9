# SPDX-License-Identifier: Apache-2.0
"""Which requests take part in a step: their order, the row budget, and bounded waiting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.diffusion.engine.scheduler.turns import NextForward, move_to_end, take_turns
from vllm.diffusion.engine.worker.run_ahead import StepLimits, step_behind

BUDGET = 100
rows = st.integers(1, 150)
requests = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), rows, min_size=1)


@settings(deadline=None)
@given(requests)
def test_the_first_goes_and_the_others_while_they_fit(next_rows: dict[str, int]) -> None:
    taken = take_turns(next_rows, BUDGET)
    order = list(next_rows)
    assert next(iter(taken)) == order[0]
    assert list(taken) == [req_id for req_id in order if req_id in taken]
    assert all(next_rows[req_id] == count for req_id, count in taken.items())
    assert sum(taken.values()) <= BUDGET or len(taken) == 1
    room = BUDGET - sum(taken.values())
    assert all(next_rows[req_id] > room for req_id in order if req_id not in taken)


@settings(deadline=None)
@given(st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.integers(1, 40)), st.data())
def test_forwards_that_can_be_cut_fill_the_step(
    blocks: dict[str, int], data: st.DataObject
) -> None:
    """A divisible forward pass has whole blocks, at least one, and as many rows as fit."""
    units = {req_id: data.draw(st.sampled_from([4, 8, 32, 64])) for req_id in blocks}
    wanted = {req_id: count * units[req_id] for req_id, count in blocks.items()}
    taken = take_turns(wanted, BUDGET, units)
    assert sum(taken.values()) <= BUDGET
    room = BUDGET - sum(taken.values())
    for req_id, rows in wanted.items():
        assert taken.get(req_id, 0) % units[req_id] == 0
        assert taken.get(req_id, 0) == rows or room < units[req_id]


def test_a_unit_beyond_the_budget_goes_alone() -> None:
    assert take_turns({"a": 300, "b": 1}, BUDGET, {"a": 150}) == {"a": 150}


def test_nobody_is_no_step() -> None:
    assert take_turns({}, BUDGET) == {}


def test_whoever_is_too_large_goes_alone() -> None:
    assert take_turns({"giant": 101, "small": 1}, BUDGET) == {"giant": 101}
    assert take_turns({"small": 1, "giant": 101, "exact": 99}, BUDGET) == {"small": 1, "exact": 99}


@settings(deadline=None)
@given(requests, st.data())
def test_nobody_waits_for_more_steps_than_there_are_before_it(
    turns: dict[str, int], data: st.DataObject
) -> None:
    """Row counts change with every step, and new requests arrive all the time."""
    waited = dict.fromkeys(turns, 0)
    ahead = {req_id: place for place, req_id in enumerate(turns)}
    for number in range(20):
        taken = take_turns(turns, BUDGET)
        for req_id in turns:
            waited[req_id] = 0 if req_id in taken else waited[req_id] + 1
            assert waited[req_id] <= ahead[req_id]
        move_to_end(turns, taken)
        order = list(turns)
        ahead.update({req_id: order.index(req_id) for req_id in taken})
        turns.update({req_id: data.draw(rows) for req_id in taken})
        turns[f"new {number}"] = data.draw(rows)
        waited[f"new {number}"], ahead[f"new {number}"] = 0, len(turns) - 1


@pytest.mark.parametrize("names", [[], ["c"], ["a", "b"], ["b", "a", "gone"]])
def test_those_who_took_part_go_to_the_end(names: list[str]) -> None:
    turns = {"a": 1, "b": 2, "c": 3}
    move_to_end(turns, names)
    stayed = [name for name in "abc" if name not in names]
    assert list(turns) == stayed + [name for name in names if name != "gone"]
    assert turns == {"a": 1, "b": 2, "c": 3}


GRAPH_ROWS = 1024
SHARES = StepLimits(GRAPH_ROWS)
FULL_BUDGET = 8 * GRAPH_ROWS
wishes = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=3),
    st.builds(NextForward, st.integers(1, GRAPH_ROWS), st.booleans(), st.booleans(), st.none()),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(wishes, st.data())
def test_a_step_behind_another_is_of_one_kind_and_of_nobody_under_way(
    parameters: dict[str, NextForward], data: st.DataObject
) -> None:
    in_flight = data.draw(st.sets(st.sampled_from(sorted(parameters))))
    taken = step_behind(in_flight, parameters, FULL_BUDGET, SHARES)
    assert in_flight.isdisjoint(taken)
    assert all(parameters[req_id].rows == rows for req_id, rows in taken.items())
    fit_a_graph = sum(wish.rows for wish in parameters.values() if wish.keeps) <= GRAPH_ROWS
    kinds = {name: (w.keeps, w.is_window and not fit_a_graph) for name, w in parameters.items()}
    assert len({kinds[req_id] for req_id in taken}) <= 1
    if not taken:  # then no waiting request fits into a step with running ones
        for kind in {kinds[req_id] for req_id in parameters if req_id not in in_flight}:
            alike = {req_id for req_id in parameters if kinds[req_id] == kind}
            assert alike & in_flight
            assert sum(parameters[req_id].rows for req_id in alike) <= GRAPH_ROWS
    elif all(kinds[req_id][1] for req_id in taken):
        assert sum(taken.values()) <= GRAPH_ROWS


def test_those_who_fit_into_one_step_wait_for_each_other() -> None:
    parameters = {
        "a": NextForward(32, keeps=True),
        "b": NextForward(32, keeps=True),
        "c": NextForward(32, keeps=False),
    }
    assert step_behind([], parameters, FULL_BUDGET, SHARES) == {"a": 32, "b": 32}
    assert step_behind(["a"], parameters, FULL_BUDGET, SHARES) == {"c": 32}
    assert step_behind(["a", "c"], parameters, FULL_BUDGET, SHARES) == {}


def test_who_has_no_pages_waits_and_a_long_prompt_is_cut_to_the_share() -> None:
    parameters = {
        "dry": NextForward(0, keeps=True, unit=32),
        "decodes": NextForward(32, keeps=True, unit=32),
        "prompt": NextForward(32_768, keeps=True, unit=32),
    }
    assert step_behind([], parameters, FULL_BUDGET, SHARES) == {
        "decodes": 32,
        "prompt": FULL_BUDGET - 32,
    }
    assert step_behind(["decodes", "prompt"], parameters, FULL_BUDGET, SHARES) == {}


@pytest.mark.parametrize(("is_window", "count", "share"), [(True, 32, 32), (False, 32, 48)])
def test_those_who_do_not_share_the_rows(is_window: bool, count: int, share: int) -> None:
    wish = NextForward(GRAPH_ROWS // count, keeps=True, is_window=is_window)
    parameters = {str(i): wish for i in range(3 * count)}
    first = step_behind([], parameters, FULL_BUDGET, SHARES)
    assert list(first) == list(parameters)[:share]
    second = step_behind(first, parameters, FULL_BUDGET, SHARES)
    assert list(second) == list(parameters)[share : 2 * share]
    assert step_behind([], parameters, GRAPH_ROWS // 2, SHARES).keys() == {
        str(i) for i in range(count // 2)
    }


def test_a_graph_may_limit_all_rows() -> None:
    parameters = {str(i): NextForward(256, keeps=True, unit=256) for i in range(12)}
    limits = StepLimits(GRAPH_ROWS, holds_for_all=True)
    first = step_behind([], parameters, FULL_BUDGET, limits)
    assert list(first) == list("0123")
    assert list(step_behind(first, parameters, FULL_BUDGET, limits)) == list("4567")


def test_windows_go_with_whole_sequences_where_a_graph_holds_all() -> None:
    parameters = {
        "window": NextForward(32, keeps=True, is_window=True),
        "whole": NextForward(256, keeps=True),
    }
    assert step_behind([], parameters, FULL_BUDGET, SHARES) == {"window": 32, "whole": 256}
    parameters["large"] = NextForward(GRAPH_ROWS, keeps=True)
    assert step_behind([], parameters, FULL_BUDGET, SHARES) == {"window": 32}
    assert step_behind(["window"], parameters, FULL_BUDGET, SHARES) == {"whole": 256}


@pytest.mark.parametrize(("count", "share"), [(128, 128), (129, 128), (300, 150)])
def test_many_requests_of_few_rows_come_in_shares(count: int, share: int) -> None:
    """The host handles the results of one share while the device computes the other one."""
    parameters = {str(i): NextForward(4, keeps=True, unit=4) for i in range(count)}
    first = step_behind([], parameters, FULL_BUDGET, SHARES)
    assert list(first) == list(parameters)[:share]
    assert list(step_behind(first, parameters, FULL_BUDGET, SHARES)) == list(parameters)[share:]
    assert step_behind(parameters, parameters, FULL_BUDGET, SHARES) == {}
