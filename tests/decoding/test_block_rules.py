# SPDX-License-Identifier: Apache-2.0
"""Rules of block-causal families follow the loops that they come from, token by token."""

import dataclasses
import random
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from reference import block_loops, causal_loops
from reference.block_loops import Draw, NoEnd
from reference.philox import uniform_matrix

from tests.decoding.toy import Decoding, Toy
from vllm.diffusion.core.random_streams import CATEGORICAL
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import (
    FAST_DLLM,
    LLADA2,
    LLADA21,
    LLADA22,
    NEMOTRON,
    SDAR,
    Family,
)
from vllm.diffusion.request.params import DiffusionParams
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

V, MASK, STOPS = 24, 23, frozenset({22, 21})
EDITS = (19, 18)  # the tokens that delete and insert
THINKING = (17, 16)  # the tokens that begin and end thinking
NEVER = {MASK: -1e9}  # the bias of a token that must not be proposed


def served(family: Family) -> ServedModel:
    edit = EDITS if family.edit_tokens else ()
    think = THINKING if family.think_tokens else ()
    return ServedModel(
        family=family,
        ids=SpecialIds(mask=MASK, eos=22, eot=21, stop=STOPS, edit=edit, think=think),
        max_model_len=4096,
        vocab_size=V,
    )


def decided(family: Family, prompt: list[int], **parameters: Any) -> DiffusionParams:
    return decision.decide(fields.canonical(parameters), served(family), prompt)


