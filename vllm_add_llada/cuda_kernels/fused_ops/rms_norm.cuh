// SPDX-License-Identifier: Apache-2.0
//
// RMSNorm with and without a residual: a block takes a row, sums its squares, and writes it on a
// second walk that finds it in the caches. Rounding: the normalised value is cast to the model
// dtype before it is multiplied by the weight.
#pragma once

#include <algorithm>

#include "rows.cuh"

namespace fused_ops {

// Sum over the block, in the same order for every row.
__device__ inline float block_sum(float value) {
  constexpr unsigned kFullMask = 0xffffffffu;
  __shared__ float warp_sums[32];
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  const int lane = threadIdx.x % 32;
  if (lane == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? warp_sums[lane] : 0.0f;
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  return value;
}

template <typename T, int kWidth, bool kHasResidual>
__global__ void rms_norm_rows(const __grid_constant__ RmsNormParams params) {
  const int64_t outer = blockIdx.x / params.x.inner;
  const int64_t inner = blockIdx.x % params.x.inner;
  const T* x = row_address<T>(params.x, outer, inner);
  T* source = kHasResidual ? row_address<T>(params.residual, outer, inner) : const_cast<T*>(x);
  T* out = row_address<T>(params.out, outer, inner);
  const T* weight = static_cast<const T*>(params.weight);
  const int step = blockDim.x * kWidth;

  float sum = 0.0f;
  for (int column = threadIdx.x * kWidth; column < params.num_columns; column += step) {
    float values[kWidth];
    load<kWidth>(source + column, values);
    if (kHasResidual) {
      float added[kWidth];
      load<kWidth>(x + column, added);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[i] = rounded<T>(values[i] + added[i]);
      store<kWidth>(source + column, values);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += values[i] * values[i];
  }
  const float scale = rsqrtf(block_sum(sum) / params.num_columns + params.eps);

  for (int column = threadIdx.x * kWidth; column < params.num_columns; column += step) {
    float values[kWidth], weights[kWidth];
    load<kWidth>(source + column, values);
    load<kWidth>(weight + column, weights);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = rounded<T>(values[i] * scale) * weights[i];
    store<kWidth>(out + column, values);
  }
}

template <typename T, int kWidth, bool kHasResidual>
cudaError_t launch_rows(const RmsNormParams& params, cudaStream_t stream) {
  const int num_vectors = (params.num_columns - 1) / kWidth + 1;
  const int num_threads = std::min(1024, (num_vectors + 31) / 32 * 32);
  rms_norm_rows<T, kWidth, kHasResidual>
      <<<static_cast<unsigned>(params.num_rows), num_threads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <bool kHasResidual>
cudaError_t launch_norm(const RmsNormParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows > INT_MAX) return cudaErrorInvalidConfiguration;
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int kWidth = kVectorWidth<T>;
    const bool is_vector = params.num_columns % kWidth == 0 && is_aligned(params.weight) &&
                           has_aligned_rows<T>(params.x) && has_aligned_rows<T>(params.out) &&
                           (!kHasResidual || has_aligned_rows<T>(params.residual));
    return is_vector ? launch_rows<T, kWidth, kHasResidual>(params, stream)
                     : launch_rows<T, 1, kHasResidual>(params, stream);
  });
}

}  // namespace fused_ops
