// SPDX-License-Identifier: Apache-2.0
//
// RMSNorm. A row stays in the registers of its threads from the sum of its squares to its result,
// so each element crosses the memory bus once in each direction. The normalised value is cast to
// the model dtype before it is multiplied by the weight.
//
// The division of a row among threads depends only on its width, so its bits do not depend on the
// other rows of the call.

#include <algorithm>

#include "fused_ops.h"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"
#include "vllm_add_llada/cuda_kernels/common/reduce.cuh"
#include "vllm_add_llada/cuda_kernels/common/vectors.cuh"

namespace fused_ops {
namespace {

constexpr int kMaxThreads = 1024;

// Sum over the threads of a row. There are blockDim.x of them: a power of two within a warp, or
// whole warps that make up the block.
__device__ float row_sum(float value) {
  value = over_lanes(value, min(blockDim.x, 32), Sum());
  if (blockDim.x <= 32) return value;
  __shared__ float warp_sums[32];
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  return over_warps(warp_sums, Sum());
}

// Normalises blockDim.y rows per block; a thread has up to kVectors vectors of its row.
template <typename T, int kWidth, int kVectors>
__global__ void __launch_bounds__(kMaxThreads)
    norm_rows(const __grid_constant__ RmsNormParams params) {
  using Part = Vector<T, kWidth>;
  launch_dependents();
  const unsigned row = blockIdx.x * blockDim.y + threadIdx.y;
  const unsigned outer = row / static_cast<unsigned>(params.x.inner);
  const unsigned inner = row % static_cast<unsigned>(params.x.inner);
  const Part* x = reinterpret_cast<const Part*>(row_address<T>(params.x, outer, inner));
  Part* out = reinterpret_cast<Part*>(row_address<T>(params.out, outer, inner));
  const Part* weight = static_cast<const Part*>(params.weight);
  // The last block may have threads without a row. They take part in the sums, but add nothing.
  const int num_vectors = row < params.num_rows ? params.num_columns / kWidth : 0;
  if (blockIdx.x == 0) {
    for (int index = threadIdx.x; index < num_vectors; index += blockDim.x) {
      prefetch(weight + index);
    }
  }
  wait_for_prerequisites();

  Part parts[kVectors], weights[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int index = threadIdx.x + i * blockDim.x;
    if (index >= num_vectors) continue;
    parts[i] = x[index];
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int index = threadIdx.x + i * blockDim.x;
    if (index < num_vectors) weights[i] = weight[index];
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int index = threadIdx.x + i * blockDim.x;
    if (index >= num_vectors) continue;
    sum += sum_of_squares(parts[i]);
  }
  const float scale = rsqrtf(row_sum(sum) / params.num_columns + params.eps);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int index = threadIdx.x + i * blockDim.x;
    if (index < num_vectors) out[index] = product_of(scaled(parts[i], scale), weights[i]);
  }
}

// Normalises rows that do not start on 16 bytes or do not fit into the registers of a block. A
// block takes a row, sums its squares, and finds it in the caches on a second pass.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kMaxThreads)
    norm_rows_in_two_walks(const __grid_constant__ RmsNormParams params) {
  using Part = Vector<T, kWidth>;
  launch_dependents();
  wait_for_prerequisites();
  const unsigned outer = blockIdx.x / static_cast<unsigned>(params.x.inner);
  const unsigned inner = blockIdx.x % static_cast<unsigned>(params.x.inner);
  const Part* x = reinterpret_cast<const Part*>(row_address<T>(params.x, outer, inner));
  Part* out = reinterpret_cast<Part*>(row_address<T>(params.out, outer, inner));
  const Part* weight = static_cast<const Part*>(params.weight);
  const int num_vectors = params.num_columns / kWidth;

  float sum = 0.0f;
  for (int index = threadIdx.x; index < num_vectors; index += blockDim.x) {
    sum += sum_of_squares(x[index]);
  }
  const float scale = rsqrtf(row_sum(sum) / params.num_columns + params.eps);
  for (int index = threadIdx.x; index < num_vectors; index += blockDim.x) {
    out[index] = product_of(scaled(x[index], scale), weight[index]);
  }
}

// Number of threads for a row of `num_parts` parts: a power of two, or whole warps.
int threads_per_row(int num_parts) {
  if (num_parts > 32) return (num_parts + 31) / 32 * 32;
  int threads = 1;
  while (threads < num_parts) threads *= 2;
  return threads;
}

template <typename T, int kWidth, int kVectors>
cudaError_t launch_in_registers(const RmsNormParams& params, cudaStream_t stream) {
  constexpr int kThreads = 128;
  const int num_vectors = params.num_columns / kWidth;
  const int threads = threads_per_row((num_vectors - 1) / kVectors + 1);
  const int rows = threads > 32 ? 1 : kThreads / threads;
  const auto blocks = static_cast<unsigned>((params.num_rows - 1) / rows + 1);
  return launch_kernel(norm_rows<T, kWidth, kVectors>, blocks, dim3(threads, rows), params, stream);
}

template <typename T, int kWidth>
cudaError_t launch_in_two_walks(const RmsNormParams& params, cudaStream_t stream) {
  const int threads = std::min(kMaxThreads, (params.num_columns / kWidth + 31) / 32 * 32);
  return launch_kernel(norm_rows_in_two_walks<T, kWidth>, static_cast<unsigned>(params.num_rows),
                       threads, params, stream);
}

}  // namespace

cudaError_t launch_rms_norm(const RmsNormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows > INT_MAX) return cudaErrorInvalidConfiguration;
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int kWidth = kVectorWidth<T>;
    const bool is_vector = params.num_columns % kWidth == 0 && is_aligned(params.weight) &&
                           has_aligned_rows<T>(params.x) && has_aligned_rows<T>(params.out);
    if (!is_vector) return launch_in_two_walks<T, 1>(params, stream);
    const int num_vectors = params.num_columns / kWidth;
    if (num_vectors <= 32) return launch_in_registers<T, kWidth, 1>(params, stream);
    if (num_vectors <= 2 * kMaxThreads) {
      return launch_in_registers<T, kWidth, 2>(params, stream);
    }
    if (num_vectors <= 4 * kMaxThreads) {
      return launch_in_registers<T, kWidth, 4>(params, stream);
    }
    return launch_in_two_walks<T, kWidth>(params, stream);
  });
}

}  // namespace fused_ops
