# SPDX-License-Identifier: Apache-2.0
"""The loops of the other sources: hand-worked selections, counts, and what must be equal."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.checkpoints import (
    EOS_ID,
    EOT_ID,
    FAMILY_CASES,
    MASK_ID,
    make_checkpoint,
    random_prompt,
)
from tests.reference import (
    d3llm,
    decode,
    dinfer,
    dream,
    fast_dllm,
    local_leap,
    sglang,
)
from tests.reference.decode import Decoded, SpecialIds
from tests.reference.families import load_reference
from tests.reference.table_model import TableModel, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from tests.reference.layers import KeyValues
    from tests.reference.llama_model import LlamaReference

    Models = Callable[..., LlamaReference]

IDS = SpecialIds(mask=MASK_ID, eos=EOS_ID, eot=EOT_ID)
SMALL = SpecialIds(mask=15, eos=14, eot=13)
BLOCKS: dict[str, Any] = {"gen_length": 32, "block_length": 16, "ids": IDS}
SHORT_BLOCKS = {**BLOCKS, "block_length": 8}
OPENING = {"block_add_threshold": 0.1, "decoded_token_threshold": 0.95, **SHORT_BLOCKS}
DELAYED = {"cache": "delayed", "cache_delay_iter": 2, "threshold": 1.0, **OPENING}
# The seeds of `mha`, `dream` and `moe`, and how long the prompt is.
SEEDS = {"llada": 14, "dream": FAMILY_CASES["dream"].seed, "moe": FAMILY_CASES["moe"].seed}
PROMPTS = {
    "llada": random_prompt(20, 20),
    "dream": random_prompt(12, 12),
    "moe": random_prompt(20, 20),
}
ONE_LAYER: dict[str, dict[str, Any]] = {
    "llada": {"n_layers": 1},
    "dream": {"num_hidden_layers": 1},
    "moe": {"num_hidden_layers": 1, "moe_layer_freq": [1]},
}
FAMILIES = list(SEEDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folders: dict[tuple[str, bool], Path] = {}

    def get(
        family: str, dtype: torch.dtype = torch.float32, one_layer: bool = False
    ) -> LlamaReference:
        key = (family, one_layer)
        if key not in folders:
            overrides = ONE_LAYER[family] if one_layer else {}
            folders[key] = make_checkpoint(
                tmp_path_factory.mktemp(family), family=family, seed=SEEDS[family], **overrides
            )
        return load_reference(folders[key], dtype)

    return get


class Recorder:
    """A model that remembers the positions of its forwards and the rows they reused."""

    def __init__(self, model: LlamaReference) -> None:
        self.model = model
        self.logit_shift = model.logit_shift
        self.windows: list[tuple[int, int]] = []
        self.reused: list[int] = []

    def logits(self, ids: Tensor) -> Tensor:
        self.windows.append((0, ids.shape[1]))
        self.reused.append(0)
        return self.model.logits(ids)

    def forward_with_kv(
        self, ids: Tensor, positions: Sequence[int], past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        self.windows.append((positions[0], positions[-1] + 1))
        rows = set(past.positions if past else ()) - set(positions)
        self.reused.append(len(rows))
        return self.model.forward_with_kv(ids, positions, past)


def peaked(*confidences: float, tokens: Sequence[int] | None = None) -> Tensor:
    """Logits [N, 16] (float64) whose softmax gives each row's token the wanted probability."""
    rows = torch.zeros(len(confidences), 16, dtype=torch.float64)
    for i, confidence in enumerate(confidences):
        token = tokens[i] if tokens else i % 10
        rows[i, token] = math.log(confidence * 15 / (1 - confidence))
    return rows


def entropy_of(confidence: float) -> float:
    rest = (1 - confidence) / 15
    return -confidence * math.log(confidence) - 15 * rest * math.log(rest)


def accepted(decoded: Decoded, prompt_len: int = 1) -> list[set[int]]:
    """Canvas positions that each forward accepted."""
    return [{p - prompt_len for p in step.accepted} for step in decoded.trace]


def same(first: Decoded, second: Decoded) -> bool:
    """The same commits in the same forwards."""
    return (
        first.ids == second.ids
        and first.num_forwards == second.num_forwards
        and [step.committed for step in first.trace] == [step.committed for step in second.trace]
    )


