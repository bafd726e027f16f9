# SPDX-License-Identifier: Apache-2.0
"""nf4 checkpoints of bitsandbytes (QLoRA, arXiv:2305.14314), dequantised as they are read.

A matrix is `weight` [N K / 2, 1], two numbers per byte, the first in the high half. Further tensors
are `weight.absmax`, the scales of blocks of neighbours, `weight.quant_map` [16], the values of the
16 codes, and JSON in `weight.quant_state.bitsandbytes__nf4`. Scales may also be bytes. Then they
are indices into `weight.nested_quant_map` [256], multiplied by `weight.nested_absmax`, one for each
`nested_blocksize` of them, plus `nested_offset`.

The largest number of a block is 1 or -1, so layers that quantise again in groups of a block compute
equal scales and numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from vllm.diffusion.core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

_WEIGHT = ".weight"
_STATE = "quant_state.bitsandbytes__nf4"


def widened(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors; each nf4 matrix becomes one [N, K] fp32 tensor when it is complete.

    Raises:
        CheckpointError: some tensors of a matrix are missing, or contradict each other.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        path, separator, part = name.partition(f"{_WEIGHT}.")
        is_packed = name.endswith(_WEIGHT) and tensor.dim() == 2 and tensor.shape[1] == 1
        if not (separator or is_packed):
            yield name, tensor
            continue
        path = path.removesuffix(_WEIGHT)
        parts = waiting.setdefault(path, {})
        parts[part] = tensor
        if _is_complete(parts):
            yield f"{path}{_WEIGHT}", _matrix(path, waiting.pop(path))
    if waiting:
        path, parts = next(iter(waiting.items()))
        raise CheckpointError(
            f"{path}{_WEIGHT}: given nf4 with {sorted(filter(None, parts))}; wanted absmax, "
            f"quant_map and {_STATE}, and nested_absmax and nested_quant_map where absmax is bytes"
        )


def _is_complete(parts: dict[str, Tensor]) -> bool:
    required = {"", "absmax", "quant_map", _STATE}
    if "absmax" in parts and parts["absmax"].dtype == torch.uint8:
        required |= {"nested_absmax", "nested_quant_map"}
    return required <= parts.keys()


def _matrix(path: str, parts: dict[str, Tensor]) -> Tensor:
    """Dequantise a matrix to [N, K] fp32."""
    state: dict[str, Any] = json.loads(bytes(parts[_STATE].tolist()))
    (num_rows, depth), block = state["shape"], state["blocksize"]
    data, scales = parts[""].contiguous().view(torch.uint8).flatten(), parts["absmax"]
    if depth % block or data.numel() * 2 != num_rows * depth:
        raise CheckpointError(
            f"{path}{_WEIGHT}: given {data.numel()} bytes in blocks of {block} for "
            f"{[num_rows, depth]}; wanted whole blocks in a row"
        )
    if scales.dtype == torch.uint8:
        nested = parts["nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(scales)]
        scales = parts["nested_quant_map"][scales.int()] * nested + state["nested_offset"]
    numbers = torch.stack((data >> 4, data & 15), dim=1).int()
    wide = parts["quant_map"].float()[numbers].view(-1, block) * scales.float()[:, None]
    return wide.view(num_rows, depth)
