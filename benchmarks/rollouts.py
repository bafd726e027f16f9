#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The waiting times of a trainer: rollouts, a pause, new weights, memory that is lent and returned.

    benchmarks/rollouts.py [--family llada] [--quantization fp8] [--prompts 16] [--answers 16]
        [--gen-length 256] [--block-length 32] [--updates 10] [--output-dir results/rollouts]
    benchmarks/rollouts.py --backend nccl                          (the server on the second GPU)
    benchmarks/rollouts.py --model models/llada-tiny --dtype float32      (on a CPU)

The server is used over HTTP, as by a trainer. It has random weights of a released shape. This
process holds them too and sends them: on a GPU by handles of the same card (`ipc`) or to another
card (`nccl`), else by a folder (`disk`).

    rollouts      tokens per second of --prompts prompts with --answers answers each, all at once,
                  until the last one has arrived, with two tokens per step, at temperature 1, with
                  kept keys and values (`cache: dual`; exact ones for block-causal families): plain,
                  with trajectories, with entropies, in turns; medians
    update        seconds from its start to its end while the server is paused, median
    under load    the same while requests run and are not paused; answers that ran under several
                  weights and report it; growth of memory in use in the second half of the updates.
                  A lost answer ends the run
    pause         steps that end between the call and its answer, with 64 requests running; ms
    sleep, wake   seconds at level 1, and memory that stays in use meanwhile

Written: rollouts.json and server.log.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

import torch
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from benchmarks import harness, windows
from benchmarks.context_length.memory import GpuMemory
from benchmarks.harness import BenchmarkError, Table, positive
from benchmarks.plain_model import load_model
from benchmarks.server_process import free_port, metric, model_server, session
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    import requests

COLUMNS = {"measure": "<40", "value": ">10.3f", "unit": "<9", "of plain": ">8.3f"}
PROMPT = 128  # tokens of a prompt
UNDER_WAY = 64  # requests that run when the server is paused
RUNNING, STEPS = "vllm:num_requests_running", "dllm:denoise_steps_total"
MIB = 1 << 20
ANSWER_S = 600.0
KINDS = {
    "plain": {},
    "with trajectories": {"return_trajectory": True},
    "with entropies": {"return_trajectory": True, "return_entropy": True},
}
# Enables a trainer's routes, and handles in a request's body.
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