# ---- keys and values between forwards ----------------------------------------------------------


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("family", FAMILIES)
def test_caches_are_exact_for_one_layer(family: str, cache: str, models: Models) -> None:
    """Keys and values of the only layer depend on their own token, and none of those changes.

    A window that misses a row, or Dream's shift across its border, would show.
    """
    model, prompt = models(family, torch.float64, one_layer=True), PROMPTS[family]
    for threshold in (0.6, 0.9):
        plain = decode.threshold(model, prompt, threshold=threshold, **SHORT_BLOCKS)
        reused = fast_dllm.cached(model, prompt, cache=cache, threshold=threshold, **SHORT_BLOCKS)
        assert same(plain, reused)
        assert plain.num_forwards > 4


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_are_approximations(family: str, models: Models) -> None:
    model, prompt = models(family), PROMPTS[family]
    plain = decode.threshold(model, prompt, threshold=0.6, **BLOCKS)
    for cache in ("prefix", "dual"):
        reused = fast_dllm.cached(model, prompt, cache=cache, threshold=0.6, **BLOCKS)
        assert reused.ids != plain.ids


def test_one_block_has_no_suffix(models: Models) -> None:
    options: dict[str, Any] = {"gen_length": 16, "block_length": 16, "ids": IDS, "threshold": 0.6}
    for family in FAMILIES:
        prefix, dual = (
            fast_dllm.cached(models(family), PROMPTS[family], cache=cache, **options)
            for cache in ("prefix", "dual")
        )
        assert same(prefix, dual)


def test_a_finished_block_makes_no_further_forward(models: Models) -> None:
    """With a threshold of 0, or one step per block, all forwards are whole ones."""
    model, prompt = Recorder(models("llada")), PROMPTS["llada"]
    for options in ({"threshold": 0.0}, {"steps": 4}):
        model.windows.clear()
        runs = [
            fast_dllm.cached(model, prompt, cache=cache, **options, **SHORT_BLOCKS)
            for cache in ("prefix", "dual")
        ]
        plain = decode.threshold(model, prompt, **{"threshold": None, **options, **SHORT_BLOCKS})
        assert same(runs[0], plain)
        assert same(runs[1], plain)
        assert model.windows == [(0, 52)] * 12


# ---- LocalLeap ---------------------------------------------------------------------------------


def test_local_leap_without_a_lower_threshold_is_a_threshold(
    models: Models,
) -> None:
    model, prompt = models("llada"), PROMPTS["llada"]
    plain = decode.threshold(model, prompt, threshold=0.6, confidence_dtype="float64", **BLOCKS)
    for options in (
        {"relaxed_threshold": None},
        {"relaxed_threshold": 0.6},
        {"relaxed_threshold": 0.1, "radius": 0},
    ):
        leap = local_leap.local_leap(model, prompt, threshold=0.6, **options, **BLOCKS)
        assert same(leap, plain)


# ---- entropy -----------------------------------------------------------------------------------


def test_entropy_equal_to_the_threshold_is_not_below() -> None:
    candidates = decode.Candidates([5, 6, 7], [1] * 3, [1] * 3, [-0.5, -0.2, -0.5], [9.0] * 3, 1.0)
    assert sglang.by_entropy_below(0.5, None)(candidates).accepted == [1]
    assert sglang.by_entropy_below(0.5, (7, 9))(candidates).accepted == [1, 2]
    assert sglang.by_entropy_below(0.5, (6, 9))(candidates).accepted == [1]
    assert sglang.by_entropy_below(0.1, (5, 6))(candidates).accepted == [0]
    assert d3llm.by_entropy(0.5, (7, 9))(candidates) == (
        [1, 0, 2],
        d3llm.by_entropy(0.5)(candidates).margins,
        (),
    )
    forced = d3llm.by_entropy(0.1, (7, 9))(candidates)
    assert (forced.accepted, list(forced.plain)) == ([1, 2], [2])


def test_entropies_are_those_of_the_noise_free_distribution() -> None:
    table = peaked(0.9, 0.5, 0.7, 0.3)
    decoded = sglang.entropy_threshold(
        TableModel(table), [1], gen_length=4, block_length=4, ids=SMALL, threshold=1.5
    )
    wanted = [-entropy_of(confidence) for confidence in (0.9, 0.5, 0.7, 0.3)]
    assert decoded.trace[0].candidates.scores == pytest.approx(wanted, abs=1e-6)
    assert [entropy_of(c) < 1.5 for c in (0.9, 0.5, 0.7, 0.3)] == [True, False, True, False]
    assert accepted(decoded) == [{0, 2}, {1}, {3}]


