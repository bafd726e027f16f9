# SPDX-License-Identifier: Apache-2.0
"""Matrix products over gathered rows: masked rows times the output matrix, tokens times experts.

Importing never fails: without Triton everything runs in PyTorch.
"""

from ._ops import gather_gemm, grouped_gemm, is_built

__all__ = ["gather_gemm", "grouped_gemm", "is_built"]