class Case:
    """A request and a model, by number."""

    def __init__(self, number: int) -> None:
        self.chance = random.Random(number)
        pick = self.chance.choice
        self.seed = number
        self.block_length = pick([1, 2, 3, 4, 5, 8, 16])
        self.gen_length = self.chance.randint(1, 40)
        length = pick([self.block_length, 2 * self.block_length, self.chance.randint(1, 20)])
        self.prompt = [self.chance.randrange(20) for _ in range(length)]
        self.threshold = pick([0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
        self.stops = pick([STOPS, frozenset()])
        self.stop_bias = pick([0.0, 1.5])

    def toy(self, **more: Any) -> Toy:
        chance = random.Random(self.seed + 1)
        bias = NEVER | dict.fromkeys(STOPS, self.stop_bias) | more.pop("bias", {})
        decimals = chance.choice([None, None, 0])  # rounding makes confidences equal
        return Toy(self.seed, V, self.block_length, chance.choice([2.0, 6.0]), bias, decimals)

    def lengths(self) -> dict[str, int]:
        return {"gen_length": self.gen_length, "block_length": self.block_length}

    def check(
        self,
        family: Family,
        loop: Callable[..., block_loops.Decoded],
        parameters: dict[str, Any],
        **bias: dict[int, float],
    ) -> Decoding:
        """Decode with the rule and with the loop, and compare them after every forward pass."""
        toy = self.toy(**bias)
        actual = Decoding(toy, self.params_of(family, parameters), self.prompt)
        expected = loop(toy, self.prompt, mask_id=MASK, stop_ids=self.stops, **self.lengths())
        assert actual.run() == expected.answer
        assert actual.history == expected.history[: len(actual.history)]
        self._check_windows(actual)
        return actual

    def params_of(self, family: Family, parameters: dict[str, Any]) -> DiffusionParams:
        ignores = {"ignore_eos": not self.stops}
        return decided(family, self.prompt, **self.lengths(), **ignores, **parameters)

    def _check_windows(self, actual: Decoding) -> None:
        """Check that each forward pass is for a block, with candidates in it or right after it."""
        length, shift = self.block_length, actual.params.logit_shift
        for target in actual.targets:
            start, end = target.rows
            assert start % length == 0
            assert end == start + length
            assert start <= int(target.eligible[0])
            assert int(target.eligible[-1]) < end + shift


CASES = range(24)


@pytest.mark.parametrize("number", CASES)
def test_llada2(number: int) -> None:
    case = Case(number)
    steps = case.chance.randint(1, 2 * case.block_length)
    parameters = {"steps_per_block": steps, "threshold": case.threshold}
    loop = partial(block_loops.llada2, steps=steps, threshold=case.threshold)
    case.check(LLADA2, loop, {"algorithm": "low_confidence_dynamic", **parameters})


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize(
    ("algorithm", "remasking"),
    [
        ("low_confidence_dynamic", "dynamic"),
        ("semi_ar", "static"),
        ("sequential", "sequential"),
        ("entropy_bounded", "entropy_bounded"),
    ],
)
def test_sdar(algorithm: str, remasking: str, number: int) -> None:
    case = Case(number)
    parameters: dict[str, Any] = {"algorithm": algorithm}
    options: dict[str, Any] = {"remasking": remasking}
    if algorithm != "entropy_bounded":
        options["steps"] = parameters["steps_per_block"] = case.chance.randint(
            1, case.block_length + 2
        )
    if algorithm in ("low_confidence_dynamic", "entropy_bounded"):
        options["threshold"] = parameters["threshold"] = case.threshold
    case.check(SDAR, partial(block_loops.sdar, **options), parameters)


@pytest.mark.parametrize("number", CASES)
def test_llada21(number: int) -> None:
    case = Case(number)
    options = {
        "threshold": case.threshold,
        "editing_threshold": case.chance.choice([0.0, 0.2, 0.5, 0.9]),
        "max_post_steps": case.chance.choice([0, 1, 2, 16]),
        "num_to_transfer": case.chance.choice([1, 2, 5]),
        "penalty_lambda": case.chance.choice([0.0, 0.0, 2.0]),
    }
    loop = partial(block_loops.llada21, **options)
    actual = case.check(LLADA21, loop, {"algorithm": "JointThreshold", **options})
    assert all(settled % case.block_length == 0 for settled in actual.num_settled[:-1])


@pytest.mark.parametrize("number", range(60))
def test_llada22(number: int) -> None:
    """Tokens of the prompt that would delete or insert are treated as plain tokens."""
    case = Case(number)
    options = {
        "threshold": case.threshold,
        "editing_threshold": case.chance.choice([0.0, 0.2, 0.5]),
        "max_post_steps": case.chance.choice([0, 1, 2, 16]),
    }
    steps = case.chance.choice([1, 2, 5, 32])
    loop = partial(block_loops.llada22, edit_ids=EDITS, steps=steps, **options)
    wanted = {"algorithm": "levenshtein", "steps_per_block": steps, **options}
    edits = dict.fromkeys(EDITS, case.chance.choice([0.0, 2.0, 6.0]))
    actual = case.check(LLADA22, loop, wanted, bias=edits)
    assert all(settled % case.block_length == 0 for settled in actual.num_settled[:-1])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_llada22_never_writes_what_it_must_not(temperature: float) -> None:
    """The last round proposes no editing token, and no round a forbidden end, even by editing."""
    case = Case(3)
    toy = case.toy(bias=dict.fromkeys((*EDITS, 22), 3.0))
    parameters = {"algorithm": "levenshtein", "temperature": temperature, "max_post_steps": 1}
    parameters |= {"logits_eos_inf": True, "seed": 1}
    actual = Decoding(toy, case.params_of(LLADA22, parameters), case.prompt)
    assert not {MASK, *EDITS, 22} & set(actual.run())


@pytest.mark.parametrize("number", CASES)
def test_fast_dllm_v2(number: int) -> None:
    case = Case(number)
    divisors = [d for d in range(1, case.block_length + 1) if case.block_length % d == 0]
    options = {
        "threshold": case.threshold,
        "sub_block_length": case.chance.choice(divisors),
    }
    loop = partial(block_loops.fast_dllm_v2, **options)
    case.check(FAST_DLLM, loop, {"algorithm": "HierarchyBlock", **options})


# ---- a causal context --------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(16))
@pytest.mark.parametrize(
    ("algorithm", "loop"),
    [
        ("low_confidence_dynamic", causal_loops.diffusion),
        ("semi_ar", causal_loops.diffusion),
        ("self_speculation", causal_loops.self_speculation),
        ("autoregressive", causal_loops.autoregressive),
    ],
)
def test_nemotron(algorithm: str, loop: Callable[..., block_loops.Decoded], number: int) -> None:
    """Self-speculation gives the tokens of autoregressive decoding, also if thinking is ended."""
    case = Case(number)
    options: dict[str, Any] = {}
    if algorithm in ("low_confidence_dynamic", "self_speculation"):
        options["threshold"] = case.threshold
    parameters = {"algorithm": algorithm, **options}
    if algorithm == "semi_ar":
        parameters["steps_per_block"] = options["steps"] = case.chance.randint(
            1, case.block_length + 2
        )
    budget = case.chance.choice([None, 0, 3, case.block_length, 11])
    thinking = None if budget is None else causal_loops.Thinking(*THINKING, budget)
    if thinking is not None:
        parameters["thinking_token_budget"] = budget
    params = case.params_of(NEMOTRON, parameters)
    toy, wanted = case.toy(), {"mask_id": MASK, "stop_ids": case.stops, **case.lengths()}
    actual = Decoding(toy, params, case.prompt)
    if algorithm != "self_speculation" or thinking is None:
        message = options if algorithm == "self_speculation" else {**options, "thinking": thinking}
        expected = loop(toy, case.prompt, **wanted, **message)
        assert actual.run() == expected.answer
        is_whole = algorithm in ("self_speculation", "autoregressive")
        is_whole |= len(expected.answer) % case.block_length == 0
        # If the answer ends with the end of thinking, one more forward pass writes it.
        num_forwards = sum(target.eligible.size > 0 for target in actual.targets)
        assert num_forwards >= len(actual.targets) - 1
        assert num_forwards <= expected.forwards
        assert num_forwards == expected.forwards or not is_whole
    else:
        one_by_one = causal_loops.autoregressive(toy, case.prompt, **wanted, thinking=thinking)
        assert actual.run() == one_by_one.answer


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [([1, 2], True), ([1, 17, 2, 16, 3], False), ([17, 2, 16, 1, 17], True)],
)
def test_thinking_is_open_where_the_prompt_leaves_it_so(prompt: list[int], is_open: bool) -> None:
    """A block that is filled by the end of thinking costs no forward pass."""
    parameters = {
        "gen_length": 8,
        "block_length": 2,
        "thinking_token_budget": 3,
        "ignore_eos": True,
    }
    actual = Decoding(Toy(4, V, 2, bias=NEVER), decided(NEMOTRON, prompt, **parameters), prompt)
    assert (actual.run()[3] == THINKING[1]) == is_open
    assert all(target.eligible.size for target in actual.targets)


# ---- temperature, top_k, top_p -----------------------------------------------------------------


@cache
def uniform(seed: int, forward: int, position: int) -> torch.Tensor:
    return uniform_matrix(seed, CATEGORICAL, forward, [position], V)[0]


def uniform_of(seed: int) -> block_loops.Uniform:
    return partial(uniform, seed)


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 3},
    {"top_p": 0.5},
    {"top_k": 4, "top_p": 0.7},
]


