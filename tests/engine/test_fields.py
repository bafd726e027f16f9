# SPDX-License-Identifier: Apache-2.0
"""Fields that edit logits or restrict sampling act with every algorithm, cache and neighbour."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import DELETE_ID, EOS_ID, EOT_ID, SPLIT_ID, random_prompt
from tests.engine.cases import CUT, DELAYED, DREAM, FULL, MULTI
from tests.engine.harness import BLOCKS, NOISY, Request, running
from vllm.diffusion.request.algorithms import ALGORITHMS, algorithms_for
from vllm.diffusion.request.families import SDAR

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engine.harness import Engine

LEAST = 5
ALLOWED = [*range(20, 40), 160, 161]
OWN: dict[str, dict[str, Any]] = {"dream": {"steps": 8}, "semi_ar": {"steps": 16}}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
WARM: dict[str, Any] = {"temperature": 0.9, "seed": 5}


def ways(algorithms: Any, length: int = 8) -> list[dict[str, Any]]:
    """Return every algorithm with every cache, and with guidance where it is supported."""
    results = []
    for name, record in algorithms.items():
        for cache in record.caches:
            own = {"algorithm": name, "cache": cache, "gen_length": 16, **OWN.get(name, {})}
            if record.blocks != "none":
                own["block_length"] = length
            if record.chooses_length:
                own["max_tokens"] = 16
            if record.is_block_causal:
                own.pop("steps", None)
            results.append(own)
            if cache == "none" and not record.is_block_causal:
                results.append({**own, "cfg_scale": 0.5})
    return results


@pytest.fixture(scope="module")
def sdar(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with running(checkpoint("sdar")) as engine:
        yield engine


def check_ways(engine: Engine, actual: list[dict[str, Any]]) -> None:
    """Check that answers have only allowed tokens and are not shorter than the minimum."""
    prompt, ends = random_prompt(9), {str(EOS_ID): 100, str(EOT_ID): 100}
    asks = []
    for own in actual:
        edited = {**own, **PENALTIES}
        asks.append(Request(prompt, {**edited, "allowed_token_ids": ALLOWED, "ignore_eos": True}))
        asks.append(Request(prompt, {**edited, "min_tokens": LEAST, "logit_bias": ends}))
    answers = engine.ask(*asks)
    for own, allowed, least in zip(actual, answers[::2], answers[1::2], strict=True):
        assert len(allowed.token_ids) == 16 and set(allowed.token_ids) <= set(ALLOWED), own
        assert len(least.token_ids) == LEAST + 1, own
        assert least.token_ids[-1] in (EOS_ID, EOT_ID) and least.finish_reason == "stop", own
        assert allowed.report["ignored"] == least.report["ignored"] == []


def test_an_end_does_not_move_before_the_least_length(checkpoint: Callable[[str], Path]) -> None:
    """`min_tokens` holds even if tokens before the end are deleted."""
    often = {"logit_bias": {str(DELETE_ID): 8, str(EOS_ID): 8}, "min_tokens": LEAST}
    parameters = {"gen_length": 24, "block_length": 8, "threshold": 0.3, "editing_threshold": 0.9}
    asks = [Request(random_prompt(9, number), {**parameters, **often}) for number in (3, 20, 28)]
    with running(checkpoint("llada22")) as engine:
        answers = engine.ask(*asks)
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert all(len(answer.token_ids) > LEAST for answer in answers)


def test_only_levenshtein_commits_tokens_that_edit(checkpoint: Callable[[str], Path]) -> None:
    """Other algorithms choose another token even if one that edits is far more likely."""
    algorithms = ("joint_threshold", "low_confidence_dynamic", "semi_ar", "entropy_bounded")
    often = {"gen_length": 16, "logit_bias": {str(DELETE_ID): 50, str(SPLIT_ID): 50}}
    asks = [
        Request(random_prompt(9), {**often, "algorithm": name, "temperature": t, "seed": 1})
        for name in algorithms
        for t in (0.0, 1.0)
    ]
    with running(checkpoint("llada22")) as engine:
        for ask, answer in zip(asks, engine.ask(*asks), strict=True):
            assert not {DELETE_ID, SPLIT_ID} & {*answer.token_ids}, ask.extra


def test_every_algorithm_and_cache(engine: Engine) -> None:
    check_ways(engine, ways(ALGORITHMS))


def test_every_algorithm_and_cache_of_a_block_causal_family(sdar: Engine) -> None:
    check_ways(sdar, ways(algorithms_for(SDAR), length=4))


SHAPED: list[dict[str, Any]] = [
    {**NOISY, **WARM, "top_p": 0.8},
    {**NOISY, **WARM, "top_k": 7, "min_p": 0.01, "cfg_scale": 0.5},
    {**NOISY, **WARM, **PENALTIES, "top_p": 0.9, "cache": "dual"},
    {**BLOCKS, **PENALTIES, "logit_bias": {"160": 3.0}, "cache": "prefix"},
    {**BLOCKS, "threshold": 0.3, "presence_penalty": 1.0, "cache": "frozen"},
    {**MULTI, **WARM, "top_k": 12, "frequency_penalty": 0.5},
    {**DELAYED, "threshold": 1.5, "cache_delay_iter": 2, "presence_penalty": 0.7},
    {**FULL, "repetition_penalty": 1.5, "min_tokens": 20},
    {**DREAM, "steps": 8, **WARM, "top_p": 0.9, "top_k": 20, "min_p": 0.02, **PENALTIES},
    {**DREAM, "steps": 8, "alg": "topk_margin", "allowed_token_ids": ALLOWED},
]


def test_neighbours_and_chunks_change_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = [
        Request(random_prompt(9 + i, i), {**own, "ignore_eos": True})
        for i, own in enumerate(SHAPED)
    ]
    alone = [engine.ask(ask)[0].token_ids for ask in asks]
    assert [answer.token_ids for answer in engine.ask(*asks)] == alone
    assert [answer.token_ids for answer in engine.ask(*asks[::-1])] == alone[::-1]
    planner = engine.runner.planner
    monkeypatch.setattr(planner, "plan", lambda *_, **__: CUT)
    assert [answer.token_ids for answer in engine.ask(*asks)] == alone


def test_several_answers(engine: Engine) -> None:
    """Several answers share a prompt, and each of them samples with its own seed."""
    extra = {**NOISY, **WARM, "top_p": 0.9, "presence_penalty": 0.5, "ignore_eos": True}
    apart = [engine.ask(Request(random_prompt(9), {**extra, "seed": 5 + i}))[0] for i in range(3)]
    outputs = engine.llm.generate(
        [{"prompt_token_ids": random_prompt(9)}],
        [sampling(extra, n=3)],
        use_tqdm=False,
    )
    actual = [list(completion.token_ids) for completion in outputs[0].outputs]
    assert actual == [answer.token_ids for answer in apart]
    assert len({tuple(ids) for ids in actual}) == 3


def sampling(extra: dict[str, Any], **fields: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.9, extra_args=extra, **fields)


def test_bad_words_of_several_tokens(engine: Engine) -> None:
    """With one token per step, the bad word appears in neither order of commits."""
    tokenizer: Any = engine.llm.get_tokenizer()
    letters = tokenizer.encode("abcd", add_special_tokens=False)
    own = {**BLOCKS, **WARM, "steps": 32, "allowed_token_ids": letters, "ignore_eos": True}

    def answers(**fields: Any) -> list[list[int]]:
        """Return answers to requests with these fields of upstream's SamplingParams."""
        asks = [Request(random_prompt(9), {**own, "seed": seed}, fields) for seed in range(4)]
        return [answer.token_ids for answer in engine.ask(*asks)]

    pairs = Counter(pair for ids in answers() for pair in pairwise(ids))
    ((first, second), count), *_ = pairs.most_common()
    word = tokenizer.decode([first, second])
    assert tokenizer.encode(word, add_special_tokens=False) == [first, second] and count > 3
    without = answers(bad_words=[word])
    assert (first, second) not in {pair for ids in without for pair in pairwise(ids)}
    assert {first, second} <= {token for ids in without for token in ids} <= set(letters)


