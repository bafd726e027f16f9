// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "fused_ops.h"

namespace fused_ops {

constexpr int kMaxGroups = 1024;  // the groups' ends are in shared memory

// Products of groups of rows, where each group has its own matrix. Row i belongs to slot slots[i].
struct GroupedGemmParams {
  bool is_gated;
  const void* x;       // [any, depth], rows x_stride apart
  const void* weight;  // [num_groups, columns, depth], rows weight_stride apart
  // scales of fp8 rows x; null together with weight_scales: both operands are bf16
  const float* x_scales;
  const float* weight_scales;       // [num_groups, columns]
  const int* ends;                  // [num_groups], ends of the groups' rows
  const int* slots;                 // [num_rows]
  const void* scales;               // [num_rows], or null for unscaled products
  void* out;                        // [num_rows, num_columns]
  int64_t x_stride, weight_stride;  // elements
  int num_rows, num_groups, num_columns, depth;
  int num_chosen;  // slots per row of x, for a gated product
  int num_blocks;  // one for each multiprocessor
  bool early;      // read ends and weight while the kernel before this one ends
  bool is_gelu;    // gelu in its tanh form instead of silu
};

// Gated: out[i] = silu(x[slots[i] / num_chosen] gate[g]^T) * (x[the same] up[g]^T), bf16, for the
// rows i of every group g. The weight of a group is num_columns gates and then num_columns ups.
// Both products, silu and the result are rounded.
//
// Otherwise: out[slots[i]] = (x[i] weight[g]^T) * scales[slots[i]], bf16; slots are a permutation.
// The product is rounded, and rounded again after the scale.
//
// fp8 products are multiplied by the scales of both operands before they are rounded.
//
// Returns cudaErrorInvalidValue for an unsupported shape, and cudaErrorNotSupported if the card
// does not have compute capability 9.0 or the driver lacks the call that describes a matrix.
cudaError_t launch_grouped_gemm(const GroupedGemmParams& params, cudaStream_t stream);

}  // namespace fused_ops
