// SPDX-License-Identifier: Apache-2.0
//
// Products of groups of few rows, each group with a matrix of its own: a stream of weights.
//
// One block for each multiprocessor walks over the tiles of all groups with one ring of
// shared-memory stages that never drains: while the sums of a tile are written, the copy engine
// fetches the weights of the next ones. The weight is the left operand of the tensor cores (64 of
// its rows to a group of four warps), and the group's few rows are the right one. Every sum has one
// order, whatever the rows beside a row.
//
// Weights do not depend on the kernel before this one: an early launch fills its ring with them
// while that kernel ends, and waits for it before it reads x.

#include "epilogue.cuh"
#include "ring.cuh"
#include "weighted_gemm.h"

namespace fused_ops {
namespace {

constexpr int kColumns = 128;                                             // of a tile
constexpr int kRows = 64;                                                 // of a tile, at most
constexpr int kBoxRows = 8;                                               // that are copied at once
constexpr int kMultipliers = kColumns / kGroupRows * kGroupThreads / 32;  // warps
constexpr int kThreads = kMultipliers * 32 + 32;

struct Sizes {
  static constexpr int weight_bytes = kColumns * kRowBytes;
  static constexpr int stage_bytes = weight_bytes + kRows * kRowBytes;
  static constexpr int num_stages =
      (kSharedBytes - kMaxGroups * 4 - kAlignment - 1024) / stage_bytes;
  static constexpr int shared_bytes = num_stages * stage_bytes + kAlignment;
};

struct KernelParams {
  const int* ends;
  const int* slots;
  const __nv_bfloat16* scales;
  __nv_bfloat16* out;
  int num_groups, num_columns, depth;
  bool early;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct Shared {
  unsigned long long barriers[Sizes::num_stages][2];
  int ends[kMaxGroups];
};

// A block's tiles. All tiles are ordered by group, then by columns, then by rows: blocks that run
// together share weights and rows.
struct Walk {
  const int* ends;  // shared memory
  int num_groups, column_tiles;
  int tile;                                                           // of the block, the next one
  int group = -1, first_tile = 0, num_tiles = 0, start = 0, end = 0;  // of the group
  int first_column = 0, first_row = 0, num_rows = 0;                  // of the tile

  // Goes on to the next tile; false past the last.
  __device__ bool next() {
    while (tile >= first_tile + num_tiles) {
      if (++group == num_groups) return false;
      first_tile += num_tiles;
      start = end;
      end = ends[group];
      num_tiles = row_tiles() * column_tiles;
    }
    const int local = tile - first_tile;
    first_column = local / row_tiles() * kColumns;
    first_row = start + local % row_tiles() * kRows;
    num_rows = min(end - first_row, kRows);
    tile += gridDim.x;
    return true;
  }

  __device__ int row_tiles() const { return (end - start + kRows - 1) / kRows; }
};

// What the copy engine reads for the stages, one after the other.
struct Source {
  const CUtensorMap* x;
  const CUtensorMap* weight;
  int num_columns, num_steps;
  Walk walk;
  int step;

  __device__ bool next() {
    if (++step < num_steps) return true;
    step = 0;
    return walk.next();
  }

  __device__ void copy_weight(const Ring<Sizes>& ring, int stage) const {
    expect_bytes(ring.full(stage), Sizes::weight_bytes + num_boxes() * kBoxRows * kRowBytes);
    copy_tile(ring.weight(stage), weight, step * kDepth,
              walk.group * num_columns + walk.first_column, ring.full(stage), kEvictFirst);
  }

  // Up to 7 rows more than those of the tile, and what is behind them in shared memory, are
  // multiplied, too; nothing reads their sums.
  __device__ void copy_rows(const Ring<Sizes>& ring, int stage) const {
    for (int box = 0; box < num_boxes(); ++box) {
      copy_tile(ring.x(stage) + box * kBoxRows * kRowBytes, x, step * kDepth,
                walk.first_row + box * kBoxRows, ring.full(stage), kEvictLast);
    }
  }

  __device__ int num_boxes() const { return (walk.num_rows + kBoxRows - 1) / kBoxRows; }
};

// One thread keeps the ring full.
__device__ void produce(const Ring<Sizes>& ring, Source source) {
  Source rows = source;
  int num_filled = 0;
  bool is_more = true;
  while (num_filled < Sizes::num_stages && (is_more = source.next())) {
    source.copy_weight(ring, num_filled++);
  }
  wait_for_prerequisites();
  for (int stage = 0; stage < num_filled; ++stage) {
    rows.next();
    rows.copy_rows(ring, stage);
  }
  Position at;
  while (is_more && source.next()) {
    wait(ring.empty(at.stage), at.phase);
    source.copy_weight(ring, at.stage);
    source.copy_rows(ring, at.stage);
    at.advance(ring);
  }
}

// Two neighbouring columns of one row from two threads that have a column of two rows each: the
// even one gets the first row, the odd one the second.
__device__ float2 pair_columns(float first_row, float second_row) {
  const bool is_odd = threadIdx.x & 4;
  const float other = __shfl_xor_sync(0xFFFFFFFF, is_odd ? first_row : second_row, 4);
  return is_odd ? make_float2(other, second_row) : make_float2(first_row, other);
}

// Where a thread writes its sums of a tile. Of the 64 rows of the weight that four warps multiply
// it has row lane / 4 of its warp's 16 and the one 8 further, and of every eight rows of the tile
// lane % 4 * 2 and the next. It writes two columns of one of these rows, and two 8 further.
template <int kWidth>
struct Target {
  int column;
  int slots[kWidth / 8];  // -1: no row
  float scales[kWidth / 8];

