// SPDX-License-Identifier: Apache-2.0
//
// Sums and other reductions over threads. Their order depends only on the number of threads.
#pragma once

namespace native {

constexpr unsigned kFullMask = 0xffffffffu;

struct Sum {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Largest {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

// Reduces over all lanes of a warp; every lane receives the result.
template <typename T, typename Combine>
__device__ T over_warp(T value, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

// Reduces over `num_lanes` neighbouring lanes, a power of two. Every lane of the warp must take
// part.
template <typename T, typename Count, typename Combine>
__device__ T over_lanes(T value, Count num_lanes, Combine combine) {
  for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

// The sum over the lanes of a warp up to and including this one.
template <typename T>
__device__ T sum_upto_lane(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(kFullMask, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// Reduces the values of a block's warps in `of_warps`. Missing warps count as 0, so the values must
// be summed or non-negative.
template <typename T, typename Combine>
__device__ T over_warps(const T (&of_warps)[32], Combine combine) {
  const int lane = threadIdx.x % 32;
  return over_warp(lane < blockDim.x / 32 ? of_warps[lane] : T{}, combine);
}

}  // namespace native
