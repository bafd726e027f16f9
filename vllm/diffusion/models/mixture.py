# SPDX-License-Identifier: Apache-2.0
"""The weights of a mixture of experts, by the names of Qwen3-MoE's checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.diffusion import ops
from vllm.diffusion.errors import CheckpointError, ServerConfigError
from vllm.diffusion.layers.moe import ExpertsMLP
from vllm.diffusion.layers.parallel import keep_plain
from vllm.diffusion.models.modules import DenseMLP, MLPWeights
from vllm.diffusion.models.weights import Destination
from vllm.diffusion.quantisation import Fp8Scheme
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.utils import set_weight_attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.diffusion.models.config import DiffusionConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig

_PART = {"gate_proj": 0, "up_proj": 1}


class ExpertMatrices(nn.Module):
    """One matrix, or several stacked ones, of every expert; the experts' width is sharded.

    Args:
        num_experts: E.
        num_parts: matrices stacked by rows.
        shape: [out, in] of a matrix of the whole model.
        sharded_dim: which of the two is the experts' width.
        scheme: how the matrices are stored; None for the model dtype.

    Raises:
        ServerConfigError: the tensor-parallel size does not divide the width.
    """

    def __init__(
        self,
        num_experts: int,
        num_parts: int,
        shape: tuple[int, int],
        sharded_dim: int,
        scheme: Fp8Scheme | None = None,
    ) -> None:
        super().__init__()
        num_ranks = get_tensor_model_parallel_world_size()
        width = shape[sharded_dim]
        if width % num_ranks:
            raise ServerConfigError(
                f"tensor_parallel_size: given {num_ranks}; "
                f"wanted a divisor of the experts' width {width}"
            )
        self.width = width // num_ranks
        self.sharded_dim = sharded_dim
        rows, columns = (
            size // num_ranks if dim == sharded_dim else size for dim, size in enumerate(shape)
        )
        self.rows = rows
        self.scheme, size = scheme, (num_experts, num_parts * rows)
        values = torch.empty(*size, columns, dtype=None if scheme is None else torch.float8_e4m3fn)
        self.weight = nn.Parameter(values, requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": self._load})
        if scheme is None:
            self.register_buffer("weight_scale", None, persistent=False)
            return
        set_weight_attrs(self.weight, {"take_part": self._quantise, "num_weights": values.numel()})
        scales = torch.ones(size, dtype=torch.float32)
        if scheme.is_online:
            self.register_buffer("weight_scale", scales, persistent=False)
        else:
            self.weight_scale = nn.Parameter(scales, requires_grad=False)
            set_weight_attrs(self.weight_scale, {"weight_loader": self._load_scales})

    @property
    def matrices(self) -> ops.Matrices:
        """As products take them."""
        scales: Tensor | None = self.weight_scale
        return ops.Matrices(self.weight.data, None if scales is None else scales.data)

    def _load(self, param: nn.Parameter, matrix: Tensor, place: tuple[int, int]) -> None:
        """Copy this rank's part of a matrix [out, in] to (expert, part)."""
        start = get_tensor_model_parallel_rank() * self.width
        mine, (expert, rows) = matrix.narrow(self.sharded_dim, start, self.width), self._rows(place)
        scales = self.matrices.scales
        if scales is not None and self.scheme is not None and self.scheme.is_online:
            ops.quantise_weight(mine, param.data[expert, rows], scales[expert, rows])
        else:
            param.data[expert, rows].copy_(mine)

    def _load_scales(self, param: nn.Parameter, scales: Tensor, place: tuple[int, int]) -> None:
        """Of a matrix [out, in] one number, or [out] or [out, 1]."""
        expert, rows = self._rows(place)
        if scales.numel() > 1 and self.sharded_dim == 0:
            start = get_tensor_model_parallel_rank() * self.width
            scales = scales.narrow(0, start, self.width)
        param.data[expert, rows].copy_(scales.flatten().expand(self.rows))

    def _quantise(self, experts: slice, matrices: Tensor) -> None:
        """Store matrices [experts, rows, in] of this rank."""
        values, scales = self.matrices
        assert scales is not None
        for value, scale, matrix in zip(values[experts], scales[experts], matrices, strict=True):
            ops.quantise_weight(matrix, value, scale)

    def _rows(self, place: tuple[int, int]) -> tuple[int, slice]:
        expert, part = place
        return expert, slice(part * self.rows, (part + 1) * self.rows)


