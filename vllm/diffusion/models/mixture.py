# SPDX-License-Identifier: Apache-2.0
"""Weights of a mixture of experts, with the names of Qwen3-MoE's checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.diffusion import ops
from vllm.diffusion.core.errors import CheckpointError
from vllm.diffusion.layers.moe import ExpertsMLP
from vllm.diffusion.layers.parallel import without_weight_packing
from vllm.diffusion.models.expert_matrices import expert_matrices, scheme_of_experts
from vllm.diffusion.models.modules import DenseMLP
from vllm.diffusion.models.weights import Destination
from vllm.model_executor.layers.linear import ReplicatedLinear

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.diffusion.models.config import DiffusionConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig

_PART = {"gate_proj": 0, "up_proj": 1}


class MixtureMLP(nn.Module):
    """Router and experts of one layer, with the shared expert if there is one.

    The experts' matrices are stacked, so that one grouped product multiplies by all of them. The
    shared expert is the first in the stack if it is as wide as the others, and neither quantised
    nor changed by adapters. Then it is computed while the other experts are read.

    Raises:
        ServerConfigError: the requested quantisation is not supported for experts.
    """

    def __init__(
        self, config: DiffusionConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        scheme = scheme_of_experts(quant_config, prefix)
        architecture = config.architecture
        width, inner = config.hidden_size, architecture.expert_width
        self.scoring = ops.Scoring(*architecture.scoring)
        self.num_experts, self.num_chosen = config.num_experts, config.num_experts_per_tok
        self.shape = (inner, width)
        self.gate = without_weight_packing(
            ReplicatedLinear(width, config.num_experts, bias=False, prefix=f"{prefix}.gate")
        )
        self.expert_bias_of = architecture.expert_bias_of
        if self.expert_bias_of is not None:
            # fp32, because the choice is made in fp32 and small differences of the bias matter
            bias = torch.empty(config.num_experts, dtype=torch.float32)
            owner = self.gate if self.expert_bias_of == "mlp.gate" else self
            owner.register_parameter("expert_bias", nn.Parameter(bias, requires_grad=False))
        self.num_joined = int(architecture.joins_shared_expert(is_plain=quant_config is None))
        num_stacked = self.num_joined + config.num_experts
        self.w1 = expert_matrices(num_stacked, 2, (inner, width), 0, scheme)
        self.w2 = expert_matrices(num_stacked, 1, (width, inner), 1, scheme)
        self.shared_experts: DenseMLP | None = None
        if architecture.shared_expert_width and not self.num_joined:
            self.shared_experts = DenseMLP(
                config, quant_config, f"{prefix}.shared_experts", architecture.shared_expert_width
            )

    @property
    def bias(self) -> Tensor | None:
        """Bias [E] fp32 of the scores for the choice of experts; None if there is none."""
        bias: Tensor | None = getattr(self, "expert_bias", None)
        return getattr(self.gate, "expert_bias", None) if bias is None else bias

    def stage(self, norm: RMSNorm) -> ExpertsMLP:
        """Create the stage over these weights, after they are loaded."""
        if ops.is_invariant(self):
            ops.check_invariant(self.w1.matrices, self.w2.matrices)
        return ExpertsMLP(
            norm,
            self.gate.weight,
            self.w1.matrices,
            self.w2.matrices,
            self.num_chosen,
            self.bias,
            self.scoring,
            None if self.shared_experts is None else self.shared_experts.stage(norm),
            is_invariant=ops.is_invariant(self),
        )

    def destinations(self, path: str) -> dict[str, Destination]:
        """Return the destination of each module of a checkpoint below `path`."""
        inward, outward = self.shape, self.shape[::-1]
        destinations = {f"{path}.gate": Destination(f"{path}.gate", (self.num_experts, inward[1]))}
        if self.expert_bias_of == "mlp":
            destinations[path] = Destination(path, (self.num_experts,))
        stacked = [f"{path}.experts.{expert}" for expert in range(self.num_experts)]
        if self.num_joined:
            stacked.insert(0, f"{path}.shared_experts")
        for expert, source in enumerate(stacked):
            for name, part in _PART.items():
                destinations[f"{source}.{name}"] = Destination(f"{path}.w1", inward, (expert, part))
            destinations[f"{source}.down_proj"] = Destination(f"{path}.w2", outward, (expert, 0))
        if self.shared_experts is not None:
            destinations |= self.shared_experts.destinations(f"{path}.shared_experts")
        return destinations


def unstacked(
    weights: Iterable[tuple[str, Tensor]], config: DiffusionConfig
) -> Iterator[tuple[str, Tensor]]:
    """Split the stacked experts of a fused checkpoint into views, one for each matrix.

    Fused checkpoints contain `mlp.w1` [E, 2I, D], the gate's rows first, and `mlp.w2` [E, D, I].
    Scales of the experts' input rows are skipped, because experts multiply unscaled rows.

    Raises:
        CheckpointError: a stacked tensor has another shape.
    """
    num_experts, inner = config.num_experts, config.architecture.expert_width
    shapes = {
        "w1": (num_experts, 2 * inner, config.hidden_size),
        "w2": (num_experts, config.hidden_size, inner),
    }
    for name, tensor in weights:
        path, _, kind = name.rpartition(".")
        if kind == "input_scale" and ".experts." in path:
            continue
        if kind not in shapes or not path.endswith(".mlp"):
            yield name, tensor
            continue
        if tuple(tensor.shape) != shapes[kind]:
            given, required = list(tensor.shape), list(shapes[kind])
            raise CheckpointError(f"{name}: given shape {given}; config.json requires {required}")
        for expert, matrix in enumerate(tensor):
            source = f"{path}.experts.{expert}"
            if kind == "w2":
                yield f"{source}.down_proj.weight", matrix
                continue
            for part, half in zip(_PART, matrix.split(inner), strict=True):
                yield f"{source}.{part}.weight", half
