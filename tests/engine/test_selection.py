# SPDX-License-Identifier: Apache-2.0
"""A request's own say in what is committed, whatever its rule, and beside other requests."""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.checkpoints import MASK_ID, random_prompt
from tests.engine.harness import BLOCKS, Even, as_request, carrying
from vllm.diffusion.decoding import Commit, Selector

if TYPE_CHECKING:
    from tests.engine.harness import Engine

LENGTH = 9  # of the prompts
SHORT: dict[str, Any] = {"gen_length": 16, "block_length": 8}
RULES: dict[str, dict[str, Any]] = {
    "semi_ar": {**SHORT, "steps": 4},
    "noise": {**SHORT, "steps": 4, "temperature": 1.0, "seed": 3},
    "guidance": {**SHORT, "steps": 4, "cfg_scale": 0.5},
    "prefix cache": {**SHORT, "threshold": 0.2, "cache": "prefix"},
    "dual cache": {**SHORT, "steps": 4, "cache": "dual"},
    "threshold": {**SHORT, "threshold": 0.2},
    "bounded threshold": {**SHORT, "threshold": 0.9, "steps": 4},
    "factor": {**SHORT, "algorithm": "factor"},
    "local_leap": {**SHORT, "algorithm": "local_leap"},
    "credit": {**SHORT, "algorithm": "credit", "threshold": 0.2},
    "hierarchy": {**SHORT, "algorithm": "hierarchy"},
    "entropies": {**SHORT, "algorithm": "entropy_threshold"},
    "several blocks": {**SHORT, "algorithm": "multi_block"},
    "delayed cache": {**SHORT, "algorithm": "multi_block", "cache": "delayed"},
    "dream": {"gen_length": 16, "algorithm": "dream", "steps": 4},
    "dream, origin": {"gen_length": 16, "algorithm": "dream", "alg": "origin", "steps": 4},
}


class Rising(Selector):
    """Token ids that never fall from one position to the next; of the rule's choice what fits."""

    def __init__(self, prompt_length: int) -> None:
        self.start = prompt_length

    def select(self, tokens: Any, candidates: Any, choose: Any) -> Commit:
        chosen = choose(candidates)
        found = {int(p): int(t) for p, t in enumerate(tokens) if p >= self.start and t != MASK_ID}
        kept: dict[int, int] = {}
        for position, token in zip(*(x.tolist() for x in chosen), strict=True):
            low, high = self.bounds(found, position)
            if token != MASK_ID and low <= token <= high:
                found[position] = kept[position] = token
        if not kept and chosen.positions.size:
            position = int(chosen.positions[0])
            kept[position] = self.bounds(found, position)[0]
        return Commit(np.array(list(kept), dtype=np.int64), np.array([*kept.values()]))

    @staticmethod
    def bounds(found: dict[int, int], position: int) -> tuple[int, int]:
        positions = sorted(found)
        place = bisect(positions, position)
        low = found[positions[place - 1]] if place else 0
        high = found[positions[place]] if place < len(positions) else MASK_ID - 1
        return low, high


class Sevens(Selector):
    """Another token and another order than the model's: the last position is the surest."""

    def select(self, tokens: Any, candidates: Any, choose: Any) -> Commit:
        sevens = np.full_like(candidates.tokens, 7)
        scores = candidates.positions / 1000
        return choose(candidates._replace(tokens=sevens, greedy=sevens, scores=scores))


class Foreign(Selector):
    """Writes into the prompt."""

    def select(self, tokens: Any, candidates: Any, choose: Any) -> Commit:
        choose(candidates)
        return Commit(np.array([0]), np.array([1]))


class Nothing(Selector):
    """Lets nothing through."""

    def select(self, tokens: Any, candidates: Any, choose: Any) -> Commit:
        return Commit(*(x[:0] for x in choose(candidates)))


class Twice(Selector):
    """Lets the rule count two steps."""

    def select(self, tokens: Any, candidates: Any, choose: Any) -> Commit:
        choose(candidates)
        return choose(candidates)