def test_entropy_with_random_remasking_ranks_by_the_number() -> None:
    numbers = [0.8, 0.1, 0.4, 0.25]
    decoded = d3llm.generate(
        TableModel(peaked(0.9, 0.5, 0.7, 0.3)),
        [1],
        gen_length=4,
        block_length=4,
        ids=SMALL,
        threshold=0.25,
        remasking="random",
        uniform_scores=lambda step, positions: torch.tensor(numbers)[list(positions)],
    )
    assert accepted(decoded) == [{1, 3}, {2}, {0}]


# ---- several blocks at once --------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_block_thresholds_of_one_open_blocks_in_turn(family: str, models: Models) -> None:
    model, prompt = models(family), PROMPTS[family]
    closed = {"block_add_threshold": 1.0, "decoded_token_threshold": 1.0, **SHORT_BLOCKS}
    runs: list[tuple[Any, dict[str, Any]]] = [
        (d3llm.multi_block, {"variant": "dream"}),
        (sglang.full_attn_multi_block, {}),
    ]
    for threshold in (0.5, 2.0):
        one = d3llm.generate(model, prompt, threshold=threshold, **SHORT_BLOCKS)
        assert same(d3llm.multi_block(model, prompt, threshold=threshold, **closed), one)
        # The forced position of the first full block is the lowest of all.
        strict = sglang.entropy_threshold(model, prompt, threshold=threshold, **SHORT_BLOCKS)
        for run, options in runs:
            other = run(model, prompt, threshold=threshold, **options, **closed)
            assert [set(s.accepted) for s in other.trace] == [set(s.accepted) for s in strict.trace]
            assert other.ids == strict.ids


# ---- the delayed cache -------------------------------------------------------------------------


@pytest.mark.parametrize("variant", d3llm.VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_delayed_cache_is_exact_for_one_layer(family: str, variant: str, models: Models) -> None:
    model = Recorder(models(family, torch.float64, one_layer=True))
    options: dict[str, Any] = {"threshold": 1.0, "variant": variant, **OPENING}
    starts: set[int] = set()
    for delay, refresh, progress in ((1, 10000, 0.1), (2, 3, 0.1), (1, 10000, 1.0), (2, 4, 1.0)):
        options["block_add_threshold"] = progress
        plain = d3llm.multi_block(model, PROMPTS[family], **options)
        model.windows.clear()
        reused = d3llm.multi_block(
            model,
            PROMPTS[family],
            cache="delayed",
            cache_delay_iter=delay,
            refresh_interval=refresh,
            **options,
        )
        assert same(plain, reused)
        assert len(model.windows) == plain.num_forwards
        starts |= {start for start, _ in model.windows}
        assert all(end == len(PROMPTS[family]) + 32 for _, end in model.windows)
    shift = 1 if family == "dream" else 0
    assert len(starts) > 3
    assert starts <= {0} | {len(PROMPTS[family]) + 8 * b - shift for b in range(4)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_delay_that_never_ends_reuses_nothing(family: str, models: Models) -> None:
    options: dict[str, Any] = {"threshold": 1.0, **OPENING}
    plain = d3llm.multi_block(models(family), PROMPTS[family], **options)
    assert same(
        d3llm.multi_block(models(family), PROMPTS[family], cache="delayed", **options), plain
    )
    reused = d3llm.multi_block(models(family), PROMPTS[family], **DELAYED)
    assert [step.committed for step in reused.trace] != [step.committed for step in plain.trace]


# ---- dInfer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "scores", "wanted"),
    [
        ([1, 2, 3], [0.95, 0.9, 0.89], [0, 1]),
        ([1, 2, 3], [0.5, 0.5 - 5e-6, 0.4], [0, 1]),  # within 1e-5 of the best
        ([15, 2, 3], [0.99, 0.5, 0.4], [1]),  # the mask is no candidate
        ([15, 15], [0.99, 0.5], []),
        ([1, 2], [0.900001, 0.9], [0, 1]),
    ],
)
def test_dinfer_threshold(tokens: list[int], scores: list[float], wanted: list[int]) -> None:
    assert dinfer.select_threshold_eligible(tokens, scores, 0.9, 15) == wanted


def test_dinfer_threshold_raises_where_only_masks_are_predicted() -> None:
    table = peaked(0.9, 0.9, tokens=[15, 15])
    with pytest.raises(RuntimeError, match="predicts the mask"):
        dinfer.threshold(TableModel(table), [1], gen_length=2, block_length=2, ids=SMALL)


def test_credit_without_weight_is_the_threshold_decoder(
    models: Models,
) -> None:
    model, prompt = models("moe"), PROMPTS["moe"]
    plain = dinfer.threshold(model, prompt, threshold=0.6, **BLOCKS)
    assert same(dinfer.credit(model, prompt, threshold=0.6, alpha=0.0, **BLOCKS), plain)
    assert plain.ids == decode.threshold(model, prompt, threshold=0.6, **BLOCKS).ids


# ---- a model that predicts the mask ------------------------------------------------------------

LOOPS = [
    fast_dllm.factor,
    local_leap.local_leap,
    sglang.entropy_threshold,
    sglang.full_attn_multi_block,
    dinfer.hierarchy,
    dinfer.threshold,
    dinfer.credit,
    d3llm.generate,
    d3llm.multi_block,
]


@pytest.mark.parametrize("run", LOOPS)
def test_predicted_masks_raise_unless_guarded(run: Callable[..., Decoded]) -> None:
    table = peaked(0.9, 0.8, 0.7, 0.6, tokens=[15] * 4)
    table[:, 4] = torch.tensor([0.1, 0.2, 0.3, 0.4])  # the best other token
    options: dict[str, Any] = {"gen_length": 4, "block_length": 2, "ids": SMALL}
    with pytest.raises(RuntimeError, match="predicts the mask"):
        run(TableModel(table), [1], **options)
    decoded = run(TableModel(table), [1], guard_mask_token=True, **options)
    assert decoded.ids == [4] * 4
    assert all(step.guarded for step in decoded.trace)
    assert decoded.num_forwards == 4


def test_cached_loops_raise_too(models: Models) -> None:
    model = models("llada")
    model.weights["model.transformer.ff_out.weight"][MASK_ID] *= 50
    for options in ({"threshold": 0.9}, {"steps": 4}):
        with pytest.raises(RuntimeError, match="predicts the mask"):
            fast_dllm.cached(model, PROMPTS["llada"], cache="dual", **options, **SHORT_BLOCKS)


# ---- Dream ---------------------------------------------------------------------------------------


class ShiftedTable:
    """Raw logits: row i of the canvas is given at the position before it."""

    logit_shift = 1

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def logits(self, ids: Tensor) -> Tensor:
        length, num_rows = ids.shape[1], len(self.rows)
        raw = torch.zeros(*ids.shape, self.rows.shape[1], dtype=self.rows.dtype)
        raw[:, length - num_rows - 1 : length - 1] = self.rows
        raw[:, -1] = 7.0 * torch.eye(self.rows.shape[1])[15]  # of the token behind the row
        return raw


def dream_of(rows: Tensor, prompt: Sequence[int] = (1,), **options: Any) -> Decoded:
    return dream.diffusion_generate(
        ShiftedTable(rows), prompt, gen_length=len(rows), ids=SMALL, **options
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 32, 100, 512])
def test_times_are_rounded_once(steps: int) -> None:
    """Each is the fp32 number nearest to start + i x step or, in the upper half, end - ..."""
    start, end = np.float32(1), np.float32(1e-3)
    step = Fraction(float((end - start) / np.float32(steps)))
    for i, value in enumerate(dream.times(steps, 1e-3).tolist()):
        exact = 1 + step * i
        if i >= (steps + 1) // 2:
            exact = Fraction(float(end)) - step * (steps - i)
        assert value == float(np.float32(float(exact)))


