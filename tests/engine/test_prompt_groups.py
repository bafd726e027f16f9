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
from vllm.diffusion.memory import Demand

PROMPT = [3] * (2 * PAGE_SIZE + 10)


@dataclass(frozen=True)
class Params:
    """What siblings want to know of a request's parameters."""

    num_answers: int = 3
    cache: str = "frozen"
    gen_length: int = 20
    cfg_scale: float = 0.0
    mask_id: int = 9
    logit_shift: int = 0
    seed: int = field(default_factory=count().__next__)


def item(
    name: str,
    siblings: PromptGroups,
    prompt: list[int] = PROMPT,
    *,
    skips_prefixes: bool = False,
    **params: Any,
) -> Any:
    """A waiting request, for one of three answers where nothing else is said."""
    length = len(prompt) + 20
    made = SimpleNamespace(
        req_id=name,
        params=Params(**params),
        request=SimpleNamespace(
            prompt_token_ids=prompt,
            num_prompt_tokens=len(prompt),
            skip_reading_prefix_cache=skips_prefixes,
        ),
        demand=Demand(length, 20, keeps_cache=True, window=20),
        prompt_of=None,
        num_forwards=0,
    )
    siblings.arrived(made)
    return made


def start(siblings: PromptGroups, waiting: list[Any]) -> list[tuple[str, str | None]]:
    """Those that start now, in order, and whose prompt they read."""
    for one in waiting:
        siblings.place(one)
    started = []
    for one in waiting:
        if not siblings.waits(one):
            siblings.start(one)
            started.append((one.req_id, one.prompt_of))
    return started


def test_one_computes_the_prompt_and_the_others_wait_for_it() -> None:
    siblings = PromptGroups()
    a, b, c, d = (item(name, siblings) for name in "abcd")
    others = [item("e", siblings, PROMPT[1:]), item("f", siblings, num_answers=1)]
    others += [item("g", siblings, [9, *PROMPT]), item("h", siblings, cache="dual")]
    assert start(siblings, [a, b, c, *others]) == [(name, None) for name in "aefgh"]
    assert a.demand.cached_positions == (3 + 2 * 1) * PAGE_SIZE  # one page of each sibling's own
    assert [o.demand.spare for o in others] == [2 * PAGE_SIZE, 0, 0, 0]
    assert start(siblings, [b, c]) == []
    a.num_forwards = 1
    assert start(siblings, [b, c, d]) == [("b", "a"), ("c", "a")]  # it had two siblings
    assert (b.demand.cached_positions, b.demand.largest_rows(10**6)) == (0, 20)
    counted = a.demand
    siblings.left(a)
    assert (b.demand, c.demand.cached_positions) == (counted, 0)
    siblings.left(b)
    assert c.demand == counted
    siblings.left(c)
    assert start(siblings, [d]) == [("d", None)]


def test_an_aborted_request_leaves_its_prompt_to_the_next() -> None:
    siblings = PromptGroups()
    a, b, c = (item(name, siblings) for name in "abc")
    assert start(siblings, [a]) == [("a", None)]
    siblings.left(a)
    siblings.left(c)  # still waiting
    assert start(siblings, [b]) == [("b", None)]
    assert b.demand.spare == 2 * PAGE_SIZE


def test_guidance_and_shifted_logits_need_more_room_of_their_own() -> None:
    siblings = PromptGroups()
    shifted = item("a", siblings, [3] * 2 * PAGE_SIZE, logit_shift=1)
    assert shifted.demand.spare == 2 * 2 * PAGE_SIZE  # the page of the row before the canvas, too
    straight = item("b", siblings, [3] * 2 * PAGE_SIZE)
    assert straight.demand.spare == 2 * PAGE_SIZE


@pytest.mark.parametrize("cache", ["none", "exact", "dual"])
def test_other_caches_wait_for_the_first_forward_and_keep_no_room(cache: str) -> None:
    siblings = PromptGroups()
    a, b, c = (item(name, siblings, cache=cache) for name in "abc")
    counted = a.demand
    assert start(siblings, [a, b, c]) == [("a", None)]
    a.num_forwards = 1
    assert start(siblings, [b]) == [("b", "a")]
    b.num_forwards = 1
    siblings.left(a)
    assert start(siblings, [c]) == [("c", "b")]  # which has what it had of the first one
    assert [one.demand for one in (a, b, c)] == [counted] * 3


def test_who_has_nothing_to_share_does_not_wait() -> None:
    siblings = PromptGroups()
    few = [item(name, siblings, PROMPT[:60], cache="none") for name in "ab"]
    unread = [item(name, siblings, cache="exact", skips_prefixes=True) for name in "cd"]
    writing = [item(name, siblings, PROMPT[:60], cache="dual") for name in "ef"]
    everybody = [*few, *unread, *writing]
    assert start(siblings, everybody) == [(one.req_id, None) for one in everybody]
