# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of the fused operations; they define the results and where they are rounded.

"Model dtype" is the dtype of the activations. The rounding follows the public modelling code of
LLaDA (https://huggingface.co/GSAI-ML/LLaDA-8B-Instruct) and Dream
(https://huggingface.co/Dream-org/Dream-v0-Instruct-7B).
"""

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """``weight * cast(x32 * rsqrt(mean(x32^2) + eps))``; see `fused_ops.rms_norm`."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return _written(weight * (x32 * scale).to(x.dtype), out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """``residual += x`` in the model dtype, then `rms_norm`; see `fused_ops.add_rms_norm`."""
    residual += x
    return rms_norm(residual, weight, eps, out)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Half-split rotation of q and k in place; see `fused_ops.apply_rotary`."""
    for heads in (q, k):
        rotated = heads[..., : cos.shape[-1]]
        # fp32 tables promote the product to fp32; tables in the model dtype keep it there.
        lower, upper = rotated.chunk(2, dim=-1)
        turned = torch.cat((-upper, lower), dim=-1)
        rotated.copy_(rotated * cos[:, None, :] + turned * sin[:, None, :])


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu(gate) * up`` in the model dtype; see `fused_ops.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _written(silu(gate) * up, out)


def _written(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)
