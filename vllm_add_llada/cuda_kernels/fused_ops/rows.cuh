// SPDX-License-Identifier: Apache-2.0
//
// What the kernels share: conversion, vectors of 16 bytes, and addresses of rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>

#include "fused_ops.h"

namespace fused_ops {

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// The value as the model dtype holds it.
template <typename T>
__device__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T values[kWidth];
};

template <int kWidth, typename T>
__device__ void load(const T* source, float (&values)[kWidth]) {
  // At most 16 bytes a load: fp32 tables beside 16-bit activations take two.
  constexpr int kStep = kWidth * sizeof(T) <= 16 ? kWidth : 16 / sizeof(T);
#pragma unroll
  for (int first = 0; first < kWidth; first += kStep) {
    const auto vector = *reinterpret_cast<const Vector<T, kStep>*>(source + first);
#pragma unroll
    for (int i = 0; i < kStep; ++i) values[first + i] = to_float(vector.values[i]);
  }
}

template <int kWidth, typename T>
__device__ void store(T* target, const float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) vector.values[i] = from_float<T>(values[i]);
  *reinterpret_cast<Vector<T, kWidth>*>(target) = vector;
}

template <typename T>
__device__ T* row_address(const Rows& rows, int64_t outer, int64_t inner) {
  return static_cast<T*>(rows.data) + outer * rows.outer_stride + inner * rows.inner_stride;
}

template <typename T>
constexpr int kVectorWidth = 16 / sizeof(T);

inline bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// Whether every row starts on 16 bytes.
template <typename T>
bool has_aligned_rows(const Rows& rows) {
  return is_aligned(rows.data) && rows.outer_stride % kVectorWidth<T> == 0 &&
         rows.inner_stride % kVectorWidth<T> == 0;
}

// One block for each of `num_rows` and each `num_threads` of its `num_items`; empty where a grid
// cannot hold that many.
inline dim3 row_grid(int64_t num_rows, int64_t num_items, int num_threads) {
  const int64_t blocks = (num_items - 1) / num_threads + 1;
  if (num_rows > INT_MAX || blocks > 65535) return dim3(0, 0);
  return dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(blocks));
}

// Calls `function` with a null pointer of the C++ type of `dtype`.
template <typename Function>
cudaError_t dispatch(DataType dtype, Function function) {
  switch (dtype) {
    case DataType::kFloat32:
      return function(static_cast<float*>(nullptr));
    case DataType::kFloat16:
      return function(static_cast<__half*>(nullptr));
    case DataType::kBFloat16:
      return function(static_cast<__nv_bfloat16*>(nullptr));
  }
  return cudaErrorInvalidValue;
}

}  // namespace fused_ops
