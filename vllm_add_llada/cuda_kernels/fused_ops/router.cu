// SPDX-License-Identifier: Apache-2.0
//
// Routes few rows to experts in one kernel, because its time is all latency. One cluster of blocks
// does the work; the blocks exchange their few results through shared memory.
//
// A block multiplies all rows by the router along its part of the depth, 64 experts at a time. It
// reads its part of the router while the previous kernel ends. Then each block takes its share of
// the rows, adds up the parts of their scores in the order of the blocks, and chooses experts, with
// one warp per row. The blocks count the rows of each expert. From the counts of all blocks, each
// block computes where its rows belong.

#include <cuda_bf16.h>

#include "router.h"
#include "vllm_add_llada/cuda_kernels/common/dispatch.cuh"
#include "vllm_add_llada/cuda_kernels/common/reduce.cuh"
#include "vllm_add_llada/cuda_kernels/common/ring.cuh"

namespace fused_ops {
namespace {

constexpr int kBlocks = 8;  // blocks per cluster
constexpr int kThreads = 256;
constexpr int kMaxSteps = kMaxRouterDepth / kRouterDepthStep;
constexpr int kTileBytes = kGroupRows * kRowBytes;
constexpr int kRowsBytes = kMaxSteps * kTileBytes;  // bytes of the rows' part of the depth
static_assert(kMaxRoutedRows == kGroupRows, "one product for 64 experts");
static_assert(kMaxRoutedExperts <= kThreads, "one thread for each expert");

// Sizes that depend on the number of experts.
template <int kExperts>
struct Sizes {
  static constexpr int tiles = kExperts / kGroupRows;  // tiles per step of the depth
  // elements per row of scores, so that rows start in different banks
  static constexpr int pitch = kExperts + 4;
  static constexpr int gate_bytes = kMaxSteps * tiles * kTileBytes;
  // The scores reuse the memory of the router after the multiplication.
  static constexpr int score_bytes = kMaxRoutedRows * pitch * 4;
  static constexpr int operand_bytes = gate_bytes > score_bytes ? gate_bytes : score_bytes;
  static constexpr int dynamic_bytes = kAlignment + operand_bytes + kRowsBytes;
  static_assert(kExperts % 64 == 0 && dynamic_bytes + 8192 <= kSharedBytes, "it must fit");
};

struct KernelParams {
  const float* bias;
  void* weights;
  int* slots;
  int* ends;
  int num_rows, num_chosen, depth;
  RouterScoring scoring;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kWarps = kThreads / 32;
constexpr int kGroups = kThreads / kGroupThreads;  // groups of four warps that multiply together
constexpr int kShare = kMaxRoutedRows / kBlocks;

template <int kExperts>
constexpr int kWords = kExperts / 64;  // 64-bit words, with one bit per expert

template <int kExperts>
constexpr int kLaneExperts = kExperts / 32;  // consecutive experts per lane

// The chosen experts of a row, with one bit per expert.
template <int kExperts>
struct Chosen {
  unsigned long long words[kWords<kExperts>];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords<kExperts>; ++i) words[i] = 0;
  }

  __device__ void add(int expert) {
#pragma unroll
    for (int i = 0; i < kWords<kExperts>; ++i) {
      if (expert / 64 == i) words[i] |= 1ull << (expert % 64);
    }
  }

  __device__ bool has(int expert) const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < kWords<kExperts>; ++i) {
      if (expert / 64 == i) found = words[i] >> (expert % 64) & 1;
    }
    return found;
  }

  __device__ int num_below(int expert) const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWords<kExperts>; ++i) {
      if (i < expert / 64) count += __popcll(words[i]);
      if (i == expert / 64) count += __popcll(words[i] & ((1ull << (expert % 64)) - 1));
    }
    return count;
  }
};

