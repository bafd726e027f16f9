// SPDX-License-Identifier: Apache-2.0
//
// Conversions, vectors of 16 bytes, and addresses of rows.
#pragma once

#include <climits>

#include "vllm_add_llada/cuda_kernels/common/dispatch.cuh"

namespace native {

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

// Two neighbouring elements of a 16-bit dtype in one register.
template <typename T>
__device__ float2 pair_to_floats(unsigned word);
template <>
__device__ inline float2 pair_to_floats<__half>(unsigned word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
template <>
__device__ inline float2 pair_to_floats<__nv_bfloat16>(unsigned word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
template <typename T>
__device__ unsigned pair_from_floats(float first, float second);
template <>
__device__ inline unsigned pair_from_floats<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const unsigned*>(&pair);
}
template <>
__device__ inline unsigned pair_from_floats<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Neighbouring elements as they are loaded and kept: in whole registers, or a single element.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  unsigned words[sizeof(T) * kWidth / 4];
};
template <typename T>
struct Vector<T, 1> {
  T value;
};

template <typename T, int kWidth>
__device__ void to_floats(const Vector<T, kWidth>& vector, float (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    values[0] = to_float(vector.value);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = __uint_as_float(vector.words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const float2 pair = pair_to_floats<T>(vector.words[i / 2]);
      values[i] = pair.x;
      values[i + 1] = pair.y;
    }
  }
}

template <typename T, int kWidth>
__device__ Vector<T, kWidth> from_floats(const float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
  if constexpr (kWidth == 1) {
    vector.value = from_float<T>(values[0]);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vector.words[i] = __float_as_uint(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      vector.words[i / 2] = pair_from_floats<T>(values[i], values[i + 1]);
    }
  }
  return vector;
}

// Arithmetic in the model dtype. Each result is rounded to that dtype and operations are never
// contracted, so the bits are those of separate operations. (For 16-bit dtypes the product is exact
// in fp32, and so is every sum whose rounding it could change. So these are also the bits of fp32
// arithmetic that is rounded at the end.)
template <typename T>
__device__ T product_of(T a, T b) {
  return from_float<T>(__fmul_rn(to_float(a), to_float(b)));
}
template <typename T>
__device__ T sum_of(T a, T b) {
  return from_float<T>(__fadd_rn(to_float(a), to_float(b)));
}

// The type that packed instructions use.
template <typename T>
struct Pair {
  using Type = T;
};
template <>
struct Pair<__half> {
  using Type = __half2;
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

template <typename T, int kWidth, typename OnElement, typename OnPair>
__device__ Vector<T, kWidth> combined(const Vector<T, kWidth>& a, const Vector<T, kWidth>& b,
                                      OnElement on_element, OnPair on_pair) {
  Vector<T, kWidth> result;
  if constexpr (kWidth == 1) {
    result.value = on_element(a.value, b.value);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      result.words[i] =
          __float_as_uint(on_element(__uint_as_float(a.words[i]), __uint_as_float(b.words[i])));
    }
  } else {
    using Two = typename Pair<T>::Type;
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const Two two = on_pair(*reinterpret_cast<const Two*>(&a.words[i]),
                              *reinterpret_cast<const Two*>(&b.words[i]));
      result.words[i] = *reinterpret_cast<const unsigned*>(&two);
    }
  }
  return result;
}

template <typename T, int kWidth>
__device__ Vector<T, kWidth> product_of(const Vector<T, kWidth>& a, const Vector<T, kWidth>& b) {
  return combined(
      a, b, [](auto x, auto y) { return product_of(x, y); },
      [](auto x, auto y) { return __hmul2_rn(x, y); });
}

template <typename T, int kWidth>
__device__ Vector<T, kWidth> sum_of(const Vector<T, kWidth>& a, const Vector<T, kWidth>& b) {
  return combined(
      a, b, [](auto x, auto y) { return sum_of(x, y); },
      [](auto x, auto y) { return __hadd2_rn(x, y); });
}

template <typename T, int kWidth>
__device__ Vector<T, kWidth> negated(const Vector<T, kWidth>& vector) {
  if constexpr (kWidth == 1) {
    return {from_float<T>(-to_float(vector.value))};
  } else {
    Vector<T, kWidth> result;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) * kWidth / 4; ++i) {
      result.words[i] = vector.words[i] ^ (sizeof(T) == 4 ? 0x80000000u : 0x80008000u);
    }
    return result;
  }
}

// Multiplies the elements by a number in fp32, then rounds them.
template <typename T, int kWidth>
__device__ Vector<T, kWidth> scaled(const Vector<T, kWidth>& vector, float scale) {
  float values[kWidth];
  to_floats(vector, values);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= scale;
  return from_floats<T>(values);
}

template <typename T, int kWidth>
__device__ float sum_of_squares(const Vector<T, kWidth>& vector) {
  float values[kWidth];
  to_floats(vector, values);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum += values[i] * values[i];
  return sum;
}

template <int kWidth, typename T>
__device__ Vector<T, kWidth> load_vector(const T* source) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(source);
}

template <typename T, int kWidth>
__device__ void store_vector(T* target, const Vector<T, kWidth>& vector) {
  *reinterpret_cast<Vector<T, kWidth>*>(target) = vector;
}

template <int kWidth, typename T>
__device__ void load(const T* source, float (&values)[kWidth]) {
  // At most 16 bytes per load: with 16-bit activations, fp32 tables take two loads.
  constexpr int kStep = kWidth * sizeof(T) <= 16 ? kWidth : 16 / sizeof(T);
#pragma unroll
  for (int first = 0; first < kWidth; first += kStep) {
    float part[kStep];
    to_floats(load_vector<kStep>(source + first), part);
#pragma unroll
    for (int i = 0; i < kStep; ++i) values[first + i] = part[i];
  }
}

template <typename T>
__device__ T* row_address(const Rows& rows, int64_t outer, int64_t inner) {
  return static_cast<T*>(rows.data) + outer * rows.outer_stride + inner * rows.inner_stride;
}

__device__ inline int64_t at(const Integers& integers, int64_t index) {
  return integers.is_wide ? static_cast<const int64_t*>(integers.data)[index]
                          : static_cast<const int*>(integers.data)[index];
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

// A grid with one block per row and per `num_threads` of the row's `num_items`. Returns an empty
// grid if a grid cannot hold this many blocks.
inline dim3 row_grid(int64_t num_rows, int64_t num_items, int num_threads) {
  const int64_t blocks = (num_items - 1) / num_threads + 1;
  if (num_rows > INT_MAX || blocks > 65535) return dim3(0, 0);
  return dim3(static_cast<unsigned>(num_rows), static_cast<unsigned>(blocks));
}

}  // namespace native
