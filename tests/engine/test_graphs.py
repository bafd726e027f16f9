# SPDX-License-Identifier: Apache-2.0
"""Buckets of CUDA graphs, their padded inputs, and replays compared with eager layers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.checkpoints import llada2_config, llada_config, make_checkpoint, sdar_config
from tests.engine.cases import SERVED
from tests.engine.harness import Request, running
from tests.pages import NO_PAGES, store_with
from vllm.diffusion import ops
from vllm.diffusion.core.spans import Span
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.decoding import Candidates
from vllm.diffusion.engine.messages import NewCanvas
from vllm.diffusion.engine.step_times import ROW_BUCKETS
from vllm.diffusion.engine.worker.batch import StepBatch, build_batch
from vllm.diffusion.engine.worker.canvas import Canvas
from vllm.diffusion.engine.worker.forward import run_body, run_to_end
from vllm.diffusion.engine.worker.step_graphs import (
    MAX_WHOLE_ROWS,
    MAX_WHOLE_ROWS_FP8,
    MAX_WINDOW_ROWS,
    Bucket,
    Buckets,
    buckets_of,
    fill,
)
from vllm.diffusion.models.llada import LLaDAConfig
from vllm.diffusion.models.llada2 import LLaDA2Config
from vllm.diffusion.models.sdar import SDARConfig
from vllm.diffusion.request import decision, fields

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.diffusion.core.spans import AttentionLayout
    from vllm.diffusion.engine.worker.batch import StepInputs
    from vllm.diffusion.memory import KeptSequence


def canvas(
    length: int, cache: KeptSequence | None = None, name: str = "a", **parameters: Any
) -> Canvas:
    """Return a request of `length` positions, the last 8 of them masked."""
    parameters = {"gen_length": 8, "block_length": 8, "steps": 8, "seed": 0, **parameters}
    if cache is not None:
        parameters["cache"] = "dual"
    prompt = [2 + i % 90 for i in range(length - 8)]
    decided = decision.decide(fields.canonical(parameters), SERVED, prompt)
    made = Canvas(NewCanvas(name, prompt, decided))
    made.window.cache = cache
    return made


def kept(*lengths: int) -> list[KeptSequence]:
    """Return the pages of requests of these lengths."""
    return store_with(*lengths)[1]


def batch_of(*canvases: Canvas) -> StepBatch:
    return build_batch(canvases, 0, NO_PAGES)


WHOLE = tuple(rows for rows in ROW_BUCKETS if rows <= MAX_WHOLE_ROWS)
WINDOWS = tuple(rows for rows in ROW_BUCKETS if rows <= MAX_WINDOW_ROWS)
DENSE = Buckets(WHOLE, WINDOWS, rows_per_sequence=16)


def test_buckets_rise_and_hold_whole_tiles() -> None:
    assert list(ROW_BUCKETS) == sorted(set(ROW_BUCKETS))
    assert all(rows % 16 == 0 for rows in ROW_BUCKETS)
    # Padding takes at most a third of the rows, except in the smallest bucket.
    assert all(b <= 1.5 * a or b <= 32 for a, b in itertools.pairwise(ROW_BUCKETS))


def test_experts_and_short_blocks_have_buckets_of_their_own() -> None:
    experts = buckets_of(LLaDA2Config(**llada2_config()))
    assert buckets_of(LLaDAConfig(**llada_config())) == DENSE
    assert experts.whole == experts.windows == ROW_BUCKETS
    in_fp8 = buckets_of(LLaDAConfig(**llada_config()), is_fp8=True)
    assert in_fp8.windows == WINDOWS and in_fp8.whole[-1] == MAX_WHOLE_ROWS_FP8
    caches = store_with(*[9] * 100)[1]
    windows = [canvas(9, cache, name=str(i)) for i, cache in enumerate(caches)]
    assert experts.find(batch_of(*windows)) == Bucket(1024, 256, True)
    dense = buckets_of(SDARConfig(**sdar_config()))
    assert dense.find(batch_of(*windows)) == Bucket(1024, 256, True)
    assert dense.windows == WINDOWS
    assert DENSE.find(batch_of(*windows)) is None
    caches = store_with(*[60] * 60)[1]
    longer = [canvas(60, cache, name=str(i)) for i, cache in enumerate(caches)]
    assert experts.find(batch_of(*longer)) == Bucket(4096, 256, True)
    assert experts.find(batch_of(*(canvas(60) for _ in range(60)))) == Bucket(4096, 256, False)
    assert DENSE.find(batch_of(*(canvas(60) for _ in range(60)))) is None


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([16], Bucket(16, 1, False)),
        ([17], Bucket(32, 1, False)),
        ([100], Bucket(128, 1, False)),
        ([1024], Bucket(1024, 1, False)),
        ([1025], Bucket(1152, 1, False)),
        ([1537], None),
        ([512, 512], Bucket(1024, 64, False)),
        ([9, 10], Bucket(32, 2, False)),
        ([10, 10, 10], Bucket(48, 3, False)),  # a bucket of 32 rows holds only 2 sequences
        ([500, 500], Bucket(1024, 64, False)),
        ([600, 600], Bucket(1280, 80, False)),
        ([800, 800], None),
    ],
)
def test_the_smallest_bucket_that_holds_a_batch(lengths: list[int], wanted: Bucket | None) -> None:
    assert DENSE.find(batch_of(*map(canvas, lengths))) == wanted


def test_windows_have_buckets_of_their_own_and_mixed_batches_none() -> None:
    cached = canvas(40, *kept(40))
    assert DENSE.find(batch_of(cached)) == Bucket(48, 1, True)
    assert DENSE.find(batch_of(canvas(40), canvas(40, *kept(40)))) is None


def padded_inputs(
    batch: StepBatch, bucket: Bucket
) -> tuple[StepInputs[Any], AttentionLayout[Any], list[Any]]:
    """Return a bucket's inputs filled with a batch, their layout, and all arrays but the tokens."""
    inputs = bucket.inputs(
        NO_PAGES if bucket.is_cached else None, 1000, has_blocks=True, marks_blocks=False
    )
    ((layout,),) = inputs.layouts
    columns = (layout.query_ends, layout.key_starts, layout.key_counts)
    others = [inputs.positions, inputs.slot_mapping, *columns, layout.block_lengths, layout.firsts]
    for array in (inputs.token_ids, *others):
        array[...] = 99  # stale values of an earlier batch
    fill(inputs, batch)
    return inputs, layout, others


