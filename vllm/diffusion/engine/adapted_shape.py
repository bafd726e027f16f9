# SPDX-License-Identifier: Apache-2.0
"""Sizes of steps in which some rows have a LoRA adapter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.diffusion import ops
from vllm.diffusion.adapters.joined_weights import num_joined_rows
from vllm.diffusion.adapters.matrices import HEAD
from vllm.diffusion.core import stages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.diffusion.adapters.lora_flags import SlotSizes
    from vllm.diffusion.adapters.matrices import Matrix
    from vllm.diffusion.core.stages import Listed
    from vllm.diffusion.memory import LinearBuffers, ModelShape

QKV, GATE_UP, HIDDEN = "qkv_proj", "gate_up_proj", ("o_proj", "down_proj")


class AdaptedBuffers:
    """Buffers of products, and of the products of adapters.

    Args:
        slots: the slots of the adapters.
        specs: the widest weight of each use, by the last part of its path.
        can_join: whether weights may be multiplied together with matrices of adapters.
    """

    def __init__(
        self, slots: SlotSizes, specs: Mapping[str, ops.WeightSpec], *, can_join: bool
    ) -> None:
        self._slots, self._specs = slots, specs
        self.num_parts = _most_parts(slots.matrices.allowed.values())
        # Uses whose products adapters may change in all columns.
        are_whole = {
            use
            for use, count in _most_parts(slots.matrices.all.values()).items()
            if count == self.num_parts[use]
        }
        self._joined_uses = are_whole & specs.keys() if can_join else set()

    @property
    def gate_up(self) -> ops.WeightSpec:
        """The widest weight of gate and up."""
        return self._specs[GATE_UP]

    @property
    def split_bytes(self) -> int:
        """Bytes that few rows take in several parts of a sum."""
        depths = [matrix.num_columns for matrix in self._slots.matrices.allowed.values()]
        num_parts = max(self.num_parts.values(), default=0)
        return ops.split_bytes(num_parts * self._slots.max_rank, max(depths, default=0))

    def low(self, *uses: str) -> Listed:
        """Return the buffer of products with the first matrices alone."""
        count = max(self.num_parts[use] for use in uses)
        return (stages.low_rank(count * self._slots.max_rank),) if count else ()

    def joined(self, kind: type[ops.Projection], *uses: str) -> Listed:
        """Return the buffer of a weight's product together with the first matrices of all slots."""
        widths = [0]
        for use in self._joined_uses.intersection(uses) if ops.can_append(kind) else ():
            spec = self._specs[use]
            num_numbers = self._slots.num_slots * self.num_parts[use] * self._slots.max_rank
            further = num_joined_rows(num_numbers, spec.columns, spec.depth, spec.device)
            if further:
                widths.append(spec.columns + further)
        return (stages.joined_product(self.gate_up.dtype, max(widths)),) if max(widths) else ()


def adapted_shape(
    shape: ModelShape,
    buffers: AdaptedBuffers,
    kinds: Sequence[type[ops.Projection]],
    shared_width: int,
) -> ModelShape:
    """Return the sizes of a model, including the sizes of steps with adapters.

    Args:
        shape: the sizes of other steps.
        buffers: buffers of the products.
        kinds: classes of the model's projections.
        shared_width: width of the shared expert on a rank, which is apart in steps with adapters;
            0 without one.
    """
    experts = shape.experts
    adapted = replace(
        shape,
        products=tuple(
            _of_kind(shape, buffers, *pair) for pair in zip(kinds, shape.products, strict=True)
        ),
        experts=experts and replace(experts, shared_width=shared_width),
        head=(*shape.head, *buffers.low(HEAD)),
        split_bytes=shape.split_bytes + buffers.split_bytes,
    )
    return replace(shape, adapted=adapted)


def _of_kind(
    shape: ModelShape, buffers: AdaptedBuffers, kind: type[ops.Projection], plain: LinearBuffers
) -> LinearBuffers:
    """Return the buffers of products by one kind of weights."""
    gated = plain
    if buffers.num_parts[GATE_UP]:
        # Gate and up are stored before an adapter changes them. A step in which one kernel computes
        # both takes less.
        stored = buffers.joined(kind, GATE_UP)
        if not stored:
            project = kind.workspace(ops.ProjectionKind.PROJECT, buffers.gate_up).buffers
            stored = (stages.gate_up(shape.dtype, buffers.gate_up.columns), *project)
        gated = plain._replace(
            gated=(*stored, *buffers.low(GATE_UP)), most_gated_rows=None, gated_limit=()
        )
    copy, wide = _copies(shape, buffers.gate_up, quantises=kind.quantises)

    def low(*uses: str) -> Listed:
        return *buffers.low(*uses), *buffers.joined(kind, *uses)

    return gated._replace(
        project=(*plain.project, *copy, *low(QKV)),
        gated=(*gated.gated, *copy, *wide),
        add_to=(*plain.add_to, *wide, *low(*HIDDEN)),
        keeps_plain=kind.quantises,
    )


def _most_parts(matrices: Iterable[Matrix]) -> Counter[str]:
    """Return in how many parts the widest product of each use is divided."""
    num_parts = Counter[str]()
    for product, count in Counter(matrix.product for matrix in matrices).items():
        use = product.rpartition(".")[2]
        num_parts[use] = max(num_parts[use], count)
    return num_parts


def _copies(
    shape: ModelShape, gate_up: ops.WeightSpec, *, quantises: bool
) -> tuple[Listed, Listed]:
    """Return buffers that steps with adapters take for both forms of rows [D], and of wider rows.

    Adapters multiply rows in the model dtype, which are quantised for the other products.
    """
    if not quantises:
        return (), ()
    widest = max(gate_up.columns // 2, shape.num_heads * shape.head_dim)
    normed, wide = (
        stages.quantised_rows(shape.dtype, width).quantised for width in (shape.hidden_size, widest)
    )
    return normed, (*wide, stages.plain_rows(shape.dtype, widest))
