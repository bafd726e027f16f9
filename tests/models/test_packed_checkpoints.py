# SPDX-License-Identifier: Apache-2.0
"""4-bit checkpoints, and fp8 checkpoints with scales of blocks, written by this module."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import LLaDAReference
from torch import Tensor

from tests.checkpoint_files import change_weights, weights_of
from tests.checkpoints import make_checkpoint
from tests.models.support import (
    assert_same_logits,
    compressed_tensors,
    logits,
    quantise_checkpoint,
    some_ids,
    staged_logits,
)
from vllm.diffusion import ops
from vllm.diffusion.core.errors import CheckpointError, ModelConfigError
from vllm.diffusion.core.quantisation import PackedScheme, scheme_of
from vllm.diffusion.models.weights import stored_weights

GROUP = 16


def words_of(numbers: Tensor) -> Tensor:
    """Pack eight 4-bit numbers of the last dimension into each int32, the first one lowest."""
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= numbers[..., place::8].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def random_numbers(num_rows: int, depth: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers [D, N], and zeros and scales [D / GROUP, N] of their groups."""
    generator = torch.Generator().manual_seed(seed)
    size = depth // GROUP, num_rows
    numbers = torch.randint(0, 16, (depth, num_rows), generator=generator)
    zeros = torch.randint(0, 16, size, generator=generator)
    return numbers, zeros, (torch.rand(size, generator=generator) / 16).half()


