// SPDX-License-Identifier: Apache-2.0
//
// What is done with sums before they are written.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace gather_gemm {

__device__ inline float rounded(float value) {
  return __bfloat162float(__float2bfloat16_rn(value));
}

// As PyTorch rounds them one by one: both products, silu, and silu times up.
__device__ inline float silu_mul(float gate, float up) {
  gate = rounded(gate);
  return rounded(__fdividef(gate, 1.0f + __expf(-gate))) * rounded(up);
}

// Two elements as the 32 bits that registers and shuffles take, the first in the lower half.
__device__ inline __nv_bfloat162 as_pair(uint32_t bits) {
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}

__device__ inline uint32_t as_bits(__nv_bfloat162 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

}  // namespace gather_gemm
