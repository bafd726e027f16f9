// SPDX-License-Identifier: Apache-2.0
#pragma once

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011). The key is a request's 64-bit seed, low word first; the counter is (purpose, step, canvas
// position, column / 4), and column % 4 selects one of the four words.

#include <cstdint>

namespace flash_sample {

struct Words {
  uint32_t word[4];
};

// Low and high word of a product. With 64-bit types the compiler emits one more instruction.
__device__ inline uint2 multiply(uint32_t a, uint32_t b) {
  uint2 product;
  asm("{\n.reg .b64 wide;\nmul.wide.u32 wide, %2, %3;\nmov.b64 {%0, %1}, wide;\n}"
      : "=r"(product.x), "=r"(product.y)
      : "r"(a), "r"(b));
  return product;
}

struct Stream {
  uint64_t seed;
  uint32_t purpose;
  uint32_t step;
  uint32_t position;

  __device__ Words words(uint32_t group) const {
    uint32_t c0 = purpose, c1 = step, c2 = position, c3 = group;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const uint2 product0 = multiply(0xD2511F53u, c0);
      const uint2 product1 = multiply(0xCD9E8D57u, c2);
      c0 = product1.y ^ c1 ^ k0;
      c2 = product0.y ^ c3 ^ k1;
      c1 = product1.x;
      c3 = product0.x;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
  }

  __device__ uint32_t word(int64_t column) const {
    const Words found = words(static_cast<uint32_t>(column >> 2));
    const int index = static_cast<int>(column & 3);
    const uint32_t low = index & 1 ? found.word[1] : found.word[0];
    const uint32_t high = index & 1 ? found.word[3] : found.word[2];
    return index & 2 ? high : low;
  }
};

// The number in the open interval (0, 1) that a word encodes; exact in double.
__device__ inline double to_uniform(uint32_t word) {
  return (static_cast<double>(word) + 0.5) * 0x1p-32;
}

}  // namespace flash_sample