@pytest.mark.parametrize("lengths", [[33], [64], [20, 13, 40]])
def test_padding_is_one_more_sequence_of_its_own(lengths: list[int]) -> None:
    batch = batch_of(*map(canvas, lengths))
    bucket = DENSE.find(batch)
    assert bucket is not None
    inputs, layout, _ = padded_inputs(batch, bucket)
    total = sum(lengths)
    assert inputs.token_ids.tolist() == [*batch.token_ids, *[0] * (bucket.rows - total)]
    assert inputs.positions.tolist() == [*batch.positions, *[0] * (bucket.rows - total)]
    assert inputs.slot_mapping.size == 0
    sizes = [*lengths, bucket.rows - total]
    sizes += [0] * (bucket.sequences + 1 - len(sizes))
    assert np.diff(layout.query_ends).tolist() == layout.key_counts.tolist() == sizes
    starts, ends = layout.key_starts, layout.query_ends
    assert starts[: len(lengths) + 1].tolist() == ends[: len(lengths) + 1].tolist()


@pytest.mark.parametrize("lengths", [[33], [20, 13, 40]])
def test_a_step_that_lies_where_the_one_before_did_writes_its_tokens_alone(
    lengths: list[int],
) -> None:
    made = list(map(canvas, lengths))
    batch = batch_of(*made)
    bucket = DENSE.find(batch)
    assert bucket is not None
    inputs, _, others = padded_inputs(batch, bucket)
    before = [array.copy() for array in others]
    later = replace(batch, token_ids=batch.token_ids + 1)
    fill(inputs, later, batch.packing)
    assert inputs.token_ids[: batch.num_rows].tolist() == (batch.token_ids + 1).tolist()
    assert not inputs.token_ids[batch.num_rows :].any()  # padding is unchanged
    assert all(map(np.array_equal, others, before))
    shorter = batch_of(*map(canvas, [length - 1 for length in lengths]))
    fill(inputs, shorter, batch.packing)  # with other windows, all inputs are written
    total = shorter.num_rows
    assert inputs.positions.tolist() == [*shorter.positions, *[0] * (bucket.rows - total)]


