# SPDX-License-Identifier: Apache-2.0
"""The Dream and LLaDA-MoE references against independent float64 forward passes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from tests.checkpoints import (
    BOS_ID,
    EOS_ID,
    EOT_ID,
    MASK_ID,
    make_checkpoint,
    random_prompt,
)
from tests.reference.families import load_reference
from tests.reference.layers import KeyValues, shift_right

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IDS = random_prompt(11) + [MASK_ID] * 6


def test_fused_experts_are_the_same_model(checkpoint: Callable[[str], Path]) -> None:
    logits = [
        load_reference(checkpoint(name)).logits(torch.tensor([IDS]))
        for name in ("moe", "moe_fused")
    ]
    assert torch.equal(logits[0], logits[1])
    files = list(checkpoint("moe_fused").glob("*.safetensors"))
    names = {name for file in files for name in load_file(file)}
    assert "model.layers.0.mlp.w1" in names
    assert not any(".experts." in name for name in names)


def test_router_weights_do_not_sum_to_one_and_bias_only_chooses(
    checkpoint: Callable[[str], Path],
) -> None:
    model = load_reference(checkpoint("moe_bias"))
    h = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(0))
    mlp = "model.layers.0.mlp"
    chosen, weights = model.route(mlp, h)
    p = torch.softmax(h @ model.weights[f"{mlp}.gate.weight"].T, dim=-1)
    torch.testing.assert_close(weights, p.gather(-1, chosen))
    assert weights.sum(-1).max() < 0.999
    unbiased = p.topk(2, dim=-1).indices
    assert (chosen.sort().values != unbiased.sort().values).any()
    model.weights[f"{mlp}.expert_bias"] = torch.tensor([0.0] * 6 + [9.0, 9.0])
    assert set(model.route(mlp, h)[0].flatten().tolist()) == {6, 7}


def test_equal_experts_are_chosen_from_the_lowest(checkpoint: Callable[[str], Path]) -> None:
    model = load_reference(checkpoint("moe"))
    chosen, weights = model.route("model.layers.0.mlp", torch.zeros(1, 3, 64))
    assert chosen.tolist() == [[[0, 1]] * 3]
    assert weights.unique().tolist() == [0.125]


def test_shift_right() -> None:
    raw = torch.arange(4.0)[None, :, None].expand(1, 4, 2)
    assert shift_right(raw)[0, :, 0].tolist() == [0.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("name", ["mha", "qk_norm", "dream", "moe_dense_mix"])
def test_a_window_with_the_keys_of_the_same_row_gives_the_same_logits(
    name: str, checkpoint: Callable[[str], Path]
) -> None:
    """Keys and values of an unchanged row are exact, wherever the window lies."""
    model = load_reference(checkpoint(name), torch.float64)
    ids = torch.tensor([IDS])
    whole, kv = model.forward_with_kv(ids, range(17), None)
    assert kv.positions == tuple(range(17))
    for start, end in ((0, 5), (6, 9), (11, 17), (16, 17)):
        window = range(start, end)
        for past in (kv, kv.keep(set(range(17)) - set(window))):
            part, after = model.forward_with_kv(ids[:, start:end], window, past)
            torch.testing.assert_close(part, whole[:, start:end], rtol=0, atol=1e-9)
            assert after.positions == kv.positions
            for (k, v), (old_k, old_v) in zip(after.layers, kv.layers, strict=True):
                torch.testing.assert_close(k, old_k, rtol=0, atol=1e-9)
                torch.testing.assert_close(v, old_v, rtol=0, atol=1e-9)


def test_a_window_sees_changed_tokens_only_inside(checkpoint: Callable[[str], Path]) -> None:
    model = load_reference(checkpoint("dream"), torch.float64)
    ids = torch.tensor([IDS])
    whole, kv = model.forward_with_kv(ids, range(17), None)
    changed = ids.clone()
    changed[0, 12] += 1
    stale, after = model.forward_with_kv(changed[:, 11:], range(11, 17), kv.keep(range(11)))
    exact = model.logits(changed)[:, 11:]
    assert (stale - whole[:, 11:]).abs().max() > 0.01  # the window's own change is seen
    assert (stale - exact).abs().max() > 1e-6  # but the prefix did not hear of it
    assert torch.equal(after.keep(range(11)).layers[2][0], kv.keep(range(11)).layers[2][0])


def test_overwriting_rows_keeps_positions_ascending() -> None:
    def rows(*positions: int, value: float) -> KeyValues:
        k = torch.full((1, 1, len(positions), 1), value)
        return KeyValues(positions, ((k, -k),))

    merged = rows(0, 1, 2, 5, value=1.0).overwrite(rows(2, 3, value=2.0))
    assert merged.positions == (0, 1, 2, 3, 5)
    assert merged.layers[0][0].flatten().tolist() == [1, 1, 2, 2, 1]
    assert merged.layers[0][1].flatten().tolist() == [-1, -1, -2, -2, -1]


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("dream", {"hidden_act": "gelu"}, "hidden_act"),
        ("dream", {"tie_word_embeddings": True}, "lm_head"),
        ("moe", {"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
        ("moe", {"moe_layer_freq": [1, 1, 0]}, "experts"),
        ("moe", {"moe_router_enable_expert_bias": True}, "expert_bias"),
    ],
)
def test_unfitting_configs_are_refused(
    family: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family=family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        load_reference(folder)


# ---- tokenizers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "end_of_turn", "mask", "rendered"),
    [
        (
            "dream",
            "<|im_end|>",
            "<|mask|>",
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "moe",
            "<|role_end|>",
            "<|mask|>",
            "<role>HUMAN</role>Hi<|role_end|><role>ASSISTANT</role>",
        ),
    ],
)
def test_family_tokenizers(
    family: str, end_of_turn: str, mask: str, rendered: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family=family)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    assert tokenizer.convert_tokens_to_ids([end_of_turn, mask]) == [EOT_ID, MASK_ID]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (
        BOS_ID,
        EOS_ID,
        MASK_ID,
    )
    text = "What is 2 + 3?"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode([*ids, EOT_ID, EOS_ID], skip_special_tokens=True) == text
    given = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert given == rendered
    assert tokenizer(given, add_special_tokens=False).input_ids.count(EOT_ID) == rendered.count(
        end_of_turn
    )
