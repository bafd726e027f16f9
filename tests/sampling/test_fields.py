# SPDX-License-Identifier: Apache-2.0
"""Every field of sampling gives the exact frequencies of draws, on every family."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from reference import shaping

from tests.sampling.support import EOS, EOT, MASK, MODEL, GivenLogits
from vllm.diffusion.decoding import make_rule
from vllm.diffusion.request import decision, fields
from vllm.diffusion.request.families import (
    DIFFULLAMA,
    DREAM,
    FAMILIES,
    FAST_DLLM,
    LLADA,
    LLADA2,
    LLADA_MOE,
    SDAR,
)
from vllm.diffusion.sampling import LogitEditor, RowGroup, sample

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.decoding import DecodingRule
    from vllm.diffusion.request.families import Family
    from vllm.diffusion.request.params import DiffusionParams

NUM_DRAWS = 4000
NUM_COLUMNS = MODEL.vocab_size
PROMPT = [3, 4, 4, 5, 30]
COMMITTED = {0: 5, 1: 6, 2: 6, 7: EOS}  # tokens on the canvas, by position
HOT: dict[str, Any] = {"temperature": 0.8, "seed": 11}
FIELDS: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "filters": {"min_p": 0.04, "top_k": 6, "top_p": 0.85},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {7: 2.0, 6: -1.0}},
    "allowed": {"allowed_token_ids": [3, 5, 6, 9, EOS]},
    "min_tokens": {"min_tokens": 8},
    "bad_words": {"bad_words": ["a", "bc"]},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {3: 1.0, 9: -2.0},
        "allowed_token_ids": list(range(3, 30)),
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.01,
    },
}
WORDS = {"a": (3,), "bc": (6, 9), " a": (1, 3), " bc": (1, 6, 9)}


def row_of_logits() -> Tensor:
    logits = 1.5 * torch.randn(NUM_COLUMNS, generator=torch.Generator().manual_seed(8))
    logits[[3, 5, 6, EOS]] = torch.tensor([2.5, 1.5, 2.0, 2.2])
    logits[MASK] = -9.0
    return logits


def decided(family: Family, **parameters: Any) -> DiffusionParams:
    ids = dataclasses.replace(MODEL.ids, edit=(33, 34) if family.edit_tokens else ())
    served = dataclasses.replace(MODEL, family=family, ids=ids, encode=WORDS.__getitem__)
    # The positions of the canvas are the draws. Only the first ones are in separate blocks.
    parameters = {"gen_length": 16, "top_p": 1.0, **parameters}
    return decision.decide(fields.canonical(parameters), served, PROMPT)


def canvas(params: DiffusionParams) -> np.ndarray[Any, Any]:
    tokens = np.full(len(PROMPT) + 16, params.mask_id, dtype=np.int64)
    tokens[: len(PROMPT)] = PROMPT
    return tokens


def group(params: DiffusionParams, rule: DecodingRule, position: int, step: int) -> RowGroup:
    """Return draws for one canvas position, with the noise of rows at different positions."""
    tokens = canvas(params)
    editor = None if params.edits is None else LogitEditor(params, tokens, len(PROMPT))
    for place, token in COMMITTED.items():
        tokens[len(PROMPT) + place] = token
    at = np.full(NUM_DRAWS, len(PROMPT) + position)
    return RowGroup(
        params=params,
        scoring=rule.scoring,
        step=step,
        forbid_mask=False,
        rows=slice(0, NUM_DRAWS),
        unconditional_rows=None,
        positions=torch.arange(NUM_DRAWS),
        edits=None if editor is None else editor.of(tokens, at),
    )


def order_of(params: DiffusionParams) -> str:
    return "top_p top_k" if params.algorithm == "dream" else "top_k top_p"


def distribution(parameters: dict[str, Any], params: DiffusionParams, position: int) -> list[float]:
    row = canvas(params).tolist()
    for place, token in COMMITTED.items():
        row[len(PROMPT) + place] = token
    words = [WORDS[word] for word in parameters.get("bad_words", ())]
    logits = row_of_logits().repeat(16, 1)
    own = shaping.edited(logits, row, len(PROMPT), parameters, MASK, [EOS, EOT], words)[position]
    at_temperature = torch.softmax(own.double() / params.temperature, 0).tolist()
    return shaping.filtered(at_temperature, parameters, order_of(params))


def chi_square(counts: list[int], wanted: list[float]) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom; rare tokens share one cell."""
    cells = [(c, p * sum(counts)) for c, p in zip(counts, wanted, strict=True)]
    often = [(c, w) for c, w in cells if w >= 5]
    rest = [(c, w) for c, w in cells if w < 5]
    if sum(w for _, w in rest) > 0:
        often.append((sum(c for c, _ in rest), sum(w for _, w in rest)))
    return sum((c - w) ** 2 / w for c, w in often), len(often) - 1


def limit(degrees: int) -> float:
    """Return the value that chi-square exceeds once in 100,000 (Wilson and Hilferty)."""
    spread = 2 / (9 * max(degrees, 1))
    return max(degrees, 1) * (1 - spread + 4.26 * math.sqrt(spread)) ** 3