def test_padding_of_windows_reads_and_writes_nothing() -> None:
    first, second = kept(30, 20)
    batch = batch_of(canvas(30, first), canvas(20, second, name="b"))
    bucket = DENSE.find(batch)
    assert bucket is not None
    inputs, layout, _ = padded_inputs(batch, bucket)
    slots = [*first.slots, *second.slots] + [-1] * (bucket.rows - 50)
    assert inputs.slot_mapping.tolist() == slots
    assert layout.query_ends[:4].tolist() == [0, 30, 50, bucket.rows]
    assert layout.key_starts[:2].tolist() == [first.start, second.start] == [128, 192]
    assert layout.key_counts[:3].tolist() == [30, 20, 0]


def test_windows_of_all_positions_read_their_own_rows_without_a_graph() -> None:
    """Windows that read cached keys come last; windows of all positions read their own rows."""
    part, whole = map(canvas, (100, 100), kept(100, 100), "pw")
    eligible = part.begin().eligible
    part.commit(Candidates(eligible, np.full_like(eligible, 5), np.zeros(eligible.size)))
    batch = batch_of(part, whole, canvas(30))
    assert [c.req_id for c in batch.items] == ["a", "w", "p"]
    own, cached = batch.layouts(slice(0, batch.num_rows))
    assert (own.pages, own.rows) == (None, slice(0, 130))
    assert (cached.pages, cached.rows) == (NO_PAGES, slice(130, 138))
    assert own.spans == [Span(0, 30, 0, 30), Span(30, 130, 30, 130)]
    start = part.window.cache.start
    assert cached.spans == [Span(0, 8, start, start + 100, first=92, in_pages=True)]
    assert (batch.num_whole, batch.shape.kept_keys) == (30, 100)
    assert batch_of(whole, canvas(30)).shape.kept_keys == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "longest"), [("llada", 1024), ("dream", 128), ("moe", 128)])
