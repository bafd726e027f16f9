// SPDX-License-Identifier: Apache-2.0
//
// Matrices of 4-bit numbers, or fp8, made bf16; for products of many rows.

#include <cuda_fp8.h>

#include <climits>

#include "epilogue.cuh"
#include "linear.h"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"

namespace fused_ops {
namespace {

constexpr int kStrip = 128;
constexpr int kParts = 4;  // of a strip, a thread each
constexpr int kThreads = 256;

// Four numbers of a part, q - zero or of the table, as they follow each other in memory.
struct Meaning {
  float scale, zero;
  const float* table;

  __device__ uint32_t operator()(uint32_t numbers) const {
    const int first = numbers & 15, second = numbers >> 16 & 15;
    const float2 plain = table != nullptr ? make_float2(table[first], table[second])
                                          : make_float2(first - zero, second - zero);
    return as_bits(__floats2bfloat162_rn(plain.x * scale, plain.y * scale));
  }
};

// A thread has the numbers 32 c + 8 part and on of a strip, for c from 0 to 3: of the words c of
// all four threads of a tensor core, by `STRIP` in Python, those that are `part` from the first.
__global__ void __launch_bounds__(kThreads)
    unpack_strips(const __grid_constant__ UnpackParams params) {
  __shared__ float table[16];
  launch_dependents();
  wait_for_prerequisites();
  if (params.table != nullptr && threadIdx.x < 16) table[threadIdx.x] = params.table[threadIdx.x];
  __syncthreads();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int num_strips = params.depth / kStrip;
  const int part = index % kParts, strip = index / kParts % num_strips;
  const int64_t row = index / kParts / num_strips;
  if (row >= params.num_rows) return;
  const auto* source = reinterpret_cast<const uint4*>(
      static_cast<const uint8_t*>(params.values) + row * params.values_stride + strip * kStrip / 2);
  uint32_t words[kParts][4];
#pragma unroll
  for (int thread = 0; thread < kParts; ++thread) {
    const uint4 four = source[thread];
    words[0][thread] = four.x >> part * 4;
    words[1][thread] = four.y >> part * 4;
    words[2][thread] = four.z >> part * 4;
    words[3][thread] = four.w >> part * 4;
  }
  auto* target = reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(params.out) +
                                          row * params.depth + strip * kStrip);
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int64_t group = row * params.scales_stride + (strip * kStrip + word * 32) / params.group;
    const float zero = params.zeros == nullptr ? 0.0f : params.zeros[group];
    const Meaning meaning{params.scales[group], zero, params.zeros == nullptr ? table : nullptr};
    const uint32_t (&numbers)[4] = words[word];
    target[word * 4 + part] = make_uint4(meaning(numbers[0]), meaning(numbers[1]),
                                         meaning(numbers[2]), meaning(numbers[3]));
  }
}

// A thread has 16 numbers.
__global__ void __launch_bounds__(kThreads) widen_fp8(const __grid_constant__ UnpackParams params) {
  launch_dependents();
  wait_for_prerequisites();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int column = index % (params.depth / 16) * 16;
  const int64_t row = index / (params.depth / 16);
  if (row >= params.num_rows) return;
  const auto* source = static_cast<const uint8_t*>(params.values) + row * params.values_stride;
  const uint4 bytes = *reinterpret_cast<const uint4*>(source + column);
  const float scale = params.scales[row * params.scales_stride + column / params.group];
  const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> i % 2 * 16);
    const __half2 halves = __nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3);
    const float2 wide = __half22float2(halves);
    pairs[i] = as_bits(__floats2bfloat162_rn(wide.x * scale, wide.y * scale));
  }
  auto* target = reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(params.out) +
                                          row * params.depth + column);
  target[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  target[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

}  // namespace

cudaError_t launch_unpack(const UnpackParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.depth % kStrip != 0 || params.group % 32 != 0) return cudaErrorInvalidValue;
  const int in_thread = params.is_fp8 ? 16 : kStrip / kParts;
  const int64_t blocks =
      (static_cast<int64_t>(params.num_rows) * (params.depth / in_thread) - 1) / kThreads + 1;
  if (blocks > INT_MAX) return cudaErrorInvalidValue;
  const auto kernel = params.is_fp8 ? widen_fp8 : unpack_strips;
  return launch_kernel(kernel, static_cast<unsigned>(blocks), kThreads, params, stream);
}

}  // namespace fused_ops
