# SPDX-License-Identifier: Apache-2.0
"""/metrics has the metrics of `vllm.diffusion.metrics`, as documented, with the right values."""

import re

from prometheus_client.parser import text_string_to_metric_families

from tests.metric_names import METRIC_NAME, UPSTREAMS, samples_of
from tests.programs import ROOT
from tests.server.client import CHAT, GENERATE, PUZZLE, QUESTION, Client, body_for
from tests.server.process import MODEL_NAME
from vllm.diffusion.metrics import METRICS

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
TABLE = re.compile(r"^\| `(dllm:\w+)` \| (\w+) \| (.+) \| (.+) \|$", re.MULTILINE)


def test_the_document_is_the_table() -> None:
    wanted = [
        (m.name, m.kind, ", ".join(f"`{label}`" for label in m.labels), m.doc) for m in METRICS
    ]
    assert TABLE.findall(DOCUMENT) == wanted


def test_what_is_served_is_what_is_documented(client: Client) -> None:
    client.generate(prompt=PUZZLE, gen_length=8)
    families = {
        family.name: family
        for family in text_string_to_metric_families(client.http.get("/metrics").text)
        if not family.name.endswith("_created")
    }
    ours = {name: f for name, f in families.items() if name.startswith("dllm:")}
    assert {(f.name, f.type, f.documentation) for f in ours.values()} == {
        (m.name, m.kind, m.doc) for m in METRICS
    }
    for metric in METRICS:
        samples = ours[metric.name].samples
        assert samples, metric.name
        assert {s.name for s in samples} == set(samples_of(metric))
        for sample in samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels)
            assert sample.labels["model_name"] == MODEL_NAME
    served = {sample.name for family in families.values() for sample in family.samples}
    assert served >= UPSTREAMS
    # The document names each metric in full, or a family of metrics.
    for name in METRIC_NAME.findall(DOCUMENT):
        assert name in served or name in families, name


def test_the_numbers_are_those_of_the_requests(client: Client) -> None:
    def numbers() -> dict[str, float]:
        return {
            sample.removeprefix("dllm:"): client.metric(sample)
            for metric in METRICS
            for sample in samples_of(metric)
            if not sample.endswith("_bucket")
        }

    before = numbers()
    bodies = [
        {"prompt": PUZZLE, "gen_length": 32, "steps": 8, "ignore_eos": True, "cfg_scale": 1.0},
        {"prompt": PUZZLE, "gen_length": 64, "steps": 64, "ignore_eos": True, "cache": "dual"},
        {"prompt": QUESTION, "apply_chat_template": True, "gen_length": 64, "steps": 64},
    ]
    answers = [client.generate(**body) for body in bodies]
    for route, bad in ((GENERATE, {"steps": 0}), (CHAT, {"steps": 0}), (GENERATE, {"stepz": 1})):
        assert client.http.post(route, json=body_for(route, **bad)).status_code == 400
    after = numbers()
    rise = {name: value - before[name] for name, value in after.items()}
    forwards = 8 + 64 + 32  # the last answer ends in the first of its two blocks
    assert sum(answer["diffusion"]["num_forwards"] for answer in answers) == forwards
    assert rise["denoise_steps_total"] == rise["forwards_total"] == forwards
    assert rise["forwards_saved_total"] == 32
    assert rise["committed_tokens_total"] == 32 + 64 + 32
    assert rise["step_batch_size_count"] == rise["step_batch_size_sum"] == forwards
    assert rise["step_rows_count"] == rise["step_time_seconds_count"] == forwards
    prompt = answers[0]["usage"]["prompt_tokens"]
    guided, cached = 8 * 2 * (prompt + 32), 64 * (prompt + 64)
    plain = 32 * (answers[2]["usage"]["prompt_tokens"] + 64)
    assert guided + 64 * 32 + plain <= rise["step_rows_sum"] < guided + cached + plain
    assert rise["tokens_per_forward_count"] == 3
    assert rise["tokens_per_forward_sum"] == 32 / 8 + 64 / 64 + 32 / 32
    assert rise["queue_time_seconds_count"] == 3
    assert rise["time_to_first_committed_token_seconds_count"] == 3
    first, queued = "time_to_first_committed_token_seconds_sum", "queue_time_seconds_sum"
    assert rise[first] > rise[queued] >= 0
    assert rise["step_time_seconds_sum"] > 0
    assert rise["planner_time_seconds_count"] == forwards
    budget = after["activation_pool_budget_bytes"]
    assert budget > after["activation_pool_peak_bytes"] > 0
    assert after["activation_pool_in_use_bytes"] == 0  # no request has a cache any more
    assert rise["requests_refused_total"] == 3
    assert rise["requests_aborted_total"] == 0
    text = client.http.get("/metrics").text
    assert f'dllm:requests_refused_total{{model_name="{MODEL_NAME}",reason="steps"}} ' in text
    assert 'reason="other"' in text
    assert "stepz" not in text
