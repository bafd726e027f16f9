// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "fused_ops.h"

namespace fused_ops {

constexpr int kMaxGroups = 1024;  // their ends lie in shared memory

// Products of groups of rows, each group with a matrix of its own. Row i stands for slots[i].
struct GroupedGemmParams {
  bool is_gated;
  const void* x;                    // [, depth], rows x_stride apart
  const void* weight;               // [num_groups, columns, depth], rows weight_stride apart
  const float* x_scales;            // of the rows of fp8 x; null, as the next: both are bf16
  const float* weight_scales;       // [num_groups, columns]
  const int* ends;                  // [num_groups], of the groups' rows
  const int* slots;                 // [num_rows]
  const void* scales;               // [num_rows], or null for products as they are
  void* out;                        // [num_rows, num_columns]
  int64_t x_stride, weight_stride;  // elements
  int num_rows, num_groups, num_columns, depth;
  int num_chosen;  // slots of a row of x, of a gated product
  int num_blocks;  // one for each multiprocessor
  bool early;      // read ends and weight while the kernel before this one ends
};

// Gated: out[i] = silu(x[slots[i] / num_chosen] gate[g]^T) * (x[the same] up[g]^T), bf16, for the
// rows i of every group g, whose weight is num_columns gates and then as many ups. Both products,
// silu and the result are rounded. Else: out[slots[i]] = (x[i] weight[g]^T) * scales[slots[i]],
// bf16; slots are a permutation. The product is rounded, and again after the scale. Products of fp8
// are multiplied by the scales of both before they are rounded.
//
// cudaErrorInvalidValue: a shape that it does not take; cudaErrorNotSupported: not a card of
// compute capability 9.0, or no such driver call.
cudaError_t launch_grouped_gemm(const GroupedGemmParams& params, cudaStream_t stream);

}  // namespace fused_ops
