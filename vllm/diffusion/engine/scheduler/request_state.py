# SPDX-License-Identifier: Apache-2.0
"""State of a request in the scheduler."""

from __future__ import annotations

import math
import secrets
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from vllm.diffusion.engine.messages import NewCanvas
from vllm.diffusion.engine.planning import demand_of
from vllm.diffusion.request.decision import decision_of
from vllm.diffusion.request.lengths import forwards_saved
from vllm.diffusion.request.params import DRAWN_SEED_BITS
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.diffusion.engine.messages import StepResult, StepUsage
    from vllm.diffusion.engine.scheduler.gates import AdmissionGate
    from vllm.diffusion.memory import Demand
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.diffusion.request.served_model import ServedModel
    from vllm.v1.request import Request


# Reasons to wait: rows of a step (`--max-num-batched-tokens`), memory, the number of running
# requests (`--max-num-seqs`), the end of running requests (`force_single_batch`), the prompt that
# another request computes, the missing requests of its call, a slot for its adapter, its turn after
# earlier requests.
WaitsFor = Literal["rows", "memory", "requests", "others", "prompt", "call", "adapter", "order"]


@dataclass(eq=False)
class RequestState:
    """A request with its decided parameters, from arrival to its last token; compared by identity.

    Attributes:
        gates: the gates that accepted the request.
        started: time.monotonic() of admission; 0 before.
        deadline: time.monotonic() at which the request ends, complete or not.
        waits_for: reason for which the request waits, until it is admitted.
        num_overtaken: number of later requests that have started before it.
        next_rows: rows of its next forward.
        num_kept: number of positions, from 0, whose keys and values are cached.
        num_pages: number of its pages, if the scheduler assigns them.
        most_rows: maximum rows of its next forward that get pages.
        has_pages: whether its next forward has the pages that it needs, if it needs any.
        earlier_lengths: lengths of its canvas before it has grown, in order.
        prompt_of: the request that has computed the beginning of its first forward.
        largest: usage of its step with the highest peak.
        labels: labels of weights, by the number of weight changes before them.
        adapter_key: identifies the tensors of its adapter; "" without one.
        adapter_steps: generations of its adapter, each with the first step that it computed.
    """

    request: Request
    params: DiffusionParams
    demand: Demand
    gates: tuple[AdmissionGate, ...] = ()
    started: float = 0.0
    deadline: float = math.inf
    waits_for: WaitsFor = "order"
    num_overtaken: int = 0
    next_rows: int = field(init=False)
    num_kept: int = 0
    num_pages: int = 0
    most_rows: int = sys.maxsize
    has_pages: bool = True
    num_steps: int = 0
    num_forwards: int = 0
    num_drafts: int = 0
    report: Mapping[str, int] = field(default_factory=dict)
    num_committed: int = 0
    earlier_lengths: list[int] = field(default_factory=list)
    prompt_of: str | None = None
    largest: StepUsage | None = None
    labels: Mapping[int, str] = field(default_factory=dict)
    adapter_key: str = ""
    adapter_steps: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_rows = self.demand.first_rows

    @classmethod
    def of(cls, request: Request, model: ServedModel) -> RequestState:
        """Create the state of a request that has arrived, with its decided parameters.

        Raises:
            InvalidParameterError: the request requires something that this model cannot do.
        """
        request.prefill_stats.set(request.num_prompt_tokens, 0, 0)
        prompt = request.prompt_token_ids or []
        decided = decision_of(request.sampling_params, model, prompt)
        if decided.seed is None:
            decided = decided.with_seed(secrets.randbits(DRAWN_SEED_BITS))
        if decided.priority is None:
            decided = replace(decided, priority=request.priority)
        adapts = request.lora_request is not None or model.adapts_drafts(decided.algorithm)
        demand = demand_of(decided, request.num_prompt_tokens, adapts=adapts)
        item = cls(request, decided, demand)
        if decided.timeout_s is not None:
            left_s = decided.timeout_s - seconds_since_arrival(request)
            item.deadline = time.monotonic() + left_s
        return item

    @property
    def req_id(self) -> str:
        return str(self.request.request_id)

    @property
    def block_offset(self) -> int:
        """Number of positions that the first block of its sequence lacks."""
        return self.params.block_offset(self.request.num_prompt_tokens)

    @property
    def priority(self) -> int:
        """Priority of the request; lower numbers come first."""
        return self.params.priority or 0

    @property
    def is_paged(self) -> bool:
        """Whether the scheduler assigns pages for its keys and values."""
        return self.params.cache == "exact"

    def start(self) -> NewCanvas:
        """Mark the request as running and return the message for the workers."""
        for gate in self.gates:
            gate.started(self)
        self.started = self.started or time.monotonic()
        self.request.status = RequestStatus.RUNNING
        prompt = list(self.request.prompt_token_ids or [])
        return NewCanvas(
            self.req_id,
            prompt,
            self.params,
            host_layers=self.demand.host_layers,
            prompt_of=self.prompt_of,
            kept_positions=self.demand.cached_positions,
            adapter=self.request.lora_request,
        )

    def grow(self, new_lengths: Sequence[int]) -> None:
        """Demand a canvas of the last of `new_lengths`; the prompt is computed again."""
        lasting = tuple(gate for gate in self.gates if gate.outlasts_growth)
        self.gates = tuple(gate for gate in self.gates if gate not in lasting)
        self.leave()
        self.gates, self.prompt_of = lasting, None
        self.earlier_lengths += [self.params.gen_length, *new_lengths[:-1]]
        self.params = self.params.with_canvas(new_lengths[-1])
        num_prompt_tokens = self.request.num_prompt_tokens
        self.demand = demand_of(self.params, num_prompt_tokens, adapts=self.demand.adapts)
        self.next_rows = self.demand.first_rows
        self.num_overtaken = 0

    def advance(self, result: StepResult, usage: StepUsage | None) -> list[int]:
        """Update the request with the result of a step and the memory that it used.

        Returns:
            The new final tokens that belong to the answer.
        """
        self.next_rows, self.num_kept = result.next_rows, result.num_kept
        self.num_steps, self.num_forwards = result.num_steps, result.num_forwards
        self.num_drafts, self.num_committed = result.num_drafts, result.num_committed
        self.report = result.report
        if usage is not None and (
            self.largest is None or usage.peak_bytes > self.largest.peak_bytes
        ):
            self.largest = usage
        new = self._accept(result)
        for gate in self.gates:
            gate.advanced(self)
        return new

    @property
    def num_accepted(self) -> int:
        """Number of accepted drafts."""
        return self.num_steps - self.num_forwards

    @property
    def num_forwards_saved(self) -> int:
        """Number of saved forwards: of steps that were not run, or that shared a forward."""
        unneeded = forwards_saved(self.params, self.num_steps, self.num_committed)
        return unneeded + self.num_accepted

    def leave(self) -> None:
        """Report the end of the request to its gates, whether it has started or not."""
        for gate in self.gates:
            gate.left(self)

    def _accept(self, result: StepResult) -> list[int]:
        """Return the new final tokens that belong to the answer; record how the answer ends."""
        request, tokens = self.request, result.new_token_ids
        if self.params.score is not None:  # a forward that is cut scores nothing
            request.status = RequestStatus.FINISHED_STOPPED if result.scores else request.status
            return []
        end = self.params.answer_end(
            tokens, request.num_output_tokens, continues=bool(result.new_lengths)
        )
        new = tokens if end is None else tokens[:end]
        if new:
            request.append_output_token_ids(new)
        if end is None:
            return new
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        if new and new[-1] in self.params.stop_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = new[-1] if new[-1] != self.params.eos_id else None
        elif result.is_closed:
            request.status = RequestStatus.FINISHED_STOPPED
        return new


def seconds_since_arrival(request: Request) -> float:
    """Return the seconds since the server stamped the request, by the clock that both share."""
    return float(max(time.time() - request.arrival_time, 0.0))
