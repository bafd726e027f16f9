# SPDX-License-Identifier: Apache-2.0
"""The references themselves: hand-worked examples and an independent forward pass."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.checkpoints import (
    BOS_ID,
    EOS_ID,
    EOT_ID,
    MASK_ID,
    make_checkpoint,
    random_prompt,
)
from tests.reference.decode import (
    SpecialIds,
    near_ties,
    semi_ar,
    threshold,
    truncate,
)
from tests.reference.layers import rms_norm
from tests.reference.llada_model import LLaDAReference
from tests.reference.table_model import TableModel, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

IDS = SpecialIds(mask=MASK_ID, eos=EOS_ID, eot=EOT_ID)
PROMPTS = [random_prompt(length, seed=length) for length in (1, 7, 20)]
BLOCKS: dict[str, Any] = {"gen_length": 32, "block_length": 8, "ids": IDS}


class ContextModel:
    """Logits that depend on everything: a random table read by a hash of the row and position."""

    def __init__(self, num_columns: int = 16, seed: int = 0) -> None:
        self.table = 3 * torch.randn(
            997, num_columns, generator=torch.Generator().manual_seed(seed)
        )

    def logits(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        hashed = (ids * (31 * positions + 7)).sum(dim=1, keepdim=True) * 17 + 101 * positions
        return self.table[hashed % len(self.table)]


SMALL = SpecialIds(mask=15, eos=14, eot=13)


def small_model(seed: int = 0) -> ContextModel:
    """A ContextModel that never predicts SMALL.mask."""
    model = ContextModel(seed=seed)
    model.table[:, SMALL.mask] = -9.0
    return model


# ---- the model ---------------------------------------------------------------------------------


def test_rows_of_a_batch_do_not_see_each_other(checkpoint: Callable[[str], Path]) -> None:
    model = LLaDAReference.from_checkpoint(checkpoint("mha"), torch.float64)
    ids = torch.tensor([random_prompt(9, seed) for seed in (0, 1)])
    both = model.logits(ids)
    torch.testing.assert_close(both[1:], model.logits(ids[1:]), rtol=0, atol=1e-10)


def test_attention_looks_both_ways(checkpoint: Callable[[str], Path]) -> None:
    model = LLaDAReference.from_checkpoint(checkpoint("mha"))
    ids = torch.tensor([random_prompt(9)])
    changed = ids.clone()
    changed[0, -1] += 1
    assert (model.logits(ids)[0, 0] - model.logits(changed)[0, 0]).abs().max() > 0.01


def test_bfloat16_gains_are_applied_after_the_cast() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator).bfloat16()
    gain = torch.randn(64, generator=generator).bfloat16()
    statistics = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    cast_then_multiply = (x.float() * statistics).bfloat16() * gain
    multiply_then_cast = (x.float() * statistics * gain.float()).bfloat16()
    assert torch.equal(rms_norm(x, gain, 1e-5), cast_then_multiply)
    assert not torch.equal(cast_then_multiply, multiply_then_cast)


def test_huggingface_names_are_read_too(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    ids = torch.tensor([random_prompt(5)])
    before = LLaDAReference.from_checkpoint(folder).logits(ids)
    config = json.loads((folder / "config.json").read_text())
    config["hidden_size"] = config.pop("d_model")
    config["num_key_value_heads"] = config.pop("n_kv_heads")
    config["intermediate_size"] = config.pop("mlp_hidden_size")
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(LLaDAReference.from_checkpoint(folder).logits(ids), before)


def test_unfitting_configs_and_weights_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, include_qkv_bias=True)
    config = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"include_qkv_bias": False}, "q_proj.bias"),
        ({"block_type": "sequential"}, "block_type"),
        ({"alibi": True}, "alibi"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=message):
            LLaDAReference.from_checkpoint(folder)


# ---- the checkpoints ---------------------------------------------------------------------------


def test_tokenizer_loads_without_remote_code(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_checkpoint(tmp_path), trust_remote_code=False)
    text = "What is the capital of France?\n(2 + 3)"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text)  # merges are used
    assert max(ids) < 245
    assert tokenizer.convert_tokens_to_ids("<|eot_id|>") == EOT_ID
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (
        BOS_ID,
        EOS_ID,
        MASK_ID,
    )
    assert tokenizer.decode([*ids, 253, EOS_ID, EOT_ID], skip_special_tokens=True) == text

    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "  Hi \n"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    rendered_ids = tokenizer(rendered, add_special_tokens=False).input_ids
    assert rendered_ids[:2] == [BOS_ID, 247]
    assert rendered_ids.count(EOT_ID) == 1


def test_bfloat16_model_rotates_in_the_precision_of_the_config(tmp_path: Path) -> None:
    """The released precision: near the float64 logits, and rope_full_precision matters."""
    ids = torch.tensor([random_prompt(12)])
    logits = {}
    for full in (True, False):
        folder = make_checkpoint(tmp_path / str(full), rope_full_precision=full)
        narrow = LLaDAReference.from_checkpoint(folder, torch.bfloat16).logits(ids)
        exact = LLaDAReference.from_checkpoint(folder, torch.float64).logits(ids)
        assert narrow.dtype == torch.bfloat16
        assert (narrow.double() - exact).abs().mean() < 0.05 * exact.abs().mean()
        logits[full] = narrow
    assert not torch.equal(logits[True], logits[False])


def test_a_case_predicts_the_mask(checkpoint: Callable[[str], Path]) -> None:
    """Without the guard masks stay or the loop is stuck; with it every token is decided."""
    model = LLaDAReference.from_checkpoint(checkpoint("predicts_mask"))
    with pytest.raises(RuntimeError, match="masks remain"):
        threshold(model, PROMPTS[-1], threshold=0.9, **BLOCKS)
    guarded = threshold(model, PROMPTS[-1], threshold=0.9, guard_mask_token=True, **BLOCKS)
    assert any(step.guarded for step in guarded.trace)
    assert MASK_ID not in guarded.ids
    plain = semi_ar(model, PROMPTS[-1], steps=32, **BLOCKS)
    one_each = semi_ar(model, PROMPTS[-1], steps=32, guard_mask_token=True, **BLOCKS)
    assert MASK_ID in plain.ids
    assert MASK_ID not in one_each.ids


# ---- the loops ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_length", "steps"), [(16, 16), (16, 5), (4, 8), (8, 16), (2, 8)])
def test_semi_ar_equals_quota_mode_of_the_other_loop(block_length: int, steps: int) -> None:
    for seed in range(3):
        model = small_model(seed)
        lengths: dict[str, Any] = {"gen_length": 16, "block_length": block_length, "steps": steps}
        one = semi_ar(model, [1, 2, 3], ids=SMALL, **lengths)
        other = threshold(model, [1, 2, 3], threshold=None, ids=SMALL, **lengths)
        assert one.ids == other.ids
        assert SMALL.mask not in one.ids
        assert one.num_forwards == other.num_forwards == steps


def test_idle_steps_change_only_the_number_of_forwards() -> None:
    lengths: dict[str, Any] = {"gen_length": 8, "block_length": 4, "steps": 20}
    idle = semi_ar(small_model(), [1], ids=SMALL, **lengths)
    skipped = semi_ar(small_model(), [1], ids=SMALL, skip_idle_steps=True, **lengths)
    quota_mode = threshold(small_model(), [1], ids=SMALL, threshold=None, **lengths)
    assert (idle.num_forwards, skipped.num_forwards, quota_mode.num_forwards) == (20, 8, 8)
    assert idle.ids == skipped.ids == quota_mode.ids


def test_threshold_mode_extremes() -> None:
    model = small_model()
    lengths: dict[str, Any] = {"gen_length": 8, "block_length": 4}
    everything = threshold(model, [1, 2], threshold=0.0, ids=SMALL, **lengths)
    single = threshold(model, [1, 2], threshold=1.1, ids=SMALL, **lengths)
    one_per_step = semi_ar(model, [1, 2], steps=8, ids=SMALL, **lengths)
    assert everything.num_forwards == 2
    assert single.num_forwards == 8
    assert single.ids == one_per_step.ids


def test_masks_in_the_prompt_are_filled_first_and_take_quota() -> None:
    """The prompt's mask is committed with the first block's quota, so one mask is left over."""
    rows = rows_of({5: 8.0}, {1: 4.0}, {2: 3.0}, {3: 2.0}, {4: 1.0})
    decoded = semi_ar(
        TableModel(rows), [7, SMALL.mask], gen_length=4, block_length=2, steps=4, ids=SMALL
    )
    assert [step.committed for step in decoded.trace] == [{1: 5}, {2: 1}, {3: 2}, {4: 3}]
    assert decoded.ids == [1, 2, 3, SMALL.mask]


# ---- options -----------------------------------------------------------------------------------


def test_logits_eos_inf_forbids_eos() -> None:
    rows = rows_of({SMALL.eos: 9.0, 3: 2.0}, {4: 1.0})
    for loop in (semi_ar, threshold):
        plain = loop(TableModel(rows), [7], gen_length=2, block_length=2, steps=2, ids=SMALL)
        without = loop(
            TableModel(rows),
            [7],
            gen_length=2,
            block_length=2,
            steps=2,
            logits_eos_inf=True,
            ids=SMALL,
        )
        assert plain.ids == [SMALL.eos, 4]
        assert without.ids == [3, 4]
        # EOS takes no part in the softmax either.
        assert without.trace[0].last_accepted == pytest.approx(
            math.exp(2) / (math.exp(2) + 14), rel=1e-6
        )


def test_confidence_eos_eot_inf_demotes_only_eot_with_noise() -> None:
    """With temperature the noised logits are another tensor, so EOS keeps its confidence."""
    eos, eot = SMALL.eos, SMALL.eot
    assert eot is not None
    rows = rows_of({eos: 9.0}, {eot: 8.0}, {1: 5.0})

    def no_noise(step: int, positions: Sequence[int], columns: Sequence[int]) -> Tensor:
        return torch.full((len(positions), len(columns)), math.exp(-1), dtype=torch.float64)

    decoded = semi_ar(
        TableModel(rows),
        [7],
        gen_length=3,
        block_length=3,
        steps=3,
        temperature=1.0,
        confidence_eos_eot_inf=True,
        uniform_logits=no_noise,
        ids=SMALL,
    )
    assert decoded.ids == [eos, eot, 1]
    assert [step.accepted for step in decoded.trace] == [[1], [3], [2]]


# ---- the mask as a prediction ------------------------------------------------------------------


def test_predicted_masks_are_left_in_the_row() -> None:
    mask = SMALL.mask
    rows = rows_of({mask: 9.0, 3: 6.0}, {4: 1.0})
    decoded = semi_ar(TableModel(rows), [7], gen_length=2, block_length=2, steps=2, ids=SMALL)
    assert decoded.ids == [mask, mask]  # both quotas are spent on the same position
    with pytest.raises(RuntimeError, match="masks remain"):
        threshold(TableModel(rows), [7], gen_length=2, block_length=2, ids=SMALL)
    with pytest.raises(RuntimeError, match="masks remain"):
        threshold(
            TableModel(rows),
            [7],
            gen_length=2,
            block_length=2,
            threshold=None,
            steps=2,
            ids=SMALL,
        )


def test_guard_takes_the_best_other_token() -> None:
    """Position 0 predicts the mask; of all other tokens, token 4 at position 1 is likeliest."""
    rows = rows_of({SMALL.mask: 9.0, 3: 6.0}, {4: 1.0})
    best = math.exp(6) / (math.exp(9) + math.exp(6) + 14)
    other = math.exp(1) / (math.exp(1) + 15)
    assert other > best
    for loop in (semi_ar, threshold):
        decoded = loop(
            TableModel(rows),
            [7],
            gen_length=2,
            block_length=2,
            steps=2,
            guard_mask_token=True,
            ids=SMALL,
        )
        assert decoded.ids == [3, 4]
        assert [step.guarded for step in decoded.trace] == [True, True]
        assert [step.accepted for step in decoded.trace] == [[2], [1]]
        assert decoded.trace[0].last_accepted == pytest.approx(other, rel=1e-6)
        assert decoded.trace[1].last_accepted == pytest.approx(best, rel=1e-6)


def test_guard_sleeps_while_anything_is_committed() -> None:
    for seed in range(3):
        options: dict[str, Any] = {"gen_length": 8, "block_length": 4, "steps": 8, "ids": SMALL}
        plain = semi_ar(small_model(seed), [1], **options)
        guarded = semi_ar(small_model(seed), [1], guard_mask_token=True, **options)
        assert plain == guarded


# ---- the end of the answer ---------------------------------------------------------------------


def test_truncate() -> None:
    assert truncate([1, 2, 14, 3, 14], {13, 14}) == ([1, 2], "stop")
    assert truncate([1, 2, 3], {13, 14}) == ([1, 2, 3], "length")
    assert truncate([13, 1], {13, 14}) == ([], "stop")
    assert truncate([1, 14, 15], {13, 14}, mask_id=15) == ([1], "stop")
    with pytest.raises(ValueError, match="mask id 15 at 1"):
        truncate([1, 15, 14], {13, 14}, mask_id=15)


@pytest.mark.parametrize("loop", [semi_ar, threshold])
def test_stopping_after_a_complete_block_keeps_the_text(loop: Callable[..., Any]) -> None:
    num_saved = 0
    stop_ids = (14, 13)
    for seed in range(6):
        options: dict[str, Any] = {"gen_length": 24, "block_length": 4, "steps": 24, "ids": SMALL}
        whole = loop(small_model(seed), [1, 2], **options)
        stopped = loop(small_model(seed), [1, 2], early_stop_ids=stop_ids, **options)
        assert truncate(stopped.ids, stop_ids, SMALL.mask) == truncate(whole.ids, stop_ids)
        assert stopped.trace == whole.trace[: stopped.num_forwards]
        num_saved += whole.num_forwards - stopped.num_forwards
    assert num_saved > 0


# ---- the report --------------------------------------------------------------------------------


def test_near_ties_are_reported_by_kind() -> None:
    options: dict[str, Any] = {"gen_length": 2, "block_length": 2, "ids": SMALL}
    token = rows_of({1: 5.0, 2: 5.0 - 1e-5}, {3: 3.0})
    order = rows_of({1: 3.0}, {2: 3.0 + 1e-6})
    clear = rows_of({1: 3.0}, {2: 5.0})
    exact = math.exp(3) / (math.exp(3) + 15)

    def kinds(rows: Tensor, **more: Any) -> set[str]:
        return {
            t.kind for t in near_ties(threshold(TableModel(rows), [7], **options, **more).trace)
        }

    assert kinds(clear, threshold=0.9) == set()
    assert kinds(token, threshold=0.9) == {"token"}
    assert kinds(order, threshold=0.9) == {"order"}
    assert kinds(order, threshold=0.1) == set()  # both accepted, their order has no effect
    assert kinds(clear, threshold=exact + 1e-6) == {"threshold"}
