# SPDX-License-Identifier: Apache-2.0
"""Checkpoint tensors into a model's parameters, with nothing left over on either side."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.errors import CheckpointError
from vllm.diffusion.ops import is_plain
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set

    from torch import Tensor, nn


class Destination(NamedTuple):
    """Where the tensors of one checkpoint module go."""

    module: str  # path of the model's module
    shard: str | int | None = None  # which part of a fused module, as its weight loader names it


def load_checkpoint(
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    destinations: Mapping[str, Destination],
    ignored: Set[str] = frozenset(),
) -> set[str]:
    """Load every tensor of a checkpoint by its parameter's own weight loader.

    Args:
        model: the model to fill.
        weights: (name, tensor) pairs, in any order.
        destinations: for each module path of the checkpoint (a tensor's name less its last
            part), the module of the model. All of them must be filled.
        ignored: module paths whose tensors are skipped.

    Returns:
        names of the model's parameters that were loaded.

    Raises:
        CheckpointError: tensors that belong to no parameter, or parameters (parts of fused ones
            included) for which no tensor came; the message names them.
    """
    parameters = dict(model.named_parameters())
    loaded: set[str] = set()
    seen: set[str] = set()
    unknown: list[str] = []
    for name, tensor in weights:
        path, _, kind = name.rpartition(".")
        if path in ignored:
            continue
        destination = destinations.get(path)
        target = f"{destination.module}.{kind}" if destination is not None else None
        if destination is None or target not in parameters:
            unknown.append(name)
            continue
        _load(name, parameters[target], tensor, destination.shard)
        loaded.add(target)
        seen.add(name)
    missing = _missing(model, destinations, seen)
    if unknown or missing:
        raise CheckpointError(
            f"the checkpoint does not fit config.json: {_listed('tensors missing', missing)}; "
            f"{_listed('tensors that are not part of the model', unknown)}"
        )
    return loaded


def _load(name: str, parameter: nn.Parameter, tensor: Tensor, shard: str | int | None) -> None:
    loader = getattr(parameter, "weight_loader", default_weight_loader)
    try:
        if shard is None:
            loader(parameter, tensor)
        else:
            loader(parameter, tensor, shard)
    except (AssertionError, RuntimeError, ValueError) as error:
        # upstream's loaders check shapes by assertions without a name
        raise CheckpointError(
            f"{name}: shape {tuple(tensor.shape)} does not fit config.json ({error})"
        ) from error


def _missing(
    model: nn.Module, destinations: Mapping[str, Destination], seen: Set[str]
) -> list[str]:
    """Names of the tensors that should have come.

    What a quantised layer stores is its method's affair: there any tensor of the layer counts.
    """
    seen_paths = {name.rpartition(".")[0] for name in seen}
    missing: list[str] = []
    for path, destination in destinations.items():
        module = model.get_submodule(destination.module)
        if isinstance(module, LinearBase) and not is_plain(module):
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
