# SPDX-License-Identifier: Apache-2.0
"""Layers with a sliding window have pages for the end of a sequence only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import random_prompt
from tests.engine.harness import Engine, Request, record, running, start, step, tokens, uncached
from tests.engine.schedules import run_schedule
from tests.gemma import CANVAS, load_network, make_gemma, run_loop
from vllm.diffusion.engine.scheduler.paging import Paging

WINDOW = 100
NUM_PAGES, NUM_WINDOW_PAGES = 64, 9  # for three requests of three pages
SHARED = random_prompt(330, seed=50)


def ask(prompt: list[int], seed: int, max_tokens: int = 3 * CANVAS, **fields: Any) -> Request:
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": max_tokens}
    return Request(prompt, {"ignore_eos": True, "steps_per_block": 3, **fields}, sampling)


ASKS = [
    ask(random_prompt(700, 1), 1, 10 * CANVAS),
    ask(SHARED, 2),
    ask([*SHARED[:300], 4, 5], 3, 40, block_length=5),
    ask(random_prompt(150, 4), 4, 12 * CANVAS, steps_per_block=1),
    ask(random_prompt(90, 5), 5, 50, block_length=3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma"), sliding_window=WINDOW)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with running(
        folder,
        max_model_len=1024,
        max_num_batched_tokens=48,
        max_num_seqs=3,
        num_gpu_blocks_override=NUM_PAGES,
        disable_log_stats=False,
    ) as engine:
        assert engine.runner.caches.windows.num_pages == NUM_WINDOW_PAGES
        yield engine


@pytest.fixture
def unread(engine: Engine) -> None:
    """Rows that no forward pass has written hold NaN."""
    assert engine.scheduler.reset_prefix_cache()
    for layer in range(4):
        engine.runner.caches.keys(layer).fill_(torch.nan)
        engine.runner.caches.values(layer).fill_(torch.nan)


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> list[list[int]]:
    return [engine.ask(uncached(one))[0].token_ids for one in ASKS]


def test_long_contexts(
    engine: Engine, folder: Path, wanted: list[list[int]], unread: None, runs_ahead: bool
) -> None:
    """Prompts that are far longer than the window pages are computed in parts."""
    network = load_network(folder)
    for one, token_ids in zip(ASKS[:2], wanted, strict=False):
        run = run_loop(network, one.prompt, max_denoising_steps=3, **one.sampling)
        assert run.ids == token_ids
        assert engine.ask(one)[0].token_ids == token_ids


def test_together(engine: Engine, wanted: list[list[int]], unread: None, runs_ahead: bool) -> None:
    assert [answer.token_ids for answer in engine.ask(*ASKS)] == wanted
    assert engine.is_idle()
    assert engine.scheduler.make_stats().kv_cache_usage == 0


def test_a_sequence_needs_the_pages_of_its_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three pages hold a window of 100, and a canvas with the one before it."""
    start(engine, "a", ASKS[0])
    usage = list[float]()
    while engine.llm.llm_engine.has_unfinished_requests():
        step(engine)
        usage.append(engine.scheduler.make_stats().kv_cache_usage * NUM_WINDOW_PAGES)
    assert max(usage) <= 4
    assert round(usage[-2]) == 3


def test_a_prefix_needs_the_pages_of_its_end(engine: Engine, wanted: list[list[int]]) -> None:
    """If others have taken the window pages of a prefix, less of the prefix is used."""
    assert engine.scheduler.reset_prefix_cache()

    def cached_tokens(number: int) -> int:
        (output,) = engine.outputs(ASKS[number])
        assert list(output.outputs[0].token_ids) == wanted[number]
        return int(output.num_cached_tokens)

    assert cached_tokens(1) == 0
    assert cached_tokens(1) == 320
    assert cached_tokens(2) == 256  # ends before the other prompt
    assert cached_tokens(0) == 0  # takes all window pages in turn
    (output,) = engine.outputs(ask([*ASKS[0].prompt[:520], 3], 7))
    assert output.num_cached_tokens == 512
    assert cached_tokens(1) == 0


def test_who_loses_its_pages_goes_on_where_it_was(
    engine: Engine, wanted: list[list[int]], unread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whose forward passes read more pages than there are take turns."""
    lost = record(monkeypatch, Paging, "preempt", lambda _, paging, item: item.req_id)
    many = [ask(random_prompt(240, 20 + seed), seed, 12 * CANVAS) for seed in range(3)]
    alone = [engine.ask(uncached(one))[0] for one in many]
    windows = engine.scheduler.paging.windows
    for number in range(3):  # another request holds some of the window pages meanwhile
        windows.begin("another", [])
        windows.extend("another", range(1000, 1000 + number))
        assert tokens(engine.ask(*many)) == tokens(alone)
        windows.leave("another")
    assert lost


@pytest.mark.parametrize("seed", range(4))
def test_schedules(engine: Engine, wanted: list[list[int]], unread: None, seed: int) -> None:
    """Requests that come and go at any step do not change the answers of others."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(0, 30, (6, 3), generator=generator).tolist()
    entries = [(a % 6, b % len(ASKS), c if c < 15 else None) for a, b, c in draws]
    schedule = [(delay, ASKS[number], end) for delay, number, end in entries]
    for place, answer in run_schedule(engine, schedule).items():
        assert answer.token_ids == wanted[entries[place][1]]
    assert engine.scheduler.make_stats().kv_cache_usage == 0
