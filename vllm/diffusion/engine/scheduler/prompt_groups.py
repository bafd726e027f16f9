# SPDX-License-Identifier: Apache-2.0
"""Answers to one prompt: what their first forwards have in common is computed once.

A request for n answers comes as n requests, which differ in their seeds alone. One of them computes
its first forward, and the others wait for it. What they read of it depends on what they keep:

- `frozen`: the prompt's keys and values, where they are, for which the first one keeps room for
  what the others do not share. In their first forward they compute the canvas.
- `none`: the hidden states of the sample rows. Their first forward is over when they start.
- `prefix`, `dual`, `delayed`: the same, and a copy of all keys and values that it has left. The
  next forward writes some of them, so who starts after that computes its own.
- `exact`: the prompt's keys and values, as anybody whose prompt begins alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm.diffusion.core.pages import PAGE_SIZE, in_whole_pages
from vllm.diffusion.engine.messages import MOST_SHARED_ROWS

if TYPE_CHECKING:
    from vllm.diffusion.engine.scheduler.request_state import RequestState
    from vllm.diffusion.request.params import DiffusionParams

# First forwards that have fewer rows all together cost no more than one of them.
FEWEST_ROWS = 256


class Prompt(NamedTuple):
    """Key of a prompt group: what the first forward depends on; `params` are without seed."""

    token_ids: bytes
    params: DiffusionParams


@dataclass
class _Sharers:
    """Running requests that share what one of them has computed.

    Attributes:
        members: the first one's demand includes what all of them keep.
        num_places: number of requests that may still join.
    """

    members: list[RequestState]
    num_places: int


class PromptGroups:
    """Decides which waiting requests may begin with what a running one has computed."""

    def __init__(self) -> None:
        self._groups: dict[Prompt, _Sharers] = {}
        self._prompts: dict[str, Prompt] = {}  # by request

    def arrived(self, item: RequestState) -> None:
        """Note a request that waits; until it is placed, it is expected to compute its prompt."""
        if item.params.num_answers > 1 and _may_share(item):
            token_ids = np.array(item.request.prompt_token_ids or []).tobytes()
            self._prompts[item.req_id] = Prompt(token_ids, replace(item.params, seed=None))
            self._compute(item)

    def place(self, item: RequestState) -> None:
        """Update a waiting request's demand by whose prompt it would read if it started now."""
        prompt = self._prompts.get(item.req_id)
        if prompt is None:
            return
        group = self._groups.get(prompt)
        if group is None or not group.num_places:
            self._compute(item)
            return
        item.prompt_of = group.members[0].req_id
        if item.params.cache == "frozen":
            item.demand = replace(item.demand, reads_prompt=True, spare=0, host_layers=0)
            item.next_rows = item.demand.first_rows

    def _compute(self, item: RequestState) -> None:
        """Make a request compute its prompt and keep room for its siblings."""
        item.prompt_of = None
        if item.params.cache == "frozen":
            demand = replace(item.demand, reads_prompt=False)
            spare = (item.params.num_answers - 1) * own_positions(item) * demand.num_sequences
            item.demand = replace(demand, spare=spare)
            item.next_rows = item.demand.first_rows

    def waits(self, item: RequestState) -> bool:
        """Whether a request is to begin with something that a sibling has not computed yet."""
        group = self._group_of(item)
        if group is None or not group.num_places:  # it is to be placed anew
            return item.prompt_of is not None
        return item.prompt_of is None or not group.members[0].num_forwards

    def start(self, item: RequestState) -> None:
        """Start a request: with what a sibling has computed, or as the one that computes it."""
        prompt, group = self._prompts.get(item.req_id), self._group_of(item)
        if prompt is None:
            return
        if group is None:
            demand, is_frozen = item.demand, item.params.cache == "frozen"
            if not demand.host_layers and (demand.spare or not is_frozen):
                self._groups[prompt] = _Sharers([item], item.params.num_answers - 1)
        elif item.prompt_of is not None:
            group.members.append(item)
            group.num_places -= 1

    def left(self, item: RequestState) -> None:
        """Remove a request that is over; another one's demand then counts what all keep."""
        group, prompt = self._group_of(item), self._prompts.pop(item.req_id, None)
        if prompt is None or group is None or item not in group.members:
            return
        was_first = group.members[0] is item
        group.members.remove(item)
        if not group.members:
            del self._groups[prompt]
        elif was_first:
            group.members[0].demand = item.demand

    def _group_of(self, item: RequestState) -> _Sharers | None:
        prompt = self._prompts.get(item.req_id)
        return None if prompt is None else self._groups.get(prompt)


def _may_share(item: RequestState) -> bool:
    """Whether a request's first forward has something for its siblings that is worth sharing."""
    params, demand, request = item.params, item.demand, item.request
    if params.cache == "frozen":
        return params.mask_id not in (request.prompt_token_ids or [])
    if params.num_answers * demand.first_rows < FEWEST_ROWS:
        return False
    if params.cache == "exact":
        return not request.skip_reading_prefix_cache
    return demand.sample_rows <= MOST_SHARED_ROWS


def own_positions(item: RequestState) -> int:
    """Positions, in whole pages, that a sequence keeps beside the prompt of another one.

    The row before the canvas is among them where it predicts the canvas's first token.
    """
    frozen: int = item.request.num_prompt_tokens - item.params.logit_shift
    return in_whole_pages(item.demand.length) - max(frozen, 0) // PAGE_SIZE * PAGE_SIZE
