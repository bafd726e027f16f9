#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Many clients with random requests for a long time: does anything differ, hang or leak?

    benchmarks/soak.py --model models/llada-tiny [--clients 64] [--minutes 10]
    benchmarks/soak.py --model models/llada-tiny --mixed 4096 --minutes 20

The server runs in float32. Requests are drawn from a set with mixed algorithms, caches, lengths and
seeds. Each is first sent alone, and its answer is kept. Then the clients send them at random. One
in ten disconnects before the end, and every other answer must equal the kept one. Memory is the
resident set of the server's processes: before the load, after a tenth of it, and at its end. After
that tenth it may grow by 3 %.

With --mixed LENGTH prompts have 64 to LENGTH tokens, most of them short. One in twenty bodies is
malformed and must be answered with 400, and the memory of the pool must return to its floor at the
end. On a GPU a length of 32768 takes long steps; on a CPU a tiny model takes them from about 2048
on.

Written: soak.json and server.log. Exit status: 0 only if no answer differed, no request failed or
hung, nothing was left in the engine, and memory stayed constant.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

import requests
from test_api_request import RequestError, post
from tqdm import tqdm

from benchmarks import harness
from benchmarks.harness import positive
from benchmarks.server_process import metric, model_server, resident_mib, session
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

LONGEST_PROMPT = 200
LONGEST_CANVAS = 96
MARGIN = 64  # positions in addition to prompt and canvas
NUM_BODIES = 100
SHARE_LEAVING, SHARE_MALFORMED = 0.1, 0.05
MALFORMED: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": []},
    {"prompt": "a", "steps": 0},
    {"prompt": "a", "gen_length": "x"},
    {"prompt": "a", "unknown": 1},
    {"prompt": "a", "cache": "dual", "cfg_scale": 1.0},
    {"prompt": [10**9]},
)
ANSWER_S = 300.0  # seconds; a request that takes longer hangs
SETTLE_S = 30.0
MAX_GROWTH = 1.03  # growth of resident memory from a tenth of the load to its end
WAYS: tuple[dict[str, Any], ...] = (
    {"algorithm": "semi_ar", "temperature": 1.0},
    {"algorithm": "semi_ar", "remasking": "random"},
    {"algorithm": "semi_ar", "cfg_scale": 1.0},
    {"algorithm": "semi_ar", "cache": "prefix"},
    {"algorithm": "threshold", "threshold": 0.7, "cache": "dual"},
    {"algorithm": "factor", "cache": "dual"},
    {"algorithm": "local_leap"},
    {"algorithm": "entropy_threshold"},
    {"algorithm": "hierarchy", "cache": "prefix"},
    {"algorithm": "multi_block", "cache": "delayed"},
    {"algorithm": "semi_ar", "cache": "frozen"},
    {"algorithm": "threshold", "cache": "frozen"},
    {"algorithm": "full_attn_multi_block"},
    {"algorithm": "adablock"},
    {"algorithm": "daedal"},
    {"algorithm": "credit"},
)


@dataclass
class Outcome:
    """Outcome of all clients; resident sets in MiB."""

    seconds: float = 0.0
    num_answers: int = 0
    num_left: int = 0
    num_refused: int = 0
    different: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_unfinished: float = 0.0
    rss_before: float = 0.0
    rss_early: float = 0.0
    rss_end: float = 0.0
    pool_left: float = 0.0  # bytes in use when nothing runs

    @property
    def is_good(self) -> bool:
        is_served = not self.different and not self.failures
        is_flat = self.rss_end <= MAX_GROWTH * self.rss_early
        return is_served and is_flat and self.num_unfinished == 0 and self.pool_left == 0


class Clients:
    """Threads that send requests to a server until their time has passed.

    Args:
        url: URL of the server.
        bodies: bodies that may be sent.
        wanted: token ids of each body's answer.
        sends_malformed: whether some bodies are malformed.
    """

    def __init__(
        self,
        url: str,
        bodies: Sequence[dict[str, Any]],
        wanted: Sequence[list[int]],
        *,
        sends_malformed: bool = False,
    ) -> None:
        self._url = url
        self._share_malformed = SHARE_MALFORMED if sends_malformed else 0.0
        self._bodies = bodies
        self._wanted = wanted
        self._lock = threading.Lock()
        self.outcome = Outcome()

    def run(self, num_clients: int, seconds: float, seed: int) -> Outcome:
        """Send requests for `seconds`; return when the last answer has arrived."""
        started = time.monotonic()
        draws = [random.Random(seed + i) for i in range(num_clients)]
        with ThreadPoolExecutor(num_clients) as pool:
            done = [pool.submit(self._client, draw, started + seconds) for draw in draws]
            for tenth in tqdm(range(10), unit="tenth", leave=False, disable=None):
                time.sleep(max(0.0, started + seconds * (tenth + 1) / 10 - time.monotonic()))
                self.outcome.rss_early = self.outcome.rss_early or resident_mib()
            for client in done:
                client.result()
        self.outcome.seconds = time.monotonic() - started
        return self.outcome

    def _client(self, draw: random.Random, deadline: float) -> None:
        while time.monotonic() < deadline:
            index = draw.randrange(len(self._bodies))
            if draw.random() < SHARE_LEAVING:
                leave(self._url, self._bodies[index], after_s=draw.uniform(0.0, 1.0))
                with self._lock:
                    self.outcome.num_left += 1
                continue
            if draw.random() < self._share_malformed:
                self._refused(draw.choice(MALFORMED))
                continue
            try:
                token_ids = answer(self._url, self._bodies[index])
            except RequestError as error:
                with self._lock:
                    self.outcome.failures.append(str(error))
                continue
            with self._lock:
                self.outcome.num_answers += 1
                if token_ids != self._wanted[index]:
                    self.outcome.different.append(index)

    def _refused(self, body: dict[str, Any]) -> None:
        """Send a body that must be answered with 400."""
        with session() as http:
            status = http.post(f"{self._url}/generate", json=body, timeout=ANSWER_S).status_code
        with self._lock:
            self.outcome.num_refused += 1
            if status != HTTPStatus.BAD_REQUEST:
                self.outcome.failures.append(f"{body}: wanted 400, got {status}")


