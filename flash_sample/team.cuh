// SPDX-License-Identifier: Apache-2.0
#pragma once

// The blocks and warps that share a row, and how they tell each other what they found. Why they do
// so this way stands in candidates.cu.

#include <cstring>

#include "row.cuh"
#include "vllm_add_llada/cuda_kernels/common/barriers.cuh"

namespace flash_sample {

constexpr int kShares = 64;  // of a row, at most

// This warp's place.
struct Member {
  int index;       // among the warps of the team that reduce
  int count;       // of those
  int num_shares;  // of a row: those from `index` on, in steps of `count`, are this warp's
  int64_t team;
  int64_t num_teams;
  int num_blocks;  // of the team
  bool joins;

  __device__ explicit Member(int num_segments) : num_shares(min(num_segments, kShares)) {
    const int warp = threadIdx.x / kWarpSize;
    const int num_warps = blockDim.x / kWarpSize - 1;  // the last one joins
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

// A barrier of the team in two halves, which orders the work of a block and barriers alone.
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

// What was found in the shares of a row and of the one before; rows are numbered within the team.
// The last block's copy counts. Other blocks send messages of counted bytes there; a team of one
// block writes, and counts the shares.
template <typename Found>
struct Mail {
  static_assert(sizeof(Found) % sizeof(uint4) == 0, "sent in vectors");
  Found found[2][kShares];
  uint64_t full[2];   // barriers: all shares have come
  uint64_t empty[2];  // they have been read

  // To be followed by a barrier of the team.
  __device__ void open(const Member& member) {
    if (threadIdx.x != 0) return;
    const int num_arrivals = member.num_blocks > 1 ? 1 : member.num_shares;
    for (const uint64_t& barrier : full) init_barrier(shared_address(&barrier), num_arrivals);
    for (const uint64_t& barrier : empty) init_barrier(shared_address(&barrier), 1);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Of one lane.
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

  // Of the warp that joins: the shares of a row, once all are there.
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

  // Of the warp that joins, in a team of one block: what was received may be overwritten.
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

// A bound of the largest noised logit of a row, from what the warps of a block have drawn so far.
// Where they are in several rows, the last one counts.
class SharedBound {
 public:
  __device__ void open() {
    if (threadIdx.x == 0) best_ = 0;
  }

  // -inf: none is known. The same for all lanes, which may well read different values.
  __device__ float of(int number) const {
    const uint64_t best = *static_cast<const volatile uint64_t*>(&best_);
    const bool is_known = static_cast<int>(best >> 32) == number + 1;
    const float bound = from_ordered(static_cast<int>(static_cast<uint32_t>(best) ^ kSign));
    return __shfl_sync(kFullMask, is_known ? bound : negative_infinity(), 0);
  }

  // Of one lane; a number that the best noised logit reaches.
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