def test_gaps_of_a_prompt_and_a_suffix(engine: Engine) -> None:
    """Edited logits apply to infilled gaps. A gap has no end, so no token is forbidden there."""
    from tests.checkpoints import MASK_ID

    prompt = [*random_prompt(5), MASK_ID, MASK_ID, *random_prompt(4, 1)]
    extra = {**BLOCKS, "allow_infill": True, "allowed_token_ids": ALLOWED, "ignore_eos": True}
    (answer,) = engine.ask(Request(prompt, {**extra, "presence_penalty": 2.0}))
    assert set(answer.report["infilled"].values()) <= set(ALLOWED)
    assert set(answer.token_ids) <= set(ALLOWED)
    ends = {str(EOS_ID): 100}
    between = {"gen_length": 32, "steps": 32, "suffix_ids": random_prompt(7), "max_tokens": 12}
    (answer,) = engine.ask(
        Request(random_prompt(5), {**between, "min_tokens": 6, "logit_bias": ends})
    )
    assert len(answer.token_ids) == 7 and answer.token_ids[-1] == EOS_ID
    assert answer.report["num_end_tokens"] == 12 - 6  # without the suffix


def test_guided_output_weighs_edited_probabilities(engine: Engine) -> None:
    """Guided output takes a forbidden token only if no other token matches the format."""
    room = {"gen_length": 32, "block_length": 16, "steps": 16}
    vocabulary: dict[str, int] = engine.llm.get_tokenizer().get_vocab()

    def answer(pattern: str, letter: str) -> str:
        bias = {str(token): -100 for text, token in vocabulary.items() if letter in text}
        parameters = {**room, "logit_bias": bias, "structured_outputs": {"regex": pattern}}
        return engine.ask(Request(random_prompt(9), parameters))[0].text

    assert answer("[ab]{6}c", "a") == "bbbbbbc"
    assert answer("[ab]{6}c", "b") == "aaaaaac"
    assert answer("a{3}c", "c") == "aaac"
