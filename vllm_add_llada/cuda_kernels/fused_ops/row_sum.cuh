// SPDX-License-Identifier: Apache-2.0
//
// Sums over a row that lies in the registers of its threads.
#pragma once

#include <cuda_runtime.h>

namespace fused_ops {

constexpr unsigned kFullMask = 0xffffffffu;

// Sum over the threads of a row: blockDim.x of them, which are a power of two within a warp, or
// whole warps that make up the block.
__device__ inline float row_sum(float value) {
  for (int distance = min(blockDim.x, 32) / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  if (blockDim.x <= 32) return value;
  __shared__ float warp_sums[32];
  const int lane = threadIdx.x % 32;
  if (lane == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? warp_sums[lane] : 0.0f;
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  return value;
}

// Threads of a row that has `num_parts` parts to spread: a power of two, or whole warps.
inline int threads_per_row(int num_parts) {
  if (num_parts > 32) return (num_parts + 31) / 32 * 32;
  int threads = 1;
  while (threads < num_parts) threads *= 2;
  return threads;
}

}  // namespace fused_ops
