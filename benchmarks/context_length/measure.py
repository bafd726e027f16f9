# SPDX-License-Identifier: Apache-2.0
"""Measurement of one length: start a server, send one request, record its cost, stop the server."""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import requests
from test_api_request import FAMILIES, refusal

from benchmarks.context_length import records
from benchmarks.context_length.memory import GpuMemory, MemoryUse, PeakMemory, memory_of
from benchmarks.context_length.records import Point
from benchmarks.server_process import ServerFailed, ServerProcess, is_healthy, session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

STEP_TIME = re.compile(r"execute_diffusion_once time = ([\d.]+) ms")
PLAN = re.compile(r"plan for T = .*")
NO_MEMORY = re.compile(r"out of memory|OutOfMemoryError|can't allocate memory", re.IGNORECASE)
DYING_S = 15.0  # seconds from the death of an engine to the end of its server


@dataclass(frozen=True)
class Server:
    """Command and limits with which the server of a point is started.

    Attributes:
        command: the command line.
        variables: environment variables.
        port: port on which the command and variables make it listen.
        startup_s, shutdown_s: seconds that it may take to become healthy, and to end.
        gpu: index or UUID of its GPU; None: all GPUs.
    """

    command: Sequence[str]
    variables: dict[str, str]
    port: int
    startup_s: float
    shutdown_s: float
    gpu: str | None


