// SPDX-License-Identifier: Apache-2.0
//
// Sums and other reductions over threads, whose order depends on nothing but their number.
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

// Over all lanes of a warp; each has the result.
template <typename T, typename Combine>
__device__ T over_warp(T value, Combine combine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

// Over `num_lanes` lanes side by side, a power of two; every lane of the warp takes part.
template <typename T, typename Count, typename Combine>
__device__ T over_lanes(T value, Count num_lanes, Combine combine) {
  for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

// The sum over the lanes of a warp up to this one.
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

// Over what the warps of a block have left in `of_warps`, sums or what is not negative.
template <typename T, typename Combine>
__device__ T over_warps(const T (&of_warps)[32], Combine combine) {
  const int lane = threadIdx.x % 32;
  return over_warp(lane < blockDim.x / 32 ? of_warps[lane] : T{}, combine);
}

}  // namespace native
