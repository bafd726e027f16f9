# SPDX-License-Identifier: Apache-2.0
"""The command that the log of a start suggests, without a server."""

import json
import shlex
from argparse import Namespace
from typing import Any

import pytest

from vllm.diffusion.api.server import welcome


def arguments(**given: Any) -> Namespace:
    plain = {"host": None, "port": 8000, "root_path": None, "ssl_certfile": None}
    return Namespace(**plain | given)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 8901}, "http://127.0.0.1:8901"),
        ({"host": "::1"}, "http://[::1]:8000"),
        ({"host": "box", "ssl_certfile": "x.pem", "root_path": "/m"}, "https://box:8000/m"),
    ],
)
def test_the_address_is_one_that_answers(given: dict[str, Any], url: str) -> None:
    assert welcome.address(arguments(**given)) == url


@pytest.mark.parametrize("has_template", [True, False])
def test_the_command_is_a_request(has_template: bool) -> None:
    words = shlex.split(welcome.curl("http://h:1", has_template=has_template, has_key=True))
    assert words[:3] == ["curl", "-s", "http://h:1/generate"]
    assert "Authorization: Bearer KEY" in words
    body = json.loads(words[-1])
    assert body.get("apply_chat_template", False) == has_template
    assert body["gen_length"] == 32
