// SPDX-License-Identifier: Apache-2.0
#pragma once

// The blocks and warps that share a row, and how they exchange their results. candidates.cu
// explains the design.

#include <cstring>

#include "row.cuh"
#include "vllm_add_llada/cuda_kernels/common/barriers.cuh"

namespace flash_sample {

constexpr int kShares = 64;  // shares per row, at most

// The position of this warp in its team.
struct Member {
  int index;  // index among the team's reducing warps
  int count;  // number of the team's reducing warps
  // Shares of a row. This warp reduces every `count`-th share, starting with `index`.
  int num_shares;
  int64_t team;
  int64_t num_teams;
  int num_blocks;  // blocks per team
  bool joins;

  __device__ explicit Member(int num_segments) : num_shares(min(num_segments, kShares)) {
    const int warp = threadIdx.x / kWarpSize;
    const int num_warps = blockDim.x / kWarpSize - 1;  // the last warp joins
#if __CUDA_ARCH__ >= 900
    int rank, cluster, num_clusters;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(num_blocks));
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%nclusterid.x;" : "=r"(num_clusters));
#else
    const int rank = 0, cluster = blockIdx.x, num_clusters = gridDim.x;
    num_blocks = 1;
#endif
    count = num_blocks * num_warps;
    index = warp < num_warps ? warp * num_blocks + rank : count;
    joins = warp == num_warps && rank == num_blocks - 1;
    team = cluster;
    num_teams = num_clusters;
  }

  __device__ bool reduces() const { return index < min(count, num_shares); }
};

// A barrier of the team in two halves. It orders only the work of a block and its barriers.
__device__ inline void team_arrive() {
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void team_wait() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ inline void wait(const uint64_t& barrier, int phase) {
  uint32_t is_done = 0;
  while (is_done == 0) {
    asm volatile(
        "{\n.reg .pred done;\n"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
#endif
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(is_done)
        : "r"(shared_address(&barrier)), "r"(phase)
        : "memory");
  }
}

// The results of the shares of two consecutive rows, which are numbered within the team. The copy
// in the last block is the one in use. If the team has several blocks, they send messages to it,
// and the barrier counts bytes. A team of one block writes directly, and the barrier counts shares.
template <typename Found>
struct Mail {
  static_assert(sizeof(Found) % sizeof(uint4) == 0, "sent in vectors");
  Found found[2][kShares];
  uint64_t full[2];   // barriers: all shares have arrived
  uint64_t empty[2];  // barriers: all shares have been read

  // Initialises the barriers; a barrier of the team must follow.
  __device__ void open(const Member& member) {
    if (threadIdx.x != 0) return;
    const int num_arrivals = member.num_blocks > 1 ? 1 : member.num_shares;
    for (const uint64_t& barrier : full) init_barrier(shared_address(&barrier), num_arrivals);
    for (const uint64_t& barrier : empty) init_barrier(shared_address(&barrier), 1);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Sends the result of a share; called by one lane.
  __device__ void send(int number, int share, const Found& mine, const Member& member) {
    const int half = number % 2;
    if (number >= 2) wait(empty[half], (number / 2 - 1) % 2);
    if (member.num_blocks > 1) {
      send_to_last_block(half, share, mine, member);
    } else {
      found[half][share] = mine;
      arrive(shared_address(&full[half]));
    }
  }

  // Waits for all shares of a row and returns them; called by the joining warp.
  __device__ const Found* receive(int number, const Member& member) {
    const int half = number % 2;
    if (member.num_blocks > 1 && threadIdx.x % kWarpSize == 0) {
      expect_bytes(shared_address(&full[half]),
                   member.num_shares * static_cast<int>(sizeof(Found)));
    }
    __syncwarp();
    wait(full[half], number / 2 % 2);
    __syncwarp();
    return found[half];
  }

  // Allows a row's results to be overwritten; called by the joining warp of a team of one block.
  __device__ void release(int number) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) arrive(shared_address(&empty[number % 2]));
  }

 private:
  __device__ void send_to_last_block([[maybe_unused]] int half, [[maybe_unused]] int share,
                                     [[maybe_unused]] const Found& mine,
                                     [[maybe_unused]] const Member& member) {
#if __CUDA_ARCH__ >= 900
    const uint32_t barrier = in_last_block(&full[half], member);
    const uint32_t target = in_last_block(&found[half][share], member);
    constexpr int kCount = sizeof(Found) / sizeof(uint4);
    uint4 vectors[kCount];
    memcpy(vectors, &mine, sizeof(Found));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
          "[%5];" ::"r"(target + i * static_cast<uint32_t>(sizeof(uint4))),
          "r"(vectors[i].x), "r"(vectors[i].y), "r"(vectors[i].z), "r"(vectors[i].w), "r"(barrier)
          : "memory");
    }
#endif
  }

#if __CUDA_ARCH__ >= 900
  __device__ static uint32_t in_last_block(const void* mine, const Member& member) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(shared_address(mine)), "r"(member.num_blocks - 1));
    return address;
  }
#endif
};

// A lower bound of the largest noised logit of a row, from the draws of a block's warps so far. If
// the warps are in different rows, the bound is that of the last row.
class SharedBound {
 public:
  __device__ void open() {
    if (threadIdx.x == 0) best_ = 0;
  }

  // Returns the bound of a row, or -inf if none is known. All lanes return the value of lane 0,
  // because they may read different values.
  __device__ float of(int number) const {
    const uint64_t best = *static_cast<const volatile uint64_t*>(&best_);
    const bool is_known = static_cast<int>(best >> 32) == number + 1;
    const float bound = from_ordered(static_cast<int>(static_cast<uint32_t>(best) ^ kSign));
    return __shfl_sync(kFullMask, is_known ? bound : negative_infinity(), 0);
  }

  // Raises the bound to a number that the best noised logit reaches; called by one lane.
  __device__ void raise(int number, float bound) {
    const uint32_t key = static_cast<uint32_t>(ordered(bound)) ^ kSign;
    atomicMax(reinterpret_cast<unsigned long long*>(&best_),
              static_cast<unsigned long long>(number + 1) << 32 | key);
  }

 private:
  static constexpr uint32_t kSign = 0x80000000u;
  uint64_t best_;  // number of the row, from 1 on, and the ordered bits of the bound
};

}  // namespace flash_sample
