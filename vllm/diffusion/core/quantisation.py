# SPDX-License-Identifier: Apache-2.0
"""Quantisation schemes: how weights are stored, as given by --quantization or config.json.

A layer's method implements a scheme. Checkpoints without a scheme here are left to upstream's
methods. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.diffusion.core.errors import ModelConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Fp8Scheme:
    """fp8 (e4m3) weights with scales; rows are quantised to fp8 before the product.

    Attributes:
        is_online: whether weights of a checkpoint are quantised while they are loaded, with one
            scale per channel.
        has_input_scale: whether all rows use the checkpoint's scale; otherwise each has its own.
        ignored: modules that are not quantised: names in the checkpoint, suffixes of names, or
            patterns with the prefix "re:".
    """

    is_online: bool = False
    has_input_scale: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name for --quantization."""
        return "fp8"


@dataclass(frozen=True)
class PackedScheme:
    """4-bit weights in groups along the depth; plain checkpoints are quantised at loading.

    Attributes:
        name: name for --quantization: "int4" has integers with a scale and a zero point per group,
            "nf4" has quantiles of a normal distribution with a scale per group.
        group: maximum numbers per group; the exact size in a checkpoint, or -1 for whole rows.
        ignored: see `Fp8Scheme`.
        layout: format of a quantised checkpoint: "gptq", "awq", "compressed-tensors" or
            "bitsandbytes"; None for a plain checkpoint.
        has_order: whether the columns of a group are not adjacent (GPTQ's desc_act).
        zero_offset: number subtracted from zero points that GPTQ stores.
    """

    name: str
    group: int
    ignored: tuple[str, ...] = ()
    layout: str | None = None
    has_order: bool = False
    zero_offset: int = 1

    @property
    def is_made_here(self) -> bool:
        """Whether matrices are packed while they are loaded, from numbers in the checkpoint."""
        return self.layout in (None, "bitsandbytes")


