// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fused_ops {

constexpr int kMaxGroups = 1024;  // their ends lie in shared memory

// out[slots[i]] = (x[i] weight[g]^T) * scales[slots[i]], bf16, for the rows i of every group g. The
// product is rounded, and again after the scale.
struct WeightedGemmParams {
  const void* x;       // [num_rows, depth], rows x_stride apart, those of group 0 first
  const void* weight;  // [num_groups * num_columns, depth], rows weight_stride apart
  const int* ends;     // [num_groups], of the groups' rows
  const int* slots;    // [num_rows], a permutation
  const void* scales;  // [num_rows], or null for products as they are
  void* out;           // [num_rows, num_columns]
  int64_t x_stride, weight_stride;  // elements
  int num_rows, num_groups, num_columns, depth;
  int num_blocks;  // one for each multiprocessor
  bool early;      // read ends and weight while the kernel before this one ends
};

// Enqueues the product. cudaErrorInvalidValue: a shape that it does not take;
// cudaErrorNotSupported: not a card of compute capability 9.0, or no such driver call.
cudaError_t launch_weighted_gemm(const WeightedGemmParams& params, cudaStream_t stream);

}  // namespace fused_ops