def test_every_step_makes_a_forward_unless_idle_ones_are_left_out() -> None:
    rows = rows_of(*[{i: 5.0 + i} for i in range(4)])
    whole = dream_of(rows, steps=16)
    assert whole.num_forwards == 16
    short = dream_of(rows, steps=16, skip_idle_steps=True)
    assert short.num_forwards == 3  # the last step commits two
    assert short.ids == whole.ids == [0, 1, 2, 3]
    assert accepted(short) == [step for step in accepted(whole) if step]


def test_dream_decides_masks_of_the_prompt_too() -> None:
    rows = rows_of({1: 3.0}, {2: 4.0}, {3: 5.0})
    decoded = dream.diffusion_generate(
        ShiftedTable(rows), [1, 15], gen_length=2, steps=1, ids=SMALL, alg="maskgit_plus"
    )
    assert accepted(decoded, prompt_len=2) == [{1, 0, -1}]
    assert decoded.ids == [2, 3]


def test_dream_leaves_predicted_masks_unless_guarded() -> None:
    rows = rows_of(*[{15: 5.0, 4: 1.0 + i} for i in range(3)])
    plain = dream_of(rows, steps=3, alg="maskgit_plus")
    assert (plain.ids, plain.num_forwards) == ([15] * 3, 3)
    guarded = dream_of(rows, steps=8, alg="maskgit_plus", guard_mask_token=True)
    assert guarded.num_forwards == 8
    assert guarded.ids.count(4) >= 1
    assert any(step.guarded for step in guarded.trace)
