# SPDX-License-Identifier: Apache-2.0
"""Loads checkpoint tensors into a model's parameters, and checks that both sides are complete."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion import ops
from vllm.diffusion.core.errors import CheckpointError
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import WeightsMapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Set

    import torch
    from torch import Tensor, nn

    from vllm.diffusion.models.config import Architecture


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a model multiplies by, by name: parameters and modules' buffers.

    Quantised numbers and their scales may be buffers. Buffers of the model itself are computed from
    its configuration and are left out. A tensor that two modules share occurs once.
    """
    buffers = {name: buffer for name, buffer in model.named_buffers() if "." in name}
    return {**{name: p.data for name, p in model.named_parameters()}, **buffers}


def quantised_sizes(model: nn.Module, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the sizes of the matrices on this rank that our schemes store.

    See `StreamedParameter`.

    Returns:
        the number of matrices (a stack of experts counts as one); their bytes, including scales;
        and the bytes of the same matrices in `dtype`, the dtype of the model.
    """
    count = num_bytes = num_weights = 0
    for module in model.modules():
        tensors = {*module.parameters(recurse=False), *module.buffers(recurse=False)}
        sizes = [number for p in tensors if (number := getattr(p, "num_weights", 0))]
        if sizes:
            count += len(sizes)
            num_weights += sum(sizes)
            num_bytes += sum(p.nbytes for p in tensors if p is not getattr(module, "bias", None))
    return count, num_bytes, num_weights * dtype.itemsize


class Destination(NamedTuple):
    """Destination of the tensors of one checkpoint module."""

    module: str  # path of the model's module
    # Shape of the checkpoint's unquantised weight: [out, in], or [width].
    shape: tuple[int, ...]
    # Part of a fused module, in the form that its weight loader expects.
    shard: str | int | tuple[int, int] | None = None


# Buffers of `rotary_emb` modules, in checkpoints of old versions of transformers. They are computed
# from config.json.
ROTARY_BUFFERS = frozenset(("inv_freq", "original_inv_freq", "cos_cached", "sin_cached"))


def module_names(architecture: Architecture) -> WeightsMapper:
    """Map the checkpoint's names of modules, within a layer or not, to the model's names."""
    names = {stored: ours for ours, stored in architecture.module_names.items()}
    whole = {stored: ours for stored, ours in names.items() if "." in stored}
    layers = {name: f"model.layers.{i}" for i, name in enumerate(architecture.layer_names)}
    return WeightsMapper(
        orig_to_new_regex={
            re.compile(rf"(?<!\w){re.escape(stored)}(?!\w)"): ours
            for stored, ours in (whole | layers | names).items()
        }
    )


def checkpoint_name(architecture: Architecture, path: str) -> str:
    """Return the checkpoint's name of a module of the model, given by its path."""
    names = architecture.module_names
    within = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
    if within is None:
        return names.get(path, path)
    layer, name = architecture.layer_names[int(within[1])], within[2]
    return f"{layer}.{names.get(name, name)}"


def load_checkpoint(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    destinations: Mapping[str, Destination],
    ignored: Set[str] = frozenset(),
    *,
    received: set[str] | None = None,
) -> set[str]:
    """Load every tensor of a checkpoint with its parameter's own weight loader.

    Args:
        model: the model to fill.
        weights: (name, tensor) pairs, in any order.
        destinations: for each module path of the checkpoint (a tensor's name without its last
            part), the module of the model. All of them must be filled.
        ignored: module paths whose tensors are skipped.
        received: set to which the names of loaded tensors are added. If given, the tensors may be
            incomplete, and missing ones are not an error here.

    Returns:
        names of the model's parameters that were loaded.

    Raises:
        CheckpointError: tensors that belong to no parameter, parameters (including parts of fused
            ones) without a tensor, a tensor of another shape, or integers instead of floating-point
            numbers; the message names them.
    """
    parameters = dict(model.named_parameters())
    loaded: set[str] = set()
    seen: set[str] = set()
    unknown: list[str] = []
    for name, tensor in weights:
        path, _, kind = name.rpartition(".")
        if path in ignored:
            continue
        if kind in ROTARY_BUFFERS and path.rpartition(".")[2] == "rotary_emb":
            continue
        destination = destinations.get(path)
        target = f"{destination.module}.{kind}" if destination is not None else None
        if destination is None or target not in parameters:
            unknown.append(name)
            continue
        if not _is_quantised(model.get_submodule(destination.module)):
            shape = destination.shape if kind == "weight" else destination.shape[:1]
            is_streamed = isinstance(parameters[target], ops.StreamedParameter)
            if kind == "weight" or not (is_streamed or kind.endswith("_scale")):
                # Quantised layers check their other tensors themselves.
                _check_plain(name, tensor, shape)
        _load(name, parameters[target], tensor, destination.shard)
        loaded.add(target)
        seen.add(name)
    missing = missing_tensors(model, destinations, seen) if received is None else []
    if received is not None:
        received |= seen
    if unknown or missing:
        raise CheckpointError(
            f"the checkpoint does not fit config.json: {_listed('tensors missing', missing)}; "
            f"{_listed('tensors that are not part of the model', unknown)}"
        )
    return loaded


def _load(
    name: str, parameter: nn.Parameter, tensor: Tensor, shard: str | int | tuple[int, int] | None
) -> None:
    loader: Callable[..., None] = getattr(parameter, "weight_loader", default_weight_loader)
    try:
        loader(parameter, tensor, *(() if shard is None else (shard,)))
    except RuntimeError as error:
        raise CheckpointError(
            f"{name}: given {tensor.dtype} {list(tensor.shape)}, which is no part of "
            f"{parameter.dtype} {list(parameter.shape)}: {error}"
        ) from error


def _check_plain(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    """Check a tensor, because upstream's loaders would silently use a part of a larger one."""
    if not tensor.is_floating_point():
        raise CheckpointError(f"{name}: given {tensor.dtype}; wanted floating point")
    if tuple(tensor.shape) != wanted:
        raise CheckpointError(
            f"{name}: given shape {list(tensor.shape)}; config.json requires {list(wanted)}"
        )


def _is_quantised(module: nn.Module) -> bool:
    if not isinstance(module, LinearBase | VocabParallelEmbedding):
        return False
    return ops.kind_of(module) is ops.QuantisedProjection


def missing_tensors(
    model: nn.Module, destinations: Mapping[str, Destination], seen: Set[str]
) -> list[str]:
    """Return the names of the tensors that did not arrive.

    For a layer that upstream's quantisation stores, any one of its tensors is enough.
    """
    seen_paths = {name.rpartition(".")[0] for name in seen}
    missing: list[str] = []
    for path, destination in destinations.items():
        module = model.get_submodule(destination.module)
        if _is_quantised(module):
            if path not in seen_paths:
                missing.append(f"{path}.*")
            continue
        kinds = (kind for kind, _ in module.named_parameters(recurse=False))
        missing += [f"{path}.{kind}" for kind in kinds if f"{path}.{kind}" not in seen]
    return missing


def _listed(what: str, names: list[str], limit: int = 8) -> str:
    if not names:
        return f"no {what}"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} {what}: {', '.join(names[:limit])}{more}"
