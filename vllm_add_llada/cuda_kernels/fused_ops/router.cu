// SPDX-License-Identifier: Apache-2.0
//
// The experts of few rows in one kernel, as all of its time is latency: one cluster of blocks,
// which tell each other the little that they know through their shared memory.
//
// A block multiplies all rows by the router along its part of the depth; the router's part is read
// while the kernel before runs out. Then each block takes its share of the rows, adds up the parts
// of their scores, in the order of the blocks, and chooses, a warp for each row. The blocks count
// the rows of each expert, and with the counts of all of them each knows where its rows belong.

#include <cuda_bf16.h>

#include "ring.cuh"
#include "router.h"

namespace fused_ops {
namespace {

constexpr int kBlocks = 8;  // of the cluster
constexpr int kThreads = 256;
constexpr int kMaxSteps = kMaxRouterDepth / kRouterDepthStep;
constexpr int kTileBytes = kGroupRows * kRowBytes;
constexpr int kOperandBytes = kMaxSteps * kTileBytes;  // of the router, and of the rows
static_assert(kRoutedExperts == kGroupRows && kMaxRoutedRows == kGroupRows, "one product");
static_assert(kRoutedExperts == 2 * 32, "two experts a lane");

struct KernelParams {
  const float* bias;
  __nv_bfloat16* weights;
  int* slots;
  int* ends;
  int num_rows, num_chosen, depth;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kWarps = kThreads / 32;
constexpr int kPitch = kRoutedExperts + 4;  // of a row of scores: rows apart in the banks
constexpr int kShare = kMaxRoutedRows / kBlocks;

struct Shared {
  unsigned long long barriers[2];
  unsigned long long chosen[kShare];      // of each row of the block, a bit for an expert
  int counts[kRoutedExperts];             // of the block's rows
  int totals[kRoutedExperts];             // of all rows
  float scores[kMaxRoutedRows * kPitch];  // of the block's depth
};

__device__ float2 load_pair_of_block(uint32_t address, int rank) {
  float2 value;
  asm volatile(
      "{\n.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %2, %3;\n"
      "ld.shared::cluster.v2.f32 {%0, %1}, [remote];\n}\n"
      : "=f"(value.x), "=f"(value.y)
      : "r"(address), "r"(rank)
      : "memory");
  return value;
}

__device__ int load_count_of_block(uint32_t address, int rank) {
  int value;
  asm volatile(
      "{\n.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.s32 %0, [remote];\n}\n"
      : "=r"(value)
      : "r"(address), "r"(rank)
      : "memory");
  return value;
}

// Whole numbers in the order of the floats. NaN is greater than nothing: as the least number its
// row still chooses the lowest experts.
__device__ unsigned ordered(float score) {
  const unsigned bits = __float_as_uint(score > -3.0e38f ? score : -3.0e38f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float max_of_warp(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, offset));
  }
  return value;
}

__device__ float sum_of_warp(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFF, value, offset);
  }
  return value;
}

// The num_chosen best of 64 scores, of which a lane has 2 * lane and the next, as bits; among
// equals the lowest expert.
__device__ unsigned long long choose(float2 scores, int num_chosen) {
  const int lane = threadIdx.x % 32;
  unsigned first = ordered(scores.x), second = ordered(scores.y);  // 0: taken
  unsigned long long chosen = 0;
  for (int i = 0; i < num_chosen; ++i) {
    const unsigned best = __reduce_max_sync(0xFFFFFFFF, max(first, second));
    const int winner = __ffs(__ballot_sync(0xFFFFFFFF, max(first, second) == best)) - 1;
    const bool is_second = __shfl_sync(0xFFFFFFFF, first != best, winner);
    chosen |= 1ull << (2 * winner + is_second);
    if (lane == winner) (is_second ? second : first) = 0;
  }
  return chosen;
}

