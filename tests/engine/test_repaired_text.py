# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.1 repairs a text as if its rule worked on one block after the other."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from reference.models import load_reference

from tests.checkpoints import EOS_ID, MASK_ID, random_prompt
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    rows_of_launches,
    running,
    start,
    step,
)

BLOCK = 8
NUM_CASES = 40
THRESHOLD = 0.9
ENDS = [EOS_ID]  # tokens that end an answer of this checkpoint


class Wanted(NamedTuple):
    """The result of the rule, block by block: tokens, and forwards of each block with a change.

    Blocks behind the first `num_blocks` are pinned.
    """

    token_ids: list[int]
    forwards: dict[int, int]
    num_blocks: int

    @property
    def num_forwards(self) -> int:
        """Forwards with scans: the first forward of a block is a scan; the last scan changes
        nothing.
        """
        ends_last = bool(self.forwards) and max(self.forwards) == self.num_blocks - 1
        return sum(self.forwards.values()) + (not ends_last)


@pytest.fixture(scope="module")
def served(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Any]]:
    folder = tmp_path_factory.mktemp("llada21")
    for file in checkpoint("llada2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llada21_moe"}))
    with running(folder) as engine:
        assert engine.runner.model.family.name == "llada2.1"
        yield engine, load_reference(folder)


def repair(text: list[int], prompt: list[int], editing_threshold: float, **more: Any) -> Request:
    fields = {"block_length": BLOCK, "threshold": THRESHOLD, "max_post_steps": 3, **more}
    fields |= {"canvas_token_ids": text, "editing_threshold": editing_threshold}
    return Request(prompt, fields)


