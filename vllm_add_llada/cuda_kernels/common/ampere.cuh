// SPDX-License-Identifier: Apache-2.0
//
// Wrappers of the instructions of compute capability 8.0 and later (PTX ISA, sections on cp.async,
// ldmatrix, movmatrix and mma). All later cards have these instructions too.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace native {

__device__ inline uint32_t shared_place(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// Starts a copy to shared memory without waiting for it; writes zeros if there is no source.
template <int kBytes>
__device__ inline void copy_later(uint32_t target, const void* source, bool is_there) {
  const int given = is_there ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target),
                 "l"(__cvta_generic_to_global(source)), "r"(given)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target),
                 "l"(__cvta_generic_to_global(source)), "n"(kBytes), "r"(given)
                 : "memory");
  }
}

__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the kCount latest groups of copies are still running.
template <int kCount>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kCount) : "memory");
}

// Loads four matrices of 8 rows of 16 bytes. Lane i passes the address of row i % 8 of matrix i /
// 8.
__device__ inline void load_matrices(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

__device__ inline uint4 load_vector(uint32_t source) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(source)
               : "memory");
  return value;
}

// Transposes a matrix [8, 8] of 16-bit numbers that is distributed over the lanes of a warp.
__device__ inline uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Converts the four fp8 numbers (e4m3) of a word to pairs of fp16: the first two and the last two.
__device__ inline void widen(uint32_t word, uint32_t& lower, uint32_t& upper) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 l, u;\nmov.b32 {l, u}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, u;\n}"
      : "=r"(lower), "=r"(upper)
      : "r"(word));
#endif
}

enum class Operands { kBFloat16, kFloat16, kFp8 };

// sums [16, 8] += left [16, 32 bytes] right [8, 32 bytes]^T. fp8 requires compute capability 8.9.
// Later data-centre cards (below 12.0) have this instruction only for fp16, so the operands are
// widened there.
template <Operands kOperands>
__device__ inline void multiply_add(float (&sums)[4], const uint32_t (&left)[4], uint32_t right0,
                                    uint32_t right1) {
#define MOSAIC_MMA(types)                                                                          \
  asm("mma.sync.aligned." types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                 \
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1))
  if constexpr (kOperands == Operands::kBFloat16) {
    MOSAIC_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else if constexpr (kOperands == Operands::kFloat16) {
    MOSAIC_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  } else {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
    uint32_t wide[8], right[4];
    for (int i = 0; i < 4; ++i)
      widen(left[i], wide[i / 2 * 4 + i % 2], wide[i / 2 * 4 + 2 + i % 2]);
    widen(right0, right[0], right[1]);
    widen(right1, right[2], right[3]);
    multiply_add<Operands::kFloat16>(sums, {wide[0], wide[1], wide[2], wide[3]}, right[0],
                                     right[1]);
    multiply_add<Operands::kFloat16>(sums, {wide[4], wide[5], wide[6], wide[7]}, right[2],
                                     right[3]);
#elif __CUDA_ARCH__ >= 890
    MOSAIC_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32");
#endif
  }
#undef MOSAIC_MMA
}

}  // namespace native
