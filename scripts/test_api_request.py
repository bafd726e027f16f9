#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Send one request to `POST /generate` of a running server and print its JSON answer.

    scripts/test_api_request.py --model-family llada --host http://127.0.0.1:8901 \
        --steps 8 --gen-length 32 --block-length 32 --prompt "What is the capital of France?"

Needs nothing but Python. Exit status: 0 with the answer on stdout; 1 with one line on stderr when
the server is absent, refuses the request, or does not answer in time; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ModelFamily:
    """What a client must know about a family.

    Attributes:
        mask_id: the mask token of its released checkpoints.
        port: where its server script listens.
        block_length: tokens of one block where none is given; None where blocks have no meaning.
        fields: more fields of the body, which choose the decoding of the family's authors.
    """

    mask_id: int
    port: int
    block_length: int | None
    fields: dict[str, Any]


SEMI_AUTOREGRESSIVE = {"cfg_scale": 0.0, "remasking": "low_confidence"}
FAMILIES = {
    "llada": ModelFamily(126336, port=8901, block_length=32, fields=SEMI_AUTOREGRESSIVE),
    "dream": ModelFamily(
        151666, port=8701, block_length=None, fields={"algorithm": "dream", "alg": "entropy"}
    ),
    "llada-moe": ModelFamily(156895, port=10001, block_length=32, fields=SEMI_AUTOREGRESSIVE),
}


class RequestError(Exception):
    """The request got no answer; the message is one line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse_arguments(arguments)
    host = options.host or f"http://127.0.0.1:{FAMILIES[options.model_family].port}"
    url = host.rstrip("/") + "/generate"
    try:
        answer = post(url, payload(options), options.timeout)
    except RequestError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print(answer)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Send one request to POST /generate.")
    parser.add_argument("--model-family", choices=sorted(FAMILIES), default="llada")
    parser.add_argument(
        "--host",
        metavar="URL",
        type=server_url,
        help="the server (default: this machine, the port of the family's server script)",
    )
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument(
        "--raw", action="store_true", help="send the prompt as it is, without the chat template"
    )
    parser.add_argument("--steps", type=int, default=32, help="denoise steps")
    parser.add_argument("--gen-length", type=int, default=32, help="canvas length in tokens")
    parser.add_argument(
        "--block-length", type=int, help="tokens of one block (default: 32; none for dream)"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--mask-id",
        type=mask_id,
        default="family",
        metavar="N|none",
        help="mask token id to send; none leaves it to the server (default: the family's)",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds to wait (default 600)"
    )
    return parser.parse_args(arguments)


def server_url(text: str) -> str:
    """Check that the address of a server is an http or https URL with a host."""
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"given {text!r}; wanted http://HOST:PORT")
    return text


def mask_id(text: str) -> int | str:
    """A token id, or one of the words `none` (send nothing) and `family`."""
    if text in ("none", "family"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"given {text!r}; wanted a token id or none") from None


def payload(options: argparse.Namespace) -> dict[str, Any]:
    """The JSON body of the request."""
    family = FAMILIES[options.model_family]
    body: dict[str, Any] = {
        "prompt": options.prompt,
        "steps": options.steps,
        "gen_length": options.gen_length,
        "temperature": options.temperature,
        **family.fields,
    }
    block_length = options.block_length
    if block_length is None:
        block_length = family.block_length
    if block_length is not None:
        body["block_length"] = block_length
    if not options.raw:
        body["apply_chat_template"] = True
    if options.mask_id == "family":
        body["mask_id"] = family.mask_id
    elif options.mask_id != "none":
        body["mask_id"] = options.mask_id
    return body


def post(url: str, body: dict[str, Any], timeout: float) -> str:
    """Send `body` and return the answer as text.

    Proxies are passed by for a server on this machine. `timeout` bounds each wait for the server,
    in seconds.

    Raises:
        RequestError: nobody listens at `url`, the server refused, or it did not answer in time.
    """
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    is_local = urllib.parse.urlsplit(url).hostname in LOOPBACK
    try:
        with opener(is_local).open(request, timeout=timeout) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            detail = refusal(error.read().decode(errors="replace"))
        raise RequestError(f"{url} refused the request ({error.code}): {detail}") from None
    except TimeoutError:
        raise RequestError(f"{url} did not answer within {timeout:g} s") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise RequestError(f"{url} did not answer within {timeout:g} s") from None
        raise RequestError(f"no server answers at {url}: {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise RequestError(f"{url} broke off the connection: {error!r}") from None


@functools.cache
def opener(is_local: bool) -> urllib.request.OpenerDirector:
    """What opens URLs, past all proxies for a server on this machine.

    Made once: from Python 3.12 on it reads all certificates of the system, which takes longer than
    some answers.
    """
    handlers = [urllib.request.ProxyHandler({})] if is_local else []
    return urllib.request.build_opener(*handlers)


def refusal(text: str) -> str:
    """The message of a refusal in OpenAI's error shape, or the whole body, on one line."""
    try:
        error = json.loads(text)["error"]
        message = error["message"]
        if error.get("param") and error["param"] not in message:
            message = f"{error['param']}: {message}"
    except (ValueError, KeyError, TypeError):
        message = text
    return " ".join(str(message).split()) or "no message"


if __name__ == "__main__":
    sys.exit(main())