template <int kExperts>
struct Shared {
  unsigned long long barriers[2];
  Chosen<kExperts> chosen[kShare];  // chosen experts of each row of the block
  int counts[kExperts];             // the block's rows per expert
  int warp_totals[kWarps];          // rows of each warp's experts
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

// Maps floats to integers of the same order. NaN becomes the least number, so that its row still
// chooses the lowest experts.
__device__ unsigned ordered(float score) {
  const unsigned bits = __float_as_uint(score > -3.0e38f ? score : -3.0e38f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float number(unsigned order) {
  return __uint_as_float(order & 0x80000000u ? order & 0x7FFFFFFFu : ~order);
}

// Finds the largest of a warp's numbers; returns the first lane that has it.
__device__ int first_with_largest(unsigned mine, unsigned& largest) {
  largest = __reduce_max_sync(kFullMask, mine);
  return __ffs(__ballot_sync(kFullMask, mine == largest)) - 1;
}

// Sets the ranks of all experts outside the kept groups to 0. The kept groups are those whose two
// best ranks have the largest sums; of equal sums the lowest group wins. Ranks are in the order of
// the floats; 0 means taken.
template <int kPerLane>
__device__ void keep_groups(unsigned (&ranks)[kPerLane], const RouterScoring& scoring) {
  const int lane = threadIdx.x % 32;
  const int size = kPerLane * 32 / scoring.num_groups;
  unsigned sum = 0;  // sum of the group whose number is the lane's
  for (int group = 0; group < scoring.num_groups; ++group) {
    unsigned first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const unsigned rank = (lane * kPerLane + i) / size == group ? ranks[i] : 0;
      second = max(second, min(first, rank));
      first = max(first, rank);
    }
    unsigned best, next;
    const int winner = first_with_largest(first, best);
    first_with_largest(lane == winner ? second : first, next);
    if (lane == group) sum = ordered(number(best) + number(next));
  }
  unsigned kept = 0;
  for (int i = 0; i < scoring.num_kept_groups; ++i) {
    unsigned largest;
    const int winner = first_with_largest(sum, largest);
    kept |= 1u << winner;
    if (lane == winner) sum = 0;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (!(kept >> ((lane * kPerLane + i) / size) & 1)) ranks[i] = 0;
  }
}

// Chooses the num_chosen best experts; of equal ranks the lowest expert wins. A lane has kPerLane
// experts.
template <int kExperts>
__device__ Chosen<kExperts> choose(unsigned (&ranks)[kLaneExperts<kExperts>], int num_chosen) {
  constexpr int kPerLane = kLaneExperts<kExperts>;
  const int lane = threadIdx.x % 32;
  Chosen<kExperts> chosen;
  chosen.clear();
  for (int n = 0; n < num_chosen; ++n) {
    unsigned mine = 0, largest;
    int place = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (ranks[i] > mine) {
        mine = ranks[i];
        place = i;
      }
    }
    const int winner = first_with_largest(mine, largest);
    chosen.add(winner * kPerLane + __shfl_sync(kFullMask, place, winner));
    if (lane == winner) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (i == place) ranks[i] = 0;
      }
    }
  }
  return chosen;
}

// Computes the scores [rows, experts] of the block's part of the depth. Every four warps process 64
// experts at a time.
template <int kExperts>
__device__ void multiply_part(uint32_t gate, uint32_t rows, float* scores, int num_steps) {
  constexpr int kTiles = Sizes<kExperts>::tiles;
  constexpr int kMine = (kTiles + kGroups - 1) / kGroups;
  const int group = threadIdx.x / kGroupThreads;
  float total[kMine][kMaxRoutedRows / 2];
#pragma unroll
  for (int n = 0; n < kMine; ++n) {
    const int tile = n * kGroups + group;
    if (tile >= kTiles) continue;
    for (int step = 0; step < num_steps; ++step) {
      const uint64_t left = matrix_descriptor(gate + (step * kTiles + tile) * kTileBytes);
      const uint64_t right = matrix_descriptor(rows + step * kTileBytes);
      begin_products();
#pragma unroll
      for (int k = 0; k < kDepth / 16; ++k) {
        multiply(total[n], left + k * 2, right + k * 2, step > 0 || k > 0);
      }
      commit_products();
    }
    settle(total[n]);
  }
  __syncthreads();  // From here on the scores overwrite the router.
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kMine; ++n) {
    const int tile = n * kGroups + group;
    if (tile >= kTiles) continue;
    const int expert = tile * kGroupRows + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kMaxRoutedRows / 8; ++i) {
      float* at = scores + (i * 8 + lane % 4 * 2) * Sizes<kExperts>::pitch + expert;
      at[0] = total[n][i * 4];
      at[Sizes<kExperts>::pitch] = total[n][i * 4 + 1];
      at[8] = total[n][i * 4 + 2];
      at[Sizes<kExperts>::pitch + 8] = total[n][i * 4 + 3];
    }
  }
}