__device__ int num_below(unsigned long long chosen, int expert) {
  return __popcll(chosen & ((1ull << expert) - 1));
}

// The scores [rows, experts] of the block's depth, by four warps.
__device__ void multiply_part(uint32_t gate, uint32_t rows, float* scores, int num_steps) {
  float total[kMaxRoutedRows / 2];
  for (int step = 0; step < num_steps; ++step) {
    const uint64_t left = matrix_descriptor(gate + step * kTileBytes);
    const uint64_t right = matrix_descriptor(rows + step * kTileBytes);
    begin_products();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      multiply(total, left + k * 2, right + k * 2, step > 0 || k > 0);
    }
    commit_products();
  }
  settle(total);
  const int lane = threadIdx.x % 32;
  const int expert = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < kMaxRoutedRows / 8; ++i) {
    const int row = i * 8 + lane % 4 * 2;
    scores[row * kPitch + expert] = total[i * 4];
    scores[(row + 1) * kPitch + expert] = total[i * 4 + 1];
    scores[row * kPitch + expert + 8] = total[i * 4 + 2];
    scores[(row + 1) * kPitch + expert + 8] = total[i * 4 + 3];
  }
}

// The choice of one row by a warp.
__device__ unsigned long long choose_row(const float* scores, int row, const KernelParams& params,
                                         float2 bias) {
  const int lane = threadIdx.x % 32;
  const uint32_t address = shared_address(scores + row * kPitch + lane * 2);
  float2 some[kBlocks];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) some[block] = load_pair_of_block(address, block);
#pragma unroll
  for (int block = 1; block < kBlocks; ++block) {
    some[0].x += some[block].x;
    some[0].y += some[block].y;
  }
  const float2 logits = __bfloat1622float2(__floats2bfloat162_rn(some[0].x, some[0].y));
  const float highest = max_of_warp(fmaxf(logits.x, logits.y));
  const float2 powers{__expf(logits.x - highest), __expf(logits.y - highest)};
  const float total = sum_of_warp(powers.x + powers.y);
  const float2 probabilities{powers.x / total, powers.y / total};
  const unsigned long long chosen =
      choose({probabilities.x + bias.x, probabilities.y + bias.y}, params.num_chosen);
  __nv_bfloat16* weights = params.weights + row * params.num_chosen;
  const int place = num_below(chosen, lane * 2);
  const bool has_first = chosen >> (lane * 2) & 1;
  if (has_first) weights[place] = __float2bfloat16_rn(probabilities.x);
  if (chosen >> (lane * 2 + 1) & 1) {
    weights[place + has_first] = __float2bfloat16_rn(probabilities.y);
  }
  return chosen;
}

