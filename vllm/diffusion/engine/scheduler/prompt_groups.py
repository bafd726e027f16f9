# SPDX-License-Identifier: Apache-2.0
"""Requests that share a prompt: the common part of their first forwards is computed once.

A request for n answers arrives as n requests that differ only in their seeds. One of them computes
its first forward, and the others wait for it. What they reuse depends on the cache:

- `frozen`: the prompt's keys and values, in the same pages. The request that computes them reserves
  the memory that the others do not share. In their first forward the others compute the canvas.
- `none`: the hidden states of the sample rows. Their first forward is complete when they start.
- `prefix`, `dual`, `delayed`: these hidden states, and a copy of all keys and values after the
  first forward. The second forward overwrites some of them, so a request that starts later computes
  its own first forward.
- `exact`: the prompt's keys and values, like all requests with a common prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm.diffusion.core.pages import PAGE_SIZE, in_whole_pages
from vllm.diffusion.engine.scheduler.gates import AdmissionGate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.engine.scheduler.request_state import RequestState, WaitsFor
    from vllm.diffusion.request.params import DiffusionParams

# If their first forwards have fewer rows in total, they cost no more than one first forward.
MIN_SHARED_ROWS = 256
# Maximum sample rows of a first forward whose hidden states are kept for requests with its prompt.
MAX_SHARED_ROWS = 8_192


class Prompt(NamedTuple):
    """Key of a prompt group: all that the first forward depends on; `params` have no seed."""

    token_ids: bytes
    params: DiffusionParams
    adapter_key: str


@dataclass(eq=False)
class _PromptGroup:
    """Requests with one prompt, and the running requests that share one computation of it.

    Attributes:
        key: key of the group.
        num_known: number of requests, waiting or running.
        members: running requests; the first one's demand includes the memory of all.
        num_places: number of requests that may still join.
    """

    key: Prompt
    num_known: int = 0
    members: dict[RequestState, None] = field(default_factory=dict)
    num_places: int = 0

    @property
    def first(self) -> RequestState:
        return next(iter(self.members))

    def dissolve(self) -> None:
        """Make each running request compute its prompt again by itself."""
        for item in [*self.members][1:]:
            if item.params.cache == "frozen":
                item.demand = replace(item.demand, reads_prompt=False)
        self.members.clear()


class PromptGroups(AdmissionGate):
    """Gate of requests that share a prompt: one request computes it, and the others wait for it."""

    def __init__(self) -> None:
        self._groups: dict[Prompt, _PromptGroup] = {}
        # A key may be long, so it is compared only once, when a request arrives.
        self._group_of: dict[RequestState, _PromptGroup] = {}

    def arrived(self, item: RequestState) -> bool:
        """Accept one of several answers; at first it is expected to compute its prompt itself."""
        if item.params.num_answers == 1 or not _may_share(item):
            return False
        token_ids = np.array(item.request.prompt_token_ids or []).tobytes()
        key = Prompt(token_ids, replace(item.params, seed=None), item.adapter_key)
        group = self._group_of[item] = self._groups.setdefault(key, _PromptGroup(key))
        group.num_known += 1
        _make_prompt_owner(item)
        return True

    def prepare(self, item: RequestState) -> None:
        """Set a waiting request's demand by the prompt that it would read if it started now."""
        group = self._group_of[item]
        if not group.members or not group.num_places:
            _make_prompt_owner(item)
            return
        item.prompt_of = group.first.req_id
        if item.params.cache == "frozen":
            item.demand = replace(item.demand, reads_prompt=True, spare=0, host_layers=0)
            item.next_rows = item.demand.first_rows

    def waits_for(self, item: RequestState) -> WaitsFor | None:
        """Return "prompt" while another request computes the start of this one's first forward."""
        group = self._group_of[item]
        if not group.members or not group.num_places:
            is_ready = item.prompt_of is None  # otherwise it is prepared again in the next step
        else:
            is_ready = item.prompt_of is not None and group.first.num_forwards > 0
        return None if is_ready else "prompt"

    def started(self, item: RequestState) -> None:
        """Add a request to its group; the first member is the one that computes the prompt."""
        group = self._group_of[item]
        if not group.members:
            demand, is_frozen = item.demand, item.params.cache == "frozen"
            if not demand.host_layers and (demand.spare or not is_frozen):
                group.members[item], group.num_places = None, item.params.num_answers - 1
        elif item.prompt_of is not None:
            group.members[item] = None
            group.num_places -= 1

    def results_dropped(self, items: Sequence[RequestState], epoch: int) -> None:
        """Dissolve all groups: each running request computes its prompt again by itself."""
        for group in self._groups.values():
            group.dissolve()

    def adapters_renewed(self, items: Sequence[RequestState]) -> None:
        """Dissolve the groups of these requests."""
        for item in items:
            if item in self._group_of:
                self._group_of[item].dissolve()

    def left(self, item: RequestState) -> None:
        """Remove a request; if it was the first member, the next one takes over its demand."""
        group = self._group_of.pop(item)
        group.num_known -= 1
        if not group.num_known:
            del self._groups[group.key]
        if item not in group.members:
            return
        was_first = group.first is item
        del group.members[item]
        if group.members and was_first:
            group.first.demand = item.demand


def _make_prompt_owner(item: RequestState) -> None:
    """Make a request compute its prompt, and reserve memory for the requests that will read it."""
    item.prompt_of = None
    if item.params.cache == "frozen":
        demand = replace(item.demand, reads_prompt=False)
        spare = (item.params.num_answers - 1) * own_positions(item) * demand.num_sequences
        item.demand = replace(demand, spare=spare)
        item.next_rows = item.demand.first_rows


def _may_share(item: RequestState) -> bool:
    """Whether sharing a request's first forward saves time."""
    params, demand, request = item.params, item.demand, item.request
    if params.cache == "frozen":
        return params.mask_id not in (request.prompt_token_ids or [])
    if params.num_answers * demand.first_rows < MIN_SHARED_ROWS:
        return False
    if params.cache == "exact":
        return not request.skip_reading_prefix_cache
    return demand.sample_rows <= MAX_SHARED_ROWS


def own_positions(item: RequestState) -> int:
    """Return the positions, in whole pages, of a sequence besides the shared part of its prompt.

    ```
    prompt [0, P), frozen ......... | canvas [P, length)
    whole pages of it, shared ... | own positions, in whole pages
    ```

    If the row before the canvas predicts the first token of the canvas, that row is not shared.
    """
    frozen: int = item.request.num_prompt_tokens - item.params.logit_shift
    return in_whole_pages(item.demand.length) - max(frozen, 0) // PAGE_SIZE * PAGE_SIZE
