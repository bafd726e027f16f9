# SPDX-License-Identifier: Apache-2.0
"""A draft of the end of a canvas of DiffusionGemma saves forward passes and changes no answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_prompt
from tests.engine.harness import Engine, Request, Response, running, uncached
from tests.engine.schedules import ask_while_pages_are_lost
from tests.gemma import CANVAS, load_network, make_gemma, run_loop

WINDOW = 40
# At low temperatures, canvases of random weights end early, too.
COOL = {"t_min": 0.05, "t_max": 0.3, "confidence_threshold": 0.5, "entropy_bound": 1.0}


def ask(seed: int, length: int, max_tokens: int = 4 * CANVAS, **fields: Any) -> Request:
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": max_tokens}
    named = {"ignore_eos": True, "steps_per_block": 16, **COOL, **fields}
    return Request(random_prompt(length, seed), named, sampling)


ASKS = [
    ask(1, 16),
    ask(2, 25, stability_threshold=2),
    ask(3, 70, 6 * CANVAS),
    ask(4, 130, 5 * CANVAS, block_length=5),
    ask(5, 9, confidence_threshold=0.0, steps_per_block=4),
    ask(6, 61, stability_threshold=0),
    ask(7, 200, 8 * CANVAS, entropy_bound=3.0),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma"), sliding_window=WINDOW)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    settings = {"dllm": {"longest_pause_ms": 0, "num_speculative_states": 1}}
    with running(folder, max_model_len=512, additional_config=settings) as engine:
        yield engine


def drafting(one: Request, count: int) -> Request:
    return Request(one.prompt, {**one.extra, "num_speculative_states": count}, one.sampling)


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> list[Response]:
    return [engine.ask(drafting(uncached(one), 0))[0] for one in ASKS]


def test_the_answer_is_that_of_the_authors_loop(engine: Engine, folder: Path) -> None:
    one, network = ASKS[0], load_network(folder)
    run = run_loop(network, one.prompt, max_denoising_steps=16, **one.sampling, **COOL)
    (answer,) = engine.ask(one)
    assert answer.token_ids == run.ids
    assert answer.num_steps == sum(run.steps)


@pytest.mark.parametrize("cache", ["exact", "none"])
def test_guesses_change_no_answer(
    engine: Engine, wanted: list[Response], runs_ahead: bool, cache: str
) -> None:
    assert engine.scheduler.reset_prefix_cache()
    asks = [Request(one.prompt, {**one.extra, "cache": cache}, one.sampling) for one in ASKS]
    for answers in ([engine.ask(one)[0] for one in asks], engine.ask(*asks)):
        for answer, other in zip(answers, wanted, strict=True):
            assert answer.token_ids == other.token_ids
            assert answer.num_steps == other.num_steps
    assert engine.is_idle()


def test_right_guesses_save_forward_passes(engine: Engine, wanted: list[Response]) -> None:
    saved = 0
    for one, other in zip(ASKS, wanted, strict=True):
        (answer,) = engine.ask(one)
        assert answer.num_steps is not None and answer.num_forwards is not None
        num_canvases = -(-one.sampling["max_tokens"] // one.extra.get("block_length", CANVAS))
        assert 0 <= answer.num_steps - answer.num_forwards < num_canvases
        saved += answer.num_steps - answer.num_forwards
        assert other.num_forwards == other.num_steps
    assert saved >= 3
    (never,) = engine.ask(ASKS[5])  # the end does not depend on the previous step
    assert never.num_forwards == never.num_steps


def test_canvases_and_log_probabilities_are_the_same(engine: Engine) -> None:
    one = ASKS[2]
    sampling = {**one.sampling, "logprobs": 2}
    fields = {**one.extra, "return_trajectory": True, "return_entropy": True}
    reports = []
    for count in (0, 1):
        (output,) = engine.outputs(drafting(Request(one.prompt, fields, sampling), count))
        trajectory = (output.kv_transfer_params or {})["dllm"]["trajectory"]
        values = [
            entry[t].logprob
            for entry, t in zip(
                output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True
            )
        ]
        reports.append((trajectory["token_ids"], trajectory["commit_steps"], values))
    assert reports[0][:2] == reports[1][:2]
    assert reports[0][2] == pytest.approx(reports[1][2], abs=1e-4)


def test_memory_of_pages_is_lent(engine: Engine, wanted: list[Response]) -> None:
    """All kinds of pages come back: those of requests, of drafts, and of layers with a window."""
    store = engine.runner.caches
    assert engine.is_idle()
    sizes = store.num_pages, store.windows.num_pages, len(store.free)
    assert sizes[2] > 0
    engine.llm.sleep(level=0)
    engine.core.release_kv_cache_memory()
    assert store.reserved_bytes == 0
    engine.llm.wake_up()
    assert (store.num_pages, store.windows.num_pages, len(store.free)) == sizes
    (answer,) = engine.ask(ASKS[0])
    assert answer.token_ids == wanted[0].token_ids
    assert answer.num_forwards < wanted[0].num_forwards


def test_pages_that_are_lost_meanwhile(engine: Engine, wanted: list[Response]) -> None:
    one = ASKS[2]
    answer = ask_while_pages_are_lost(engine, one, 5)
    assert answer.token_ids == wanted[2].token_ids
