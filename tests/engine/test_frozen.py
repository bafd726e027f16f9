# SPDX-License-Identifier: Apache-2.0
"""`cache: frozen` computes the prompt once, in a whole forward pass, and then only reads it.

The reference is the published loop of each algorithm over a model that does the same
(`scripts/reference/frozen.py`).
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.models import load_reference

from tests.checkpoints import MASK_ID, random_prompt
from tests.engine.cases import ADABLOCK, DREAM, FOUR_BLOCKS, FULL, MULTI, TWO_BLOCKS
from tests.engine.harness import (
    Engine,
    Request,
    as_request,
    assert_parity,
    clear_case,
    rows_of_launches,
    running,
    shrink,
)
from vllm.diffusion.engine.worker.first_forwards import SharedRows

FROZEN: dict[str, Any] = {"cache": "frozen"}
ASKED: list[dict[str, Any]] = [
    {**FOUR_BLOCKS, "algorithm": "semi_ar", "steps": 16},
    {**FOUR_BLOCKS, "algorithm": "semi_ar", "steps": 8, "cfg_scale": 1.0},
    {**TWO_BLOCKS, "algorithm": "semi_ar", "steps": 4, "temperature": 0.6, "cfg_scale": 0.5},
    {**FOUR_BLOCKS, "algorithm": "threshold", "threshold": 0.6},
    {**FOUR_BLOCKS, "algorithm": "factor"},
    {**FOUR_BLOCKS, "algorithm": "local_leap"},
    {**FOUR_BLOCKS, "algorithm": "entropy_threshold", "threshold": 2.0},
    {**FOUR_BLOCKS, "algorithm": "hierarchy"},
    {**FOUR_BLOCKS, "algorithm": "credit"},
    {**ADABLOCK, "gen_length": 30, "block_length": 8, "delimiter_threshold": 0.01},
    {**FULL, "threshold": 1.0},
    {**MULTI, "threshold": 1.5},
    {**DREAM, "steps": 12},
    {**DREAM, "steps": 8, "alg": "maskgit_plus", "alg_temp": 0.5, "seed": 4},
]


@pytest.fixture(scope="module", params=["gqa", "dream", "moe"])
def pair(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[Engine, Any]]:
    folder = checkpoint(request.param)
    with running(folder) as engine:
        yield engine, load_reference(folder)


def test_every_algorithm_in_one_batch(pair: tuple[Engine, Any]) -> None:
    engine, model = pair
    asks, wanted = [], []
    for number, parameters in enumerate(ASKED):
        prompt, decoded = clear_case(model, 5 + 7 * number, **parameters, **FROZEN)
        asks.append(as_request(prompt, **parameters, **FROZEN))
        wanted.append((decoded.ids, decoded.num_forwards))
    answers = engine.ask(*asks)
    assert [(a.token_ids, a.num_forwards) for a in answers] == wanted
    plain = as_request(asks[0].prompt, **ASKED[0])
    assert engine.ask(plain)[0].token_ids != wanted[0][0]
    assert engine.is_idle()
    assert engine.runner.caches.num_bytes == 0


@pytest.mark.parametrize("prompt_length", [1, 70])
def test_a_request_alone(pair: tuple[Engine, Any], prompt_length: int) -> None:
    engine, model = pair
    assert_parity(engine, model, prompt_length, {**ASKED[1], **FROZEN})


# Each of these requests caches keys and values in another way.
KEEPING: list[dict[str, Any]] = [
    {**ASKED[1], **FROZEN},
    {**FOUR_BLOCKS, "algorithm": "semi_ar", "steps": 16, "cache": "prefix"},
    {**FOUR_BLOCKS, "algorithm": "semi_ar", "steps": 16, "cache": "dual"},
    {**MULTI, "cache": "delayed", "threshold": 1.5, "cache_delay_iter": 1, "block_length": 4},
]


def test_a_prompt_with_masks_is_frozen_once_they_are_filled(
    pair: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first forward pass in which no mask is left in the prompt is the last whole one."""
    engine, _ = pair
    rows = rows_of_launches(engine, monkeypatch)
    prompt = random_prompt(20)
    prompt[3] = prompt[15] = MASK_ID
    parameters = {**FOUR_BLOCKS, "algorithm": "semi_ar", "steps": 32, "allow_infill": True}
    (answer,) = engine.ask(as_request(prompt, **parameters, **FROZEN))
    filled = len(answer.report["infilled"])
    num_whole = rows.count(52)
    assert filled == 2
    # Ten positions of the prompt and the first block compete for commits.
    assert 2 <= num_whole <= 11
    assert rows == [52] * num_whole + rows[num_whole:]
    assert set(rows[num_whole:]) <= {32, 33}
    assert len(rows) > num_whole


