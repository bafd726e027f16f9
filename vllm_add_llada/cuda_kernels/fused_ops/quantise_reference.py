# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of the fp8 operations; they define the results and where they are rounded."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest number of the format
SMALLEST = 1e-30  # lower bound for the largest number of a row: its reciprocal must be finite


def quantise_rows(x: Tensor, out: Tensor, scales: Tensor, fixed_scale: Tensor | None) -> None:
    """Divide rows by their scales, and cast; see `fused_ops.quantise_rows`."""
    wide = x.float()
    if fixed_scale is None:
        largest = wide.abs().amax(dim=1).clamp(min=SMALLEST)
        scales.copy_(largest / LARGEST)
        inverse = LARGEST / largest
    else:
        scales.copy_(fixed_scale.expand(len(x)))
        inverse = 1.0 / scales
    out.copy_((wide * inverse[:, None]).clamp(-LARGEST, LARGEST).to(FP8))


def rescaled(product: Tensor, row_scales: Tensor, column_scales: Tensor) -> Tensor:
    """Multiply a product of fp8 numbers by its scales, in fp32."""
    return product.float() * (row_scales[:, None] * column_scales)


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x W^T of the unscaled numbers, in fp32."""
    return torch.mm(x.float(), weight.float().t())
