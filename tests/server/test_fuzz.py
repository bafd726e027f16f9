# SPDX-License-Identifier: Apache-2.0
"""Random requests from the server's OpenAPI document cause no server error or broken stream."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case

from tests.server.client import Client
from tests.server.process import ServerProcess

NUM_EXAMPLES = 24  # per operation
# For two routes, drawing one request takes a second: lists of conversations, and all tools.
FEWER_EXAMPLES = {"/v1/chat/completions/batch": 6, "/v1/messages/count_tokens": 8}
ROUTES = (
    *("/generate", "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"),
    *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/loglikelihood"),
    *(
        "/v1/decisions",
        "/v1/systemone",
        "/generative_scoring",
        "/tokenize",
        "/detokenize",
        "/invocations",
        "/v1/fim/completions",
        "/v1/edit/completions",
        "/v1/apply/completions",
    ),
)
TIMED_OUT = 504  # the right status for a small drawn `timeout_s`


@pytest.mark.parametrize("route", ROUTES)
def test_drawn_requests_are_answered_or_refused(
    client: Client, server: ServerProcess, route: str
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = schema[route]["POST"]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=FEWER_EXAMPLES.get(route, NUM_EXAMPLES),
        phases=[Phase.generate],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Case) -> None:
        response = case.call(timeout=60)  # raises if a stream breaks off
        assert response.status_code < 500 or response.status_code == TIMED_OUT, response.text
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}, response.text
            assert error["code"] == response.status_code

    check()