// Adds up a lane's logits of one row over the parts of all blocks, in the order of the blocks.
template <int kExperts>
__device__ void add_parts(const float* scores, int row, bool in_fp32,
                          float (&logits)[kLaneExperts<kExperts>]) {
  constexpr int kPerLane = kLaneExperts<kExperts>;
  const float* mine = scores + row * Sizes<kExperts>::pitch + threadIdx.x % 32 * kPerLane;
#pragma unroll
  for (int i = 0; i < kPerLane; i += 2) {
    const uint32_t address = shared_address(mine + i);
    float2 some[kBlocks];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) some[block] = load_pair_of_block(address, block);
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) {
      some[0].x += some[block].x;
      some[0].y += some[block].y;
    }
    if (!in_fp32) some[0] = __bfloat1622float2(__floats2bfloat162_rn(some[0].x, some[0].y));
    logits[i] = some[0].x;
    logits[i + 1] = some[0].y;
  }
}

// Replaces logits by scores: the sigmoid of each, or the softmax over the logits of all lanes.
template <int kPerLane>
__device__ void score(float (&values)[kPerLane], bool is_sigmoid) {
  if (is_sigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) values[i] = 1.0f / (1.0f + expf(-values[i]));
    return;
  }
  float highest = values[0], total = 0.0f;
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) highest = fmaxf(highest, values[i]);
  highest = over_warp(highest, Largest());
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    values[i] = __expf(values[i] - highest);
    total += values[i];
  }
  total = over_warp(total, Sum());
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) values[i] /= total;
}

// Chooses the experts of one row; called by a warp.
template <int kExperts>
__device__ Chosen<kExperts> choose_row(const float* scores, int row, const KernelParams& params,
                                       const float (&bias)[kLaneExperts<kExperts>]) {
  constexpr int kPerLane = kLaneExperts<kExperts>;
  const RouterScoring& scoring = params.scoring;
  const int first = threadIdx.x % 32 * kPerLane;
  float values[kPerLane];
  add_parts<kExperts>(scores, row, scoring.in_fp32, values);
  score(values, scoring.is_sigmoid);
  unsigned ranks[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) ranks[i] = ordered(values[i] + bias[i]);
  if (scoring.num_groups > 1) keep_groups(ranks, scoring);
  const Chosen<kExperts> chosen = choose<kExperts>(ranks, params.num_chosen);

  float divisor = 1.0f;
  if (scoring.is_normalised) {
    float mine = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) mine += chosen.has(first + i) ? values[i] : 0.0f;
    divisor = over_warp(mine, Sum()) + 1e-20f;
  }
  int at = row * params.num_chosen + chosen.num_below(first);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (!chosen.has(first + i)) continue;
    const float weight = values[i] / divisor * scoring.scale;
    if (scoring.in_fp32) {
      static_cast<float*>(params.weights)[at] = weight;
    } else {
      static_cast<__nv_bfloat16*>(params.weights)[at] = __float2bfloat16_rn(weight);
    }
    ++at;
  }
  return chosen;
}

// Lists the block's rows of each expert, with one thread per expert.
template <int kExperts>
__device__ void list_rows(Shared<kExperts>& shared, const KernelParams& params, int rank,
                          int first_row, int num_rows) {
  const int expert = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0, total = 0;
  if (expert < kExperts) {
    for (int block = 0; block < kBlocks; ++block) {
      const int count = load_count_of_block(shared_address(&shared.counts[expert]), block);
      before += block < rank ? count : 0;
      total += count;
    }
  }
  int end = sum_upto_lane(total);  // end of the expert's rows, among the rows of the warp's experts
  if (lane == 31) shared.warp_totals[warp] = end;
  __syncthreads();
  if (expert >= kExperts) return;
  for (int i = 0; i < warp; ++i) end += shared.warp_totals[i];
  if (rank == 0) params.ends[expert] = end;
  int* slots = params.slots + end - total + before;
  for (int i = 0; i < num_rows; ++i) {
    const Chosen<kExperts>& chosen = shared.chosen[i];
    if (chosen.has(expert)) {
      *slots++ = (first_row + i) * params.num_chosen + chosen.num_below(expert);
    }
  }
}

#endif