@dataclass(frozen=True)
class Request:
    """The only request of a point.

    Attributes:
        family: model family, as named in scripts/test_api_request.py.
        length: prompt and canvas together, in tokens, at least 2.
        alpha: share of the prompt.
        steps: denoising steps.
        timeout_s: seconds to wait for the answer.
    """

    family: str
    length: int
    alpha: float
    steps: int
    timeout_s: float

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; prompt and canvas have at least one each."""
        return min(max(round(self.alpha * self.length), 1), self.length - 1)

    @property
    def gen_tokens(self) -> int:
        """Number of canvas tokens."""
        return self.length - self.prompt_tokens

    def body(self, ordinary_ids: Sequence[int]) -> dict[str, Any]:
        """Build the JSON body: a random prompt, one block, the canvas returned as token ids."""
        return {
            "prompt": random.Random(self.length).choices(ordinary_ids, k=self.prompt_tokens),
            "gen_length": self.gen_tokens,
            "output_length": self.gen_tokens,
            "block_length": self.gen_tokens,
            "steps": self.steps,
            "temperature": 0,
            "remasking": "low_confidence",
            "ignore_eos": True,
            "detokenize": False,
            **FAMILIES[self.family].fields,
        }


@dataclass(frozen=True)
class Answer:
    """Outcome of a request; `status` and `reason` as in `Point`."""

    status: str
    reason: str = ""
    report: dict[str, Any] = field(default_factory=dict)


def ordinary_ids(model: Path) -> Sequence[int]:
    """Return token ids for a random prompt: the lower half of the vocabulary, no special tokens.

    Raises:
        KeyError, OSError, ValueError: config.json cannot be read, or has no vocab_size.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    special = {value for key, value in config.items() if key.endswith("_token_id")}
    return [number for number in range(config["vocab_size"] // 2) if number not in special]


def measure(
    server: Server,
    request: Request,
    prompt_ids: Sequence[int],
    log: Path,
    report_progress: Callable[[str], None],
    tick: Callable[[], None],
) -> Point:
    """Start a server, send one request, and stop the server; return the point.

    Args:
        server, request: server to start, and request to send.
        prompt_ids: ids from which a prompt is drawn.
        log: file for the server's output.
        report_progress: called with the current activity, in a few words.
        tick: called from time to time while the request runs.
    """
    point = Point(request.length, request.prompt_tokens, request.gen_tokens, records.NOT_STARTED)
    gpu = GpuMemory(server.gpu)
    report_progress("starting the server")
    started = time.monotonic()
    with ServerProcess(
        server.command,
        log,
        port=server.port,
        variables=server.variables,
        stop_s=server.shutdown_s,
    ) as process:
        try:
            process.wait_until_healthy(server.startup_s)
        except ServerFailed as error:
            return replace(point, reason=str(error))
        point = replace(point, startup_s=round(time.monotonic() - started, 3))
        report_progress("denoising")
        point = _ask(process, request, prompt_ids, gpu, report_progress, tick, point)
        report_progress("stopping the server")
    return point


def _ask(
    process: ServerProcess,
    request: Request,
    prompt_ids: Sequence[int],
    gpu: GpuMemory,
    report_progress: Callable[[str], None],
    tick: Callable[[], None],
    point: Point,
) -> Point:
    """Send the request; return the point with its time and memory."""

    def memory_now() -> MemoryUse:
        return memory_of(process.processes(), gpu)

    body = request.body(prompt_ids)
    idle, mark = memory_now(), process.log_size()
    started = time.monotonic()

    def look() -> None:
        report_progress(progress_text(process.log_text(mark), request.steps, memory.peak))
        tick()

    with PeakMemory(memory_now, look) as memory:
        answer = send(process, body, request, mark)
    request_s = time.monotonic() - started
    log = process.log_text(mark)
    step_ms = [float(text) for text in STEP_TIME.findall(log)]
    median_ms = round(statistics.median(step_ms), 3) if step_ms else None
    return replace(
        point,
        status=answer.status,
        reason=answer.reason,
        num_steps=len(step_ms),
        first_ms=step_ms[0] if step_ms else None,
        median_ms=median_ms,
        last_ms=step_ms[-1] if step_ms else None,
        request_s=round(request_s, 3),
        gpu_idle_bytes=idle.gpu_bytes,
        gpu_peak_bytes=memory.peak.gpu_bytes,
        host_idle_bytes=idle.host_bytes,
        host_peak_bytes=memory.peak.host_bytes,
        activation_peak_bytes=answer.report.get("peak_bytes"),
        activation_average_bytes=answer.report.get("average_bytes"),
        activation_budget_bytes=answer.report.get("budget_bytes"),
        plan=next(reversed(PLAN.findall(log)), ""),
        diffusion=answer.report,
    )


def progress_text(log: str, steps: int, peak: MemoryUse) -> str:
    """Describe the progress of a request by the server's log of its steps, and its memory."""
    step_s = [float(text) / 1000 for text in STEP_TIME.findall(log)]
    num_bytes = peak.host_bytes if peak.gpu_bytes is None else peak.gpu_bytes
    line = f"step {len(step_s)} of {steps}"
    if step_s:
        line += f", {statistics.median(step_s) * max(steps - len(step_s), 0):.0f} s left"
    return f"{line}, {num_bytes / 2**30:.1f} GiB"


def send(process: ServerProcess, body: dict[str, Any], request: Request, mark: int) -> Answer:
    """Send a request and return its outcome.

    Args:
        mark: size of the server's log before the request.
    """
    try:
        with session() as http:
            response = http.post(
                f"{process.url}/generate", json=body, timeout=(30.0, request.timeout_s)
            )
    except requests.Timeout:
        return Answer(records.TIMEOUT, f"no answer within {request.timeout_s:g} s")
    except requests.RequestException as error:
        return failure(process, f"the connection broke off: {error!r}", mark)
    if response.status_code >= 500:
        return failure(process, f"{response.status_code}: {refusal(response.text)}", mark)
    if response.status_code != 200:
        return Answer(records.REFUSED, f"{response.status_code}: {refusal(response.text)}")
    return checked(response.json(), request)


def checked(content: dict[str, Any], request: Request) -> Answer:
    """Return the outcome of an answer, which must hold the whole canvas."""
    report = content.get("diffusion", {})
    given = len(content["token_ids"][0])
    if given != request.gen_tokens:
        reason = f"wanted {request.gen_tokens} tokens in the answer, got {given}"
        return Answer(records.FAILED, reason, report)
    return Answer(records.OK, report=report)


def failure(process: ServerProcess, message: str, mark: int) -> Answer:
    """Classify a request without an answer: no memory, a dead server, or another error."""
    if NO_MEMORY.search(message) or NO_MEMORY.search(process.log_text(mark)):
        return Answer(records.OUT_OF_MEMORY, message)
    if is_healthy(process.url):
        return Answer(records.FAILED, message)
    process.has_ended(DYING_S)
    return Answer(records.SERVER_DIED, f"{message}; {process.last_words(mark)}")
