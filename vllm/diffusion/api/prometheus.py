# SPDX-License-Identifier: Apache-2.0
"""Metrics of `vllm.diffusion.metrics` in the Prometheus registry that `/metrics` serves."""

from __future__ import annotations

from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

from vllm.diffusion.api.protocol import GenerateBody
from vllm.diffusion.metrics import (
    BUILD_INFO,
    METRICS,
    REQUESTS_ABORTED,
    REQUESTS_REFUSED,
    observations_in,
    waiting_in,
)
from vllm.diffusion.request import fields
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.diffusion.metrics import Metric
    from vllm.engine.protocol import EngineClient
    from vllm.v1.metrics.stats import SchedulerStats

_REASONS = frozenset(
    {
        *("api_key", "body_size", "draining", "memory"),
        *GenerateBody.model_fields,
        *fields.SPELLINGS,
    }
)
_parts_aborted: ContextVar[list[bool] | None] = ContextVar("_parts_aborted", default=None)
# logger of the latest diffusion engine of this process, or empty
_installed: list[DiffusionStatLogger] = []


@cache
def _collector(metric: Metric) -> Any:
    """Return the collector of a metric, which exists once per process."""
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.doc, metric.labels, buckets=metric.buckets)
    if metric.kind == "gauge":
        # Several server processes may record metrics of one engine: the latest value counts.
        return Gauge(metric.name, metric.doc, metric.labels, multiprocess_mode="mostrecent")
    return Counter(metric.name, metric.doc, metric.labels)


class DiffusionStatLogger(AggregateStatLoggerBase):
    """Records the scheduler's observations, which upstream's statistics of a step carry.

    Attributes:
        waiting: reason why each request waits, by the engine's request id.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._model_name = str(vllm_config.model_config.served_model_name)
        self._samples: dict[tuple[str, int, str], Any] = {}
        self.waiting: dict[str, str] = {}
        for metric in METRICS:
            if not metric.facts:
                self._export(metric, engine_indexes)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        waiting = waiting_in(scheduler_stats)
        if waiting is not None:
            self.waiting = waiting
        for metric, value, times in observations_in(scheduler_stats):
            if metric.kind == "counter":
                self._of(metric, engine_idx, value).inc(times)
            elif metric.label is not None:
                self._of(metric, engine_idx, value).set(times)
            elif metric.kind == "gauge":
                self._of(metric, engine_idx).set(float(value))
            else:
                for _ in range(times):
                    self._of(metric, engine_idx).observe(float(value))

    def runs_on(self, build_info: Mapping[str, str]) -> None:
        """Export the build info of the engine, by label."""
        values = {"model_name": self._model_name, **build_info}
        _collector(BUILD_INFO).labels(*(values[name] for name in BUILD_INFO.labels)).set(1)

    def aborted(self) -> None:
        """Count a request whose client disconnected."""
        self._of(REQUESTS_ABORTED, 0).inc()

    def refused(self, reason: str) -> None:
        """Count a request that the server refused."""
        self._of(REQUESTS_REFUSED, 0, reason).inc()

    def log_engine_initialized(self) -> None:
        """Log nothing; upstream calls this method at start."""

    def _export(self, metric: Metric, engine_indexes: list[int]) -> None:
        """Export the samples of a metric that exist from the start, with value 0."""
        for engine in engine_indexes if metric.per_engine else (0,):
            for value in metric.label_values or ("",):
                self._of(metric, engine, value)

    def _of(self, metric: Metric, engine: int, label: str = "") -> Any:
        key = (metric.name, engine, label if metric.label else "")
        sample = self._samples.get(key)
        if sample is None:
            values = {"model_name": self._model_name, "engine": str(engine), metric.label: label}
            sample = _collector(metric).labels(*(values[name] for name in metric.labels))
            self._samples[key] = sample
        return sample


def install(engine: EngineClient, build_info: Mapping[str, str]) -> None:
    """Make the engine's client record our metrics too, unless statistics are disabled."""
    manager = getattr(engine, "logger_manager", None)
    _installed.clear()
    if manager is not None:
        ours = DiffusionStatLogger(engine.vllm_config, manager.engine_indexes)
        manager.stat_loggers.append(ours)
        ours.runs_on(build_info)
        _installed.append(ours)


def begin_request() -> None:
    """Mark the start of a client's request for this task and the tasks that it starts."""
    _parts_aborted.set([])


def count_abort() -> None:
    """Count a request whose client disconnected before its answer was complete.

    A request may have several parts (answers and score queries). Only the first aborted part
    counts.
    """
    parts = _parts_aborted.get()
    if parts:
        return
    if parts is not None:
        parts.append(True)
    for logger in _installed:
        logger.aborted()


def count_refusal(reason: str) -> None:
    """Count a request refused for `reason`, which is the name of a field or of a limit.

    Unknown names count as `other`, so that clients cannot fill the registry with labels.
    """
    for logger in _installed:
        logger.refused(reason if reason in _REASONS else "other")


def waiting() -> dict[str, str]:
    """Return the last reported reason why each request waits, by the engine's request id."""
    return {req_id: reason for logger in _installed for req_id, reason in logger.waiting.items()}
