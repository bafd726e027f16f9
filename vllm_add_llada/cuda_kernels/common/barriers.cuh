// SPDX-License-Identifier: Apache-2.0
//
// Wrappers of the instructions for barriers in shared memory (PTX ISA, section on mbarrier).
#pragma once

#include <cstdint>

namespace native {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}

// Arrives at the barrier, and makes it also wait for this many bytes.
__device__ inline void expect_bytes([[maybe_unused]] uint32_t barrier, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

}  // namespace native
