# SPDX-License-Identifier: Apache-2.0
"""A batch-invariant engine gives an answer the same bits alone and next to other requests.

The weights are random, so that two tokens are often nearly equal and a changed bit shows.
Trajectories are compared with their log probabilities, which show changed bits, too.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from make_dummy_checkpoint import write_checkpoint

from tests.engine.harness import Engine, Request, engine_config, record, running, shrink
from tests.engine.same_bits import INVARIANT, bits, check_beside, check_drafts, requests
from vllm.diffusion.config import settings_of
from vllm.diffusion.engine.scheduler.paging import Paging
from vllm.diffusion.ops import invariant

WEIGHT_STD, FP8_SCALE = 0.02, 1 / 4000
VOCABULARY = range(300, 30_000)  # ordinary tokens of all released models


# ---- on the CPU, where products are computed row by row ----


@pytest.mark.parametrize("family", ["mha", "gqa", "dream", "sdar", "nemotron", "fp8"])
def test_answers_do_not_depend_on_others(family: str, checkpoint: Callable[[str], Path]) -> None:
    given: dict[str, Any] = {"max_num_seqs": 16, "additional_config": INVARIANT}
    if family == "fp8":
        family = "mha"
        given |= {"quantization": "fp8"}
        given["additional_config"] = {"dllm": {**INVARIANT["dllm"], "fp8_head": True}}
    asks, others = (
        requests(6, range(5, 200), most_prompt=40, seed=seed, family=family) for seed in (1, 2)
    )
    with running(checkpoint(family), **given) as engine:
        alone = check_beside(engine, asks, others, (9,))
        if family != "nemotron":
            check_drafts(engine, asks, alone)


def check_pages(engine: Engine, asks: Sequence[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check bits with prompts in parts, with preempted requests, and with shared pages.

    The engine has pages and rows for a part of `asks` at a time.
    """
    lost = record(monkeypatch, Paging, "preempt", lambda _, paging, item: item.req_id)
    alone = []
    for ask in asks:
        assert engine.scheduler.reset_prefix_cache()
        alone.append(bits(engine.ask(ask)[0]))
    assert [bits(engine.ask(ask)[0]) for ask in asks] == alone  # with the pages of the last ones
    assert [bits(answer) for answer in engine.ask(*asks)] == alone
    assert len(lost) >= 2
    drafting = [replace(ask, extra={**ask.extra, "num_speculative_states": 2}) for ask in asks]
    assert [bits(answer) for answer in engine.ask(*drafting)] == alone


def growing(vocabulary: range) -> list[Request]:
    """Return requests of a block-causal family that begin with one page and end with three."""
    draw, extra = random.Random(5), {"gen_length": 88, "block_length": 8, "return_trajectory": True}
    options = [{}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7}]
    return [
        Request(
            draw.choices(vocabulary, k=50),
            {**extra, **options[number % 3], "seed": number, "ignore_eos": True},
        )
        for number in range(5)
    ]


def test_pages_and_parts_of_prompts_change_nothing(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"max_num_batched_tokens": 48, "num_gpu_blocks_override": 8}
    with running(checkpoint("sdar"), **rows, additional_config=INVARIANT) as engine:
        check_pages(engine, growing(range(5, 200)), monkeypatch)


