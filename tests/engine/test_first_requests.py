# SPDX-License-Identifier: Apache-2.0
"""The first requests find every kernel loaded and a graph for every step that one can serve."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint, random_prompt
from tests.engine.harness import Engine, Request, record, running
from vllm.diffusion.config import served_model
from vllm.diffusion.engine.worker.step_graphs import Bucket, buckets_of
from vllm.diffusion.engine.worker.warm_up import warm_up

LONGEST = 8448
# Number of requests at once, and the number of tokens of each prompt.
SIZES = ((1, 1), (1, 8192), (2, 3000), (3, 700), (8, 129), (32, 17), (64, 100), (128, 5))
BLOCKS: dict[str, Any] = {"gen_length": 32, "block_length": 32}
CACHES: dict[bool, tuple[str, ...]] = {
    True: ("none", "exact"),
    False: ("none", "prefix", "dual", "frozen", "delayed"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llada", "dream", "moe", "sdar", "sdar_moe", "llada2"])
def test_nothing_is_compiled_loaded_or_captured_for_a_request(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Triton kernel is compiled or loaded from the disk cache, and no graph is captured."""
    import triton

    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    monkeypatch.setenv("VLLM_ACTIVATION_POOL_SIZE_BYTES", str(4 << 30))
    served = {"head_dim": 32} if family.startswith("sdar") else {}  # supported by the kernels
    folder = make_checkpoint(tmp_path, family=family, seed=3, dtype=torch.bfloat16, **served)
    late: list[str] = []
    begin = torch.cuda.CUDAGraph.capture_begin

    def captured(graph: Any, *given: Any, **named: Any) -> None:
        late.append("a graph")
        begin(graph, *given, **named)

    def compiled(**message: Any) -> None:
        late.append(f"{message['fn'].name}: {message['repr']}")

    def loaded(module: Any, function: Any, name: str, *_: Any) -> None:
        late.append(f"{name}, loaded")

    with running(folder, dtype="bfloat16", max_model_len=LONGEST, max_num_seqs=128) as engine:
        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", captured)
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", compiled)
        triton.knobs.runtime.kernel_load_end_hook.add(loaded)
        try:
            for asks in workload(engine):
                what, seen = asks[0].extra, len(late)
                answers = engine.ask(*asks)
                assert [a.report.get("error") for a in answers] == [None] * len(asks)
                assert late[seen:] == [], (what, len(asks), len(asks[0].prompt))
        finally:
            triton.knobs.runtime.kernel_load_end_hook.remove(loaded)


def workload(engine: Engine) -> Iterator[list[Request]]:
    """Yield lists of requests that run together, for every kind of step."""
    is_block_causal = engine.runner.model.family.is_block_causal
    steps: dict[str, Any] = {} if is_block_causal else {"algorithm": "semi_ar", "steps": 8}
    for cache in CACHES[is_block_causal]:
        rule = {"algorithm": "multi_block"} if cache == "delayed" else steps
        for temperature in (0.0, 0.7):
            for count, length in SIZES:
                extra = {**BLOCKS, **rule, "cache": cache, "seed": 1}
                sampling = {"temperature": temperature}
                yield [Request(random_prompt(length), extra, sampling) for _ in range(count)]
    if not is_block_causal:
        yield [
            Request(random_prompt(length), {**BLOCKS, **steps, "cfg_scale": 1.0})
            for length in (20, 900)
        ]


@pytest.mark.parametrize(
    ("family", "budget", "longest"),
    [("llada", 1024, 200), ("llada2", 300, 200), ("sdar", 512, 388)],
)
def test_every_bucket_that_a_step_can_need_has_been_run(
    family: str, budget: int, longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buckets cover the longest single request and the largest common batch."""
    monkeypatch.setenv("VLLM_ACTIVATION_POOL_SIZE_BYTES", str(1 << 30))
    folder = make_checkpoint(tmp_path, family=family, seed=3)
    wide = {"max_position_embeddings": longest}
    with running(folder, max_model_len=longest, hf_overrides=wide) as engine:
        model = served_model(engine.llm.llm_engine.vllm_config)
        batches = record(monkeypatch, engine.runner, "launch", lambda step, _: step.batch)
        warm_up(engine.runner, model, row_budget=budget, shows_progress=False)
        buckets = buckets_of(engine.runner.model.config)
        run = {buckets.find(batch) for batch in batches}
        assert {len(batch.packing.sequences) for batch in batches} >= {1, 2}
        for is_cached in (False, True):
            needed = {
                find(buckets, rows, number, is_cached=is_cached)
                for rows in range(1, budget + 1)
                for number in (1, 2, 16, 64)
                if rows <= longest * number
            }
            assert needed <= run


def find(buckets: Any, rows: int, number: int, *, is_cached: bool) -> Bucket | None:
    """Return the bucket of a step with this number of rows of this number of sequences."""
    packing = SimpleNamespace(ends=torch.zeros(number).numpy(), copy_slots=None)
    num_whole = 0 if is_cached else rows
    sizes = {"num_rows": rows, "num_whole": num_whole, "slots": None}
    return buckets.find(SimpleNamespace(packing=packing, **sizes))