def test_layers_in_host_memory_change_no_token(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are kept in host memory only if the device has no room for the cache of a request."""
    with running(checkpoint("grouped")) as engine:
        runner, planner = engine.runner, engine.runner.planner
        asks = [as_request(random_prompt(200), **parameters) for parameters in KEEPING]
        wanted = [engine.ask(ask)[0] for ask in asks]
        layers = []
        allocate = runner.pages.allocate
        monkeypatch.setattr(
            runner.pages, "allocate", lambda *a: (layers.append(a[2]), allocate(*a))[1]
        )
        for ask, answer in zip(asks, wanted, strict=True):
            sequences = 2 if "cfg_scale" in ask.extra else 1
            kept = sequences * 256 * planner.shape.cache_bytes
            assert engine.is_idle()
            shrink(runner, kept)
            # With this request, the worker reports the new budget to the scheduler.
            engine.ask(as_request([1], gen_length=8, steps=8))
            assert engine.ask(ask)[0].token_ids == answer.token_ids
        assert layers == [3, 3, 3, 3]
        assert engine.is_idle()
        assert (runner.caches.reserved_bytes, runner.caches.host_bytes) == (0, 0)
        monkeypatch.setenv("VLLM_USE_HOST_RESIDUAL", "0")
        shrink(runner, kept + 1)
        engine.ask(as_request([1], gen_length=8, steps=8))
        assert engine.ask(asks[0])[0].finish_reason == "error"


@pytest.mark.parametrize("prompt_length", [3, 150])
@pytest.mark.parametrize("cache", ["frozen", "none"])
def test_what_several_answers_have_in_common_is_computed_once(
    pair: tuple[Engine, Any], prompt_length: int, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several answers equal separate requests, also with guidance, and compute the prompt once."""
    engine, _ = pair
    rows = rows_of_launches(engine, monkeypatch)
    parameters = {
        "gen_length": 16,
        "block_length": 8,
        "steps": 4,
        "ignore_eos": True,
        "cache": cache,
    }
    for guidance in (0.0, 0.5):
        extra = {**parameters, "cfg_scale": guidance}
        prompt, whole = random_prompt(prompt_length), prompt_length + 16
        noisy = {"temperature": 0.8, "n": 3, "seed": 5}
        alone = engine.ask(
            *(Request(prompt, extra, {**noisy, "n": 1, "seed": 5 + i}) for i in range(3))
        )
        assert len({tuple(answer.token_ids) for answer in alone}) > 1
        rows.clear()
        (output,) = engine.outputs(Request(prompt, extra, noisy))
        assert [list(o.token_ids) for o in output.outputs] == [a.token_ids for a in alone]
        whole *= 2 if guidance else 1
        if cache == "none":  # short prompts are computed again
            assert sum(rows) == whole * (3 * 4 if prompt_length < 64 else 1 + 3 * 3)
        elif prompt_length > 64:
            assert rows[0] == whole
            assert max(rows[1:]) < whole
        assert engine.is_idle()
        assert engine.runner.caches.num_bytes == 0
        assert not any(isinstance(actual, SharedRows) for actual in gc.get_objects())


@pytest.mark.parametrize(
    "parameters",
    [
        {"cache": "prefix", "algorithm": "semi_ar", "steps": 8},
        {"cache": "dual", "algorithm": "semi_ar", "steps": 8},
        {"cache": "delayed", "algorithm": "multi_block", "cache_delay_iter": 1},
    ],
    ids=lambda parameters: parameters["cache"],
)
def test_what_the_first_forward_keeps_is_copied(
    pair: tuple[Engine, Any], parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of several answers computes the first forward pass, step by step and ahead."""
    engine, _ = pair
    prompt, extra = random_prompt(150), {"gen_length": 16, "block_length": 8, "ignore_eos": True}
    asks = [
        Request(prompt, {**extra, **parameters}, {"temperature": 0.8, "seed": 5 + i})
        for i in range(3)
    ]
    rows = rows_of_launches(engine, monkeypatch)
    alone, num_rows = engine.ask(*asks), sum(rows)
    assert len({tuple(answer.token_ids) for answer in alone}) > 1
    together = Request(prompt, {**extra, **parameters}, {**asks[0].sampling, "n": 3})
    for ahead in (False, True):
        monkeypatch.setattr(engine.loop, "runs_ahead", ahead)
        rows.clear()
        (output,) = engine.outputs(together)
        assert [list(o.token_ids) for o in output.outputs] == [a.token_ids for a in alone]
        assert sum(rows) == num_rows - 2 * (150 + 16)
        assert engine.is_idle()
        assert engine.runner.caches.num_bytes == 0
        assert not any(isinstance(actual, SharedRows) for actual in gc.get_objects())
