// SPDX-License-Identifier: Apache-2.0
//
// LoRA adapters in a product of few rows: the numbers between both matrices of an adapter, which
// some blocks of a kernel write and the other blocks of the same kernel read.

#pragma once

#include "linear.h"
#include "vllm_add_llada/cuda_kernels/common/hopper.cuh"

namespace fused_ops {
namespace {

// Stages of the products with the second matrices.
__host__ __device__ inline int low_steps(const Adapters& adapters) {
  return (adapters.num_numbers + kDepth - 1) / kDepth;
}

// Bytes of `LowTile`.
template <int kNumbers, int kRows>
constexpr int kLowTileBytes = (1 + kRows + 2 * kNumbers) * sizeof(int);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Makes writes of threads visible to copies by the copy engine, and the other way round.
__device__ inline void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Counts this block after its first `num_threads` threads have written their part of `low`.
__device__ inline void announce_low(const Adapters& adapters, int num_threads) {
  fence_copies();
  sync_first(num_threads);
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(adapters.counters, 1);
  }
}

// Waits until all blocks have written `low`, so that it can be copied.
__device__ inline void wait_for_low(const Adapters& adapters) {
  int count;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(count)
                 : "l"(adapters.counters)
                 : "memory");
  } while (count < adapters.num_low_blocks);
  fence_copies();
}

// Counts a block that has waited. The last one sets the counters to zero for the next kernel.
__device__ inline void count_waiting(const Adapters& adapters) {
  if (atomicAdd(adapters.counters + 1, 1) == adapters.num_waiting - 1) {
    adapters.counters[0] = 0;
    adapters.counters[1] = 0;
  }
}

// What determines the numbers of a tile: the slot of every row, and slot and factor of every
// number.
template <int kNumbers, int kRows>
struct LowTile {
  static constexpr int kNoSlot = -1;
  int first, slots_of_rows[kRows], slots[kNumbers];
  float factors[kNumbers];

  // Called by the first `num_threads` threads. The tables are not in the cache, and other blocks
  // read from memory at the same time, so all loads begin before the first one is waited for.
  __device__ void prepare(const Adapters& adapters, int first_number, int num_rows,
                          int num_threads) {
    if (threadIdx.x == 0) first = first_number;
    for (int row = threadIdx.x; row < kRows; row += num_threads) slots_of_rows[row] = kNoSlot;
    int tile = threadIdx.x, slot = kNoSlot, start = 0, count = 0;
    const auto load_tile = [&]() {
      const int* entry = adapters.tiles + 3 * tile;
      slot = entry[0], start = entry[1] - adapters.first_row, count = entry[2];
    };
    if (tile < adapters.num_tiles) load_tile();
    for (int i = threadIdx.x; i < kNumbers; i += num_threads) {
      const int number = min(first_number + i, adapters.num_numbers - 1);
      const int part = number / adapters.max_rank, own_slot = part / adapters.num_parts;
      const int place = own_slot * adapters.table_stride + part % adapters.num_parts;
      const int rank = adapters.ranks[place];
      factors[i] = adapters.scales[place];
      slots[i] = number % adapters.max_rank < rank ? own_slot : kNoSlot - 1;
    }
    sync_first(num_threads);
    while (tile < adapters.num_tiles) {
      for (int row = max(start, 0); row < min(start + count, num_rows); ++row) {
        slots_of_rows[row] = slot;
      }
      tile += num_threads;
      if (tile < adapters.num_tiles) load_tile();
    }
    sync_first(num_threads);
  }

  // Writes two numbers of a row, or zeros if its slot is another one.
  __device__ void store(const Adapters& adapters, int row, int column, float2 sums) const {
    const int number = first + column, slot = slots_of_rows[row];
    if (number >= adapters.num_numbers) return;
    const float low = slots[column] == slot ? sums.x * factors[column] : 0.0f;
    const float high = slots[column + 1] == slot ? sums.y * factors[column + 1] : 0.0f;
    const int64_t place = int64_t{row} * adapters.num_numbers + number;
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(adapters.low) + place) =
        __floats2bfloat162_rn(low, high);
  }
};

#endif

}  // namespace
}  // namespace fused_ops
