// SPDX-License-Identifier: Apache-2.0
//
// Operations on sums before they are written.

#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace fused_ops {

// Two elements as the 32 bits that registers and shuffles hold, the first in the lower half.
__device__ inline uint32_t as_bits(__nv_bfloat162 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ inline __nv_bfloat162 as_pair(uint32_t bits) {
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}

// Transposes a 4 x 4 matrix that four neighbouring lanes hold: v[j] of lane i becomes v[i] of lane
// j.
__device__ inline void transpose(uint32_t (&v)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = (lane & bit) != 0;
      const uint32_t other = __shfl_xor_sync(~0u, upper ? v[i] : v[i | bit], bit);
      v[i] = upper ? other : v[i];
      v[i | bit] = upper ? v[i | bit] : other;
    }
  }
}

__device__ inline float rounded(float value) {
  return __bfloat162float(__float2bfloat16_rn(value));
}

__device__ inline float2 rounded(float2 value) {
  return __bfloat1622float2(__float22bfloat162_rn(value));
}

// x times the sigmoid of `inner`.
__device__ inline float times_sigmoid(float x, float inner) {
  float power, quotient;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(inner * -1.4426950408889634f));  // -log2(e)
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
  return x * quotient;
}

__device__ inline float silu(float x) { return times_sigmoid(x, x); }

// gelu in its tanh form: (1 + tanh(z)) / 2 is the sigmoid of 2z, with z = sqrt(2 / pi) (x + c x^3).
__device__ inline float gelu(float x) {
  return times_sigmoid(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
}

// silu(gate) * up of bf16 numbers, rounded like PyTorch's separate operations: silu here, the
// product when the caller stores it.
__device__ inline float2 silu_mul_of_rounded(float2 gate, float2 up) {
  gate = rounded(make_float2(silu(gate.x), silu(gate.y)));
  return make_float2(gate.x * up.x, gate.y * up.y);
}

// The same for sums, which are first rounded to bf16.
__device__ inline float2 silu_mul(float2 gate, float2 up) {
  return silu_mul_of_rounded(rounded(gate), rounded(up));
}

// gelu(gate) * up for sums, rounded in the same way.
__device__ inline float2 gelu_mul(float2 gate, float2 up) {
  gate = rounded(gate);
  gate = rounded(make_float2(gelu(gate.x), gelu(gate.y)));
  up = rounded(up);
  return make_float2(gate.x * up.x, gate.y * up.y);
}

// The destination of sums.
struct Target {
  const __nv_bfloat16* bias;  // [columns], or null
  __nv_bfloat16* out;         // rows are `stride` elements apart
  int64_t stride;
  bool adds;  // whether sums are added to the values in `out`
};

__device__ inline __nv_bfloat162* place_of(const Target& target, int row, int column) {
  return reinterpret_cast<__nv_bfloat162*>(target.out + row * target.stride + column);
}

// Loads the two neighbouring elements that sums are added to, before the sums are ready.
__device__ inline __nv_bfloat162 load_pair(const Target& target, int row, int column) {
  return target.adds ? *place_of(target, row, column) : __nv_bfloat162{};
}

__device__ inline void store_pair(const Target& target, int row, int column, float first,
                                  float second, __nv_bfloat162 there) {
  if (target.bias != nullptr) {
    first += __bfloat162float(target.bias[column]);
    second += __bfloat162float(target.bias[column + 1]);
  }
  if (target.adds) {
    first += __low2float(there);
    second += __high2float(there);
  }
  *place_of(target, row, column) = __floats2bfloat162_rn(first, second);
}

}  // namespace fused_ops
