# SPDX-License-Identifier: Apache-2.0
"""Answers of DiffusionGemma do not depend on what happens to other requests, pages or steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.checkpoints import random_prompt
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    finish,
    record,
    running,
    start,
    tokens,
    uncached,
)
from tests.engine.schedules import Arrival, arrivals, check_schedule
from tests.gemma import CANVAS, load_network, make_gemma, run_loop
from vllm.diffusion.engine.scheduler.paging import Paging

NUM_PAGES = 8  # one of them is reserved by upstream
SHARED = random_prompt(130, seed=99)


def ask(prompt: list[int], seed: int, max_tokens: int, **fields: Any) -> Request:
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": max_tokens}
    return Request(prompt, {"ignore_eos": True, "steps_per_block": 4, **fields}, sampling)


COOL = {"t_min": 0.05, "t_max": 0.3, "confidence_threshold": 0.5, "entropy_bound": 2.0}
ASKS = [
    ask(SHARED, 1, 20),
    ask([*SHARED[:128], 7, 8], 2, 2 * CANVAS, block_length=5),
    ask([*SHARED[:70], 3], 3, 30, steps_per_block=9, **COOL),
    ask(random_prompt(5, 1), 4, 70, steps_per_block=2),
    ask(random_prompt(64, 2), 5, 3, steps_per_block=12, **COOL),
    ask(random_prompt(33, 3), 6, 40, block_length=3, entropy_bound=4.0),
]
# Requests that grow from one page to two, when only seven pages are free.
LARGE = [ask(random_prompt(50, 10 + seed), seed, 24, stream_canvas=seed > 3) for seed in range(6)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running(
        make_gemma(tmp_path_factory.mktemp("gemma")),
        max_num_batched_tokens=40,
        num_gpu_blocks_override=NUM_PAGES,
        disable_log_stats=False,
    ) as engine:
        # Full layers leave a part of each row as it is, and schedules compare whole pages.
        for layer in range(4):
            engine.runner.caches.keys(layer).zero_()
            engine.runner.caches.values(layer).zero_()
        yield engine


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> list[Response]:
    return [engine.ask(uncached(one))[0] for one in ASKS]


@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(arrivals(len(ASKS)), st.booleans())
def test_any_schedule_gives_the_same_tokens(
    engine: Engine, wanted: list[Response], schedule: list[Arrival], ahead: bool
) -> None:
    for number, answer in check_schedule(engine, ASKS, schedule, runs_ahead=ahead):
        assert tokens([answer]) == tokens([wanted[number]])


def test_who_loses_its_pages_goes_on_where_it_was(
    engine: Engine, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [engine.ask(uncached(one))[0] for one in LARGE]
    lost = record(monkeypatch, Paging, "preempt", lambda _, paging, item: item.req_id)
    assert engine.scheduler.reset_prefix_cache()
    assert tokens(engine.ask(*LARGE)) == tokens(alone)
    assert lost
    assert engine.is_idle()


def test_steps_in_slices(
    engine: Engine, wanted: list[Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without cached keys are cut into slices, between which other requests run."""
    monkeypatch.setattr(engine.scheduler, "long_steps", None)
    engine.cut_steps(1e-4)
    slices = record(monkeypatch, type(engine.loop), "_part", lambda *_: None)
    asks = [uncached(ASKS[0]), ASKS[3], uncached(ASKS[1])]
    assert tokens(engine.ask(*asks)) == tokens([wanted[0], wanted[3], wanted[1]])
    assert len(slices) > 20


def test_weights_that_are_loaded_again(engine: Engine, wanted: list[Response]) -> None:
    """Some tensors are loaded again between two steps: the context is computed again."""
    model = engine.runner.model
    file = next(Path(engine.llm.llm_engine.model_config.model).glob("*.safetensors"))
    names = ("layer_scalar", "gate_up_proj", "k_proj.weight", "router.scale", "pre_norm.weight")
    some = {name: tensor for name, tensor in load_file(file).items() if name.endswith(names)}
    start(engine, "a", ASKS[2])
    for _ in range(8):
        engine.llm.llm_engine.step()
    assert len(model.load_weights(some.items())) > len(names)
    assert tokens([finish(engine)["a"]]) == tokens([wanted[2]])


def test_weights_that_change(engine: Engine, tmp_path: Path) -> None:
    """Layers without a value projection change their values with their keys."""
    model, one = engine.runner.model, ask(random_prompt(40, 5), 8, 2 * CANVAS)
    folders = Path(engine.llm.llm_engine.model_config.model), make_gemma(tmp_path, seed=1)
    old, new = (load_file(next(folder.glob("*.safetensors"))) for folder in folders)
    run = run_loop(load_network(folders[1]), one.prompt, max_denoising_steps=4, **one.sampling)
    model.load_weights(new.items())
    (answer,) = engine.ask(one)
    model.load_weights(old.items())
    assert answer.token_ids == run.ids
