# SPDX-License-Identifier: Apache-2.0
"""`timeout_s` gives status 504 before a stream begins and ends it afterwards; and priorities."""

from typing import Any

import pytest

from tests.server.client import CHAT, COMPLETIONS, GENERATE, ROUTES, Client, body_for, refusal

SLOW = {"gen_length": 1024, "steps": 1024, "block_length": 4, "ignore_eos": True}
TIMED_OUT = "dllm:requests_timed_out_total"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}], ids=str)
def test_a_request_that_is_not_complete_in_time_is_a_504(
    client: Client, route: str, fields: dict[str, Any]
) -> None:
    """A stream whose first block is not done in time also gets status 504."""
    before = client.metric(TIMED_OUT)
    seconds = 0.001 if "stream" in fields else 0.05
    body = body_for(route, **SLOW, **fields, timeout_s=seconds)
    error = refusal(client.http.post(route, json=body), 504)
    assert f"timeout: not complete {seconds:g} s after arrival" in error["message"]
    assert error["param"] == "timeout_s"
    client.wait_for_num_requests(0)
    assert client.metric(TIMED_OUT) == before + fields.get("n", 1)


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_that_has_begun_ends_with_abort(client: Client, route: str) -> None:
    body = body_for(route, **SLOW, timeout_s=2, stream_canvas=True)
    *before, last = client.events(route, body)
    assert before
    reason = last["finish_reason"][0] if route == GENERATE else last["choices"][0]["finish_reason"]
    assert reason == "abort"
    assert last["diffusion"]["error"].startswith("timeout: not complete 2 s after arrival")
    assert 0 < last["diffusion"]["num_forwards"] < 1024


def test_a_request_in_time_has_no_error(client: Client) -> None:
    for route in ROUTES:
        answer = client.answer(route, body_for(route, gen_length=32, timeout_s=60))
        assert "error" not in answer["diffusion"]
        assert client.events(route, body_for(route, gen_length=32, timeout_s=60))


@pytest.mark.parametrize("route", ROUTES)
def test_priorities_are_taken(client: Client, route: str) -> None:
    """The priority may be a field of the body, upstream's header, or in `vllm_xargs`."""
    for fields in ({"priority": -3}, {"vllm_xargs": {"priority": 7}}):
        if route == GENERATE and "vllm_xargs" in fields:
            continue
        assert client.answer(route, body_for(route, gen_length=32, **fields))
    header = {"X-Vllm-Priority": "5"}
    response = client.http.post(route, json=body_for(route, gen_length=32), headers=header)
    assert response.status_code == 200, response.text


def test_priorities_out_of_range_are_refused(client: Client) -> None:
    for route in (GENERATE, CHAT, COMPLETIONS):
        error = refusal(client.http.post(route, json=body_for(route, priority="urgent")))
        assert "priority" in error["message"]
        for header in ("abc", "1.5", "", "9" * 30):
            sent = {"X-Vllm-Priority": header}
            error = refusal(client.http.post(route, json=body_for(route), headers=sent))
            assert f"X-Vllm-Priority: given '{header}'; wanted an integer" in error["message"]