template <int kExperts>
__global__ void __launch_bounds__(kThreads, 1)
    router_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap gate,
                  const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kTiles = Sizes<kExperts>::tiles;
  constexpr int kPerLane = kLaneExperts<kExperts>;
  extern __shared__ char dynamic[];
  __shared__ Shared<kExperts> shared;
  launch_dependents();
  const uint32_t gate_tiles = first_stage(dynamic);
  const uint32_t row_tiles = gate_tiles + Sizes<kExperts>::operand_bytes;
  float* scores = reinterpret_cast<float*>(dynamic + (gate_tiles - shared_address(dynamic)));
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
    expect_bytes(gate_barrier, num_steps * kTiles * kTileBytes);
    for (int i = 0; i < num_steps * kTiles; ++i) {
      copy_tile(gate_tiles + i * kTileBytes, &gate, first_depth + i / kTiles * kDepth,
                i % kTiles * kGroupRows, gate_barrier, kEvictFirst);
    }
  }
  float bias[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    bias[i] = params.bias == nullptr ? 0.0f : params.bias[lane * kPerLane + i];
  }
  __syncthreads();
  wait_for_prerequisites();
  if (threadIdx.x == 0) {
    expect_bytes(row_barrier, num_steps * kTileBytes);
    for (int step = 0; step < num_steps; ++step) {
      copy_tile(row_tiles + step * kTileBytes, &x, first_depth + step * kDepth, 0, row_barrier,
                kEvictLast);
    }
  }
  wait(gate_barrier, 0);
  wait(row_barrier, 0);
  multiply_part<kExperts>(gate_tiles, row_tiles, scores, num_steps);
  cluster_sync();

  const int share = (params.num_rows + kBlocks - 1) / kBlocks;
  const int first_row = rank * share;
  const int num_rows = max(0, min(share, params.num_rows - first_row));
  for (int i = warp; i < num_rows; i += kWarps) {
    const Chosen<kExperts> chosen = choose_row<kExperts>(scores, first_row + i, params, bias);
    if (lane == 0) shared.chosen[i] = chosen;
  }
  __syncthreads();
  if (threadIdx.x < kExperts) {
    int count = 0;
    for (int i = 0; i < num_rows; ++i) count += shared.chosen[i].has(threadIdx.x);
    shared.counts[threadIdx.x] = count;
  }
  cluster_sync();
  list_rows(shared, params, rank, first_row, num_rows);
  cluster_sync();  // A block must not end while others read its shared memory.
#endif
}

template <int kExperts>
cudaError_t launch(const RouterParams& params, cudaStream_t stream) {
  CUtensorMap x, gate;
  cudaError_t error =
      describe(&x, params.x, params.num_rows, params.depth, params.x_stride, kGroupRows);
  if (error != cudaSuccess) return error;
  error = describe(&gate, params.gate, kExperts, params.depth, params.gate_stride, kGroupRows);
  if (error != cudaSuccess) return error;
  const KernelParams kernel_params{params.bias,  params.weights,  params.slots,
                                   params.ends,  params.num_rows, params.num_chosen,
                                   params.depth, params.scoring};
  const Launch launch{kBlocks, kThreads, stream, /*overlaps=*/true, Sizes<kExperts>::dynamic_bytes,
                      kBlocks};
  return launch_kernel(router_kernel<kExperts>, launch, x, gate, kernel_params);
}

bool takes(const RouterScoring& scoring, int num_experts, int num_chosen) {
  if (scoring.num_groups == 1) return true;
  const int groups = scoring.num_groups, kept = scoring.num_kept_groups;
  return groups > 1 && groups <= kMaxRouterGroups && num_experts % groups == 0 && kept <= groups &&
         num_experts / groups > 1 && kept * (num_experts / groups) >= num_chosen;
}

}  // namespace

cudaError_t launch_router(const RouterParams& params, cudaStream_t stream) {
  if (params.num_rows < 1 || params.num_rows > kMaxRoutedRows ||
      params.depth % kRouterDepthStep != 0 || params.depth > kMaxRouterDepth ||
      params.num_chosen < 1 || params.num_chosen > params.num_experts ||
      !takes(params.scoring, params.num_experts, params.num_chosen)) {
    return cudaErrorInvalidValue;
  }
  return dispatch_value<64, 128>(params.num_experts,
                                 [&](auto experts) { return launch<experts>(params, stream); });
}

}  // namespace fused_ops
