# SPDX-License-Identifier: Apache-2.0
"""Weights with the matrices of all slots, so that one product computes both.

The first matrices follow a weight in memory. The product then has further columns, which are the
rows' products with these matrices. Up to an eighth of its columns, they cost less than kernels of
their own.

The second matrices of gate and up are further columns of their weight: a *tail* of the product's
depth. They multiply the rows' products with the first matrices, which are zeros for other slots. So
the kernel of the product can compute silu(gate) * up, which otherwise waits until the adapters'
products have been added.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from vllm.diffusion import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

_MAX_SHARE = 1 / 8  # share of the columns of the checkpoint's product, or of its depth
_TAIL_UNIT = 8  # a tail's depth is a multiple of it, so that rows begin at 16 bytes


def num_joined_rows(num_numbers: int, columns: int, depth: int, device: torch.device) -> int:
    """Return how many rows are appended to a weight; 0 if it stays as it is.

    Args:
        num_numbers: rows of the first matrices of all slots.
        columns, depth: columns and depth of the product with the weight.
        device: its device.
    """
    num_rows = ops.extended_columns(columns + num_numbers, depth, device) - columns
    return num_rows if num_rows <= columns * _MAX_SHARE else 0


def append_matrices(
    base: ops.Projection, columns: int, shape: Sequence[int]
) -> tuple[ops.PlainProjection, Tensor] | None:
    """Append the first matrices of all slots to a weight; None if it stays as it is.

    Args:
        base: the projection of the weight.
        columns: columns of its product.
        shape: [slots, parts, maximum rank, depth], the shape of the matrices.

    Returns:
        the projection of the weight with the matrices, and the matrices, which are zeros.
    """
    num_numbers = prod(shape[:-1])
    if not ops.can_move(base):
        return None
    assert isinstance(base, ops.PlainProjection)
    num_rows = num_joined_rows(num_numbers, columns, shape[-1], base.weight.device)
    if not num_rows:
        return None
    extended, rows = ops.append_rows(base, num_rows)
    return extended, rows[:num_numbers].view(*shape)


def tail_depth(num_numbers: int, depth: int) -> int:
    """Return the depth of the tail of gate and up; 0 if they have none.

    Args:
        num_numbers: rows of the first matrices of all slots.
        depth: depth of the product.
    """
    fits = num_numbers <= depth * _MAX_SHARE and num_numbers % _TAIL_UNIT == 0
    return num_numbers if fits else 0
