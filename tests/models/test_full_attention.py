# SPDX-License-Identifier: Apache-2.0
"""Full-attention families give the logits of the plain references, whole and in chunks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from reference.models import load_reference
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from tests.checkpoint_files import change_json
from tests.checkpoints import CASES, FAMILY_CASES, make_checkpoint
from tests.models.conftest import OUR_CASES
from tests.models.support import (
    assert_same_logits,
    check_bf16,
    engine_config,
    logits,
    some_ids,
    staged_logits,
)
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.models import expert_matrices, mixture
from vllm.diffusion.models.base import DiffusionModel
from vllm.diffusion.models.upstream_model import UpstreamModel

PathOf = Callable[[str], Path]
ModelOf = Callable[[str], DiffusionModel]
NAMES = [*CASES, *FAMILY_CASES, *OUR_CASES]


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference(name: str, case_path: PathOf, case_model: ModelOf) -> None:
    ids = some_ids(23)
    reference = load_reference(case_path(name)).logits(ids[None])[0]
    assert_same_logits(logits(case_model(name), ids), reference)


@pytest.mark.parametrize("keep_queries", [True, False])
# One row, ragged chunks, chunks that end with a sequence, and more rows than there are.
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
@pytest.mark.parametrize("name", ["mha", "qk_norm", "dream", "moe", "moe_partial_clipped"])
def test_chunks_do_not_change_logits(
    name: str, rows: int, keep_queries: bool, case_model: ModelOf
) -> None:
    model, ids = case_model(name), some_ids(33)
    (chunked,) = staged_logits(model, [ids], rows=rows, keep_queries=keep_queries)
    torch.testing.assert_close(chunked, logits(model, ids), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("name", ["gqa", "all_biases", "dream", "moe_fused_mix"])
def test_packed_sequences_equal_each_alone(
    name: str, rows: int | None, case_model: ModelOf
) -> None:
    model = case_model(name)
    sequences = [some_ids(length, seed=length) for length in (1, 17, 4, 30)]
    for ids, packed in zip(sequences, staged_logits(model, sequences, rows=rows), strict=True):
        torch.testing.assert_close(packed, logits(model, ids), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["gqa", "dream", "moe_dense_mix"])
def test_no_rows(name: str, case_model: ModelOf) -> None:
    model = case_model(name)
    x = torch.empty(0, model.hidden_size)
    product = torch.empty(0, 2 * model.num_kv_heads * model.head_dim)
    rotary = model.rotary(torch.empty(0, dtype=torch.int64))
    buffers = FreshBuffers(x.device)
    for layer in model.layers:
        layer.attention.keys_values(x, rotary, product, buffers)
        layer.attention.attend(x, rotary, [], None, buffers)
        layer.mlp_stage.feed_forward(x, buffers)
    assert model.compute_logits(model.final_norm(x)).shape == (0, model.vocab_size)


def test_buffers_that_are_given_are_used(case_model: ModelOf) -> None:
    model, ids = case_model("scaled"), some_ids(9)
    embedded = torch.empty(9, model.hidden_size)
    assert model.embed(ids, embedded) is embedded
    assert torch.equal(embedded, model.embed_input_ids(ids))
    buffers = mock.Mock(wraps=FreshBuffers(embedded.device))
    with torch.no_grad():
        logits = model.compute_logits(model.final_norm(embedded, buffers), buffers)
        assert torch.equal(logits, model.compute_logits(model.final_norm(embedded)))
    taken = [call.args for call in buffers.take.call_args_list]
    assert ("logits", (9, model.vocab_size), torch.float32) in taken
    assert sum(shape == (9, model.hidden_size) for _, shape, _ in taken) == 1


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


@pytest.mark.parametrize("name", ["dream", "dream_odd_tied", "moe"])
def test_facts_for_the_engine(name: str, case_model: ModelOf) -> None:
    model = case_model(name)
    config = model.config
    assert model.family.logit_shift == (1 if name.startswith("dream") else 0)
    assert (model.hidden_size, model.head_dim, model.num_heads) == (64, 16, 4)
    assert model.num_kv_heads == config.num_key_value_heads
    assert (model.vocab_size, model.vocab_start) == (config.vocab_size, 0)
    assert model.num_columns == config.vocab_size
    assert model.dtype == torch.float32
    assert len(model.layers) == 3


@pytest.mark.parametrize("family", ["llada", "dream", "moe"])
def test_bf16_rounds_where_the_reference_rounds(
    family: str, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    path = make_checkpoint(tmp_path, family=family, seed=30, gain=1.0, dtype=torch.bfloat16)
    check_bf16(
        load_model(path, "bfloat16"),
        torch.float32 if family == "llada" else torch.bfloat16,
        lambda ids, dtype: load_reference(path, dtype).logits(ids)[0],
    )


def test_bf16_experts_equal_the_reference(tmp_path: Path, load_model: Callable[..., Any]) -> None:
    """One feed-forward layer has the reference's experts, roundings and order of sums."""
    path = make_checkpoint(
        tmp_path, family="moe", seed=31, dtype=torch.bfloat16, moe_router_enable_expert_bias=True
    )
    reference, model = load_reference(path, torch.bfloat16), load_model(path, "bfloat16")
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)
    given = x.clone()
    with torch.no_grad():
        model.layers[1].mlp_stage.feed_forward(given, FreshBuffers(given.device))
    wanted = reference.feed_forward(1, x[None])[0]
    differing = (given != wanted).float().mean()
    # A product may sum its fp32 terms in another order, and round to a neighbouring number.
    assert differing < 0.01
    torch.testing.assert_close(given, wanted, rtol=0.02, atol=0.02)


