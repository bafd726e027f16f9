# SPDX-License-Identifier: Apache-2.0
"""Metrics of the server, and the transport of the scheduler's observations to it.

`/metrics` serves the table `METRICS` together with upstream's metrics; `docs/metrics.md` documents
it.

The scheduler runs in the engine's process, the server in another. Messages between them are typed,
and only one field is free: `SchedulerStats.waiting_lora_adapters`, a dict from strings to whole
numbers that upstream fills only after the message has arrived. `Observations` are sent in it as
`"name value"` -> count. `unpack` takes them out where the message arrives, before upstream's
loggers read the field. If no code reads them (in the offline `LLM`, or with upstream's loggers
alone), they have no effect.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.v1.metrics.stats import SchedulerStats

_POWERS_OF_2 = tuple(float(1 << i) for i in range(9))
_ROWS = tuple(float(1 << i) for i in range(5, 21))
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG_SECONDS = (*_SECONDS[3:], 60.0, 120.0, 300.0, 600.0, 1800.0)
_MICROSECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.1)

WAITS_FOR = ("rows", "memory", "requests", "others", "prompt", "call", "adapter", "order")


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        name: name in `/metrics`, where a counter's samples end in `_total`.
        doc: the meaning, with the unit.
        buckets: upper bounds of a histogram's buckets.
        label: name of its label in addition to `model_name` and `engine`, if any.
        label_values: values of this label that are exported from the start, with value 0.
        per_engine: whether it has the label `engine`; False if the server itself counts.
        facts: labels with facts known from the start; the value is always 1.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    buckets: tuple[float, ...] = ()
    label: str | None = None
    label_values: tuple[str, ...] = ()
    per_engine: bool = True
    facts: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        names = self.facts if self.label is None else (self.label,)
        return ("model_name", "engine", *names) if self.per_engine else ("model_name", *names)


BUILD_INFO = Metric(
    "dllm:build_info",
    "gauge",
    "Always 1. The labels state what the engine uses. `flash_sample`, `fused_ops` and "
    "`gather_gemm` are `kernels`, `portable kernels` or `reference` (PyTorch). "
    "`activation_pool` is `vmm` (virtual memory) or `torch` (PyTorch's allocator). `attention` "
    "lists the backends of attention. `graphs` is `on` if the engine has CUDA graphs.",
    per_engine=False,
    facts=("flash_sample", "fused_ops", "gather_gemm", "activation_pool", "attention", "graphs"),
)
STEP_BATCH_SIZE = Metric(
    "dllm:step_batch_size",
    "histogram",
    "Requests that share a denoising step.",
    _POWERS_OF_2,
)
STEP_ROWS = Metric(
    "dllm:step_rows",
    "histogram",
    "Rows that a denoising step computes; guidance counts a sequence twice.",
    _ROWS,
)
STEP_TIME = Metric(
    "dllm:step_time_seconds",
    "histogram",
    "Duration of a denoising step in seconds, until its results are on the host. It starts at the "
    "step's launch, or at the end of the previous step if both overlap.",
    _SECONDS,
)
DENOISE_STEPS = Metric(
    "dllm:denoise_steps", "counter", "Denoising steps of the engine; requests share them."
)
FORWARDS = Metric(
    "dllm:forwards",
    "counter",
    "Forward passes of requests: a step counts once for each of its requests.",
)
FORWARDS_SAVED = Metric(
    "dllm:forwards_saved",
    "counter",
    "Forward passes that requests skipped because these could not have changed the answer. "
    "They are counted when a request finishes.",
)
REQUEST_STEPS = Metric(
    "dllm:request_steps",
    "counter",
    "Denoising steps of requests. With accepted draft states, one forward pass does several steps.",
)
DRAFT_STATES = Metric("dllm:draft_states", "counter", "Draft states that forward passes evaluated.")
ACCEPTED_STATES = Metric(
    "dllm:accepted_states", "counter", "Accepted draft states; each saved a forward pass."
)
COMMITTED_TOKENS = Metric(
    "dllm:committed_tokens",
    "counter",
    "Committed canvas positions. A position that is masked again counts once more.",
)
TOKENS_PER_FORWARD = Metric(
    "dllm:tokens_per_forward",
    "histogram",
    "Committed canvas positions per forward pass, for each finished request.",
    (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0),
)
STEPS_PER_FORWARD = Metric(
    "dllm:steps_per_forward",
    "histogram",
    "Steps per forward pass, for each finished request with draft states.",
    (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 16.0),
)
QUEUE_TIME = Metric(
    "dllm:queue_time_seconds",
    "histogram",
    "Seconds from the arrival of a request to its admission.",
    _LONG_SECONDS,
)
TIME_TO_FIRST_COMMIT = Metric(
    "dllm:time_to_first_committed_token_seconds",
    "histogram",
    "Seconds from the arrival of a request to its first committed token, at any position. The "
    "first token of the text may come later.",
    _LONG_SECONDS,
)
POOL_BUDGET = Metric(
    "dllm:activation_pool_budget_bytes",
    "gauge",
    "Memory budget of a rank in bytes, for activations and for keys and values cached between "
    "steps.",
)
POOL_IN_USE = Metric(
    "dllm:activation_pool_in_use_bytes",
    "gauge",
    "Bytes in use between two steps, which are the cached keys and values of requests.",
)
HOST_IN_USE = Metric(
    "dllm:host_cache_in_use_bytes",
    "gauge",
    "Bytes of host memory of a rank for cached keys and values that do not fit into the pool.",
)
POOL_PEAK = Metric(
    "dllm:activation_pool_peak_bytes",
    "gauge",
    "Highest number of bytes in use in any step since the engine started.",
)
PLANNER_TIME = Metric(
    "dllm:planner_time_seconds",
    "histogram",
    "Seconds to plan a denoising step.",
    _MICROSECONDS,
)
REQUESTS_WAITING = Metric(
    "dllm:requests_waiting",
    "gauge",
    "Waiting requests, by reason. `rows`: a step has no free rows "
    "(`--max-num-batched-tokens`). `memory`: there is not enough free memory. `requests`: "
    "`--max-num-seqs` requests run. `others`: the running requests must end first "
    "(`force_single_batch`). `prompt`: another request computes the same prompt. `call`: "
    "requests of the same call are missing. `adapter`: all adapter slots are in use "
    "(`--max-loras`). `order`: earlier requests start first.",
    label="waits_for",
    label_values=WAITS_FOR,
)
REQUESTS_REFUSED = Metric(
    "dllm:requests_refused",
    "counter",
    "Refused requests. `reason` is the name of the wrong field, or `other` for an unknown "
    "field. Further reasons are `api_key`, `body_size`, `draining` (shutdown), `memory` (the "
    "steps never fit into memory) and `engine` (the engine failed).",
    label="reason",
    label_values=("engine",),
    per_engine=False,
)
REQUESTS_ABORTED = Metric(
    "dllm:requests_aborted",
    "counter",
    "Requests that ended before their answer was complete, because the client disconnected.",
    per_engine=False,
)
REQUESTS_TIMED_OUT = Metric(
    "dllm:requests_timed_out",
    "counter",
    "Requests that were not complete after their `timeout_s`.",
)
ADAPTERS_KNOWN = Metric(
    "dllm:adapters_known",
    "gauge",
    "LoRA adapters in host memory (`--max-cpu-loras`).",
)
ADAPTERS_PLACED = Metric(
    "dllm:adapters_placed",
    "gauge",
    "LoRA adapters in slots of the device (`--max-loras`).",
)
ADAPTER_SLOT_BYTES = Metric(
    "dllm:adapter_slot_bytes",
    "gauge",
    "Bytes of one slot for a LoRA adapter on a rank.",
)
ADAPTER_LOADS = Metric(
    "dllm:adapter_loads",
    "counter",
    "Loads of LoRA adapters, by source. `path`: files that are read while steps wait. "
    "`staged`: files that were read while steps ran. `tensors`: tensors from a trainer. "
    "`in_place`: a replacement of an adapter.",
    label="source",
    label_values=("path", "staged", "tensors", "in_place"),
)
ADAPTER_PLACEMENTS = Metric(
    "dllm:adapter_placements", "counter", "Copies of a LoRA adapter to a slot of the device."
)
ADAPTER_EVICTIONS = Metric(
    "dllm:adapter_evictions",
    "counter",
    "LoRA adapters that were removed from host memory to make room for others.",
)
ADAPTER_STEPS = Metric(
    "dllm:adapter_steps", "counter", "Denoising steps in which a request has a LoRA adapter."
)
ADAPTER_LOAD_TIME = Metric(
    "dllm:adapter_load_seconds",
    "histogram",
    "Seconds by which a load of a LoRA adapter delays steps.",
    _SECONDS,
)

# All rows above, in this order.
METRICS = tuple(value for value in globals().values() if isinstance(value, Metric))
_BY_NAME = {metric.name: metric for metric in METRICS}


MAX_REPORTED_WAITS = 64  # maximum number of requests whose wait is reported
_WAITS = "waits"
_UNPACKED = "dllm_observations"  # attribute of upstream's statistics


class Observations:
    """Observations since the last report."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, metric: Metric, amount: int = 1, label: str = "") -> None:
        """Increase a counter; `label` is the value of the metric's label, if it has one.

        A step that masks tokens again lowers the number of committed tokens. A counter never falls,
        so a negative amount is left out.
        """
        if amount > 0:
            self._counts[f"{metric.name} {label}"] += amount

    def observe(self, metric: Metric, value: float) -> None:
        """Add a value to a histogram, or set a gauge."""
        key = f"{metric.name} {value:.17g}"
        if metric.kind == "gauge":
            # The latest value must come last.
            self._counts.pop(key, None)
        self._counts[key] += 1

    def wait_for(self, waiting: Mapping[str, str]) -> None:
        """Set the reason for which each request waits, by id, in order.

        All requests are counted; the reason of each one is reported only for the first requests.
        """
        counts = dict.fromkeys(WAITS_FOR, 0) | Counter(waiting.values())
        self._counts.update(
            {f"{REQUESTS_WAITING.name} {reason}": n for reason, n in counts.items()}
        )
        first = islice(waiting.items(), MAX_REPORTED_WAITS)
        self._counts.update({f"{_WAITS} {req_id} {reason}": 1 for req_id, reason in first})

    def put_into(self, stats: SchedulerStats) -> None:
        """Move all observations into upstream's statistics of the step."""
        stats.waiting_lora_adapters.update(self._counts)
        self._counts.clear()


def unpack(stats: SchedulerStats) -> None:
    """Move the observations out of the field that carried them, which then has adapters' names."""
    if not hasattr(stats, _UNPACKED):
        setattr(stats, _UNPACKED, stats.waiting_lora_adapters)
        stats.waiting_lora_adapters = {}


def _sent(stats: SchedulerStats) -> Mapping[str, int]:
    sent: Mapping[str, int] = getattr(stats, _UNPACKED, stats.waiting_lora_adapters)
    return sent


def observations_in(stats: SchedulerStats) -> Iterator[tuple[Metric, str, int]]:
    """Yield metric, value or label, and count or amount, of all observations in the statistics."""
    for key, times in _sent(stats).items():
        name, _, value = key.partition(" ")
        if name != _WAITS:
            yield _BY_NAME[name], value, times


def waiting_in(stats: SchedulerStats) -> dict[str, str] | None:
    """Return the reasons for which the first requests wait, by id, or None without a report."""
    keys = [key.split(" ") for key in _sent(stats)]
    if not any(parts[0] == REQUESTS_WAITING.name for parts in keys):
        return None
    return {parts[1]: parts[2] for parts in keys if parts[0] == _WAITS}
