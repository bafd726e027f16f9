// SPDX-License-Identifier: Apache-2.0
//
// Converts matrices of 4-bit or fp8 numbers to bf16, for products of many rows.

#include <cuda_fp8.h>

#include <climits>
#include <type_traits>

#include "epilogue.cuh"
#include "linear.h"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"

namespace fused_ops {
namespace {

constexpr int kStrip = 128;
constexpr int kParts = 4;  // parts per strip, one for each thread
constexpr int kRows = 4;   // rows per thread; it has some numbers of each
constexpr int kThreads = 256;

// The float 2^23. A float that is larger by a small integer has this integer in its lowest bits.
constexpr uint32_t kWhole = 0x4b000000;

// Scale and zero point of a group. A number q represents (q - zero) * scale, or table[q] * scale.
template <bool kHasTable>
struct Group {
  float scale, zero;

  __device__ float plain(uint32_t number, const float* table) const {
    if constexpr (kHasTable) return table[number & 15];
    return __uint_as_float((number & 15) | kWhole) - (__uint_as_float(kWhole) + zero);
  }
  __device__ uint32_t two(uint32_t numbers, const float* table) const {
    const float first = plain(numbers, table), second = plain(numbers >> 16, table);
    return as_bits(__floats2bfloat162_rn(first * scale, second * scale));
  }
};

// Collects the numbers i and i + 4 of four words, for i from 0 to 3: in the order of the words,
// four bits each, first the numbers i and then the numbers i + 4.
__device__ void regroup(const uint4& words, uint32_t (&pairs)[4]) {
  constexpr uint32_t kLow = 0x0f0f0f0f, kEven = 0x6240, kOdd = 0x7351;
  const uint32_t bytes[2][2] = {
      {__byte_perm(words.x, words.z, kEven), __byte_perm(words.y, words.w, kEven)},
      {__byte_perm(words.x, words.z, kOdd), __byte_perm(words.y, words.w, kOdd)}};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t even = bytes[half][0], odd = bytes[half][1];
    pairs[2 * half] = (even & kLow) | (odd << 4 & ~kLow);
    pairs[2 * half + 1] = (even >> 4 & kLow) | (odd & ~kLow);
  }
}

// Four neighbouring threads have a strip of each of `kRows` rows. A thread loads the 16 bytes that
// one thread of a tensor core has (`STRIP` in Python). It exchanges numbers with the other three,
// and then owns the numbers from 32 c + 8 part on, for c from 0 to 3. So a warp loads and stores
// whole lines.
// kGroups: number of groups per strip for which scales are read.
template <int kGroups, bool kHasTable>
__global__ void __launch_bounds__(kThreads)
    unpack_strips(const __grid_constant__ UnpackParams params) {
  __shared__ float table[16];
  launch_dependents();
  wait_for_prerequisites();
  if constexpr (kHasTable) {
    if (threadIdx.x < 16) table[threadIdx.x] = params.table[threadIdx.x];
    __syncthreads();
  }
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  const unsigned of_row = params.depth / kStrip * kParts;
  const int64_t first_row = static_cast<int64_t>(index / of_row) * kRows;
  const int place = index % of_row, part = place % kParts, first = place / kParts * kStrip;
  uint4 given[kRows];
  Group<kHasTable> groups[kRows][kGroups];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {  // A row beyond the last one repeats the last row.
    const int64_t row = min(first_row + i, static_cast<int64_t>(params.num_rows) - 1);
    const auto* values = static_cast<const uint8_t*>(params.values) + row * params.values_stride;
    given[i] = __ldcs(reinterpret_cast<const uint4*>(values) + place);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const int64_t at =
          row * params.scales_stride + (first + j * (kStrip / kGroups)) / params.group;
      groups[i][j].scale = params.scales[at];
      groups[i][j].zero = kHasTable ? 0.0f : params.zeros[at];
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    uint32_t pairs[kParts];
    regroup(given[i], pairs);
    transpose(pairs);
    if (first_row + i >= params.num_rows) continue;
    auto* target = reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(params.out) +
                                            (first_row + i) * params.depth + first);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const Group<kHasTable>& group = groups[i][word * kGroups / 4];
      const int shift = 4 * word;
      target[word * kParts + part] =
          make_uint4(group.two(pairs[0] >> shift, table), group.two(pairs[1] >> shift, table),
                     group.two(pairs[2] >> shift, table), group.two(pairs[3] >> shift, table));
    }
  }
}

// Widens fp8 numbers; a thread has 16 of them.
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
  const int64_t rows = params.is_fp8 ? params.num_rows : (params.num_rows - 1) / kRows + 1;
  const int in_thread = params.is_fp8 ? 16 : kStrip / kParts;
  const int64_t blocks = (rows * (params.depth / in_thread) - 1) / kThreads + 1;
  if (blocks > INT_MAX / kThreads) return cudaErrorInvalidValue;
  const auto start = [&](auto* kernel) {
    return launch_kernel(kernel, static_cast<unsigned>(blocks), kThreads, params, stream);
  };
  if (params.is_fp8) return start(widen_fp8);
  const auto start_groups = [&](auto groups) {
    return params.zeros == nullptr ? start(unpack_strips<groups, true>)
                                   : start(unpack_strips<groups, false>);
  };
  if (params.group % kStrip == 0) return start_groups(std::integral_constant<int, 1>());
  if (params.group == kStrip / 2) return start_groups(std::integral_constant<int, 2>());
  return start_groups(std::integral_constant<int, 4>());
}

}  // namespace fused_ops
