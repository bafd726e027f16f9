// SPDX-License-Identifier: Apache-2.0
//
// A ring of stages in shared memory, through which the copy engine feeds the tensor cores. Each
// stage holds a tile of the weight and a tile of x, both kDepth deep. Each stage has two barriers:
// `full` (its bytes have arrived) and `empty` (its products are computed).

#pragma once

#include "vllm_add_llada/cuda_kernels/common/hopper.cuh"

namespace native {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The first address in dynamic shared memory at which a stage may start.
__device__ inline uint32_t first_stage(const char* shared) {
  return (shared_address(shared) + kAlignment - 1) / kAlignment * kAlignment;
}

// Sizes that are chosen at launch.
struct RingSizes {
  int stage_bytes, num_stages, weight_bytes;
};

// `Sizes` has the members of RingSizes, or constants of the same names.
template <typename Sizes = RingSizes>
struct Ring {
  uint32_t stages, barriers;
  Sizes sizes{};

  __device__ uint32_t weight(int stage) const { return stages + stage * sizes.stage_bytes; }
  __device__ uint32_t x(int stage) const { return weight(stage) + sizes.weight_bytes; }
  __device__ uint32_t full(int stage) const { return barriers + stage * 16; }
  __device__ uint32_t empty(int stage) const { return barriers + stage * 16 + 8; }

  // Initialises the barriers; called by one thread. A stage is full after `num_producers` arrivals
  // (and their bytes), and empty after arrivals of `num_consumers` warps. A barrier of the block
  // must follow.
  __device__ void open(const CUtensorMap* x_map, const CUtensorMap* weight_map, int num_producers,
                       int num_consumers) const {
    prefetch_map(weight_map);
    prefetch_map(x_map);
    for (int stage = 0; stage < sizes.num_stages; ++stage) {
      init_barrier(full(stage), num_producers);
      init_barrier(empty(stage), num_consumers);
    }
    publish_barriers();
  }
};

struct Position {
  int stage = 0, phase = 0;

  template <typename Sizes>
  __device__ void advance(const Ring<Sizes>& ring) {
    if (++stage == ring.sizes.num_stages) stage = 0, phase ^= 1;
  }
};

// A group of four warps goes through `num_steps` stages; `multiply(stage, accumulate)` starts the
// products of a stage. A stage is released when the products of the next stage are enqueued.
// Returns the last stage, whose products are still running and which is not released yet.
template <typename Sizes, typename Multiply>
__device__ int consume(const Ring<Sizes>& ring, Position& at, int num_steps, Multiply multiply) {
  int last = 0;
  for (int step = 0; step < num_steps; ++step) {
    wait(ring.full(at.stage), at.phase);
    multiply(at.stage, step > 0);
    commit_products();
    if (step > 0 && threadIdx.x % 32 == 0) arrive(ring.empty(last));
    last = at.stage;
    at.advance(ring);
  }
  return last;
}

#endif

}  // namespace native