def test_one_file_without_index(tmp_path: Path, load_model: Callable[..., Any]) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", seed=31, num_shards=3)
    single = make_checkpoint(tmp_path / "single", seed=31, num_shards=1)
    (single / "model.safetensors.index.json").unlink()
    (single / "model-00001-of-00001.safetensors").rename(single / "model.safetensors")
    ids = some_ids(11)
    assert torch.equal(logits(load_model(sharded), ids), logits(load_model(single), ids))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llada", {"architectures": ["LLaDAForDiffusionLM"]}),
        ("dream", {"architectures": ["DreamForDiffusionLM"]}),
        ("moe", {"model_type": "llada"}),
        ("moe", {"model_type": "dllm"}),
        ("moe", {"architectures": ["LLaDAMoEForDiffusionLM"]}),
    ],
)
def test_model_types_aliases_and_remote_code_keys_get_our_class(
    family: str, overrides: dict[str, Any], tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    plain = make_checkpoint(tmp_path / "plain", family=family, seed=32)
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "modeling_x.XModel"}
    other = make_checkpoint(
        tmp_path / "other", family=family, seed=32, auto_map=auto_map, **overrides
    )
    wanted, given = load_model(plain), load_model(other, trust_remote_code=True)
    assert type(given) is type(wanted) is UpstreamModel
    assert type(given.config) is type(wanted.config)
    assert torch.equal(logits(given, some_ids(6)), logits(wanted, some_ids(6)))


def test_one_number_says_which_layers_have_experts(
    tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    path = make_checkpoint(tmp_path, family="moe", seed=33, moe_layer_freq=[1, 0, 1])
    wanted = logits(load_model(path), some_ids(6))
    change_json(path, moe_layer_freq=2)
    assert torch.equal(logits(load_model(path), some_ids(6)), wanted)


def test_experts_of_upstreams_methods_are_refused(case_path: PathOf) -> None:
    config = engine_config(case_path("moe")).model_config.hf_config
    with pytest.raises(ServerConfigError, match="given fp8; wanted fp8, int4 or nf4, or none"):
        mixture.MixtureMLP(config, Fp8Config(), "model.layers.0.mlp")


def test_expert_widths_must_divide_among_the_ranks() -> None:
    with (
        mock.patch.object(expert_matrices, "get_tensor_model_parallel_world_size", return_value=3),
        pytest.raises(ServerConfigError, match=r"given 3; wanted a divisor of .* 32"),
    ):
        expert_matrices.ExpertMatrices(4, 2, (32, 64), sharded_dim=0)
