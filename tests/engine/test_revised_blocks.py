# SPDX-License-Identifier: Apache-2.0
"""Texts are revised block by block in block-causal families that were trained to predict masks."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.models import load_reference

from tests.checkpoint_files import change_json
from tests.checkpoints import EOS_ID, MASK_ID, make_checkpoint, random_prompt
from tests.engine.harness import STOP_IDS, Engine, Request, Response, rows_of_launches, running
from tests.engine.revisions import assert_recorded, changed_positions, drawn_limits
from vllm.diffusion.editing.choice import NUM_STRIPES, choose
from vllm.diffusion.editing.differences import Edit, applied

FAMILIES = ("llada2", "sdar", "stable_diffcoder", "a2d_qwen3")
ALGORITHMS = ("low_confidence_dynamic", "semi_ar", "sequential", "entropy_bounded")
BLOCK = 8
NUM_CASES = 40  # random revisions per family
PROMPT = random_prompt(9)
TEXT = random_prompt(30, seed=4)


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Engine, Any]]:
    if request.param.startswith("a2d"):
        folder = make_checkpoint(tmp_path_factory.mktemp("bd3lm"), family=request.param, seed=3)
        change_json(folder, block_size=BLOCK)
    else:
        folder = checkpoint(request.param)
    with running(folder) as engine:
        assert engine.runner.model.family.is_block_causal
        yield engine, load_reference(folder)


def revise(text: list[int], prompt: list[int] = PROMPT, **fields: Any) -> Request:
    return Request(prompt, {"canvas_token_ids": text, "block_length": BLOCK, **fields})


def drawn(rng: random.Random) -> Request:
    text = random_prompt(rng.randint(1, 40), seed=rng.randrange(1000))
    for position in range(len(text)):
        if rng.random() < 0.05:
            text[position] = rng.choice([MASK_ID, MASK_ID, MASK_ID, EOS_ID])
    fields: dict[str, Any] = {"seed": rng.randrange(100), "temperature": rng.choice([0, 0, 0.7])}
    fields["algorithm"] = rng.choice(ALGORITHMS)
    fields["cache"] = rng.choice(["exact", "exact", "none"])
    fields |= drawn_limits(rng, len(text))
    if rng.random() < 0.3:
        fields["gen_length"] = 48
    return revise(text, random_prompt(rng.randint(1, 12), seed=rng.randrange(9)), **fields)


def assert_revised(one: Request, answer: Response) -> None:
    """Check what holds for every revision."""
    text, report = one.extra["canvas_token_ids"], answer.report
    length = one.extra.get("gen_length", len(text))
    has_ended = answer.finish_reason == "stop"
    assert has_ended or len(answer.token_ids) == length
    assert MASK_ID not in answer.token_ids
    for start, stop in one.extra.get("pinned", ()):
        given = zip(text[start:stop], answer.token_ids[start:stop], strict=False)
        assert all(new == old or old == MASK_ID for old, new in given)
    differ = changed_positions(text, answer.token_ids)
    assert len(differ) <= one.extra.get("max_edits", len(text))
    if one.extra.get("edit_rounds", 1) == 1:
        assert len(differ) <= report["num_remasked"]
    if one.extra.get("return_trajectory"):
        assert_recorded(report["trajectory"], text, answer)
    edits = [Edit(*edit.values()) for edit in report["edits"]]
    end = next((at for at, token in enumerate(text) if token in STOP_IDS), len(text))
    assert applied(text[:end], edits) == answer.token_ids[: -1 if has_ended else None]


def test_random_revisions_alone_and_together(served: tuple[Engine, Any]) -> None:
    engine, _ = served
    rng = random.Random(7)
    asks = [drawn(rng) for _ in range(NUM_CASES)]
    together = engine.ask(*asks)
    for one, answer in zip(asks, together, strict=True):
        assert_revised(one, answer)
    for one, answer in list(zip(asks, together, strict=True))[::4]:
        (alone,) = engine.ask(one)
        assert alone.token_ids == answer.token_ids, one.extra
        assert alone.report["edits"] == answer.report["edits"]
    assert engine.is_idle()


def scores_from(model: Any, text: list[int], start: int) -> Any:
    """Return the log probability of every token of a text from position `start` on."""
    scores = np.zeros(len(text) - start)
    end = [EOS_ID] * (-(len(PROMPT) + len(text)) % BLOCK)
    for stripe in range(NUM_STRIPES):
        positions = range(start + stripe, len(text), NUM_STRIPES)
        copy = [MASK_ID if at in positions else token for at, token in enumerate(text)]
        rows = model.logits(torch.tensor([[*PROMPT, *copy, *end]]), BLOCK)[0, len(PROMPT) :]
        for at in positions:
            scores[at - start] = float(rows[at].double().log_softmax(-1)[text[at]])
    return scores


def by_hand(engine: Engine, model: Any, threshold: float, **fields: Any) -> tuple[list[int], int]:
    """Revise TEXT block by block; return the text and the number of forward passes."""
    text, start, num_forwards = list(TEXT), 0, 0
    while start < len(text):
        num_forwards += 1
        chosen = start + choose(scores_from(model, text, start), threshold=threshold)
        if not chosen.size:
            break
        stop = chosen[0] + BLOCK - (len(PROMPT) + chosen[0]) % BLOCK
        masked = [MASK_ID if at in chosen and at < stop else t for at, t in enumerate(text)]
        (filled,) = engine.ask(revise(masked, noise=0, **fields))
        text, start = filled.token_ids, int(stop)
        num_forwards += filled.num_forwards or 0
    return text, num_forwards


@pytest.mark.parametrize("cache", ["exact", "none"])
@pytest.mark.parametrize("threshold", [1e-3, 3e-3])
def test_later_blocks_are_scored_again(
    served: tuple[Engine, Any], threshold: float, cache: str
) -> None:
    engine, model = served
    fields: dict[str, Any] = {"block_grid": "start"}
    if engine.runner.model.family.block_grids == ("start",):
        fields = {}
    shared = {"cache": cache, **fields}
    wanted, num_forwards = by_hand(engine, model, threshold, **shared)
    (answer,) = engine.ask(revise(TEXT, edit_threshold=threshold, **shared))
    assert answer.token_ids == wanted != TEXT
    assert answer.num_forwards == num_forwards
    assert answer.report["scoring"] == "striped"


@pytest.mark.parametrize(
    "fields",
    [{"noise": 0}, {"edit_threshold": 0}, {"max_edits": 0}, {"pinned": [[0, 30]]}],
    ids=lambda fields: next(iter(fields)),
)
def test_nothing_to_change_takes_one_forward(
    served: tuple[Engine, Any], fields: dict[str, Any]
) -> None:
    engine, _ = served
    (answer,) = engine.ask(revise(TEXT, **fields))
    assert answer.token_ids == TEXT
    assert (answer.num_forwards, answer.report["edits"]) == (1, [])


def test_likely_text_takes_one_step_of_all_copies(
    served: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = served
    rows = rows_of_launches(engine, monkeypatch)
    (answer,) = engine.ask(revise(TEXT, edit_threshold=1e-99))
    assert (answer.token_ids, answer.num_forwards, answer.num_steps) == (TEXT, 1, 1)
    assert len(rows) == 1
    assert rows[0] >= NUM_STRIPES * (len(PROMPT) + len(TEXT))


@pytest.mark.parametrize("limit", [BLOCK, 3 * BLOCK, 10_000])
def test_few_rows_only_take_more_steps(
    served: tuple[Engine, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = served
    asks = [revise(TEXT, edit_threshold=3e-3), revise(TEXT[:20], noise=0.3, max_edits=3)]
    (wanted, _) = engine.ask(*asks)
    monkeypatch.setattr(engine.scheduler, "row_budget", limit, raising=False)
    monkeypatch.setattr(engine.runner.planner, "row_budget", limit)
    (answer, other) = engine.ask(*asks)
    if limit > 3 * BLOCK:
        assert answer.token_ids == wanted.token_ids
    for one, result in zip(asks, (answer, other), strict=True):
        assert_revised(one, result)
    assert engine.is_idle()


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("limit", [BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("fields", [{"edit_rounds": 3, "noise": 0.5}, {"slack": 2}])
def test_texts_that_settle_late_need_no_more_rows(
    served: tuple[Engine, Any],
    fields: dict[str, Any],
    limit: int,
    is_fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their forwards are not cut, because no cache keeps what a part computes."""
    engine, _ = served
    monkeypatch.setenv("VLLM_DLLM_COMMIT_FUSION", str(int(is_fused)))
    asks = [revise(TEXT, edit_threshold=3e-3, **fields), revise(TEXT[:20], noise=0.3)]
    wanted = engine.ask(asks[0])[0]
    monkeypatch.setattr(engine.scheduler, "row_budget", limit, raising=False)
    monkeypatch.setattr(engine.runner.planner, "row_budget", limit)
    answer, _ = engine.ask(*asks)
    assert answer.token_ids == wanted.token_ids
    assert engine.is_idle()


def test_blocks_before_the_first_change_are_settled(served: tuple[Engine, Any]) -> None:
    """The answer after a text is generated as after any other text."""
    engine, _ = served
    longer = revise(TEXT, edit_threshold=1e-99, gen_length=48)
    masked = revise([*TEXT, *[MASK_ID] * 18], noise=0)
    first, second = engine.ask(longer, masked)
    assert first.token_ids == second.token_ids
    assert first.token_ids[: len(TEXT)] == TEXT
