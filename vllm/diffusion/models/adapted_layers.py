# SPDX-License-Identifier: Apache-2.0
"""Adds the adapters' products to a loaded model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.diffusion.adapters.adapted_projection import AdaptedProjection
from vllm.diffusion.adapters.adapted_rows import AdaptedRows
from vllm.diffusion.adapters.slot_memory import LayerProduct
from vllm.diffusion.layers.mlp import GatedMLP
from vllm.diffusion.layers.moe import ExpertsMLP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from vllm.diffusion import ops
    from vllm.diffusion.adapters.slot_memory import SlotMemory
    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.models.base import DiffusionModel


@dataclass(frozen=True)
class AdaptedExperts:
    """Experts that are stored with the shared expert, which adapters may change.

    Attributes:
        joined: the stage for rows that no adapter changes.
        apart: the stage with adapters, over the same weights.
    """

    joined: ExpertsMLP
    apart: ExpertsMLP

    @property
    def products(self) -> tuple[ops.Projection, ...]:
        """Empty, as in `ExpertsMLP`."""
        return self.joined.products

    @property
    def shared(self) -> GatedMLP | None:
        """The shared expert, with adapters."""
        return self.apart.shared

    def with_shared(self, shared: GatedMLP) -> AdaptedExperts:
        """Return the stage with another shared expert."""
        return replace(self, apart=self.apart.with_shared(shared))

    def feed_forward(self, x: Tensor, buffers: Buffers) -> None:
        """Add the experts' products to x [R, D] in place; see `ExpertsMLP`."""
        assert self.shared is not None
        is_changed = any(_is_used(product) for product in self.shared.products)
        stage = self.apart if is_changed else self.joined
        stage.feed_forward(x, buffers)


def _is_used(product: ops.Projection) -> bool:
    """Return whether adapters of the current rows may change a product."""
    return isinstance(product, AdaptedProjection) and product.is_used


def install_adapters(
    model: DiffusionModel,
    slots: SlotMemory,
    draft_slot: int | None = None,
) -> None:
    """Make a model's products include the adapters in `slots`; before the first step.

    Products that no adapter may change stay as they are. `draft_slot` is that of `AdaptedRows`.
    """
    device = model.rotary_frequencies.device
    adapted = model.adapting = AdaptedRows(slots.num_slots, device, draft_slot)

    def wrapped(base: ops.Projection, path: str, columns: int) -> ops.Projection:
        product = slots.products.get(path)
        if product is None:
            return base
        return AdaptedProjection(base, product, adapted, columns)

    _change_products(model, wrapped)
    model.head = wrapped(model.head, "lm_head", model.num_columns)


def layer_products(model: DiffusionModel) -> dict[str, LayerProduct]:
    """Return every product of the layers, by path."""
    products = dict[str, LayerProduct]()

    def record(base: ops.Projection, path: str, columns: int) -> ops.Projection:
        products[path] = LayerProduct(base, columns, path.endswith("gate_up_proj"))
        return base

    _change_products(model, record)
    return products


def _change_products(
    model: DiffusionModel, change: Callable[[ops.Projection, str, int], ops.Projection]
) -> None:
    """Replace every product of the layers by what `change` returns for it, its path and columns."""

    def changed_mlp(mlp: GatedMLP, path: str) -> GatedMLP:
        return replace(
            mlp,
            gate_up_proj=change(mlp.gate_up_proj, f"{path}.gate_up_proj", 2 * mlp.width),
            down_proj=change(mlp.down_proj, f"{path}.down_proj", model.hidden_size),
        )

    for index, layer in enumerate(model.layers):
        path, attention = f"model.layers.{index}", layer.attention
        qkv_columns = attention.query_width + 2 * attention.key_width
        layer.attention = replace(
            attention,
            qkv_proj=change(attention.qkv_proj, f"{path}.self_attn.qkv_proj", qkv_columns),
            out_proj=change(attention.out_proj, f"{path}.self_attn.o_proj", model.hidden_size),
        )
        stage = layer.mlp_stage
        if isinstance(stage, GatedMLP):
            layer.mlp_stage = changed_mlp(stage, f"{path}.mlp")
            continue
        if isinstance(stage, ExpertsMLP) and stage.has_joined:
            stage = AdaptedExperts(stage, stage.apart())
        if stage.shared is not None:
            shared = changed_mlp(stage.shared, f"{path}.mlp.shared_experts")
            layer.mlp_stage = stage.with_shared(shared)


def feed_forward_stages(
    stage: GatedMLP | ExpertsMLP | AdaptedExperts,
) -> tuple[GatedMLP | ExpertsMLP, ...]:
    """Return the stages that a layer may run, which differ in their kernels."""
    return (stage.joined, stage.apart) if isinstance(stage, AdaptedExperts) else (stage,)


def adapted_products(model: DiffusionModel) -> Iterator[tuple[AdaptedProjection, bool]]:
    """Yield the products that adapters may change, and whether each computes gate and up."""
    for layer in model.layers:
        stage = layer.mlp_stage
        mlp = stage if isinstance(stage, GatedMLP) else stage.shared
        products = [(product, False) for product in layer.attention.products]
        if mlp is not None:
            products += [(mlp.gate_up_proj, True), (mlp.down_proj, False)]
        for product, is_gated in products:
            if isinstance(product, AdaptedProjection):
                yield product, is_gated
    if isinstance(model.head, AdaptedProjection):
        yield model.head, False