def gptq(weight: Tensor, path: str, order: str, offset: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a matrix with new random numbers, and the values of these numbers."""
    num_rows, depth = weight.shape
    # Matrices with the same inputs have the same order.
    of_inputs = "attention" if path.endswith(("q_proj", "k_proj", "v_proj")) else path
    of_inputs = "mlp" if path.endswith(("ff_proj", "up_proj")) else of_inputs
    of_order = torch.Generator().manual_seed(sum(map(ord, of_inputs)))
    numbers, zeros, scales = random_numbers(num_rows, depth, sum(map(ord, path)))
    places = torch.arange(depth) // GROUP
    if order == "permuted":
        places = places[torch.randperm(depth, generator=of_order)]
    meaning = (numbers - zeros[places]).float() * scales.float()[places]
    tensors = {
        "qweight": words_of(numbers.t()).t().contiguous(),
        "qzeros": words_of(zeros) - offset * 0x11111111,  # zeros of 0 borrow from the next number
        "scales": scales,
        "g_idx": places.int(),
    }
    return tensors, meaning.t()


def compressed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(dim=2) / 7).bfloat16()
    numbers = (groups / scales.float()[:, :, None]).round().clamp(-8, 7)
    tensors = {
        "weight_packed": words_of((numbers + 8).flatten(1)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (numbers * scales.float()[:, :, None]).flatten(1)


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return tensors and values; a word has eight columns, the even ones before the odd ones."""
    num_rows, depth = weight.shape
    numbers, zeros, scales = random_numbers(num_rows, depth, num_rows + depth)
    in_words = torch.arange(num_rows).view(-1, 4, 2).transpose(1, 2).flatten()
    tensors = {
        "qweight": words_of(numbers[:, in_words]),
        "qzeros": words_of(zeros[:, in_words]),
        "scales": scales,
    }
    places = torch.arange(depth) // GROUP
    return tensors, ((numbers - zeros[places]).float() * scales.float()[places]).t()


def fp8_blocks(weight: Tensor, scale_name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return tensors and values with a scale for every 8 rows and 16 columns."""
    blocks = weight.unflatten(0, (-1, 8)).unflatten(2, (-1, GROUP))
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
    wide = scales.repeat_interleave(8, 0).repeat_interleave(GROUP, 1)
    return {"weight": values, scale_name: scales}, values.float() * wide


NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)


def nf4(weight: Tensor, *, is_nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return tensors and values in blocks of 64 neighbouring numbers.

    If nested, scales are bytes, and 256 of them have their own scale.
    """
    blocks, table = weight.flatten().view(-1, 64), torch.tensor(NF4)
    scales = blocks.abs().amax(dim=1)
    numbers = ((blocks / scales[:, None])[:, :, None] - table).abs().argmin(dim=2).flatten()
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": list(weight.shape)}
    tensors = {
        "weight": (numbers[::2] * 16 + numbers[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": table,
        "weight.absmax": scales,
    }
    if is_nested:
        offset, entries = scales.mean(), torch.linspace(-1, 1, 256)
        parts = (scales - offset).split(256)
        nested = torch.stack([part.abs().max() for part in parts])
        places = [
            ((part / most)[:, None] - entries).abs().argmin(dim=1)
            for part, most in zip(parts, nested, strict=True)
        ]
        scales = torch.cat(
            [entries[at] * most for at, most in zip(places, nested, strict=True)]
        ).add(offset)
        state |= {"nested_blocksize": 256, "nested_offset": offset.item()}
        tensors |= {
            "weight.absmax": torch.cat(places).to(torch.uint8),
            "weight.nested_absmax": nested,
            "weight.nested_quant_map": entries,
        }
    written = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors["weight.quant_state.bitsandbytes__nf4"] = written
    return tensors, (table[numbers].view(-1, 64) * scales[:, None]).view_as(weight)


def bitsandbytes(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": ["lm_head"],
    } | changes


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "fp8_blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [8, GROUP],
        "modules_to_not_convert": ["model.transformer.ff_out"],
    },
    "compressed_blocks": compressed_tensors(
        {**FP8, "strategy": "block", "block_structure": [8, GROUP]},
        {**FP8, "dynamic": True},
        format="float-quantized",
        ignore=["model.transformer.ff_out"],
    ),
    "nf4": bitsandbytes(),
    "nf4_nested": bitsandbytes(bnb_4bit_use_double_quant=True),
    "gptq": GPTQ | {"desc_act": False},
    "gptq_order": GPTQ
    | {"desc_act": True, "sym": False, "checkpoint_format": "gptq", "lm_head": False},
    "gptq_v2": GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"},
    "compressed": compressed_tensors(
        {**INT4, "group_size": GROUP}, None, format="pack-quantized", ignore=["lm_head"]
    ),
}


def write(folder: Path, format_: str) -> LLaDAReference:
    """Write a quantised checkpoint, and return the reference with the values of its weights."""
    sizes = {"d_model": 64, "mlp_hidden_size": 128} if format_.startswith("nf4") else {}
    make_checkpoint(folder, seed=11, num_shards=1, n_kv_heads=2, **sizes)
    reference = LLaDAReference.from_checkpoint(folder)
    weights = dict(reference.weights)
    order = "neighbours" if format_ == "gptq" else "permuted"
    writers: dict[str, Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]] = {
        "nf4": partial(nf4, is_nested=False),
        "nf4_nested": partial(nf4, is_nested=True),
        "awq": awq,
        "fp8_blocks": partial(fp8_blocks, scale_name="weight_scale_inv"),
        "compressed_blocks": partial(fp8_blocks, scale_name="weight_scale"),
        "compressed": compressed,
    }

    def matrix(path: str, weight: Tensor) -> dict[str, Tensor]:
        offset = 0 if format_ == "gptq_v2" else 1
        write = writers.get(format_, partial(gptq, path=path, order=order, offset=offset))
        own, weights[f"{path}.weight"] = write(weight)
        return own

    quantise_checkpoint(folder, CONFIGS[format_], matrix)
    return LLaDAReference(reference.config, weights)


@pytest.mark.parametrize("format_", CONFIGS)
def test_checkpoints_mean_what_they_say(
    format_: str, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    reference = write(tmp_path / format_, format_)
    model = load_model(tmp_path / format_)
    has_order = format_ in ("gptq_order", "gptq_v2")
    kind = ops.OrderedProjection if has_order else ops.PackedProjection
    assert type(model.layers[1].attention.out_proj) is kind
    ids = some_ids(30)
    wanted = reference.logits(ids[None])[0]
    assert_same_logits(logits(model, ids), wanted)
    (chunked,) = staged_logits(model, [ids], rows=7, keep_queries=False)
    assert_same_logits(chunked, wanted)


def test_parts_of_one_matrix_have_one_order(tmp_path: Path, load_model: Callable[..., Any]) -> None:
    write(tmp_path / "gptq", "gptq_order")
    name = "model.transformer.blocks.1.k_proj.g_idx"
    change_weights(tmp_path / "gptq", lambda t: t.update({name: t[name].flip(0).contiguous()}))
    with pytest.raises(CheckpointError, match="several orders for one matrix"):
        load_model(tmp_path / "gptq")


@pytest.mark.parametrize("part", ["absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4"])
def test_nf4_without_all_of_its_tensors_is_refused(
    part: str, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    write(tmp_path / "nf4", "nf4_nested")
    missing = f"model.transformer.blocks.1.k_proj.weight.{part}"
    change_weights(tmp_path / "nf4", lambda tensors: tensors.pop(missing))
    with pytest.raises(CheckpointError, match=r"blocks.1.k_proj.weight: given nf4 with \['"):
        load_model(tmp_path / "nf4")


def keep(*_: Any) -> None:
    """Leave a matrix unchanged."""


def test_order_without_desc_act_is_refused(tmp_path: Path, load_model: Callable[..., Any]) -> None:
    write(tmp_path / "gptq", "gptq_order")
    quantise_checkpoint(tmp_path / "gptq", {**CONFIGS["gptq_order"], "desc_act": False}, keep)
    with pytest.raises(CheckpointError, match="out of order without desc_act"):
        load_model(tmp_path / "gptq")


def test_schemes_of_configurations() -> None:
    gptq_scheme = scheme_of("auto_gptq", CONFIGS["gptq_order"])
    assert gptq_scheme == PackedScheme("int4", GROUP, layout="gptq", has_order=True)
    wanted = PackedScheme("int4", GROUP, ("lm_head",), layout="compressed-tensors")
    assert scheme_of(None, CONFIGS["compressed"]) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, "quantization_config.bits: given 8"),
        ({"lm_head": True}, "quantization_config.lm_head"),
        ({"dynamic": {"-:.*up_proj": {}}}, "quantization_config.dynamic"),
    ],
)
def test_other_forms_of_gptq_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        scheme_of("gptq", CONFIGS["gptq_order"] | changes)