def test_chunks_and_slices_change_nothing(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little memory cuts rows into chunks, but the heads of a row are never computed in groups."""
    asks = requests(5, range(5, 200), most_prompt=180, seed=4)
    uncached = [replace(ask, extra={**ask.extra, "cache": "none"}) for ask in asks]
    with running(checkpoint("mha"), additional_config=INVARIANT) as engine:
        alone = [bits(engine.ask(ask)[0]) for ask in asks]
        wanted = [bits(engine.ask(ask)[0]) for ask in uncached]
        engine.cut_steps(1e-5)
        assert [bits(answer) for answer in engine.ask(*asks)] == alone
    with running(checkpoint("mha"), additional_config=INVARIANT) as engine:
        shrink(engine.runner, 160 << 10)
        plans = record(monkeypatch, engine.runner.planner, "plan", lambda plan, *_: plan)
        assert [bits(engine.ask(ask)[0]) for ask in uncached] == wanted
    layouts = {plan.layout for plan in plans}
    assert len(layouts) >= 2 and all(layout.head_groups == 1 for layout in layouts)


def test_reports_and_status_have_the_fingerprint(checkpoint: Callable[[str], Path]) -> None:
    ask = requests(1, range(5, 200), most_prompt=20)[0]
    seen = []
    for name in ("mha", "mha", "gqa"):
        with running(checkpoint(name), additional_config=INVARIANT) as engine:
            report = engine.ask(ask)[0].report
            (status,) = engine.llm.collective_rpc("status")
            assert report["batch_invariant"] is status["batch_invariant"] is True
            assert report["fingerprint"] == status["fingerprint"]
            assert "refreshed_early" not in report
            seen.append(report["fingerprint"])
    assert seen[0] == seen[1] != seen[2]
    assert all(re.fullmatch("[0-9a-f]{16}", fingerprint) for fingerprint in seen)
    with running(checkpoint("mha")) as engine:
        assert "batch_invariant" not in engine.ask(ask)[0].report
        assert engine.llm.collective_rpc("status")[0]["batch_invariant"] is False


@pytest.mark.parametrize("by", ["variable", "setting"])
def test_the_mode_is_turned_on(
    by: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("mha")
    assert not settings_of(engine_config(folder)).batch_invariant
    given: dict[str, Any] = {}
    if by == "variable":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    else:
        given = {"additional_config": {"dllm": {"batch_invariant": True}}}
    assert settings_of(engine_config(folder, **given)).batch_invariant


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("mha", {"quantization": "int4"}, "with quantization int4; wanted none or fp8"),
        ("mha", {"enable_lora": True}, "with LoRA adapters; wanted none"),
        ("moe", {}, "with experts on the CPU; wanted a dense model, or a GPU"),
        ("mha", {"tensor_parallel_size": 2, "nnodes": 2}, "with 2 hosts; wanted 1"),
        ("qk_norm", {"tensor_parallel_size": 2}, "with tensor_parallel_size above 1 and norms"),
    ],
)
def test_what_may_round_by_other_requests_is_refused(
    name: str, given: dict[str, Any], match: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ValueError, match=f"batch_invariant: given {match}"):
        engine_config(checkpoint(name), additional_config=INVARIANT, **given)


# ---- on a GPU, with the width of released models ----


@contextmanager
def wide_engine(folder: Path, **settings: Any) -> Iterator[Engine]:
    """Start an engine on random weights drawn from a fixed seed."""
    given = {"max_num_seqs": 64, "max_model_len": 1024, "additional_config": INVARIANT}
    given |= {"dtype": "bfloat16", "load_format": "dummy", "gpu_memory_utilization": 0.5}
    with running(folder, **(given | settings)) as engine:
        engine.llm.collective_rpc(draw_weights)
        yield engine


@torch.no_grad()
def draw_weights(worker: Any) -> None:
    """Draw a rank's weights. A router is the only matrix that ranks do not divide."""
    model, rank = worker.worker.model_runner.model, worker.worker.rank
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            seed = zlib.crc32(name.encode()) + (0 if name.endswith(".gate.weight") else rank)
            generator = torch.Generator(weight.device).manual_seed(seed)
            std = 1.0 if "embed_tokens" in name else WEIGHT_STD
            drawn = torch.empty(weight.shape, device=weight.device)
            scale = FP8_SCALE if weight.itemsize == 1 else 1.0
            drawn.normal_(std=std / scale, generator=generator)
            weight.copy_(drawn.clamp(-400, 400))
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
    for name, scales in model.named_buffers():
        if name.endswith("weight_scale"):
            scales.fill_(FP8_SCALE)


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of two layers of LLaDA-8B."""
    folder = tmp_path_factory.mktemp("llada")
    write_checkpoint(folder, "llada", num_layers=2)
    return folder


@pytest.mark.gpu
def test_a_wide_model_has_the_same_bits_beside_others_and_without_graphs(llada: Path) -> None:
    asks = requests(24, VOCABULARY, most_prompt=300, seed=1)
    others = requests(63, VOCABULARY, most_prompt=600, seed=2)
    with wide_engine(llada) as engine:
        alone = check_beside(engine, asks, others, (1, 7, 63))
        check_drafts(engine, asks, alone)
    with wide_engine(llada, enforce_eager=True, max_num_batched_tokens=1024) as engine:
        answers = engine.ask(*asks)
        assert [bits(answer) for answer in answers] == alone


@pytest.mark.gpu
def test_pages_of_a_wide_model_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "sdar", num_layers=2)
    rows = {"max_num_batched_tokens": 48, "max_num_seqs": 16, "num_gpu_blocks_override": 8}
    rows |= {"max_model_len": 256}
    with wide_engine(tmp_path, **rows) as engine:
        check_pages(engine, growing(VOCABULARY), monkeypatch)


@pytest.mark.gpu
def test_an_order_that_depends_on_rows_is_noticed(
    llada: Path, monkeypatch: pytest.MonkeyPatch, cublas_workspace: None
) -> None:
    """With a workspace cuBLAS splits sums, and the comparison fails."""
    monkeypatch.setattr(invariant, "allow_workspace", lambda *_: None)
    monkeypatch.setattr(invariant, "check_order", lambda *_: None)
    asks = requests(10, VOCABULARY, most_prompt=8, seed=1)
    others = requests(63, VOCABULARY, most_prompt=600, seed=2)
    with (
        wide_engine(llada) as engine,
        pytest.raises(AssertionError, match=r"\(63, \d"),
    ):
        check_beside(engine, asks, others, (63,))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["dream", "sdar", "llada-moe", "llada2", "nemotron", "fp8"])
def test_other_families_have_the_same_bits_beside_others(family: str, tmp_path: Path) -> None:
    quantization = "fp8" if family == "fp8" else None
    family = "llada" if family == "fp8" else family
    write_checkpoint(tmp_path, family, num_layers=2)
    asks = requests(9, VOCABULARY, most_prompt=200, seed=1, family=family)
    others = requests(31, VOCABULARY, most_prompt=400, seed=2, family=family)
    with wide_engine(tmp_path, max_num_seqs=32, quantization=quantization) as engine:
        check_beside(engine, asks, others, (1, 31))


@pytest.mark.multi_gpu(2)
@pytest.mark.parametrize("family", ["llada", "llada-moe", "llada2", "sdar", "fp8"])
def test_tensor_parallel_gpus_give_the_same_bits_beside_others(family: str, tmp_path: Path) -> None:
    """The ranks add their parts in one order, and each rank's products have one order."""
    settings: dict[str, Any] = {"max_num_seqs": 32, "tensor_parallel_size": 2}
    if family == "fp8":
        family, settings["quantization"] = "llada", "fp8"
    write_checkpoint(tmp_path, family, num_layers=2)
    asks = requests(9, VOCABULARY, most_prompt=200, seed=1, family=family)
    others = requests(31, VOCABULARY, most_prompt=400, seed=2, family=family)
    with wide_engine(tmp_path, **settings) as engine:
        alone = check_beside(engine, asks, others, (1, 31))
        check_drafts(engine, asks, alone)
    with wide_engine(tmp_path, **settings, enforce_eager=True) as engine:
        assert [bits(answer) for answer in engine.ask(*asks)] == alone