# The rule of an open canvas filters logits itself; its tests are in tests/engine/test_gemma.py.
MASKED = [family for family in FAMILIES if not family.is_open]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("family", MASKED, ids=lambda family: family.name)
def test_frequencies_are_those_of_the_distribution(family: Family, name: str) -> None:
    parameters = FIELDS[name]
    params = decided(family, **HOT, **parameters)
    rule = make_rule(params, len(PROMPT))
    position = 3  # after two tokens 6, one of which begins a bad word
    own = group(params, rule, position, step=2)
    tokens = sample(GivenLogits(), row_of_logits().repeat(NUM_DRAWS, 1), [own]).tokens
    counts = np.bincount(tokens.long().numpy(), minlength=NUM_COLUMNS).tolist()
    wanted = distribution(parameters, params, position)
    assert not any(c for c, p in zip(counts, wanted, strict=True) if p == 0)
    actual, degrees = chi_square(counts, wanted)
    assert actual < limit(degrees), (actual, degrees)
    plain = distribution({}, params, position)
    assert chi_square(counts, plain)[0] > 2 * limit(NUM_COLUMNS)  # the field has an effect


LLADAS = (LLADA, LLADA_MOE)
RULES: list[tuple[Family, dict[str, Any], str]] = [
    *((family, {"algorithm": "semi_ar"}, "plain") for family in LLADAS),
    *((family, {"algorithm": "threshold"}, "plain") for family in LLADAS),
    (LLADA, {"algorithm": "entropy_threshold"}, "plain entropy"),
    (LLADA, {"algorithm": "multi_block"}, "plain entropy"),
    (DREAM, {"algorithm": "threshold"}, "plain"),
    (DIFFULLAMA, {"algorithm": "semi_ar"}, "plain"),
    (DIFFULLAMA, {"alg": "maskgit_plus"}, "left"),
    (DREAM, {"alg": "maskgit_plus"}, "left"),
    (DREAM, {"alg": "entropy"}, "left entropy"),
    (LLADA, {"algorithm": "dream", "alg": "maskgit_plus"}, "left"),
    (LLADA2, {}, "left"),
    (FAST_DLLM, {}, "left"),
    (SDAR, {}, "at temperature"),
    (SDAR, {"algorithm": "entropy_bounded"}, "at temperature entropy"),
]


@pytest.mark.parametrize(
    ("family", "rule", "scored"),
    RULES,
    ids=[f"{family.name} {' '.join(map(str, rule.values()))}" for family, rule, _ in RULES],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scores_are_of_the_distribution_that_the_reference_has(
    family: Family, rule: dict[str, Any], scored: str, dtype: str
) -> None:
    """Scores are as in docs/requests.md: of the model, at the temperature, or after filters."""
    parameters = {"top_k": 5, "presence_penalty": 0.5}
    params = decided(family, **HOT, **parameters, **rule, confidence_dtype=dtype)
    own = group(params, make_rule(params, len(PROMPT)), 3, step=0)
    actual = sample(GivenLogits(), row_of_logits().repeat(NUM_DRAWS, 1), [own])
    edits = {"presence_penalty": 0.5}
    cold = dataclasses.replace(params, temperature=1.0)
    wanted = {
        "plain": distribution(edits, cold, 3),
        "at": distribution(edits, params, 3),
        "left": distribution(parameters, params, 3),
    }[scored.split()[0]]
    if "entropy" in scored:
        entropy = sum(p * math.log(p) for p in wanted if p)
        assert actual.scores.tolist() == pytest.approx([entropy] * NUM_DRAWS, rel=1e-4)
    else:
        drawn = [wanted[token] for token in actual.tokens.long().tolist()]
        assert actual.scores.tolist() == pytest.approx(drawn, rel=1e-4)


@pytest.mark.parametrize("family", [LLADA, SDAR], ids=lambda family: family.name)
def test_filters_do_nothing_without_temperature(family: Family) -> None:
    tables = []
    for parameters in ({}, {"top_k": 2, "top_p": 0.3, "min_p": 0.5}):
        params = decided(family, **parameters)
        own = group(params, make_rule(params, len(PROMPT)), 3, step=0)
        logits = row_of_logits().repeat(NUM_DRAWS, 1)
        tables.append(sample(GivenLogits(), logits, [own]).table)
    assert torch.equal(*tables)


def test_min_p_does_nothing_without_temperature_on_dream() -> None:
    """Its reference scores after top_p and top_k at any temperature, but has no min_p."""
    scores = []
    for parameters in ({}, {"min_p": 0.9}, {"top_k": 1}):
        params = decided(DREAM, alg="maskgit_plus", **parameters)
        own = group(params, make_rule(params, len(PROMPT)), 3, step=0)
        logits = row_of_logits().repeat(NUM_DRAWS, 1)
        scores.append(float(sample(GivenLogits(), logits, [own]).scores[0]))
    assert scores[0] == scores[1] < scores[2] == 1
