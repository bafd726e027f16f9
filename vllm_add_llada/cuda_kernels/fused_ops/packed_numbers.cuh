// SPDX-License-Identifier: Apache-2.0
//
// Converts 4-bit numbers to 16-bit floats in registers. A word holds eight numbers, of which i and
// i + 4 are neighbours along the depth (`STRIP` in Python).

#pragma once

#include "epilogue.cuh"
#include "linear.h"

namespace fused_ops {

constexpr int kStrip = 128;  // numbers along the depth whose order is changed together

__device__ inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// Looks up a byte for each of the four numbers in the lower half of a word. A selector of 8 or more
// returns the sign bit of a byte eight times. `LookUp` stores the bytes so that the XOR with the
// other half of the table cancels it.
__device__ inline uint32_t looked_up(const uint32_t (&low)[2], const uint32_t (&high)[2],
                                     uint32_t word) {
  return permuted(low[0], low[1], word) ^ permuted(high[0], high[1], word ^ 0x8888);
}

// Looks up the eight numbers of a word, as pairs of numbers i and i + 4.
__device__ inline void look_up(const LookUp& table, uint32_t word, uint32_t (&pairs)[4]) {
  uint32_t neighbours[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t numbers = word >> half * 16;
    const uint32_t upper = looked_up(table.upper_low, table.upper_high, numbers);
    const uint32_t lower = looked_up(table.lower_low, table.lower_high, numbers);
    neighbours[half][0] = permuted(lower, upper, 0x5140);
    neighbours[half][1] = permuted(lower, upper, 0x7362);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs[i * 2] = permuted(neighbours[0][i], neighbours[1][i], 0x5410);
    pairs[i * 2 + 1] = permuted(neighbours[0][i], neighbours[1][i], 0x7632);
  }
}

// Puts pair i of a word of integers into the lowest bits of a power of two, which adds them to it:
// 128 in bf16, 1024 in fp16. `base` is a pair of that power. It comes in a register, because only
// one operand of an instruction may be a constant.
__device__ inline uint32_t above(uint32_t base, uint32_t word, int i) {
  uint32_t sum;  // word & 0x000F000F | base
  asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(sum) : "r"(word >> i * 4), "r"(base));
  return sum;
}

// Like `look_up`, for integers minus their zero point. `zero` is a pair of the power of two plus
// the zero point.
__device__ inline void subtract(uint32_t k128, uint32_t zero, uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = as_bits(__hsub2(as_pair(above(k128, word, i)), as_pair(zero)));
  }
}

// A scale as two bf16 numbers whose sum is nearly the scale. An integer times both, added before
// rounding, is the product with the scale, rounded once.
struct TwoPartScale {
  __nv_bfloat162 upper, lower;

  __device__ explicit TwoPartScale(float scale) {
    upper = __float2bfloat162_rn(scale);
    lower = __float2bfloat162_rn(scale - __low2float(upper));
  }

  __device__ uint32_t operator()(uint32_t pair) const {
    const __nv_bfloat162 plain = as_pair(pair);
    return as_bits(__hfma2(plain, upper, __hmul2(plain, lower)));
  }
};

}  // namespace fused_ops