@pytest.mark.parametrize("changes", [{"bnb_4bit_quant_type": "fp4"}, {"load_in_4bit": False}])
def test_other_forms_of_bitsandbytes_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelConfigError, match=r"load_in_4bit.*wanted 4 bits, nf4"):
        scheme_of(None, bitsandbytes(**changes))


def test_weights_with_scales_of_blocks_are_replaced_in_place(
    tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    """Weights may come as the checkpoint's own tensors, or as plain tensors of a trainer."""
    reference = write(tmp_path / "fp8", "fp8_blocks")
    model, ids = load_model(tmp_path / "fp8"), some_ids(30)
    model.is_loaded = True
    wanted = logits(model, ids)
    for weights in (reference.weights, weights_of(tmp_path / "fp8")):
        for weight in stored_weights(model).values():
            weight.zero_()
        assert not torch.equal(logits(model, ids), wanted)
        model.load_weights(weights.items())
        assert_same_logits(logits(model, ids), wanted)


@pytest.mark.parametrize("format_", CONFIGS)
def test_forms_that_cannot_be_updated_are_known(
    format_: str, tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    write(tmp_path / format_, format_)
    can_change = format_ in ("fp8_blocks", "nf4", "nf4_nested")
    form = ops.repacked_form(load_model(tmp_path / format_).modules())
    assert (form is None) == can_change


def test_the_scale_of_rows_is_the_largest_of_the_newest_weights(
    tmp_path: Path, load_model: Callable[..., Any]
) -> None:
    """Matrices that share inputs use the largest scale, which an update resets; it requires fp8."""
    config = {"quant_method": "fp8", "activation_scheme": "static"}

    def matrix(path: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().max() / 448
        values = (weight / scale).to(torch.float8_e4m3fn)
        rows = torch.tensor(2.0 if path.endswith("q_proj") else 1.0)
        return {"weight": values, "weight_scale": scale, "input_scale": rows}

    make_checkpoint(tmp_path, seed=3, num_shards=1)
    quantise_checkpoint(tmp_path, config, matrix)
    model = load_model(tmp_path)
    scale = model.layers[0].self_attn.qkv_proj.input_scale
    assert scale.item() == 2.0
    model.is_loaded = True
    tensors = weights_of(tmp_path)
    model.begin_update()
    model.load_weights((n, t / 4 if n.endswith("input_scale") else t) for n, t in tensors.items())
    assert model.end_update() == []
    assert scale.item() == 0.5
    name = "model.transformer.blocks.0.q_proj.weight"
    with pytest.raises(CheckpointError, match="wanted fp8 with scales"):
        model.load_weights([(name, tensors[name].float())])
