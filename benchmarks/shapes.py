# SPDX-License-Identifier: Apache-2.0
"""Shape of a model, the bytes and FLOP of one forward of it, and the least time for it.

Letters: D width, H heads, K key and value heads, hd head width, M inner width of a feed-forward, E
experts, V rows of the head, T rows of one sequence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.diffusion.models.config import DiffusionConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Families with a block-causal mask.
BLOCK_FAMILIES = (
    *("llada2", "llada22", "sdar", "sdar-moe", "fast-dllm", "stable-diffcoder"),
    "nemotron",
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model according to its config.json, with the same names for all families.

    Attributes:
        head_dim: width of one attention head.
        mlp_width: inner width of a feed-forward, or of one expert.
        mask_id: id of the mask token; None if config.json does not have it.
        num_experts: number of routed experts; 0 if the feed-forward is dense.
        num_chosen: number of experts per row.
        num_dense: number of layers without experts, `dense_width` wide.
        shared_width: inner width of the expert that all rows use.
        shifts_rows: whether position i is read from row i - 1.
        block_length: positions of a block of a block-causal mask; 0 if every position attends to
            every other one.
    """

    family: str
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    mask_id: int | None
    num_experts: int = 0
    num_chosen: int = 0
    num_dense: int = 0
    dense_width: int = 0
    shared_width: int = 0
    shifts_rows: bool = False
    block_length: int = 0

    @property
    def kv_width(self) -> int:
        """Width of the keys of one position, and of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Number of elements in the four matrices of one layer's attention."""
        return 2 * self.width * (self.num_heads * self.head_dim + self.kv_width)

    @property
    def mlp_parameters(self) -> int:
        """Number of elements in the three matrices of one feed-forward, or of one expert."""
        return 3 * self.width * self.mlp_width

    @property
    def head_parameters(self) -> int:
        """Number of elements in the head's matrix."""
        return self.width * self.vocab_size

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Return the shape that a config.json describes.

        Raises:
            ModelConfigError: The engine does not support this model.
        """
        parsed = DiffusionConfig.from_dict(dict(config))
        family, architecture = parsed.family, parsed.architecture
        num_experts = parsed.num_experts if architecture.expert_layers else 0
        return cls(
            family=family.name,
            width=parsed.hidden_size,
            num_layers=parsed.num_hidden_layers,
            num_heads=parsed.num_attention_heads,
            num_kv_heads=parsed.num_key_value_heads,
            head_dim=parsed.head_dim,
            mlp_width=architecture.expert_width if num_experts else architecture.dense_width,
            vocab_size=architecture.num_embeddings,
            mask_id=getattr(parsed, "mask_token_id", None),
            num_experts=num_experts,
            num_chosen=parsed.num_experts_per_tok if num_experts else 0,
            num_dense=parsed.num_hidden_layers - len(architecture.expert_layers),
            dense_width=architecture.dense_width,
            shared_width=architecture.shared_expert_width,
            shifts_rows=family.logit_shift > 0,
            block_length=parsed.block_length if family.is_block_causal else 0,
        )

    @classmethod
    def of_folder(cls, folder: Path) -> Shape:
        """Return the shape of a checkpoint."""
        return cls.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Stage:
    """Part of a forward that waits for the previous part; it occurs `count` times.

    Attributes:
        num_bytes: bytes of weights, or keys and values, that it must read.
        flops: FLOP that it must compute, at the rate of attention or else of products.
    """

    name: str
    num_bytes: float
    flops: float
    count: int = 1
    is_attention: bool = False

    def least_ms(self, bandwidth: float, matmul_rate: float, attention_rate: float) -> float:
        """Return the larger of the times to move bytes and to compute; rates are per second."""
        rate = attention_rate if self.is_attention else matmul_rate
        return 1000 * self.count * max(self.num_bytes / bandwidth, self.flops / rate)


@dataclass(frozen=True)
class Work:
    """Least work of one forward of several sequences, if its parts ran in parallel."""

    weight_bytes: float
    matmul_flops: float
    attention_flops: float

    def floor_ms(self, bandwidth: float, matmul_rate: float, attention_rate: float) -> float:
        """Return the larger of the times to move bytes and to compute; rates are per second."""
        moving = self.weight_bytes / bandwidth
        computing = self.matmul_flops / matmul_rate + self.attention_flops / attention_rate
        return 1000 * max(moving, computing)


def forward_work(
    shape: Shape,
    num_rows: int,
    num_sequences: int = 1,
    *,
    head_rows: int = 32,
    touched_experts: float | None = None,
) -> Work:
    """Return the work of a forward of `num_sequences` sequences of `num_rows` rows, all layers.

    Args:
        head_rows, touched_experts: as for `window_stages`.
    """
    sampled = min(head_rows, num_rows)
    stages = window_stages(
        shape, num_rows, 0, num_sequences, head_rows=sampled, touched_experts=touched_experts
    )
    products = [stage for stage in stages if not stage.is_attention]
    return Work(
        weight_bytes=sum(stage.count * stage.num_bytes for stage in products),
        matmul_flops=sum(stage.count * stage.flops for stage in products),
        attention_flops=sum(s.count * s.flops for s in stages if s.is_attention),
    )


def window_stages(
    shape: Shape,
    window: int,
    kept: int,
    num_requests: int,
    *,
    head_rows: float | None = None,
    touched_experts: float | None = None,
    bytes_per_element: int = 2,
) -> list[Stage]:
    """Return the stages of a forward of a window of each request, over earlier keys and values.

    Args:
        window: rows of one request.
        kept: positions of one request before its window.
        head_rows: rows of one request whose logits are computed; None: all rows of the window.
        touched_experts: experts of a layer that at least one row uses, on average; None: all.
    """
    rows, keys = window * num_requests, (kept + window) * num_requests

    def products(
        name: str, parameters: float, passed: float | None = None, count: int = 1
    ) -> Stage:
        """Return the stage of matrices of `parameters` elements, of which a row uses `passed`."""
        flops = 2.0 * rows * (parameters if passed is None else passed)
        return Stage(name, bytes_per_element * parameters, flops, count)

    num_layers = shape.num_layers
    stages = [
        products("attention's products", shape.attention_parameters, count=num_layers),
        Stage(
            "attention",
            bytes_per_element * 2 * keys * shape.kv_width,
            4.0 * window * keys * shape.num_heads * shape.head_dim,
            num_layers,
            is_attention=True,
        ),
    ]
    if shape.num_experts:
        touched = shape.num_experts if touched_experts is None else touched_experts
        num_sparse = num_layers - shape.num_dense
        read, passed = (n * shape.mlp_parameters for n in (touched, shape.num_chosen))
        stages.append(products("experts", read, passed, num_sparse))
        always = shape.width * (shape.num_experts + 3 * shape.shared_width)
        stages.append(products("router, shared expert", always, count=num_sparse))
    dense = 3 * shape.width * shape.dense_width
    stages.append(products("feed-forward", dense, count=shape.num_dense))
    sampled = num_requests * (window if head_rows is None else head_rows)
    head_bytes = bytes_per_element * shape.head_parameters
    return [*stages, Stage("head", head_bytes, 2.0 * sampled * shape.head_parameters)]