@pytest.mark.parametrize(
    ("number", "temperature", "filters"),
    [(number, *sampling) for number, sampling in enumerate(product((0.0, 0.7, 1.3), FILTERS))],
)
def test_draws(number: int, temperature: float, filters: dict[str, Any]) -> None:
    """At temperature 0 filters have no effect, and confidences follow the family."""
    case = Case(number)
    sampling = {"temperature": temperature, "seed": number, **filters}
    draw = Draw(temperature, **filters, uniform=uniform_of(number))
    whole = dataclasses.replace(draw, scores_all=True)
    thresholds = {"threshold": case.threshold}
    case.check(
        SDAR,
        partial(block_loops.sdar, remasking="dynamic", steps=case.block_length, draw=whole),
        {"algorithm": "low_confidence_dynamic", "threshold": 0.85, **sampling},
    )
    case.check(
        LLADA2,
        partial(block_loops.llada2, draw=draw, **thresholds),
        {"steps_per_block": 32, **thresholds, **sampling},
    )
    case.check(
        FAST_DLLM,
        partial(block_loops.fast_dllm_v2, draw=draw, sub_block_length=1, **thresholds),
        {"sub_block_length": 1, **thresholds, **sampling},
    )
    case.check(
        SDAR,
        partial(block_loops.sdar, remasking="entropy_bounded", threshold=0.4, draw=whole),
        {"algorithm": "entropy_bounded", "threshold": 0.4, **sampling},
    )
    case.check(
        LLADA21,
        partial(block_loops.llada21, draw=draw, max_post_steps=3, **thresholds),
        {"algorithm": "joint_threshold", "max_post_steps": 3, **thresholds, **sampling},
    )