def test_replays_equal_the_layers_without_a_graph(
    family: str, longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replayed graph gives the rows of an eager run, before or after the last layer.

    Before the last layer, its keys and values are compared as well.
    """
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    folder = make_checkpoint(tmp_path, family=family, seed=3, dtype=torch.bfloat16)
    with running(folder, dtype="bfloat16", max_model_len=longest, max_num_seqs=64) as engine:
        runner = engine.runner
        assert len(runner.graphs) >= 2 * len([rows for rows in WINDOWS if rows <= longest])
        for lengths in ([16], [45], [31, 9, 77], [600], [100] * 9):
            if sum(lengths) > longest:
                continue
            for is_cached in (False, True):
                check_replay(runner, lengths, is_cached)


@torch.inference_mode()
def check_replay(runner: Any, lengths: list[int], is_cached: bool) -> None:
    ranges = [
        runner.pages.allocate(str(i), n) if is_cached else None for i, n in enumerate(lengths)
    ]
    made = [canvas(n, r) for n, r in zip(lengths, ranges, strict=True)]
    batch = build_batch(made, 0, runner.caches.table)
    plan = runner.planner.plan(batch.shape)
    wanted = run_eagerly(runner, batch, plan)
    # Clear the pages, so that a replay must write the values that it reads.
    for layer in range(len(runner.model.layers)):
        runner.caches.keys(layer).fill_(torch.nan)
        runner.caches.values(layer).fill_(torch.nan)
    for _ in range(2):
        replayed = runner.graphs.run(batch, plan)
        assert replayed is not None
        check_rows(replayed, wanted)
    for number in range(len(lengths)):
        runner.pages.release(str(number))


def run_eagerly(runner: Any, batch: StepBatch, plan: Any) -> list[torch.Tensor]:
    """Return what the graph of a batch returns, computed without a graph."""
    inputs = ops.to_device(batch.inputs([[slice(0, batch.num_rows)]]), runner.device)
    fresh = FreshBuffers(runner.device)
    to_the_end = runner.graphs.buckets.find(batch).is_ended
    where = fresh, fresh, runner.caches
    eager = run_to_end(run_body(runner.model, inputs, plan, *where, to_the_end=to_the_end))
    return [tensor.clone() for tensor in (eager.x, *(eager.keys_values or ()))]


def check_rows(replayed: Any, wanted: list[torch.Tensor]) -> None:
    actual = (replayed.x, *(replayed.keys_values or ()))
    for given, expected in zip(actual, wanted, strict=True):
        rows, expected_rows = (t.float().flatten(1) for t in (given[: len(expected)], expected))
        errors = (rows - expected_rows).norm(dim=1) / expected_rows.norm(dim=1)
        # Other kernels round differently, and a near-tie may send a row to another expert.
        assert (errors < 2e-2).float().mean() > 0.9
        assert errors.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("sdar", [{}]),
        ("a2d_qwen3", [{"block_grid": "answer"}, {"block_grid": "start"}]),
        ("idlm", [{"stride": 4, "draft_branches": "all"}]),
    ],
)
def test_steps_of_blocks_are_replayed(
    family: str,
    parameters: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All steps of requests with pages, on any grid of blocks and with branches, have graphs."""
    overrides: dict[str, Any] = {"head_dim": 16}  # narrower heads do not read pages in graphs
    if family == "a2d_qwen3":
        overrides |= {"block_size": 8, "tie_word_embeddings": False}
    folder = make_checkpoint(tmp_path, family=family, seed=3, dtype=torch.bfloat16, **overrides)
    with running(folder, dtype="bfloat16", num_gpu_blocks_override=800) as engine:
        runner, num_replays, num_items = engine.runner, 0, 0
        replay = runner.graphs.run

        def compared(batch: StepBatch, plan: Any) -> Any:
            nonlocal num_replays, num_items
            wanted = run_eagerly(runner, batch, plan)
            clear_written(runner, batch)
            replayed = replay(batch, plan)
            assert replayed is not None
            check_rows(replayed, wanted)
            num_replays, num_items = num_replays + 1, max(num_items, len(batch.items))
            return replayed

        monkeypatch.setattr(runner.graphs, "run", compared)
        for count in (1, 5):
            engine.ask(
                *(
                    Request([3 + n] * length, {"gen_length": 24, "ignore_eos": True, **more})
                    for n, length in enumerate(range(9, 9 + count))
                    for more in parameters
                )
            )
        assert num_replays > 10
        assert family != "idlm" or num_items > 5 * len(parameters)


def clear_written(runner: Any, batch: StepBatch) -> None:
    """Clear the keys and values that a step writes, so that a replay must write them again."""
    copies = batch.packing.copy_slots
    slots = torch.from_numpy(
        np.concatenate([batch.slot_mapping, *([] if copies is None else copies)])
    ).to(runner.device)
    for layer in range(len(runner.model.layers)):
        runner.caches.keys(layer)[slots[slots >= 0]] = torch.nan
        runner.caches.values(layer)[slots[slots >= 0]] = torch.nan


@pytest.mark.gpu
@pytest.mark.parametrize("switch", ["variable", "enforce_eager"])
def test_graphs_can_be_turned_off(
    switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switch == "variable":
        monkeypatch.setenv("VLLM_USE_CHUNKWISE_GRAPH", "0")
    folder = make_checkpoint(tmp_path, seed=3, dtype=torch.bfloat16)
    settings = {"enforce_eager": True} if switch == "enforce_eager" else {}
    with running(folder, dtype="bfloat16", max_model_len=64, **settings) as engine:
        assert engine.runner.graphs is None
        (answer,) = engine.ask(
            Request([3, 4, 5], {"gen_length": 16, "block_length": 8, "steps": 8})
        )
        assert answer.finish_reason in ("length", "stop")


@pytest.mark.gpu
@pytest.mark.parametrize("use_graphs", [True, False])
@pytest.mark.parametrize("family", ["llada", "dream", "moe"])
def test_a_step_waits_for_nothing_but_its_result(
    family: str, use_graphs: bool, tmp_path: Path
) -> None:
    """Torch raises here if an operation synchronises host and GPU; events are allowed."""
    folder = make_checkpoint(tmp_path, family=family, seed=3, dtype=torch.bfloat16)
    blocks = {"algorithm": "semi_ar", "gen_length": 16, "block_length": 8, "steps": 8, "seed": 1}
    asks = [
        Request([3 + i, 4, 5], {**blocks, **parameters}, {"temperature": temperature})
        for temperature in (0.0, 0.7)
        for i, parameters in enumerate(({}, {"cache": "dual"}, {"cfg_scale": 1.5}))
    ]
    settings = {"dtype": "bfloat16", "max_model_len": 64, "enforce_eager": not use_graphs}
    with running(folder, **settings) as engine:
        engine.ask(*asks)  # the first use of a kernel may synchronise
        torch.cuda.set_sync_debug_mode("error")
        try:
            answers = engine.ask(*asks)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.loop.runs_ahead
    assert [answer.report.get("error") for answer in answers] == [None] * len(asks)
