# SPDX-License-Identifier: Apache-2.0
"""Messages to the client of a request, in upstream's types.

Data without a field in upstream's output travels in its `kv_transfer_params`, which upstream's
front end passes on unchanged.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from vllm.diffusion.engine.scheduler.text_edits import edits_of
from vllm.diffusion.engine.scheduler.trajectories import trajectory_of
from vllm.outputs import RequestError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

if TYPE_CHECKING:
    from vllm.diffusion.engine.messages import StepResult, StepUsage
    from vllm.diffusion.engine.scheduler.request_state import RequestState
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request


def progress(
    item: RequestState, new_token_ids: list[int], result: StepResult
) -> list[EngineCoreOutput]:
    """Create the outputs of a step: tokens that are now final, and at the end the report.

    A closed answer stops after its last token. Upstream omits the last token of a stopping output
    from the text, because it takes this token for a stop token. So the end is sent as a separate
    output.
    """
    logprobs = result.logprobs
    output = EngineCoreOutput(
        request_id=item.req_id,
        new_token_ids=new_token_ids,
        new_logprobs=logprobs and logprobs.slice_request(0, len(new_token_ids)),
        stop_reason=item.request.stop_reason,
        trace_headers=item.request.trace_headers,
        kv_transfer_params=_side_channel(item, result),
        **_common(item.request),
    )
    if not result.is_closed or new_token_ids[-1] in item.params.stop_ids:
        return [output]
    end = replace(output, new_token_ids=[], new_logprobs=None, events=None, prefill_stats=None)
    output.finish_reason = None
    return [output, end]


def refusal(request: Request, message: str, failed: bool) -> EngineCoreOutput:
    """Create the output with the error that ends a request; the request's status must be set.

    Upstream's `LLM` drops the error, so the message is also in our fields.
    """
    code = "engine_error" if failed else "validation_error"  # HTTP 500 or 400
    return replace(_last(request, {"error": message}), error=RequestError(code, message))


def timeout(item: RequestState, message: str) -> EngineCoreOutput:
    """Create the output of a request that timed out; the request's status must be set."""
    fields = {"error": message, "timeout_s": item.params.timeout_s, **_report(item)}
    return _last(item.request, fields)


def end(item: RequestState) -> EngineCoreOutput:
    """Create the output that ends an answer without a further token."""
    return _last(item.request, _report(item))


def _last(request: Request, fields: dict[str, Any]) -> EngineCoreOutput:
    """Create the last output of a request, which has fields of our own but no token."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        kv_transfer_params={"dllm": fields},
        **_common(request),
    )


class Outbox:
    """Outputs that clients receive with the results of the next step.

    Args:
        lists_finished: whether clients need the ids of finished requests.
    """

    def __init__(self, *, lists_finished: bool) -> None:
        self._lists_finished = lists_finished
        self._outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)  # by client
        self._finished: dict[int, set[str]] = defaultdict(set)  # by client

    @property
    def num_outputs(self) -> int:
        """Number of outputs that have not been taken."""
        return sum(map(len, self._outputs.values()))

    @property
    def is_empty(self) -> bool:
        """Whether there are no messages for any client."""
        return not self._outputs and not self._finished

    def put(self, request: Request, *outputs: EngineCoreOutput) -> None:
        """Add outputs for the client of a request."""
        if outputs:
            self._outputs[request.client_index] += outputs

    def note_end(self, request: Request) -> None:
        """Record the end of a request for its client."""
        if self._lists_finished:
            self._finished[request.client_index].add(request.request_id)

    def take(self, stats: SchedulerStats | None) -> dict[int, EngineCoreOutputs]:
        """Empty the outbox: return one message per client; the first message also has `stats`."""
        messages = {client: EngineCoreOutputs(outputs=o) for client, o in self._outputs.items()}
        for client, req_ids in self._finished.items():
            messages.setdefault(client, EngineCoreOutputs()).finished_requests = req_ids
        if stats is not None:
            first = next(iter(messages), 0)
            messages.setdefault(first, EngineCoreOutputs()).scheduler_stats = stats
        self._outputs, self._finished = defaultdict(list), defaultdict(set)
        return messages


def _common(request: Request) -> dict[str, Any]:
    return {
        "finish_reason": request.get_finished_reason(),
        "events": request.take_events(),
        "prefill_stats": request.take_prefill_stats(),
    }


def _side_channel(item: RequestState, result: StepResult) -> dict[str, Any] | None:
    """Return fields that upstream's output lacks; the report is sent with the last output.

    The front end finds stop strings by itself, so for requests with stop strings every output may
    be the last one.
    """
    fields: dict[str, Any] = {}
    if item.request.is_finished() or item.request.sampling_params.stop:
        fields |= _report(item)
        fields |= {"infilled": result.infilled} if result.infilled else {}
        if result.trajectory is not None:
            fields["trajectory"] = trajectory_of(item, result.trajectory)
    if result.canvas is not None:
        fields["canvas"] = vars(result.canvas)
    if result.scores is not None:
        fields["scores"] = vars(result.scores)
    return {"dllm": fields} if fields else None


def _report(item: RequestState) -> dict[str, Any]:
    waited = time.time() - item.request.arrival_time
    ran = time.monotonic() - item.started if item.started else 0.0
    return {
        "steps": item.params.steps,
        "num_steps": item.num_steps,
        "num_forwards": item.num_forwards,
        "states_drafted": item.num_drafts,
        "states_accepted": item.num_accepted,
        "num_forwards_saved": item.num_forwards_saved,
        "num_committed": item.num_committed,
        "num_end_tokens": _num_end_tokens(item),
        "queue_ms": round(1000 * max(waited - ran, 0.0), 3),
        "denoise_ms": round(1000 * ran, 3),
        "seed": item.params.seed,
        "ignored": list(item.params.ignored),
        **_lengths(item),
        **(edits_of(item) if item.params.revision is not None else {}),
        **item.report,
        **_memory(item.largest),
    }


def _memory(usage: StepUsage | None) -> dict[str, int]:
    """Return the memory of the largest step of a request; it has none before its first step."""
    if usage is None:
        return {}
    return {
        "peak_bytes": usage.peak_bytes,
        "average_bytes": usage.average_bytes,
        "budget_bytes": usage.budget_bytes,
    }


def _lengths(item: RequestState) -> dict[str, list[int]]:
    """Return the lengths of a canvas that may grow, in order."""
    lengths = [*item.earlier_lengths, item.params.gen_length]
    return {} if item.params.canvas == "fixed" else {"canvas_lengths": lengths}


def _num_end_tokens(item: RequestState) -> int:
    """Return the number of filled positions from the stop token on; 0 without a stop token."""
    answer = item.request.output_token_ids
    if not answer or answer[-1] not in item.params.stop_ids:
        return 0
    return item.params.num_open - len(answer) + 1