def ask(engine: Engine, selector: Selector | None, **asked: Any) -> Any:
    with carrying(engine, selector):
        (answer,) = engine.ask(as_request(random_prompt(LENGTH), **asked))
    assert engine.is_idle()
    return answer


@pytest.mark.parametrize("asked", RULES.values(), ids=RULES)
def test_a_selector_that_says_nothing_changes_nothing(
    engine: Engine, runs_ahead: bool, asked: dict[str, Any]
) -> None:
    with_seed = {"seed": 5, **asked}
    found, wanted = (ask(engine, selector, **with_seed) for selector in (Selector(), None))
    assert (found.token_ids, found.num_forwards) == (wanted.token_ids, wanted.num_forwards)


@pytest.mark.parametrize("asked", RULES.values(), ids=RULES)
def test_a_joint_choice_holds_under_every_rule(
    engine: Engine, runs_ahead: bool, asked: dict[str, Any]
) -> None:
    free = ask(engine, None, **asked).token_ids
    found = ask(engine, Rising(LENGTH), **asked)
    assert found.finish_reason == "length"
    assert len(found.token_ids) == 16 and MASK_ID not in found.token_ids
    assert found.token_ids == sorted(found.token_ids)
    assert free != sorted(free)


@pytest.mark.parametrize("asked", RULES.values(), ids=RULES)
def test_tokens_are_drawn_from_the_adjusted_logits(engine: Engine, asked: dict[str, Any]) -> None:
    found = ask(engine, Even(), **asked).token_ids
    assert len(found) == 16 and not any(token % 2 for token in found)


@pytest.mark.parametrize("asked", RULES.values(), ids=RULES)
def test_rules_choose_among_what_the_selector_proposes(
    engine: Engine, asked: dict[str, Any]
) -> None:
    found = ask(engine, Sevens(), **asked).token_ids
    assert found == [7] * 16


def test_the_selectors_scores_set_the_order(engine: Engine) -> None:
    watched: list[int] = []

    class Watching(Sevens):
        def select(self, tokens: Any, candidates: Any, choose: Any) -> Commit:
            commit = super().select(tokens, candidates, choose)
            watched.extend(commit.positions.tolist())
            return commit

    ask(engine, Watching(), gen_length=8, block_length=8, steps=8)
    assert watched == list(range(LENGTH + 7, LENGTH - 1, -1))


def test_neighbours_of_a_selector_answer_as_alone(engine: Engine) -> None:
    asks = [as_request(random_prompt(20, seed), **BLOCKS) for seed in range(3)]
    alone = [answer.token_ids for a in asks for answer in engine.ask(a)]
    with carrying(engine, None, Even(), None):
        together = [answer.token_ids for answer in engine.ask(*asks)]
    assert [together[0], together[2]] == [alone[0], alone[2]]
    assert not any(token % 2 for token in together[1])


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        (Foreign(), "committed positions [0]; wanted some of"),
        (Nothing(), "committed nothing where the rule chose 1 tokens; wanted at least one"),
        (Twice(), "asked the rule 2 times; wanted once"),
    ],
)
def test_a_broken_selector_ends_its_own_request(
    engine: Engine, selector: Selector, message: str
) -> None:
    asked = {**BLOCKS, "steps": 32}
    asks = [as_request(random_prompt(LENGTH, seed), **asked) for seed in (1, 2)]
    wanted = engine.ask(asks[1])[0].token_ids
    with carrying(engine, selector, None):
        broken, whole = engine.ask(*asks)
    assert broken.finish_reason == "error"
    assert message in broken.report["error"]
    assert whole.token_ids == wanted
    assert engine.is_idle()


def test_probabilities_of_what_a_selector_chose_are_left_open(engine: Engine) -> None:
    """The model's are known of tokens that it proposed; of others nothing is made up."""
    request = as_request(random_prompt(LENGTH), **{**BLOCKS, "stream_canvas": True})
    with carrying(engine, Sevens()):
        (answer,) = engine.ask(request)
    confidence = torch.frombuffer(
        bytearray(answer.report["canvas"]["confidence"]), dtype=torch.float32
    )
    assert set(answer.token_ids) == {7}
    assert bool(confidence.isnan().any())