@dataclass(frozen=True)
class Row:
    """One measure; `ratio` is relative to the plain one."""

    measure: str
    value: float
    unit: str
    ratio: float | None = None


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    os.environ |= DEVELOPER
    table = Table(COLUMNS, "measure value unit ratio")
    with harness.checkpoint_of(options) as folder, tempfile.TemporaryDirectory() as updates:
        trainer, gpu = Trainer(folder, Path(updates), options), GpuMemory(None)
        log = options.output_dir / "server.log"
        if trainer.backend == "nccl":
            os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # GPU of the server; the trainer has its own
        with model_server(folder, log, *arguments_of(trainer, options)) as url, session() as http:
            trainer.meet(url)
            server = Server(url, http, request_parameters(folder, options), options)
            for measure in MEASURES:
                measure(server, trainer, gpu, table)
    harness.write("rollouts", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("rollouts", __doc__)
    # Its confidences are too low
    families = [name for name in harness.FAMILIES if name != "fast-dllm"]
    parser.shape("llada", families, takes_model=True)
    parser.option("--quantization", None, "fp8, int4 or nf4")
    parser.option("--prompts", 16, type=positive)
    parser.option("--answers", 16, "answers per prompt", type=positive)
    parser.option("--gen-length", 256, "tokens of an answer", type=positive)
    parser.option("--block-length", 32, type=positive)
    backends = ("ipc", "nccl", "disk")
    parser.option("--backend", None, "default: ipc on a GPU, else disk", choices=backends)
    parser.option("--rounds", 2, "rounds of each kind of rollouts", type=positive)
    parser.option(
        "--updates", 10, "updates while requests run; half as many while paused", type=positive
    )
    return parser.parse_args(arguments)


def arguments_of(trainer: Trainer, options: argparse.Namespace) -> list[str]:
    """Return the server's arguments."""
    length = PROMPT + options.gen_length + options.block_length
    arguments = ["--dtype", options.dtype, "--max-model-len", str(length), "--enable-sleep-mode"]
    arguments += ["--max-num-seqs", str(max(options.prompts * options.answers, UNDER_WAY))]
    arguments += ["--weight-transfer-config", json.dumps({"backend": trainer.backend})]
    if trainer.backend == "disk":
        own = {"dllm": {"weight_update_root": str(trainer.updates)}}
        arguments += ["--additional-config", json.dumps(own)]
    elif trainer.backend == "ipc":
        arguments += ["--gpu-memory-utilization", "0.6"]  # the trainer uses the other memory
    if options.model is None:
        arguments += ["--load-format", "dummy"]
    return arguments + (["--quantization", options.quantization] if options.quantization else [])


def request_parameters(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return a request that commits two tokens per step."""
    kept = windows.kept_parameters(
        Shape.of_folder(folder), options.gen_length, options.block_length, tokens_a_step=2
    )
    return {"temperature": 1.0, "ignore_eos": True, **kept}


class Trainer(WeightSource):
    """The weights, in this process, and the way in which they are sent to the server."""

    def __init__(self, folder: Path, updates: Path, options: argparse.Namespace) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.backend = options.backend or {"cuda": "ipc", "cpu": "disk"}[device]
        self.updates = updates
        model = load_model(
            folder, device, getattr(torch, options.dtype), has_weights=options.model is not None
        )
        self.shape, self._file = model.shape, updates / "weights.safetensors"
        self._weights: dict[str, torch.Tensor] = model.network.state_dict()
        self.gigabytes = sum(weight.nbytes for weight in self._weights.values()) / 1e9

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of the weights."""
        return [ParamMeta(n, w.dtype, tuple(w.shape)) for n, w in self._weights.items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights in the order of `metadata`."""
        yield from self._weights.items()

    def meet(self, url: str) -> None:
        """Initialise the weight transfer with a server."""
        client = HTTPVLLMWeightSyncClient(url)
        self._client = client
        if self.backend == "disk":
            client.init_weight_transfer_engine({})
            save_file({name: weight.contiguous() for name, weight in self.iter_full()}, self._file)
            return
        info: Any = IPCTrainerInitInfo(rank=0)
        if self.backend == "nccl":
            where = {"master_address": "127.0.0.1", "master_port": free_port()}
            info = NCCLTrainerInitInfo(rank=0, world_size=2, **where)
        self._sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=self)

    def send(self) -> float:
        """Update the server's weights; return the seconds from the start to the end."""
        started = time.perf_counter()
        if self.backend == "disk":
            self._client.start_weight_update()
            self._client.update_weights({"path": str(self._file)})
            self._client.finish_weight_update()
        else:
            self._sender.send_weights()
        return time.perf_counter() - started


class Server:
    """Calls of one server; a call fails if the answer is not 200.

    Args:
        url: its address.
        http: connections to it.
        parameters: the body of a request except its prompt.
        options: options of the command.
    """

    def __init__(
        self,
        url: str,
        http: requests.Session,
        parameters: dict[str, Any],
        options: argparse.Namespace,
    ) -> None:
        self.options = options
        self.url, self._http, self._parameters = url, http, parameters

    def post(self, route: str) -> float:
        """Send a call without a body; return the seconds that it took."""
        started = time.perf_counter()
        self._checked(self._http.post(f"{self.url}{route}", timeout=ANSWER_S))
        return time.perf_counter() - started

    def generate(self, prompt: Sequence[int], n: int = 1, **more: Any) -> requests.Response:
        """Return the complete answer of /generate as bytes."""
        body = {**self._parameters, "prompt": list(prompt), "n": n, **more}
        with session() as http:
            return self._checked(http.post(f"{self.url}/generate", json=body, timeout=ANSWER_S))

    def answers(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """Return the parsed answer of /generate."""
        response: dict[str, Any] = self.generate(prompt, **more).json()
        return response

    @staticmethod
    def _checked(response: requests.Response) -> requests.Response:
        if response.status_code != 200:
            raise BenchmarkError(f"{response.url}: {response.status_code}, {response.text[:200]}")
        return response


def measure_updates(server: Server, trainer: Trainer, _: GpuMemory, table: Table) -> None:
    """Measure updates of a paused server."""
    server.post("/pause?mode=keep")
    trainer.send()  # The first update opens the shared memory.
    took = [trainer.send() for _ in range(max(server.options.updates // 2, 1))]
    server.post("/resume")
    label = f"update of {trainer.gigabytes:.3g} GB by {trainer.backend}, paused"
    table.add(Row(label, statistics.median(took), "s"))


def measure_rollouts(server: Server, trainer: Trainer, _: GpuMemory, table: Table) -> None:
    """Measure rollouts of all kinds in turns."""
    options, vocab_size = server.options, trainer.shape.vocab_size
    prompts = in_process.random_prompts(options.prompts, PROMPT, vocab_size)

    def rate(more: dict[str, Any]) -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            rates = pool.map(lambda p: server.generate(p, options.answers, seed=0, **more), prompts)
        took = time.perf_counter() - started
        return sum(len(ids) for a in rates for ids in a.json()["token_ids"]) / took

    for more in KINDS.values():
        rate(more)  # Compile the kernels that it needs.
    rounds = [[rate(more) for more in KINDS.values()] for _ in range(options.rounds)]
    plain, *_ = medians = [statistics.median(rates) for rates in zip(*rounds, strict=True)]
    for name, median in zip(KINDS, medians, strict=True):
        table.add(Row(f"rollouts, {name}", median, "tokens/s", median / plain))


@contextmanager
def under_way(
    server: Server, trainer: Trainer, clients: int, **more: Any
) -> Iterator[list[dict[str, Any]]]:
    """Keep requests running while the block runs; afterwards the list has their answers."""
    prompts = in_process.random_prompts(clients, PROMPT, trainer.shape.vocab_size, seed=1000)
    has_ended = threading.Event()
    answers: list[dict[str, Any]] = []

    def client(prompt: Sequence[int]) -> None:
        while not has_ended.is_set():
            answers.append(server.answers(prompt, **more))

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, prompt) for prompt in prompts]
        deadline = time.monotonic() + ANSWER_S
        while metric(server.url, RUNNING) < clients and time.monotonic() < deadline:
            time.sleep(0.05)
        try:
            yield answers
        finally:
            has_ended.set()
            server.post("/resume")
            for done in running:
                done.result()


def measure_load(server: Server, trainer: Trainer, gpu: GpuMemory, table: Table) -> None:
    """Measure updates while the server answers requests."""
    clients = min(32, server.options.prompts * server.options.answers)
    with under_way(server, trainer, clients, return_trajectory=True) as answers:
        half = server.options.updates // 2
        took = [trainer.send() for _ in range(server.options.updates - half)]
        before = gpu.used_by([])  # Everything that is allocated once has been allocated.
        took += [trainer.send() for _ in range(half)]
        after = gpu.used_by([])
    table.add(Row(f"update beside {clients} clients", statistics.median(took), "s"))
    trajectories = [answer["trajectory"][0] for answer in answers]
    mixed = [t for t in trajectories if len(t["weight_steps"]) > 1]
    table.add(Row("answers of several weights", len(mixed), f"of {len(trajectories)}"))
    if before is not None and after is not None:
        table.add(Row(f"growth in the last {half} updates", (after - before) / MIB, "MiB"))


def measure_pause(server: Server, trainer: Trainer, _: GpuMemory, table: Table) -> None:
    """Measure how long a server takes to pause."""
    with under_way(server, trainer, UNDER_WAY):
        pauses = []
        for _ in range(5):
            before = metric(server.url, STEPS)
            seconds = server.post("/pause?mode=keep")
            pauses.append((metric(server.url, STEPS) - before, seconds))
            server.post("/resume")
            time.sleep(0.2)
    steps, seconds = map(statistics.median, zip(*pauses, strict=True))
    table.add(Row(f"pause of {UNDER_WAY} requests", steps, "steps"))
    table.add(Row(f"pause of {UNDER_WAY} requests", 1000 * seconds, "ms"))


def measure_sleep(server: Server, _: Trainer, gpu: GpuMemory, table: Table) -> None:
    """Measure sleep at level 1 and waking, twice; the second time counts."""
    for _ in range(2):
        slept, left = server.post("/sleep?level=1"), gpu.used_by([])
        woke = server.post("/wake_up")
    table.add(Row("sleep", slept, "s"))
    if left is not None:
        table.add(Row("in use while it sleeps", left / (1 << 30), "GiB"))
    table.add(Row("wake", woke, "s"))


MEASURES = (measure_updates, measure_rollouts, measure_load, measure_pause, measure_sleep)

if __name__ == "__main__":
    sys.exit(main())
