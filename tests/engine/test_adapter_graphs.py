# SPDX-License-Identifier: Apache-2.0
"""Steps with LoRA adapters in CUDA graphs: which slots rows use is data."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.adapter_files import lora_request, random_adapter, save_adapter
from tests.checkpoints import llada_config, make_checkpoint, random_prompt
from tests.engine.cases import SERVED
from tests.engine.harness import BLOCKS, Request, as_request, record, running, sampling_params
from tests.pages import NO_PAGES
from vllm.diffusion import ops
from vllm.diffusion.adapters.adapted_rows import RowSlots, StepSlots
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.engine.messages import NewCanvas
from vllm.diffusion.engine.worker.batch import StepBatch, build_batch
from vllm.diffusion.engine.worker.canvas import Canvas
from vllm.diffusion.engine.worker.forward import run_body, run_to_end
from vllm.diffusion.engine.worker.step_graphs import Bucket, buckets_of, fill
from vllm.diffusion.engine.worker.warm_up import warm_up
from vllm.diffusion.models.ahead import kernel_calls
from vllm.diffusion.models.llada import LLaDAConfig
from vllm.diffusion.request import decision, fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from vllm.diffusion.memory import KeptSequence

NUM_SLOTS = 3


def canvas(length: int, name: str, kept: KeptSequence | None = None) -> Canvas:
    """Return a request of `length` positions, the last 8 of them masked."""
    parameters: dict[str, Any] = {"gen_length": 8, "block_length": 8, "steps": 8, "seed": 0}
    if kept is not None:
        parameters["cache"] = "dual"
    prompt = [2 + i % 90 for i in range(length - 8)]
    decided = decision.decide(fields.canonical(parameters), SERVED, prompt)
    made = Canvas(NewCanvas(name, prompt, decided))
    made.window.cache = kept
    return made


def adapted_batch(lengths: Sequence[int], slots: Sequence[int | None]) -> StepBatch:
    """Return whole sequences, each with a slot."""
    made = [canvas(length, str(i)) for i, length in enumerate(lengths)]
    batch = build_batch(made, 0, NO_PAGES)
    rows = RowSlots.of(slots, np.cumsum(lengths).tolist())
    return replace(batch, slots=StepSlots(tuple(slots), rows))


def test_a_bucket_has_tiles_for_every_batch_that_fits() -> None:
    """Each row, also of the padding, belongs to one tile of its slot."""
    buckets = buckets_of(LLaDAConfig(**llada_config()), num_slots=NUM_SLOTS)
    generator = random.Random(5)
    for _ in range(200):
        lengths = [generator.randrange(9, 90) for _ in range(generator.randrange(1, 12))]
        slots = [generator.choice([None, *range(NUM_SLOTS)]) for _ in lengths]
        batch = adapted_batch(lengths, slots)
        bucket = buckets.find(batch)
        assert bucket is not None and bucket.tiles > 0
        inputs = bucket.inputs(None, 1000, has_blocks=False, marks_blocks=False)
        fill(inputs, batch)
        of_rows = np.full(bucket.rows, 99)
        assert inputs.tiles is not None
        for slot, first, count in inputs.tiles.table.tolist():
            assert 0 <= count <= inputs.tiles.size == ops.low_rank_tile(bucket.rows)
            rows = inputs.tiles.rows[first : first + count]
            assert (of_rows[rows] == 99).all()
            of_rows[rows] = slot
        assert batch.slots is not None
        wanted = np.full(bucket.rows, -1)
        for slot, start, stop in batch.slots.rows.runs:
            wanted[start:stop] = slot
        assert np.array_equal(of_rows, wanted)


def test_steps_without_adapters_have_graphs_of_their_own() -> None:
    buckets = buckets_of(LLaDAConfig(**llada_config()), num_slots=1)
    plain = build_batch([canvas(40, "a")], 0, NO_PAGES)
    assert buckets.find(plain) == Bucket(48, 1, False)
    assert Bucket(48, 1, False).inputs(None, 48, has_blocks=False, marks_blocks=False).tiles is None
    adapted = buckets.find(adapted_batch([40], [0]))
    assert adapted is not None and adapted._replace(tiles=0) == Bucket(48, 1, False)


def test_the_warm_up_runs_every_step_without_and_with_an_adapter(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(20)
    with running(checkpoint("gqa"), enable_lora=True) as engine:
        (before,) = engine.ask(as_request(prompt, **BLOCKS))
        batches = record(monkeypatch, engine.runner, "launch", lambda step, _: step.batch)
        warm_up(engine.runner, SERVED, row_budget=64, shows_progress=False)
        pairs = list(zip(batches[::2], batches[1::2], strict=True))
        assert len(pairs) > 10
        for plain, adapted in pairs:
            assert plain.slots is None and adapted.slots is not None
            assert adapted.slots.rows.runs == ((0, 0, plain.num_rows),)
            assert np.array_equal(plain.token_ids, adapted.token_ids)
        assert engine.is_idle()
        assert engine.ask(as_request(prompt, **BLOCKS))[0].token_ids == before.token_ids


def test_kernels_of_every_size_are_compiled_ahead(checkpoint: Callable[[str], Path]) -> None:
    """The calls of an engine with adapters are those of each size of a product, at 7 row counts."""
    with running(checkpoint("gqa")) as engine:
        before = len(list(kernel_calls(engine.runner.model, torch.device("cpu"))))
    with running(checkpoint("gqa"), enable_lora=True) as engine:
        calls = list(kernel_calls(engine.runner.model, torch.device("cpu")))
        # queries, keys and values; the output of attention; gate and up; down; the head
        assert len(calls) - before == 5 * 7
        with torch.inference_mode():
            for call in calls[before:]:
                call()


def test_requests_of_one_adapter_share_tiles(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("gqa")
    paths = [
        save_adapter(tmp_path / str(n), random_adapter(folder, rank=4, seed=n), rank=4)
        for n in range(2)
    ]
    adapters = [lora_request(f"a{n}", n + 1, path) for n, path in enumerate(paths)]
    chosen = [adapters[0], None, adapters[1], adapters[0], None, adapters[1]]
    asks = [Request(random_prompt(10 + n, seed=n), BLOCKS) for n in range(6)]
    with running(folder, enable_lora=True, max_loras=2) as engine:
        batches = record(monkeypatch, engine.runner, "launch", lambda step, _: step.batch)
        engine.llm.generate(
            [{"prompt_token_ids": one.prompt} for one in asks],
            [sampling_params(one) for one in asks],
            use_tqdm=False,
            lora_request=chosen,
        )
        together = [batch for batch in batches if len(batch.items) == 6]
        assert together
        for batch in together:
            assert sorted(batch.slots.of_items, key=str) == [0, 0, 1, 1, None, None]
            assert batch.shape.adapts
            tiles = batch.slots.rows.tiles(batch.num_rows)
            assert [slot for slot, *_ in tiles.table.tolist()] == [-1, 0, 1]
            assert sorted(tiles.rows.tolist()) == list(range(batch.num_rows))


# ---- on a GPU ----


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, list[Path]]:
    """Return a checkpoint, and two adapters of other modules and ranks."""
    folder = make_checkpoint(tmp_path / "model", seed=3, dtype=torch.bfloat16)
    everything = random_adapter(folder, rank=16, seed=1)
    attention = random_adapter(
        folder, lambda name: name.endswith(("q_proj", "v_proj", "attn_out")), rank=4, seed=2
    )
    return folder, [
        save_adapter(tmp_path / "a", everything, rank=16),
        save_adapter(tmp_path / "b", attention, rank=4),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_replays_equal_the_layers_without_a_graph(
    quantization: str | None, parts: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after an adapter was replaced, for which nothing is captured."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    folder, paths = parts
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 600, "max_num_seqs": 64}
    settings["quantization"] = quantization
    with running(folder, enable_lora=True, max_loras=2, **settings) as engine:
        runner = engine.runner
        num_graphs = len(runner.graphs)
        requests = [lora_request(f"a{n}", n + 1, path) for n, path in enumerate(paths)]
        for request in requests:
            assert engine.llm.llm_engine.add_lora(request)
        for first, second in ((0, 1), (1, 0)):
            for lengths in ([16], [45], [31, 9, 77], [600], [60] * 9):
                for is_kept in (False, True):
                    check_replay(runner, requests, lengths, is_kept, fp8=quantization == "fp8")
            replaced = lora_request(f"a{first}", first + 1, paths[second], load_inplace=True)
            assert engine.llm.llm_engine.add_lora(replaced)
        assert len(runner.graphs) == num_graphs


@torch.inference_mode()
def check_replay(
    runner: Any, requests: list[Any], lengths: list[int], is_kept: bool, *, fp8: bool
) -> None:
    """Compare a graph with eager layers; requests have the first adapter, the second, and none.

    The graph has more rows, whose sums have other parts, and with adapters gate and up are stored.
    This changes last bits, and a changed bit can change an fp8 number of every later layer.
    """
    from vllm.diffusion.engine.worker.adapting import source_of

    names = [f"check-{i}" for i in range(len(lengths))]
    pairs = zip(names, lengths, strict=True)
    kept = [runner.pages.allocate(n, k) if is_kept else None for n, k in pairs]
    made = list(map(canvas, lengths, names, kept))
    for number, name in enumerate(names):
        if number % 3 < 2:
            runner.adapters.start(name, source_of(requests[number % 3], runner.reader))
    batch = runner.batch_of(made)
    assert batch.slots is not None
    plan = runner.planner.plan(batch.shape)
    inputs = ops.to_device(batch.inputs([[slice(0, batch.num_rows)]]), runner.device)
    fresh = FreshBuffers(runner.device)
    to_the_end = runner.graphs.buckets.find(batch).is_ended
    where = fresh, fresh, runner.caches

    def eager(slots: StepSlots) -> list[torch.Tensor]:
        work = run_body(runner.model, inputs, plan, *where, to_the_end=to_the_end)
        body = run_to_end(runner.adapted.computing(slots, work))
        return [tensor.float().flatten(1).clone() for tensor in (body.x, *(body.keys_values or ()))]

    plain, wanted = eager(StepSlots()), eager(batch.slots)
    replayed = runner.graphs.run(batch, plan)
    assert replayed is not None
    actual = (replayed.x, *(replayed.keys_values or ()))
    adapted = np.zeros(batch.num_rows, dtype=bool)
    for _, start, stop in batch.slots.rows.runs:
        adapted[start:stop] = True
    for given, expected, without in zip(actual, wanted, plain, strict=True):
        rows = given[: batch.num_rows].float().flatten(1)
        errors = (rows - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.median() < 0.2 if fp8 else (errors < 2e-2).all()
        changes = (expected - without).norm(dim=1) / without.norm(dim=1)
        others = changes[~adapted]
        assert (changes[adapted] > 0.3).all()
        if len(others):
            assert others.median() <= 0.2 if fp8 else (others == 0).all()
    for name in names:
        runner.adapters.end(name)
        runner.pages.release(name)


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [True, False])
def test_a_step_waits_for_nothing_but_its_result(
    use_graphs: bool, parts: tuple[Path, list[Path]]
) -> None:
    """Torch raises here if an operation synchronises host and GPU; events are allowed."""
    folder, paths = parts
    adapters = [*(lora_request(f"a{n}", n + 1, path) for n, path in enumerate(paths)), None]
    blocks = {"algorithm": "semi_ar", "gen_length": 16, "block_length": 8, "steps": 8, "seed": 1}
    asks = [
        Request([3 + i, 4, 5], {**blocks, **parameters}, {"temperature": temperature})
        for temperature in (0.0, 0.7)
        for i, parameters in enumerate(({}, {"cache": "dual"}, {"cfg_scale": 1.5}))
    ]
    settings = {"dtype": "bfloat16", "max_model_len": 64, "enforce_eager": not use_graphs}
    with running(folder, enable_lora=True, max_loras=2, **settings) as engine:

        def run() -> list[Any]:
            outputs: list[Any] = engine.llm.generate(
                [{"prompt_token_ids": one.prompt} for one in asks],
                [sampling_params(one) for one in asks],
                use_tqdm=False,
                lora_request=adapters * 2,
            )
            return outputs

        run()  # the first use of a kernel, and loads, may synchronise
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    reports = [output.kv_transfer_params["dllm"] for output in outputs]
    assert [report.get("error") for report in reports] == [None] * len(asks)
