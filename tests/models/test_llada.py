# SPDX-License-Identifier: Apache-2.0
"""The LLaDA forward pass against the plain reference, whole and in chunks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.checkpoints import CASES, MASK_ID, VOCAB_SIZE, make_checkpoint
from tests.models.conftest import OUR_CASES
from tests.models.support import assert_same_logits, logits, staged_logits
from tests.reference.llada_model import LLaDAReference
from vllm.diffusion.models.base import DiffusionModel
from vllm.diffusion.models.llada import LLaDAConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    PathOf = Callable[[str], Path]
    ModelOf = Callable[[str], DiffusionModel]


def some_ids(length: int, seed: int = 0) -> torch.Tensor:
    """Ordinary tokens, with masks in the second half."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
    ids[length // 2 :: 2] = MASK_ID
    return ids


@pytest.mark.parametrize("name", [*CASES, *OUR_CASES])
def test_logits_equal_the_reference(name: str, case_path: PathOf, case_model: ModelOf) -> None:
    ids = some_ids(23)
    reference = LLaDAReference.from_checkpoint(case_path(name)).logits(ids[None])[0]
    assert_same_logits(logits(case_model(name), ids), reference)


@pytest.mark.parametrize("keep_queries", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 16, 64])  # one row, ragged, a sequence's end, more than all
@pytest.mark.parametrize("name", ["mha", "qk_norm"])
def test_chunks_do_not_change_logits(
    name: str, rows: int, keep_queries: bool, case_model: ModelOf
) -> None:
    model, ids = case_model(name), some_ids(33)
    (chunked,) = staged_logits(model, [ids], rows=rows, keep_queries=keep_queries)
    torch.testing.assert_close(chunked, logits(model, ids), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("name", ["gqa", "all_biases"])
def test_packed_sequences_equal_each_alone(
    name: str, rows: int | None, case_model: ModelOf
) -> None:
    model = case_model(name)
    sequences = [some_ids(length, seed=length) for length in (1, 17, 4, 30)]
    for ids, packed in zip(sequences, staged_logits(model, sequences, rows=rows), strict=True):
        torch.testing.assert_close(packed, logits(model, ids), rtol=1e-5, atol=1e-4)


def test_a_row_sees_rows_after_it(case_model: ModelOf) -> None:
    model, ids = case_model("mha"), some_ids(12)
    changed = ids.clone()
    changed[-1] = (changed[-1] + 1) % VOCAB_SIZE
    assert not torch.allclose(logits(model, ids)[0], logits(model, changed)[0], atol=1e-3)


def test_no_rows(case_model: ModelOf) -> None:
    model = case_model("gqa")
    x = torch.empty(0, model.hidden_size)
    product = torch.empty(0, 2 * model.num_kv_heads * model.head_dim)
    rotary = model.rotary(torch.empty(0, dtype=torch.int64))
    for layer in model.layers:
        layer.keys_values(x, rotary, product)
        layer.attend(x, rotary, [])
        layer.feed_forward(x)
    assert model.compute_logits(model.final_norm(x)).shape == (0, model.vocab_size)


def test_buffers_that_are_given_are_used(case_model: ModelOf) -> None:
    model, ids = case_model("scaled"), some_ids(9)
    embedded = torch.empty(9, model.hidden_size)
    assert model.embed(ids, embedded) is embedded
    assert torch.equal(embedded, model.embed_input_ids(ids))
    normed = torch.empty_like(embedded)
    assert model.final_norm(embedded, out=normed) is normed
    out = torch.empty(9, model.vocab_size)
    with torch.no_grad():
        assert model.compute_logits(normed, out=out) is out
        assert torch.equal(out, model.compute_logits(normed))


def test_forward_takes_embeddings_in_place_of_ids(case_model: ModelOf) -> None:
    model, ids = case_model("scaled"), some_ids(9)
    positions = torch.arange(9)
    embedded = model.embed_input_ids(ids)
    kept = embedded.clone()
    with torch.no_grad():
        assert torch.equal(model(None, positions, inputs_embeds=embedded), model(ids, positions))
    assert torch.equal(embedded, kept)
    with pytest.raises(ValueError, match="input_ids"):
        model(None, positions)


def test_bf16_rounds_where_the_reference_rounds(
    tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    path = make_checkpoint(tmp_path, seed=30, gain=1.0, dtype=torch.bfloat16)
    ids = some_ids(40)
    given = logits(load_model(path, "bfloat16"), ids)
    assert given.dtype == torch.bfloat16
    half = LLaDAReference.from_checkpoint(path, torch.bfloat16).logits(ids[None])[0]
    exact = LLaDAReference.from_checkpoint(path, torch.float64).logits(ids[None])[0]
    # no farther from exact arithmetic than the bf16 reference is, but for the attention kernel
    our_error = (given.double() - exact).square().mean()
    reference_error = (half.double() - exact).square().mean()
    assert our_error <= 1.5 * reference_error


def test_dummy_weights(case_path: PathOf, load_model: Callable[..., Any]) -> None:
    model = load_model(case_path("mha"), load_format="dummy")
    assert torch.isfinite(logits(model, some_ids(5))).all()


def test_one_file_without_index(tmp_path: Path, load_model: Callable[..., Any]) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", seed=31, num_shards=3)
    single = make_checkpoint(tmp_path / "single", seed=31, num_shards=1)
    (single / "model.safetensors.index.json").unlink()
    (single / "model-00001-of-00001.safetensors").rename(single / "model.safetensors")
    ids = some_ids(11)
    assert torch.equal(logits(load_model(sharded), ids), logits(load_model(single), ids))


def test_alias_and_remote_code_keys_get_our_class(
    tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    path = make_checkpoint(tmp_path, seed=32, architectures=["LLaDAForDiffusionLM"])
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
    }
    (path / "config.json").write_text(json.dumps(config))
    model = load_model(path, trust_remote_code=True)
    assert type(model) is DiffusionModel
    assert type(model.config) is LLaDAConfig
