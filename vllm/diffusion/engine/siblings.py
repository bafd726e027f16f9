# SPDX-License-Identifier: Apache-2.0
"""Answers to one prompt whose keys and values are frozen: the prompt is computed once for all.

A request for n answers comes as n requests, which differ in their seeds alone. The first forward
of all of them is the same, and so are the keys and values of the prompt that they keep. So one of
them computes it, and keeps room for what the others do not share. These start when its first
forward is over, read the prompt's keys and values where they are, and compute the canvas: in their
first forward it is the same computation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm.diffusion.pages import PAGE_SIZE, in_whole_pages

if TYPE_CHECKING:
    from vllm.diffusion.engine.scheduled import Scheduled


class Prompt(NamedTuple):
    """What the frozen keys and values of a prompt depend on."""

    token_ids: bytes
    gen_length: int
    is_guided: bool


@dataclass
class _Group:
    """The running requests that read one prompt's keys and values.

    Attributes:
        members: the first of them counts what all keep.
        num_places: for more of them.
    """

    members: list[Scheduled]
    num_places: int


class Siblings:
    """Says which waiting requests may read the prompt of a running one."""

    def __init__(self) -> None:
        self._groups: dict[Prompt, _Group] = {}
        self._prompts: dict[str, Prompt] = {}  # by request

    def arrived(self, item: Scheduled) -> None:
        """A request waits; its demand is that of one that computes its prompt."""
        params, token_ids = item.params, item.request.prompt_token_ids or []
        if params.num_answers == 1 or params.cache != "frozen" or params.mask_id in token_ids:
            return
        prompt = Prompt(np.array(token_ids).tobytes(), params.gen_length, params.cfg_scale > 0)
        self._prompts[item.req_id] = prompt
        self._compute(item)

    def place(self, item: Scheduled) -> None:
        """Before it may start: let its demand say whose prompt it reads."""
        prompt = self._prompts.get(item.req_id)
        if prompt is None:
            return
        group = self._groups.get(prompt)
        if group is None or not group.num_places:
            self._compute(item)
            return
        item.prompt_of = group.members[0].req_id
        item.demand = replace(item.demand, reads_prompt=True, spare=0, host_layers=0)
        item.next_rows = item.demand.first_rows

    def _compute(self, item: Scheduled) -> None:
        """It computes its prompt, and keeps room for its siblings."""
        item.prompt_of = None
        demand = replace(item.demand, reads_prompt=False)
        spare = (item.params.num_answers - 1) * own_positions(item) * demand.num_sequences
        item.demand = replace(demand, spare=spare)
        item.next_rows = item.demand.first_rows

    def is_ready(self, item: Scheduled) -> bool:
        """Whether the prompt that it is to read is there; it starts now, if so."""
        prompt = self._prompts.get(item.req_id)
        if prompt is None:
            return True
        group = self._groups.get(prompt)
        if group is None:
            if item.demand.spare and not item.demand.host_layers:
                self._groups[prompt] = _Group([item], item.params.num_answers - 1)
            return item.prompt_of is None
        if not group.num_places:
            return item.prompt_of is None
        if item.prompt_of is None or not group.members[0].num_forwards:
            return False
        group.members.append(item)
        group.num_places -= 1
        return True

    def left(self, item: Scheduled) -> None:
        """A request is over. Another one counts what all keep from now on."""
        prompt = self._prompts.pop(item.req_id, None)
        group = None if prompt is None else self._groups.get(prompt)
        if prompt is None or group is None or item not in group.members:
            return
        was_first = group.members[0] is item
        group.members.remove(item)
        if not group.members:
            del self._groups[prompt]
        elif was_first:
            group.members[0].demand = item.demand


def own_positions(item: Scheduled) -> int:
    """Positions, in whole pages, that a sequence keeps beside the prompt of another one.

    The row before the canvas is computed with it where it predicts its first token.
    """
    frozen: int = item.request.num_prompt_tokens - item.params.logit_shift
    return in_whole_pages(item.demand.length) - max(frozen, 0) // PAGE_SIZE * PAGE_SIZE