// One thread for each expert lists the block's rows of it.
__device__ void list_rows(Shared& shared, const KernelParams& params, int rank, int first_row,
                          int num_rows) {
  const int expert = threadIdx.x;
  int before = 0, total = 0;
  if (expert < kRoutedExperts) {
    for (int block = 0; block < kBlocks; ++block) {
      const int count = load_count_of_block(shared_address(&shared.counts[expert]), block);
      before += block < rank ? count : 0;
      total += count;
    }
    shared.totals[expert] = total;
  }
  __syncthreads();
  if (expert >= kRoutedExperts) return;
  int start = 0;
  for (int i = 0; i < kRoutedExperts; ++i) start += i < expert ? shared.totals[i] : 0;
  if (rank == 0) params.ends[expert] = start + total;
  int* slots = params.slots + start + before;
  for (int i = 0; i < num_rows; ++i) {
    const unsigned long long chosen = shared.chosen[i];
    if (chosen >> expert & 1) {
      *slots++ = (first_row + i) * params.num_chosen + num_below(chosen, expert);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    router_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap gate,
                  const __grid_constant__ KernelParams params) {
  extern __shared__ char dynamic[];
  __shared__ Shared shared;
  launch_dependents();
  const uint32_t gate_tiles = first_stage(dynamic);
  const uint32_t row_tiles = gate_tiles + kOperandBytes;
  const uint32_t gate_barrier = shared_address(&shared.barriers[0]);
  const uint32_t row_barrier = shared_address(&shared.barriers[1]);
  const int rank = block_of_cluster();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_steps = params.depth / kRouterDepthStep;
  const int first_depth = rank * num_steps * kDepth;
  if (threadIdx.x == 0) {
    init_barrier(gate_barrier, 1);
    init_barrier(row_barrier, 1);
    publish_barriers();
    expect_bytes(gate_barrier, num_steps * kTileBytes);
    for (int step = 0; step < num_steps; ++step) {
      copy_tile(gate_tiles + step * kTileBytes, &gate, first_depth + step * kDepth, 0, gate_barrier,
                kEvictFirst);
    }
  }
  const float2 bias = params.bias == nullptr
                          ? float2{0.0f, 0.0f}
                          : float2{params.bias[lane * 2], params.bias[lane * 2 + 1]};
  __syncthreads();
  wait_for_prerequisites();
  if (threadIdx.x == 0) {
    expect_bytes(row_barrier, num_steps * kTileBytes);
    for (int step = 0; step < num_steps; ++step) {
      copy_tile(row_tiles + step * kTileBytes, &x, first_depth + step * kDepth, 0, row_barrier,
                kEvictLast);
    }
  }
  if (warp < kGroupThreads / 32) {
    wait(gate_barrier, 0);
    wait(row_barrier, 0);
    multiply_part(gate_tiles, row_tiles, shared.scores, num_steps);
  }
  cluster_sync();

  const int share = (params.num_rows + kBlocks - 1) / kBlocks;
  const int first_row = rank * share;
  const int num_rows = max(0, min(share, params.num_rows - first_row));
  for (int i = warp; i < num_rows; i += kWarps) {
    const unsigned long long chosen = choose_row(shared.scores, first_row + i, params, bias);
    if (lane == 0) shared.chosen[i] = chosen;
  }
  __syncthreads();
  if (threadIdx.x < kRoutedExperts) {
    int count = 0;
    for (int i = 0; i < num_rows; ++i) count += shared.chosen[i] >> threadIdx.x & 1;
    shared.counts[threadIdx.x] = count;
  }
  cluster_sync();
  list_rows(shared, params, rank, first_row, num_rows);
  cluster_sync();  // no block ends while others read its shared memory
}

#else

__global__ void router_kernel(const __grid_constant__ CUtensorMap,
                              const __grid_constant__ CUtensorMap,
                              const __grid_constant__ KernelParams) {}

#endif

}  // namespace

cudaError_t launch_router(const RouterParams& params, cudaStream_t stream) {
  if (params.num_rows < 1 || params.num_rows > kMaxRoutedRows ||
      params.depth % kRouterDepthStep != 0 || params.depth > kMaxRouterDepth ||
      params.num_chosen < 1 || params.num_chosen > kRoutedExperts) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap x, gate;
  cudaError_t error =
      describe(&x, params.x, params.num_rows, params.depth, params.x_stride, kGroupRows);
  if (error != cudaSuccess) return error;
  error = describe(&gate, params.gate, kRoutedExperts, params.depth, params.gate_stride,
                   kRoutedExperts);
  if (error != cudaSuccess) return error;
  const KernelParams kernel_params{params.bias,     static_cast<__nv_bfloat16*>(params.weights),
                                   params.slots,    params.ends,
                                   params.num_rows, params.num_chosen,
                                   params.depth};
  constexpr int kDynamicBytes = kAlignment + 2 * kOperandBytes;
  const Launch launch{kBlocks, kThreads, stream, /*overlaps=*/true, kDynamicBytes, kBlocks};
  return launch_kernel(router_kernel, launch, x, gate, kernel_params);
}

}  // namespace fused_ops
