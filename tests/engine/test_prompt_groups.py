# SPDX-License-Identifier: Apache-2.0
"""Who computes a first forward for several answers, and who counts what they keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.engine.scheduler.prompt_groups import PromptGroups
from vllm.diffusion.engine.scheduler.request_state import RequestState
from vllm.diffusion.memory import Demand

PROMPT = [3] * (2 * PAGE_SIZE + 10)


@dataclass(frozen=True)
class Params:
    """What prompt groups ask of a request's parameters."""

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
    """A waiting request, for one of three answers where nothing else is said."""
    length = len(prompt) + 20
    request: Any = SimpleNamespace(
        request_id=name,
        prompt_token_ids=prompt,
        num_prompt_tokens=len(prompt),
        skip_reading_prefix_cache=skips_prefixes,
    )
    asked: Any = Params(**params)
    made = RequestState(request, asked, Demand(length, 20, keeps_cache=True, window=20))
    made.gates = (groups,) if groups.arrived(made) else ()
    return made


def start(waiting: list[RequestState]) -> list[tuple[str, str | None]]:
    """Those that start now, in order, and whose prompt they read."""
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
    assert a.demand.cached_positions == (3 + 2 * 1) * PAGE_SIZE  # one page of each other's own
    assert [o.demand.spare for o in others] == [2 * PAGE_SIZE, 0, 0, 0]
    assert start([b, c]) == []
    a.num_forwards = 1
    assert start([b, c, d]) == [("b", "a"), ("c", "a")]  # it had room for two
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
    groups.left(c)  # still waiting
    assert start([b]) == [("b", None)]
    assert b.demand.spare == 2 * PAGE_SIZE


def test_guidance_and_shifted_logits_need_more_room_of_their_own() -> None:
    groups = PromptGroups()
    shifted = item("a", groups, [3] * 2 * PAGE_SIZE, logit_shift=1)
    assert shifted.demand.spare == 2 * 2 * PAGE_SIZE  # the page of the row before the canvas, too
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
    assert start([c]) == [("c", "b")]  # which has what it had of the first one
    assert [one.demand for one in (a, b, c)] == [counted] * 3


def test_who_has_nothing_to_share_does_not_wait() -> None:
    groups = PromptGroups()
    few = [item(name, groups, PROMPT[:60], cache="none") for name in "ab"]
    unread = [item(name, groups, cache="exact", skips_prefixes=True) for name in "cd"]
    writing = [item(name, groups, PROMPT[:60], cache="dual") for name in "ef"]
    everybody = [*few, *unread, *writing]
    assert start(everybody) == [(one.req_id, None) for one in everybody]
