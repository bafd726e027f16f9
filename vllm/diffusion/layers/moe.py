# SPDX-License-Identifier: Apache-2.0
"""Feed-forward stage with experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.diffusion import ops
from vllm.diffusion.core.stages import beside_experts, of_experts
from vllm.diffusion.layers.mlp import GatedMLP

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.stages import Buffer, Buffers
    from vllm.diffusion.layers.norm import RMSNorm


@dataclass(frozen=True)
class ExpertsMLP:
    """Feed-forward stage of a layer with experts, over weights owned elsewhere.

    `gate` is the router [E, D]; `w1` [E, 2I, D] and `w2` [E, D, I] hold this rank's part of every
    expert's width; `bias` [E] shifts the choice of experts if the model has it. A shared expert, if
    there is one, is `shared`, or the first of E + 1 experts in `w1` and `w2`. `is_invariant` states
    whether no row's result depends on other rows.
    """

    norm: RMSNorm
    gate: Tensor
    w1: ops.ExpertWeights
    w2: ops.ExpertWeights
    num_chosen: int
    bias: Tensor | None = None
    scoring: ops.Scoring = ops.SOFTMAX
    shared: GatedMLP | None = None
    is_invariant: bool = False

    @property
    def has_joined(self) -> bool:
        """Whether the shared expert is stored together with the others."""
        return self.w1.num_experts > len(self.gate)

    def apart(self) -> ExpertsMLP:
        """Return this stage with the shared expert as `shared`, over the same plain weights."""
        w1, w2 = self.w1, self.w2
        assert self.has_joined and isinstance(w1, ops.DenseExperts)
        assert isinstance(w2, ops.DenseExperts)
        gate_up, down = (ops.plain_projection(weights.values[0]) for weights in (w1, w2))
        w1, w2 = (ops.DenseExperts(weights.values[1:]) for weights in (w1, w2))
        return replace(self, w1=w1, w2=w2, shared=GatedMLP(self.norm, gate_up, down, w2.depth))

    def with_shared(self, shared: GatedMLP) -> ExpertsMLP:
        """Return this stage with another shared expert."""
        return replace(self, shared=shared)

    @property
    def products(self) -> tuple[ops.Projection, ...]:
        """Empty, because the chosen experts are not known in advance."""
        return ()

    def feed_forward(self, x: Tensor, buffers: Buffers) -> None:
        """Add shared(h) + sum of weight * expert(h) over the chosen experts, h = norm(x).

        x [R, D] is updated in place. If rows choose experts by windows (`ops.Scoring`), the first
        row must begin a window.
        """
        if x.shape[0] == 0:
            return
        with buffers.scope("feed-forward"):
            output_buffers = beside_experts(x.dtype, x.shape[1], has_shared=self.shared is not None)
            out, *others = (buffer.take(buffers, len(x)) for buffer in output_buffers)
            normed, addend = self.norm(x, out=out), None
            if self.shared is not None:
                (addend,) = others
                self.shared.project(normed, addend, buffers)
            for buffer in self._temporaries(x):
                buffer.expect(buffers, len(x))
            ops.add_experts(
                x,
                normed,
                self._route(normed),
                self.w1,
                self.w2,
                buffers,
                addend=addend,
                in_fp32=self.scoring.in_fp32,
                has_shared=self.has_joined,
                is_invariant=self.is_invariant,
            )

    def _temporaries(self, x: Tensor) -> tuple[Buffer, ...]:
        return of_experts(
            x.shape[1],
            self.w1.num_experts,
            self.num_chosen + self.has_joined,
            self.w2.depth,
            x.dtype,
            in_fp32=self.scoring.in_fp32,
            quantises=self.w1.quantises,
        )

    def _route(self, normed: Tensor) -> ops.Routing:
        """Choose the experts of every row."""
        return ops.route_rows(
            normed,
            self.gate,
            self.num_chosen,
            self.bias,
            self.scoring,
            has_shared=self.has_joined,
            is_invariant=self.is_invariant,
        )