@harness.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = parse_arguments(arguments)
    outcome = soak(options)
    harness.write("soak", options, outcome=asdict(outcome))
    print(summary(outcome))
    return 0 if outcome.is_good else 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("soak", __doc__)
    parser.option("--model", None, "checkpoint folder with weights", type=Path, required=True)
    parser.option("--clients", 64, "number of clients", type=positive)
    parser.option("--minutes", 10.0, "duration of the load")
    parser.option("--mixed", 0, "longest prompt of mixed requests", metavar="LENGTH")
    parser.option("--seed", 0, "seed of the requests")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error("--minutes: wanted more than 0")
    return options


def soak(options: argparse.Namespace) -> Outcome:
    """Collect the answers to lone requests, then run the load, then check the final state.

    Raises:
        ServerFailed: The server does not start.
        RequestError: A lone request fails.
    """
    vocab_size = Shape.of_folder(options.model).vocab_size
    bodies = random_bodies(vocab_size, options.seed, options.mixed)
    longest = (options.mixed or LONGEST_PROMPT) + LONGEST_CANVAS + MARGIN
    arguments = ["--dtype", "float32", "--max-model-len", longest]
    # Fewer than the clients, so that some requests wait.
    arguments += ["--max-num-seqs", min(options.clients, 16)]
    log = options.output_dir / "server.log"
    with model_server(options.model.resolve(), log, *arguments) as url:
        wanted = [answer(url, body) for body in tqdm(bodies, leave=False, disable=None)]
        clients = Clients(url, bodies, wanted, sends_malformed=bool(options.mixed))
        clients.outcome.rss_before = resident_mib()
        outcome = clients.run(options.clients, 60 * options.minutes, options.seed)
        outcome.num_unfinished = settle(url)
        outcome.rss_end = resident_mib()
        outcome.pool_left = metric(url, "dllm:activation_pool_in_use_bytes")
    return outcome


def random_bodies(vocab_size: int, seed: int, longest: int = 0) -> list[dict[str, Any]]:
    """Draw bodies, equal for equal seeds; with `longest`, prompts have 64 to `longest` tokens."""
    draw = random.Random(seed)

    def length() -> int:
        if not longest:
            return draw.randint(1, LONGEST_PROMPT)
        return int(64 * (longest / 64) ** (draw.random() ** 3))

    return [
        {
            "prompt": in_process.random_prompt(length(), vocab_size, i),
            "gen_length": draw.choice([32, 64, LONGEST_CANVAS]),
            "block_length": draw.choice([8, 16, 32]),
            "ignore_eos": draw.random() < 0.5,
            "seed": i,
            **WAYS[i % len(WAYS)],
        }
        for i in range(NUM_BODIES)
    ]


def answer(url: str, body: dict[str, Any]) -> list[int]:
    """Return the token ids of the answer."""
    token_ids: list[int] = json.loads(post(f"{url}/generate", body, ANSWER_S))["token_ids"][0]
    return token_ids


def leave(url: str, body: dict[str, Any], after_s: float) -> None:
    """Send a request and close the connection after a while, answered or not."""
    with (
        session() as http,
        contextlib.suppress(requests.RequestException),
        # The timeout ends the wait for a late first event.
        http.post(
            f"{url}/generate", json={**body, "stream": True}, stream=True, timeout=after_s + 1e-3
        ),
    ):
        time.sleep(after_s)


def settle(url: str) -> float:
    """Wait for the engine to drop abandoned requests; return how many it still holds."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = metric(url, "vllm:num_requests_(?:running|waiting)")
        if left == 0 or time.monotonic() > deadline:
            return left
        time.sleep(1.0)


def summary(outcome: Outcome) -> str:
    """Describe the outcome in a few lines."""
    lines = [
        f"{outcome.num_answers} answers in {outcome.seconds:.0f} s, "
        f"{outcome.num_left} requests left in the middle, {outcome.num_refused} refused",
        f"{len(outcome.different)} answers differ from the same request alone",
        f"{len(outcome.failures)} requests failed, {outcome.num_unfinished:g} are left over",
        f"pool: {outcome.pool_left:g} bytes in use",
        f"memory: {outcome.rss_before:.0f} MiB before, {outcome.rss_early:.0f} after a tenth, "
        f"{outcome.rss_end:.0f} at the end",
    ]
    return "\n".join([*lines, *outcome.failures[:5]])


if __name__ == "__main__":
    sys.exit(main())
