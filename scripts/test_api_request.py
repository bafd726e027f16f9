#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Send one request to `POST /generate` of a running server and print its JSON answer.

    scripts/test_api_request.py --model-family llada --host http://127.0.0.1:8901 \
        --steps 8 --gen-length 32 --block-length 32 --prompt "What is the capital of France?"

If the server requires a key, set VLLM_API_KEY. The body has the same ten standard fields for every
family; only diffusion-gemma has no mask token, and so no fields of masks. Exit status: 0 with the
answer on stdout, and a note on stderr if it has no text; 1 with one line on stderr if the server is
absent, refuses the request, or does not answer in time; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import requests
except ImportError:  # requests is not installed for this interpreter, but for the one of the set-up
    _PYTHON = Path(__file__).resolve().parents[1] / ".venv" / "bin" / "python"
    if not _PYTHON.exists() or Path(sys.prefix) == _PYTHON.parents[1]:
        sys.exit("error: no module named requests; scripts/setup.sh installs it")
    os.execv(_PYTHON, [str(_PYTHON), *sys.argv])

if TYPE_CHECKING:
    from collections.abc import Sequence

LOOPBACK = ("localhost", "127.0.0.1", "::1")
WANTED_MASK_ID = re.compile(r"mask_id: given \d+; wanted the model's: (\d+)")


@dataclass(frozen=True)
class ModelFamily:
    """Facts about a family that a client needs.

    Attributes:
        mask_id: id of the mask token of its released checkpoints; None without a mask token.
        port: port of its server script.
        block_length: tokens per block, as released.
        fields: further fields of the body, which choose the decoding of the family's authors.
    """

    mask_id: int | None
    port: int
    block_length: int = 32
    fields: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llada": ModelFamily(126336, port=8901),
    "dream": ModelFamily(151666, port=8701, fields={"algorithm": "dream", "alg": "entropy"}),
    "llada-moe": ModelFamily(156895, port=10001),
    "llada2": ModelFamily(156895, port=8902),
    "sdar": ModelFamily(151669, port=8903, block_length=4),
    "fast-dllm": ModelFamily(151665, port=8904),
    "llada22": ModelFamily(156895, port=8905),
    "nemotron": ModelFamily(100, port=8906),
    "stable-diffcoder": ModelFamily(5, port=8907, block_length=4),
    "a2d": ModelFamily(151669, port=8909),
    "idlm": ModelFamily(151669, port=8920),
    "diffusion-gemma": ModelFamily(None, port=8908, block_length=256),
}


class RequestError(Exception):
    """The request got no answer; the message is one line for the user."""


class RefusalError(RequestError):
    """The server refused the request.

    Attributes:
        reason: message of the server.
    """

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"{url} refused the request ({status}): {reason}")
        self.reason = reason


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = parse_arguments(arguments)
    host = options.host or f"http://127.0.0.1:{FAMILIES[options.model_family].port}"
    url = host.rstrip("/") + "/generate"
    try:
        answer = ask(url, payload(options), options)
    except RequestError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print(answer)
    if note := emptiness(json.loads(answer)):
        sys.stderr.write(f"note: {note}\n")
    return 0


def emptiness(answer: dict[str, Any]) -> str:
    """Explain why an answer has no text; empty if it has text."""
    if any(answer["text"]):
        return ""
    return f"empty answer: {answer['diffusion']['num_end_tokens']} end tokens"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
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
    parser.add_argument("--steps", type=int, default=32, help="denoising steps")
    parser.add_argument("--gen-length", type=int, default=32, help="canvas length in tokens")
    parser.add_argument(
        "--block-length",
        type=int,
        help="tokens of one block (default 32, for sdar 4, for diffusion-gemma 256)",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--mask-id",
        type=mask_id,
        default="family",
        metavar="N|none",
        help="mask token id to send; none leaves it to the server (default: that of the family's "
        "released checkpoints, and if the server has another, that one)",
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
    """Parse a token id, or one of the words `none` (send nothing) and `family`."""
    if text in ("none", "family"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"given {text!r}; wanted a token id or none") from None


def payload(options: argparse.Namespace) -> dict[str, Any]:
    """Build the JSON body of the request."""
    family = FAMILIES[options.model_family]
    body: dict[str, Any] = {
        "prompt": options.prompt,
        "max_tokens": options.gen_length,
        "gen_length": options.gen_length,
        "output_length": options.gen_length,
        "steps": options.steps,
        "block_length": options.block_length or family.block_length,
        "temperature": options.temperature,
        "cfg_scale": 0.0,
        **family.fields,
    }
    if family.mask_id is not None:
        body["remasking"] = "low_confidence"
    if not options.raw:
        body["apply_chat_template"] = True
    if options.mask_id == "family":
        if family.mask_id is not None:
            body["mask_id"] = family.mask_id
    elif options.mask_id != "none":
        body["mask_id"] = options.mask_id
    return body


def ask(url: str, body: dict[str, Any], options: argparse.Namespace) -> str:
    """Send `body`; send it again if the served checkpoint has another mask token than the family.

    Raises:
        RequestError: see `post`.
    """
    try:
        return post(url, body, options.timeout)
    except RefusalError as error:
        own = WANTED_MASK_ID.match(error.reason)
        if own is None or options.mask_id != "family":
            raise
    sys.stderr.write(f"note: the mask token of this server's checkpoint is {own[1]}\n")
    return post(url, {**body, "mask_id": int(own[1])}, options.timeout)


def post(url: str, body: dict[str, Any], timeout: float) -> str:
    """Send `body` and return the answer as text.

    Proxies are ignored for a server on this machine. `timeout` bounds each wait for the server, in
    seconds.

    Raises:
        RefusalError: the server refused.
        RequestError: no server listens at `url`, or no complete answer arrived in time.
    """
    with requests.Session() as session:
        session.trust_env = urllib.parse.urlsplit(url).hostname not in LOOPBACK
        try:
            if api_key := os.environ.get("VLLM_API_KEY"):
                session.headers["Authorization"] = f"Bearer {api_key}"
            response = session.post(url, json=body, timeout=timeout)
        except requests.Timeout:
            raise RequestError(f"{url} did not answer within {timeout:g} s") from None
        except requests.RequestException as error:
            raise RequestError(no_answer(url, error)) from None
    if not response.ok:
        raise RefusalError(url, response.status_code, refusal(response.text))
    return response.text


def no_answer(url: str, error: BaseException) -> str:
    """Explain why there is no answer, with the message of the first cause."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    if isinstance(error, OSError) and not isinstance(error, ConnectionResetError):
        return f"no server answers at {url}: {error.strerror or error}"
    return f"{url} broke off the connection: {error!r}"


def refusal(text: str) -> str:
    """Return the message of a refusal in OpenAI's error shape, or the whole body, on one line."""
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