# ---- the mask token ----------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "mask_bias"), [*enumerate([0.0, 0.0, 1.0, 1.0, 50.0, 50.0])])
@pytest.mark.parametrize(
    ("family", "algorithm", "loop"),
    [
        (LLADA2, "low_confidence_dynamic", block_loops.llada2),
        (SDAR, "semi_ar", partial(block_loops.sdar, remasking="static")),
        (SDAR, "sequential", partial(block_loops.sdar, remasking="sequential")),
        (SDAR, "entropy_bounded", partial(block_loops.sdar, remasking="entropy_bounded")),
        (LLADA21, "joint_threshold", partial(block_loops.llada21, most_forwards=300)),
        (FAST_DLLM, "hierarchy_block", block_loops.fast_dllm_v2),
    ],
)
def test_every_answer_ends_though_the_mask_is_proposed(
    family: Family,
    algorithm: str,
    loop: Callable[..., block_loops.Decoded],
    mask_bias: float,
    number: int,
) -> None:
    """If the reference ends as well, both give the same answer."""
    case = Case(number)
    toy = case.toy(bias={MASK: mask_bias})
    parameters: dict[str, Any] = {"algorithm": algorithm}
    options: dict[str, Any] = {}
    if algorithm in ("low_confidence_dynamic", "semi_ar", "sequential"):
        options["steps"] = parameters["steps_per_block"] = case.block_length
    if algorithm == "joint_threshold":
        options["editing_threshold"] = parameters["editing_threshold"] = 0.2
    if algorithm == "hierarchy_block":
        options["sub_block_length"] = parameters["sub_block_length"] = 1
    if algorithm == "entropy_bounded":
        options["threshold"] = parameters["threshold"] = 0.35
    params = case.params_of(family, parameters)
    actual = Decoding(toy, params, case.prompt)
    num_blocks = 2 + case.gen_length // case.block_length
    answer = actual.run(limit=2 * num_blocks * (case.block_length + 1) * 17)
    assert MASK not in answer
    if mask_bias == 50.0:
        return
    try:
        expected = loop(
            toy, case.prompt, mask_id=MASK, stop_ids=case.stops, **case.lengths(), **options
        )
    except NoEnd:
        return
    assert answer == expected.answer


# ---- settled tokens ----------------------------------------------------------------------------


def test_masks_of_the_prompt_are_filled_first() -> None:
    prompt = [1, 2, MASK, 4, 5, 6, MASK]
    toy = Toy(5, V, 4, bias=NEVER | dict.fromkeys(STOPS, -1e9))
    for algorithm in ("low_confidence_dynamic", "joint_threshold"):
        params = decided(
            LLADA2,
            prompt,
            algorithm=algorithm,
            gen_length=6,
            block_length=4,
            allow_infill=True,
        )
        actual = Decoding(toy, params, prompt)
        assert actual.num_settled[0] == 0
        actual.run()
        assert actual.targets[0].rows == (0, 4)
        assert MASK not in actual.tokens[:7].tolist()
        assert actual.tokens[[0, 1, 3, 4, 5]].tolist() == [1, 2, 4, 5, 6]


def test_unresolved_steps_are_an_error() -> None:
    from vllm.diffusion.decoding import make_rule

    params = dataclasses.replace(
        decided(SDAR, [1], gen_length=4, algorithm="semi_ar"), steps_per_block=None
    )
    with pytest.raises(ValueError, match="steps_per_block"):
        make_rule(params, 1)