def by_blocks(model: Any, one: Request) -> Wanted:
    """Apply the rule to one block after the other."""
    prompt, text = list(one.prompt), list(one.extra["canvas_token_ids"])
    limit, end = one.extra["editing_threshold"], len(prompt) + len(text)
    length = -(-end // BLOCK) * BLOCK
    tokens = torch.tensor([*prompt, *text, *[EOS_ID] * (length - end)])
    allowed = torch.zeros(length, dtype=torch.bool)
    allowed[len(prompt) : end] = True
    for begin, stop in one.extra.get("pinned", ()):
        allowed[len(prompt) + begin : len(prompt) + stop] = False
    allowed |= tokens == MASK_ID
    last = int(allowed.nonzero().max()) if allowed.any() else 0
    forwards = dict[int, int]()
    first = len(prompt) // BLOCK
    for block in range(first, length // BLOCK):
        inside = slice(block * BLOCK, (block + 1) * BLOCK)
        num_steps = num_post = 0
        has_changed = False
        while True:
            num_steps += 1
            before = tokens[inside].clone()
            logits = model.logits(tokens[None, : inside.stop], BLOCK)[0, inside].float()
            logits[:, ENDS] = -torch.inf  # the text keeps its length
            scores, found = logits.softmax(-1).max(-1)
            is_mask = (before == MASK_ID) & allowed[inside]
            change = allowed[inside] & ~is_mask & (found != before) & (scores > limit)
            filled = is_mask & (scores > THRESHOLD)
            if is_mask.any() and not filled.any():
                filled[torch.where(is_mask, scores, -1).argmax()] = True
            tokens[inside] = torch.where(change | filled, found, before)
            has_changed |= bool((tokens[inside] != before).any())
            if (tokens[inside] == MASK_ID).any():
                continue
            if torch.equal(tokens[inside], before):
                break
            num_post += 1
            if num_post > 3:
                break
        if has_changed:
            forwards[block - first] = num_steps
    return Wanted(tokens[len(prompt) : end].tolist(), forwards, last // BLOCK + 1 - first)


def drawn(rng: random.Random, model: Any) -> tuple[Request, Wanted]:
    """Return a random text, which the model would change in places, and the expected result."""
    prompt = random_prompt(rng.randint(1, 20), seed=rng.randrange(99))
    text = random_prompt(rng.randint(1, 60), seed=rng.randrange(999))
    for at in range(len(text)):
        if rng.random() < 0.03:
            text[at] = MASK_ID
    more: dict[str, Any] = {}
    if rng.random() < 0.5:
        starts = [rng.randrange(len(text)) for _ in range(rng.randint(1, 3))]
        more["pinned"] = [[at, rng.randint(at + 1, len(text))] for at in starts]
    for name in ("complete_blocks", "return_trajectory"):
        if rng.random() < 0.2:
            more[name] = True
    limit = rng.choice([0.6, 0.8, 0.9])
    # Most blocks of a repaired text stay.
    stable = by_blocks(model, repair(text, prompt, limit, **more)).token_ids
    for _ in range(rng.choice([0, 0, 1, 2])):
        stable[rng.randrange(len(stable))] = rng.choice([7, 8, MASK_ID])
    one = repair(stable, prompt, limit, **more)
    return one, by_blocks(model, one)


def assert_repaired(answer: Response, wanted: Wanted) -> None:
    assert answer.token_ids == wanted.token_ids
    assert answer.num_forwards == wanted.num_forwards
    assert answer.report["scoring"] == "direct"
    trajectory = answer.report.get("trajectory", {"token_ids": wanted.token_ids})
    assert trajectory["token_ids"][: len(wanted.token_ids)] == wanted.token_ids


def test_random_texts_alone_and_together(served: tuple[Engine, Any]) -> None:
    engine, model = served
    rng = random.Random(5)
    cases = [drawn(rng, model) for _ in range(NUM_CASES)]
    assert 5 < sum(not wanted.forwards for _, wanted in cases) < NUM_CASES - 5
    for answer, (_, wanted) in zip(engine.ask(*(one for one, _ in cases)), cases, strict=True):
        assert_repaired(answer, wanted)
    for one, wanted in cases[::4]:
        assert_repaired(engine.ask(one)[0], wanted)
    assert engine.is_idle()


def test_a_text_without_a_change_takes_one_step(
    served: tuple[Engine, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = served
    rows = rows_of_launches(engine, monkeypatch)
    text = random_prompt(100, seed=3)
    (answer,) = engine.ask(repair(text, random_prompt(12), 1.0))
    assert (answer.token_ids, answer.num_forwards) == (text, 1)
    assert rows == [112]


@pytest.mark.parametrize("cache", ["exact", "none"])
@pytest.mark.parametrize("limit", [BLOCK, 3 * BLOCK, 10_000])
def test_scans_are_cut_to_the_rows_of_a_step(
    served: tuple[Engine, Any], limit: int, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = served
    rng = random.Random(8)
    cases = [drawn(rng, model) for _ in range(8)]
    if cache == "exact":
        monkeypatch.setattr(engine.scheduler, "row_budget", limit, raising=False)
        monkeypatch.setattr(engine.runner.planner, "row_budget", limit)
    asks = [Request(one.prompt, {**one.extra, "cache": cache}) for one, _ in cases]
    for answer, (_, wanted) in zip(engine.ask(*asks), cases, strict=True):
        assert answer.token_ids == wanted.token_ids
    assert engine.is_idle()


def test_a_stream_of_settled_blocks(served: tuple[Engine, Any]) -> None:
    """Blocks before the first change are settled by the scan."""
    engine, model = served
    rng = random.Random(5)
    one, wanted = next(
        (one, wanted)
        for one, wanted in (drawn(rng, model) for _ in range(99))
        if wanted.forwards and min(wanted.forwards) > 1
    )
    start(engine, "one", one)
    step(engine)
    canvas = next(iter(engine.runner.canvases.values()))
    begun = BLOCK * (min(wanted.forwards) + len(one.prompt) // BLOCK)
    assert canvas.window.num_kept == begun
    while engine.llm.llm_engine.has_unfinished_requests():
        step(engine)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"noise": 0.5}, "wanted it left out: joint_threshold replaces tokens"),
        ({"max_edits": 1}, "wanted it left out: joint_threshold replaces tokens"),
    ],
)
def test_limits_of_scores_are_refused(
    served: tuple[Engine, Any], fields: dict[str, Any], message: str
) -> None:
    engine, _ = served
    extra = {"canvas_token_ids": [5, 6], **fields}
    with pytest.raises(ValueError, match=message):
        engine.ask(Request([5], extra))
    assert engine.is_idle()
