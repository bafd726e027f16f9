// SPDX-License-Identifier: Apache-2.0
//
// Types that the parameters of launches consist of.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace native {

enum class DataType { kFloat32, kFloat16, kBFloat16 };

// Rows of a tensor [outer, inner, columns] with unit column stride; strides in elements.
struct Rows {
  void* data;
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
};

// An array of 32-bit or 64-bit integers.
struct Integers {
  const void* data;
  bool is_wide;  // int64 if true, else int32
};

}  // namespace native
