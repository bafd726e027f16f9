# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.2 revises a text as a stream: deletions and insertions move the rest of it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import load_reference

from tests.checkpoints import MASK_ID, random_prompt
from tests.engine.harness import (
    STOP_IDS,
    Engine,
    Request,
    Response,
    rows_of_launches,
    running,
    sampling_params,
)
from tests.plain_stream import Plain
from vllm.diffusion.config import served_model
from vllm.diffusion.editing.differences import Edit, applied
from vllm.diffusion.request.decision import decision_of

BLOCK = 8
NUM_CASES = 24
MOST_STEPS = 1000


@pytest.fixture(scope="module")
def served(checkpoint: Callable[[str], Path]) -> Iterator[tuple[Engine, Any]]:
    folder = checkpoint("llada22")
    with running(folder) as engine:
        yield engine, load_reference(folder)


def revise(text: list[int], prompt: list[int], **more: Any) -> Request:
    fields = {"block_length": BLOCK, "max_post_steps": 3, "canvas_token_ids": text, **more}
    return Request(prompt, fields)


def drawn(rng: random.Random) -> Request:
    text = random_prompt(rng.randint(1, 40), seed=rng.randrange(999))
    more: dict[str, Any] = {"editing_threshold": rng.choice([0.01, 0.02, 0.03, 0.5])}
    if rng.random() < 0.5:
        more["pinned"] = [[0, rng.randint(1, len(text))]]
    if rng.random() < 0.3:
        text[rng.randrange(len(text))] = MASK_ID
        more["max_tokens"] = more["gen_length"] = len(text) + rng.randint(0, 6)
    sampling: dict[str, Any] = {"logprobs": 1} if rng.random() < 0.3 else {}
    one = revise(text, random_prompt(rng.randint(1, 20), seed=rng.randrange(99)), **more)
    return Request(one.prompt, one.extra, sampling)


def revised(engine: Engine, model: Any, one: Request) -> Plain:
    """Return the result of the plain model with the logits of the reference."""

    def logits(tokens: Any, start: int) -> Any:
        stop = start + BLOCK
        rows = model.logits(torch.from_numpy(tokens[None, :stop]), BLOCK)[0, start:].float()
        return rows.numpy().copy()

    model_served = served_model(engine.llm.llm_engine.vllm_config)
    params = decision_of(sampling_params(one), model_served, one.prompt)
    return Plain(params, one.prompt, logits, MOST_STEPS).run()


def assert_revised(one: Request, answer: Response, wanted: Plain) -> None:
    ids = wanted.settled[len(one.prompt) :]
    ends = next((at for at, token in enumerate(ids) if token in STOP_IDS), len(ids))
    given = answer.token_ids
    assert given[:ends] == ids[:ends]
    assert len(given) <= ends + 1
    text = one.extra["canvas_token_ids"]
    edits = [Edit(*edit.values()) for edit in answer.report["edits"]]
    assert applied(text, edits) == ids[:ends]


def test_random_texts_alone_and_together(served: tuple[Engine, Any]) -> None:
    engine, model = served
    rng = random.Random(3)
    cases = [drawn(rng) for _ in range(NUM_CASES)]
    results = [revised(engine, model, one) for one in cases]
    assert sum(bool(wanted.steps) for wanted in results) > NUM_CASES / 4
    for one, answer, wanted in zip(cases, engine.ask(*cases), results, strict=True):
        assert_revised(one, answer, wanted)
    for one, wanted in list(zip(cases, results, strict=True))[::4]:
        (answer,) = engine.ask(one)
        assert_revised(one, answer, wanted)
    assert engine.is_idle()


@pytest.mark.parametrize("limit", [BLOCK, 3 * BLOCK])
def test_scans_are_cut_to_the_rows_of_a_step(
    served: tuple[Engine, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = served
    rng = random.Random(4)
    cases = [drawn(rng) for _ in range(6)]
    results = [revised(engine, model, one) for one in cases]
    monkeypatch.setattr(engine.scheduler, "row_budget", limit, raising=False)
    monkeypatch.setattr(engine.runner.planner, "row_budget", limit)
    for one, answer, wanted in zip(cases, engine.ask(*cases), results, strict=True):
        assert_revised(one, answer, wanted)


def test_a_text_without_a_change_takes_one_step(
    served: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = served
    rows = rows_of_launches(engine, monkeypatch)
    text = random_prompt(100, seed=3)
    (answer,) = engine.ask(revise(text, random_prompt(12), editing_threshold=1.0))
    *token_ids, end = answer.token_ids
    assert (token_ids, answer.num_forwards) == (text, 1)
    assert end in STOP_IDS
    assert (answer.finish_reason, answer.report["edits"]) == ("stop", [])
    assert answer.report["num_edited"] == 0
    assert rows == [112]
