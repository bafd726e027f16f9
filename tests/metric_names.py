# SPDX-License-Identifier: Apache-2.0
"""Names of metrics in Prometheus."""

import re

from vllm.diffusion.metrics import Metric

METRIC_NAME = re.compile(r"\b(?:dllm|vllm):[a-z0-9_]+")
# Upstream's metrics on the dashboard. tests/server/test_metrics.py checks that they are served.
UPSTREAMS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
}


def samples_of(metric: Metric) -> tuple[str, ...]:
    """Return the names of a metric's samples in Prometheus."""
    if metric.kind == "histogram":
        return tuple(metric.name + ending for ending in ("_bucket", "_sum", "_count"))
    return (f"{metric.name}_total" if metric.kind == "counter" else metric.name,)