  // Reads where the rows go to, long before there are sums.
  __device__ Target(const Walk& walk, const KernelParams& params, int group) {
    const int lane = threadIdx.x % 32;
    column = walk.first_column + group * kGroupRows + threadIdx.x / 32 % 4 * 16 + lane / 8 * 2;
    const int row = lane % 4 * 2 + lane / 4 % 2;
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      const bool is_row = row + i * 8 < walk.num_rows;
      slots[i] = is_row ? params.slots[walk.first_row + row + i * 8] : -1;
      scales[i] = 1.0f;
      if (is_row && params.scales != nullptr) {
        scales[i] = __bfloat162float(params.scales[slots[i]]);
      }
    }
  }

  __device__ void store(const float (&total)[kWidth / 2], const KernelParams& params) const {
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* sums = &total[i * 4 + half * 2];
        const float2 values = pair_columns(rounded(sums[0]), rounded(sums[1]));
        const int at = column + half * 8;
        if (slots[i] < 0 || at >= params.num_columns) continue;
        __nv_bfloat16* out = params.out + int64_t{slots[i]} * params.num_columns + at;
        *reinterpret_cast<__nv_bfloat162*>(out) =
            __floats2bfloat162_rn(values.x * scales[i], values.y * scales[i]);
      }
    }
  }
};

// A group of four warps multiplies its 64 rows of the weight with kWidth rows.
template <int kWidth>
__device__ void multiply_tile(const Ring<Sizes>& ring, const Walk& walk, const KernelParams& params,
                              int group, Position& at) {
  const Target<kWidth> target(walk, params, group);
  float total[kWidth / 2];
  const int last = consume(ring, at, params.depth / kDepth, [&](int stage, bool accumulate) {
    const uint64_t left = matrix_descriptor(ring.weight(stage) + group * kGroupRows * kRowBytes);
    const uint64_t right = matrix_descriptor(ring.x(stage));
    begin_products();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      multiply(total, left + k * 2, right + k * 2, accumulate || k > 0);
    }
  });
  settle(total);
  if (threadIdx.x % 32 == 0) arrive(ring.empty(last));
  target.store(total, params);
}

__device__ void multiply_tiles(const Ring<Sizes>& ring, Walk walk, const KernelParams& params,
                               int group) {
  Position at;
  while (walk.next()) {
    if (walk.num_rows <= 8) {
      multiply_tile<8>(ring, walk, params, group, at);
    } else if (walk.num_rows <= 16) {
      multiply_tile<16>(ring, walk, params, group, at);
    } else if (walk.num_rows <= 32) {
      multiply_tile<32>(ring, walk, params, group, at);
    } else {
      multiply_tile<64>(ring, walk, params, group, at);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    weighted_gemm_kernel(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap weight,
                         const __grid_constant__ KernelParams params) {
  extern __shared__ char stages[];
  __shared__ Shared shared;
  const Ring<Sizes> ring{first_stage(stages), shared_address(shared.barriers)};
  if (threadIdx.x == 0) ring.open(&x, &weight, 1, kMultipliers);
  if (!params.early) wait_for_prerequisites();
  // Read past L1, which may hold what was there before where an earlier kernel still runs.
  for (int i = threadIdx.x; i < params.num_groups; i += kThreads) {
    shared.ends[i] = __ldcg(params.ends + i);
  }
  __syncthreads();

  const int warp = threadIdx.x / 32;
  const Walk walk{shared.ends, params.num_groups, (params.num_columns + kColumns - 1) / kColumns,
                  static_cast<int>(blockIdx.x)};
  if (warp == kMultipliers) {
    if (threadIdx.x % 32 == 0) {
      const int num_steps = params.depth / kDepth;
      produce(ring, {&x, &weight, params.num_columns, num_steps, walk, num_steps - 1});
    }
    return;
  }
  // Every thread that writes waits itself.
  wait_for_prerequisites();
  launch_dependents();
  multiply_tiles(ring, walk, params, warp / 4);
}

#else

__global__ void weighted_gemm_kernel(const __grid_constant__ CUtensorMap,
                                     const __grid_constant__ CUtensorMap,
                                     const __grid_constant__ KernelParams) {}

#endif

}  // namespace

cudaError_t launch_weighted_gemm(const WeightedGemmParams& params, cudaStream_t stream) {
  if (params.depth % kDepth != 0 || params.num_columns % 8 != 0 || params.num_groups > kMaxGroups) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap x, weight;
  cudaError_t error =
      describe(&x, params.x, params.num_rows, params.depth, params.x_stride, kBoxRows);
  if (error != cudaSuccess) return error;
  error = describe(&weight, params.weight, params.num_groups * params.num_columns, params.depth,
                   params.weight_stride, kColumns);
  if (error != cudaSuccess) return error;
  const KernelParams kernel_params{params.ends,
                                   params.slots,
                                   static_cast<const __nv_bfloat16*>(params.scales),
                                   static_cast<__nv_bfloat16*>(params.out),
                                   params.num_groups,
                                   params.num_columns,
                                   params.depth,
                                   params.early};
  const Launch launch{params.num_blocks, kThreads, stream, /*overlaps=*/true, Sizes::shared_bytes};
  return launch_kernel(weighted_gemm_kernel, launch, x, weight, kernel_params);
}

}  // namespace fused_ops
