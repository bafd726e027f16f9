# SPDX-License-Identifier: Apache-2.0
"""The rule of canvases without a mask token, with steps worked by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.random_streams import NOISE
from vllm.diffusion.decoding.base import Candidates, Commit
from vllm.diffusion.decoding.entropy_bound import EntropyBound
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import DIFFUSION_GEMMA
from vllm.diffusion.request.served_model import NO_MASK, ServedModel, SpecialIds

PROMPT, LENGTH, VOCAB = 3, 4, 50
IDS = SpecialIds(NO_MASK, 1, None, frozenset({1}))
MODEL = ServedModel(DIFFUSION_GEMMA, IDS, 4096, VOCAB, block_length=LENGTH)


def rule_of(**parameters: Any) -> EntropyBound:
    given = {"gen_length": 2 * LENGTH, "steps_per_block": 6, "seed": 5, **parameters}
    return EntropyBound(decision.decide(fields.canonical(given), MODEL, [7] * PROMPT), PROMPT)


def tokens_of(rule: EntropyBound) -> np.ndarray[Any, Any]:
    tokens = np.full(PROMPT + 3 * LENGTH, NO_MASK, dtype=np.int64)
    tokens[:PROMPT] = 7
    return tokens


def noise(step: int, start: int = 0) -> list[int]:
    positions = torch.arange(start, start + LENGTH)
    uniform = ops.philox_uniform(5, NOISE, step, positions, range(1))[:, 0]
    return (uniform * VOCAB).floor().long().tolist()


def decide(
    rule: EntropyBound, best: list[int], entropies: list[float], drawn: list[int] | None = None
) -> Commit:
    """Return the commit of a step with these most likely and drawn tokens."""
    positions = np.arange(rule.start, rule.start + LENGTH)
    drawn_tokens = np.array(best if drawn is None else drawn)
    return rule.decide(Candidates(positions, drawn_tokens, -np.array(entropies), np.array(best)))


@pytest.mark.parametrize(
    ("bound", "entropies", "accepted"),
    [
        (0.1, [0.3, 0.2, 5.0, 0.4], [1]),  # the lowest entropy is always accepted
        (0.2, [0.3, 0.2, 5.0, 0.4], [0, 1]),  # a sum equal to the bound is within it
        (0.5, [0.25, 0.25, 0.25, 9.0], [0, 1, 2]),  # entropies before a position, not its own
        (0.75, [0.25, 0.25, 0.25, 9.0], [0, 1, 2, 3]),
        (0.1, [0.2, 0.2, 0.2, 0.2], [0]),  # the first of equal entropies
        (0.1, [0.0, 0.0, 0.0, 0.0], [0, 1, 2, 3]),
    ],
)
def test_accepted_positions(bound: float, entropies: list[float], accepted: list[int]) -> None:
    rule = rule_of(entropy_bound=bound)
    commit = decide(rule, [1, 2, 3, 4], entropies, [11, 12, 13, 14])
    wanted = noise(1)
    for position in accepted:
        wanted[position] = 11 + position
    assert commit.tokens.tolist() == wanted
    assert commit.positions.tolist() == [3, 4, 5, 6]
    assert rule.accepted.nonzero()[0].tolist() == accepted
    assert rule.num_settled(tokens_of(rule)) == PROMPT


def has_ended(rule: EntropyBound) -> bool:
    return rule.start > PROMPT


SURE, UNSURE = [0.001] * LENGTH, [0.01] * LENGTH


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_canvas_ends_when_its_tokens_have_been_stable(count: int) -> None:
    rule = rule_of(stability_threshold=count, confidence_threshold=0.005)
    for _ in range(count):
        decide(rule, [1, 2, 3, 4], SURE)
        assert not has_ended(rule)
    commit = decide(rule, [1, 2, 3, 4], SURE, [9, 9, 9, 9])
    assert has_ended(rule)
    assert commit.tokens.tolist() == [1, 2, 3, 4]  # not the drawn tokens
    assert rule.num_settled(tokens_of(rule)) == PROMPT + LENGTH


def test_every_earlier_step_counts() -> None:
    rule = rule_of(stability_threshold=2)
    for best in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5]):
        decide(rule, best, UNSURE)
    decide(rule, [1, 2, 3, 4], SURE)
    assert not has_ended(rule)


def test_the_mean_entropy_must_be_below_the_threshold() -> None:
    rule = rule_of(stability_threshold=0, confidence_threshold=0.25)
    decide(rule, [1, 2, 3, 4], [0.25] * LENGTH)
    assert not has_ended(rule)
    decide(rule, [1, 2, 3, 4], [0.5, 0.25, 0.125, 0.0625])
    assert has_ended(rule)


def test_zero_never_ends_early() -> None:
    rule = rule_of(stability_threshold=0, confidence_threshold=0.0, steps_per_block=3)
    for _ in range(2):
        decide(rule, [1, 2, 3, 4], [0.0] * LENGTH)
        assert not has_ended(rule)
    decide(rule, [1, 2, 3, 4], [0.0] * LENGTH)
    assert has_ended(rule)


def test_nothing_is_kept_from_canvas_to_canvas() -> None:
    """Stability, noise and temperature begin again; the end of the answer ends the rule."""
    rule, tokens = rule_of(stability_threshold=1), np.full(PROMPT + 3 * LENGTH, NO_MASK)
    for canvas in range(2):
        start = PROMPT + canvas * LENGTH
        target = rule.prepare(tokens)
        assert target is not None and target.fill is not None
        assert (target.rows, target.fill_end) == ((start, start + LENGTH), start + LENGTH)
        assert target.fill[0] == start
        assert np.asarray(target.fill[1]).tolist() == noise(0, canvas * LENGTH)
        assert rule.num_unconfirmed == LENGTH
        tokens[start : start + LENGTH] = target.fill[1]
        following = rule.prepare(tokens)
        assert following is not None and following.fill is None
        assert temperature_of(rule) == pytest.approx(0.8)
        commit = decide(rule, [1, 2, 3, 4], [3.0, 1.0, *SURE[2:]])
        assert commit.tokens.tolist()[0] == noise(1, canvas * LENGTH)[0]
        assert rule.start == start
        commit = decide(rule, [1, 2, 3, 4], SURE)
        tokens[commit.positions] = commit.tokens
        assert rule.start == start + LENGTH
    assert rule.prepare(tokens) is None
    assert rule.num_unconfirmed == 0
    assert rule.first_step == 4


def temperature_of(rule: EntropyBound) -> float:
    return 1 / float(rule.adjust_logits(torch.ones(1, VOCAB), torch.tensor([0]))[0, 0])


def test_temperatures() -> None:
    """The first step has t_max; the last one does not reach t_min."""
    rule, noted = rule_of(t_min=0.5, t_max=1.5, steps_per_block=4), []
    rule.note_logits = lambda logits, positions: noted.append((logits, positions))
    temperatures = []
    for step in range(4):
        temperatures.append(temperature_of(rule))
        decide(rule, [step, 2, 3, 4], SURE)
    assert temperatures == pytest.approx([1.5, 1.25, 1.0, 0.75])
    assert [float(1 / logits[0, 0]) for logits, _ in noted] == pytest.approx(temperatures)


def test_a_given_canvas_is_the_first_one() -> None:
    rule, given = rule_of(canvas_token_ids=[9, 8, 7, 6]), [9, 8, 7, 6]
    target = rule.prepare(tokens_of(rule))
    assert target is not None and target.fill is not None
    assert np.asarray(target.fill[1]).tolist() == given


def test_the_answer_ends_within_its_last_canvas() -> None:
    rule = rule_of(gen_length=LENGTH + 1, steps_per_block=1)
    tokens = tokens_of(rule)
    for unconfirmed in (LENGTH, 1):
        assert rule.num_unconfirmed == unconfirmed
        target = rule.prepare(tokens)
        assert target is not None and target.eligible.size == LENGTH
        commit = decide(rule, [1, 2, 3, 4], SURE)
        tokens[commit.positions] = commit.tokens
    assert rule.prepare(tokens) is None


def test_edits_do_not_count_the_current_canvas() -> None:
    rule = rule_of(steps_per_block=1)
    tokens = tokens_of(rule)
    tokens[PROMPT : PROMPT + 2 * LENGTH] = 5
    assert rule.decided(tokens)[PROMPT:].tolist() == [NO_MASK] * 3 * LENGTH
    decide(rule, [1, 2, 3, 4], SURE)
    assert rule.decided(tokens)[PROMPT:].tolist() == [5] * LENGTH + [NO_MASK] * 2 * LENGTH


@pytest.mark.parametrize("count", [1, 2])
def test_the_end_is_drafted_from_the_latest_tokens(count: int) -> None:
    """The draft has the state that the rule reaches if the canvas ends with the next step."""
    rule = rule_of(stability_threshold=count, confidence_threshold=0.005)
    for _ in range(count):
        assert not rule.is_near_end
        decide(rule, [1, 2, 3, 4], UNSURE)
    assert rule.is_near_end
    guessed, filled = rule.end_now(tokens_of(rule))
    assert filled[PROMPT : PROMPT + LENGTH].tolist() == [1, 2, 3, 4]
    assert not has_ended(rule)
    decide(rule, [1, 2, 3, 4], SURE)
    assert (guessed.start, guessed.step) == (rule.start, rule.step) == (PROMPT + LENGTH, 0)
    assert guessed.first_step == rule.first_step == count + 1
    (target, same) = (each.prepare(filled) for each in (guessed, rule))
    assert target is not None and target.fill is not None
    assert same is not None and same.fill is not None
    assert target.rows == same.rows
    assert target.fill[1].tolist() == same.fill[1].tolist() == noise(0, start=LENGTH)


def test_no_end_is_guessed_without_a_reason() -> None:
    rule = rule_of(confidence_threshold=0.005)
    decide(rule, [1, 2, 3, 4], [1.0] * LENGTH)
    assert not rule.is_near_end  # the entropies are far from the threshold
    unstable = rule_of(confidence_threshold=0.005, stability_threshold=2)
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 5]):
        decide(unstable, tokens, UNSURE)
    assert not unstable.is_near_end
    unknown = rule_of(confidence_threshold=0.005, stability_threshold=0)
    decide(unknown, [1, 2, 3, 4], UNSURE)
    assert not unknown.is_near_end
    last = rule_of(confidence_threshold=0.0, steps_per_block=2)
    decide(last, [1, 2, 3, 4], [1.0] * LENGTH)
    assert last.is_near_end  # a canvas ends with its last step
    decide(last, [1, 2, 3, 4], [1.0] * LENGTH)
    decide(last, [1, 2, 3, 4], SURE)
    assert not last.is_near_end  # no canvas follows