@dataclass(frozen=True)
class BlockScheme:
    """fp8 (e4m3) weights with a scale per block, multiplied by rows in the model dtype.

    Attributes:
        block: rows and columns of a block of the weight.
        scale_name: name of the scales in the checkpoint.
        ignored: see `Fp8Scheme`.
    """

    block: tuple[int, int]
    scale_name: str
    ignored: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name for messages; --quantization does not offer it."""
        return "fp8 with scales of blocks"


Scheme: TypeAlias = Fp8Scheme | PackedScheme | BlockScheme

# By name for --quantization, for checkpoints that are not quantised.
ONLINE: dict[str, Scheme] = {
    "fp8": Fp8Scheme(is_online=True),
    "int4": PackedScheme("int4", group=128),
    "nf4": PackedScheme("nf4", group=64),
}


BITSANDBYTES = "bitsandbytes"  # upstream has no method for this format


def stores_experts(scheme: Scheme | None) -> bool:
    """Return whether a scheme can store the matrices of experts."""
    if isinstance(scheme, PackedScheme):
        return scheme.is_made_here
    return isinstance(scheme, Fp8Scheme)


def scheme_of(quantization: str | None, config: Mapping[str, Any] | None) -> Scheme | None:
    """Return the scheme of a model, or None if it is not quantised or upstream's methods run it.

    Args:
        quantization: --quantization.
        config: `quantization_config` of config.json.

    Raises:
        ModelConfigError: the checkpoint has one of our formats in an unsupported variant.
    """
    if config is None:
        return ONLINE.get(quantization or "")
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "modelopt":
        return _modelopt(config)
    if method == "awq":
        return _awq(config)
    if method == BITSANDBYTES:
        return _bitsandbytes(config)
    if method == "fp8":
        return _fp8(config)
    return _gptq(config) if method == "gptq" else None


def _fp8(config: Mapping[str, Any]) -> Scheme:
    """Read the scheme of "fp8" checkpoints: DeepSeek's with scales of blocks, or AutoFP8's."""
    ignored = tuple(config.get("modules_to_not_convert") or config.get("ignored_layers") or ())
    if config.get("weight_block_size"):
        return _blocks(config["weight_block_size"], "weight_scale_inv", ignored)
    rows = config.get("activation_scheme")
    if rows not in ("static", "dynamic"):
        raise _refused("activation_scheme", rows, "static or dynamic")
    return Fp8Scheme(has_input_scale=rows == "static", ignored=ignored)


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme | None:
    """Read the scheme of one group for all linear layers: fp8 by tensor or channel, or 4 bits."""
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or list(groups[0].get("targets") or []) != ["Linear"]:
        raise _refused("config_groups", groups, "one group whose targets are Linear")
    weights, rows = groups[0].get("weights") or {}, groups[0].get("input_activations")
    if weights.get("type") == "int" and weights.get("num_bits") == 4 and rows is None:
        return _packed(config, weights)
    if weights.get("type") != "float" or weights.get("num_bits") != 8:
        raise _refused("weights", dict(weights), "fp8, or 4 bits with plain rows")
    if weights.get("strategy") == "block":
        ignored = tuple(config.get("ignore") or ())
        return _blocks(weights.get("block_structure"), "weight_scale", ignored)
    if weights.get("strategy") not in ("tensor", "channel") or not weights.get("symmetric", True):
        raise _refused(
            "weights.strategy", weights.get("strategy"), "tensor, channel or block, symmetric"
        )
    if rows is None:
        raise _refused("input_activations", None, "fp8, static or dynamic")
    scheme = Fp8Scheme(ignored=tuple(config.get("ignore") or ()))
    if rows.get("dynamic"):
        return scheme
    if rows.get("strategy") != "tensor":
        raise _refused("input_activations.strategy", rows.get("strategy"), "tensor where static")
    return replace(scheme, has_input_scale=True)


def _packed(config: Mapping[str, Any], weights: Mapping[str, Any]) -> Scheme:
    """Read the scheme of symmetric 4-bit groups, or of 4 bits with one scale per channel."""
    group = -1 if weights.get("strategy") == "channel" else weights.get("group_size")
    if not weights.get("symmetric", True) or not isinstance(group, int):
        raise _refused("weights", dict(weights), "symmetric, strategy group or channel")
    if weights.get("actorder") in ("group", "dynamic"):
        raise _refused("weights.actorder", weights["actorder"], "null, weight or static")
    ignored = tuple(config.get("ignore") or ())
    return PackedScheme("int4", group, ignored, layout="compressed-tensors")


def _blocks(block: Any, scale_name: str, ignored: tuple[str, ...]) -> Scheme:
    """Read the scheme of blocks; rows keep the model dtype, even if the checkpoint requests fp8."""
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) for b in block)):
        raise _refused("weight_block_size", block, "two numbers, rows and columns")
    return BlockScheme((block[0], block[1]), scale_name, ignored)


def _awq(config: Mapping[str, Any]) -> Scheme:
    """Read the scheme of AWQ: 4 bits with zero points, in the layout of its first kernels."""
    if config.get("bits", config.get("w_bit")) != 4 or config.get("version", "gemm") != "gemm":
        given = {key: config.get(key) for key in ("bits", "version")}
        raise _refused("bits", given, "4, version gemm")
    group = int(config.get("group_size", config.get("q_group_size", -1)))
    ignored = tuple(config.get("modules_to_not_convert") or ())
    return PackedScheme("int4", group, ignored, layout="awq")


def _bitsandbytes(config: Mapping[str, Any]) -> Scheme:
    """Read the scheme of bitsandbytes: nf4, with or without quantised scales."""
    kind = config.get("bnb_4bit_quant_type")
    if not config.get("load_in_4bit") or kind != "nf4":
        given = {"load_in_4bit": config.get("load_in_4bit"), "bnb_4bit_quant_type": kind}
        raise _refused("load_in_4bit", given, "4 bits, nf4")
    ignored = tuple(config.get("llm_int8_skip_modules") or ())
    return PackedScheme("nf4", group=64, ignored=ignored, layout=BITSANDBYTES)


def _gptq(config: Mapping[str, Any]) -> Scheme:
    """Read the scheme of GPTQ: 4 bits, with or without desc_act and zero points."""
    if config.get("bits") != 4:
        raise _refused("bits", config.get("bits"), "4")
    for key in ("dynamic", "modules_in_block_to_quantize", "lm_head"):
        if config.get(key):
            raise _refused(key, config[key], "none: all layers' matrices, and no other")
    return PackedScheme(
        "int4",
        int(config.get("group_size", -1)),
        layout="gptq",
        has_order=bool(config.get("desc_act")),
        zero_offset=0 if config.get("checkpoint_format") == "gptq_v2" else 1,
    )


def _modelopt(config: Mapping[str, Any]) -> Scheme | None:
    """Read the scheme of ModelOpt's fp8: one scale per tensor, and one for the rows."""
    settings = config.get("quantization") or config
    if settings.get("quant_algo") != "FP8":
        return None
    excluded = settings.get("exclude_modules") or config.get("ignore") or ()
    return Fp8Scheme(has_input_scale=True, ignored=tuple(excluded))


def _refused(key: str, given: Any, wanted: str) -> ModelConfigError:
    return ModelConfigError(f"quantization_config.{key}", given, f"wanted {wanted}")
