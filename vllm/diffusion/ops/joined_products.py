# SPDX-License-Identifier: Apache-2.0
"""Products of an unquantised weight together with further rows, or with further depth.

Adapters use them: one product of many rows costs less than two. Further depth is a *tail*: other
rows and another weight, whose products belong to the same sums.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.projection import WEIGHTS_ARE_CONSTANT, PlainProjection
from vllm_add_llada.cuda_kernels.fused_ops import Epilogue, fused_linear, has_fused_linear

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm.diffusion.ops.projection import Projection
    from vllm_add_llada.cuda_kernels.fused_ops import Tiling


def can_append(kind: type[Projection]) -> bool:
    """Return whether rows can be appended to weights of a kind."""
    return issubclass(kind, PlainProjection)


def can_move(base: Projection) -> bool:
    """Return whether the weight is a matrix of its own, to which rows can be appended."""
    if not isinstance(base, PlainProjection):
        return False
    return base.weight.untyped_storage().nbytes() == base.weight.nbytes


def plain_projection(weight: Tensor, bias: Tensor | None = None) -> PlainProjection:
    """Return the projection of a weight [columns, depth] and a bias [columns] on this rank."""
    layer: Any = SimpleNamespace(weight=weight, bias=bias)
    return PlainProjection(layer)


def extended_columns(num_columns: int, depth: int, device: torch.device) -> int:
    """Return the columns of a product that is extended to at least `num_columns`."""
    return dispatch.extended_columns(num_columns, depth, card=dispatch.card_of(device))


def append_rows(base: PlainProjection, num_rows: int) -> tuple[PlainProjection, Tensor]:
    """Append rows to a weight, before the first step.

    The weight moves, and its parameter becomes a view of the larger weight.

    Returns:
        a projection with all rows, and the new ones [num_rows, depth], which are zeros.
    """
    bias = None if base.bias is None else _extended(base.bias, num_rows)
    weight = _extended(base.weight, num_rows)
    return plain_projection(weight, bias), weight[-num_rows:]


def _extended(stored: Tensor, num_rows: int) -> Tensor:
    """Return a copy with further rows of zeros, and make `stored` a view of it."""
    num_stored = len(stored)
    whole = stored.new_zeros(num_stored + num_rows, *stored.shape[1:])
    whole[:num_stored] = stored.data
    stored.data = whole[:num_stored]
    return whole


def can_add_tail(base: Projection) -> bool:
    """Return whether a kernel computes silu(gate) * up with a tail, for some numbers of rows."""
    if not (isinstance(base, PlainProjection) and has_fused_linear(base.weight, base.weight)):
        return False
    card = dispatch.card_of(base.weight.device)
    return base.bias is None and dispatch.has_gated_tiles(*base.weight.shape, card=card)


def tail_tiling(base: PlainProjection, x: Tensor) -> Tiling | None:
    """Return the tiling of `gated_with_tail` for rows x; None if it has none, or would be slow."""
    if not has_fused_linear(x, base.weight):
        return None
    return dispatch.tail_tiling(len(x), *base.weight.shape, card=dispatch.card_of(x.device))


def gated_with_tail(
    base: PlainProjection, x: Tensor, out: Tensor, tail: tuple[Tensor, Tensor], tiling: Tiling
) -> None:
    """Write silu(gate) * up, where another product is added to both halves.

    Args:
        base, x, out: as for `Projection.gated`, in the model dtype.
        tail: rows [R, K] and a weight [columns, K], in the model dtype.
        tiling: what `tail_tiling` returns for x.
    """
    epilogue, early = Epilogue.SILU_MUL, WEIGHTS_ARE_CONSTANT
    fused_linear(x, base.weight, out, tiling=tiling, epilogue=epilogue, early=early, tail=tail)