class MixtureMLP(MLPWeights):
    """Router and experts of one layer, and the expert of all rows where there is one.

    The experts' matrices are stacked, so that one grouped product multiplies by all of them.

    Raises:
        ServerConfigError: the model is to be quantised by one of upstream's methods.
    """

    def __init__(
        self, config: DiffusionConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        scheme = _scheme_of_experts(quant_config, prefix)
        architecture = config.architecture
        width, inner = config.hidden_size, architecture.expert_width
        self.scoring = ops.Scoring(*architecture.scoring)
        self.num_experts, self.num_chosen = config.num_experts, config.num_experts_per_tok
        self.shape = (inner, width)
        self.gate = keep_plain(
            ReplicatedLinear(width, config.num_experts, bias=False, prefix=f"{prefix}.gate")
        )
        self.expert_bias_of = architecture.expert_bias_of
        if self.expert_bias_of is not None:
            # fp32: the choice is made in fp32, and the bias matters in its small differences
            bias = torch.empty(config.num_experts, dtype=torch.float32)
            owner = self.gate if self.expert_bias_of == "mlp.gate" else self
            owner.register_parameter("expert_bias", nn.Parameter(bias, requires_grad=False))
        self.w1 = ExpertMatrices(config.num_experts, 2, (inner, width), 0, scheme)
        self.w2 = ExpertMatrices(config.num_experts, 1, (width, inner), 1, scheme)
        self.shared_experts: DenseMLP | None = None
        if architecture.shared_expert_width:
            self.shared_experts = DenseMLP(
                config, quant_config, f"{prefix}.shared_experts", architecture.shared_expert_width
            )

    @property
    def bias(self) -> Tensor | None:
        """[E] fp32, added to the scores for the choice of experts; None where nothing is."""
        bias: Tensor | None = getattr(self, "expert_bias", None)
        return getattr(self.gate, "expert_bias", None) if bias is None else bias

    def stage(self, norm: RMSNorm) -> ExpertsMLP:
        return ExpertsMLP(
            norm,
            self.gate.weight,
            self.w1.matrices,
            self.w2.matrices,
            self.num_chosen,
            self.bias,
            self.scoring,
            None if self.shared_experts is None else self.shared_experts.stage(norm),
        )

    def destinations(self, path: str) -> dict[str, Destination]:
        inward, outward = self.shape, self.shape[::-1]
        destinations = {f"{path}.gate": Destination(f"{path}.gate", (self.num_experts, inward[1]))}
        if self.expert_bias_of == "mlp":
            destinations[path] = Destination(path, (self.num_experts,))
        for expert in range(self.num_experts):
            source = f"{path}.experts.{expert}"
            for name, part in _PART.items():
                destinations[f"{source}.{name}"] = Destination(f"{path}.w1", inward, (expert, part))
            destinations[f"{source}.down_proj"] = Destination(f"{path}.w2", outward, (expert, 0))
        if self.shared_experts is not None:
            destinations |= self.shared_experts.destinations(f"{path}.shared_experts")
        return destinations


def _scheme_of_experts(quant_config: QuantizationConfig | None, prefix: str) -> Fp8Scheme | None:
    """How the matrices of experts are stored; None for the model dtype.

    Raises:
        ServerConfigError: by one of upstream's methods.
    """
    if quant_config is None:
        return None
    is_ours = isinstance(quant_config, ops.SchemeConfig)
    if not is_ours or not isinstance(quant_config.scheme, Fp8Scheme):
        raise ServerConfigError(
            f"quantization: given {quant_config.get_name()}; "
            "wanted fp8, or none, for a model with experts"
        )
    return None if quant_config.ignores(f"{prefix}.experts.0.gate_proj") else quant_config.scheme


def unstacked(
    weights: Iterable[tuple[str, Tensor]], config: DiffusionConfig
) -> Iterator[tuple[str, Tensor]]:
    """Split the stacked experts of a fused checkpoint into views, one for each matrix.

    Fused checkpoints hold `mlp.w1` [E, 2I, D], the gate's rows first, and `mlp.w2` [E, D, I].
    Scales of the experts' rows are left out: experts multiply rows as they are.

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
            raise CheckpointError(
                f"{name}: given shape {list(tensor.shape)}; config.json wants {list(shapes[kind])}"
            )
        for expert, matrix in enumerate(tensor):
            source = f"{path}.experts.{expert}"
            if kind == "w2":
                yield f"{source}.down_proj.weight", matrix
                continue
            for part, half in zip(_PART, matrix.split(inner), strict=True):
                yield f"{source}.{part}.weight", half
