// SPDX-License-Identifier: Apache-2.0
//
// x weight^T for few rows of x, where reading the weight takes (nearly) all the time.
//
// The weight is read once, through the copy engine into a deep ring of shared-memory stages. The
// number of bytes in flight decides the speed. So one block has (almost) all of a multiprocessor's
// shared memory, and the tilings make about one block per multiprocessor. A cluster of `split`
// blocks computes one tile. Each block sums a part of the depth on the tensor cores (rows are
// padded to 64; the padding costs no traffic). Then it gives every other block its share of the
// columns, and adds up its own share in the order of the blocks. Every sum has one order, whatever
// the number of rows. So results are deterministic, and a row's result does not depend on the other
// rows.
//
// Weights do not depend on the previous kernel. A launch marked `early` starts to read them while
// that kernel ends, and waits for it before it reads x. Once all of its own weight has been
// requested, memory would be idle until the next product begins. So `ahead` names the data that the
// next product reads, and the start of that data is fetched into the cache meanwhile.
//
// Operands are bf16, or fp8 (e4m3) with a scale for each row of x and each row of the weight. Sums
// are multiplied by the scales before any other operation. A stage has the same number of bytes for
// both, so it is twice as deep for fp8. The data that the end of a block needs is loaded long
// before: scales, and the values that sums are added to.
//
// Tried, and slower:
// - half of the shared memory, so that the next product's weights fit in addition (32 rows)
// - rows of x that the blocks of two tiles copy for each other (multicast, fp8, any number of rows:
//   twice the time)
// - 256 rows of fp8 with 128 columns in four parts, whose clusters do not all fit on the card at
//   once; and the same in tiles of 128 rows, which read less of x (4 % of a layer)

#pragma once

#include <algorithm>

#include "epilogue.cuh"
#include "linear.h"
#include "vllm_add_llada/cuda_kernels/common/dispatch.cuh"
#include "vllm_add_llada/cuda_kernels/common/ring.cuh"

namespace fused_ops {
namespace {

constexpr int kMaxStages = 16;
constexpr int kBarrierBytes = kMaxStages * 16;
constexpr int kMostSumBytes = 20 * 1024;  // bytes, at most, of a cluster's sums next to the stages

// Depth of a stage in elements.
template <bool kIsFp8>
constexpr int kStageDepth = kIsFp8 ? kRowBytes : kDepth;

struct KernelParams {
  const __nv_bfloat16* bias;
  const float* x_scales;  // for fp8 only, like weight_scales
  const float* weight_scales;
  __nv_bfloat16* out;
  int64_t out_stride;
  int num_rows, num_columns, depth;
  int stage_bytes, num_stages;
  int sums;  // bytes from the first stage to a cluster's sums; 0: the sums reuse the stages' memory
  Ahead ahead;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The tiles that a block reads of the weight: `parts` tiles of rows, `part_stride` rows apart.
struct WeightTiles {
  const CUtensorMap* map;
  int first_row, part_stride, parts;
};

// The scales of a block's fp8 operands in shared memory. The scales of the weight's rows arrive
// with the first stage.
struct Scales {
  float *of_columns, *of_rows;
  const float* source;  // scales of the weight in global memory
  int width;            // columns per part
};

__device__ void copy_weight(const Ring<>& ring, const WeightTiles& tiles, int stage, int depth,
                            int more_bytes = 0) {
  expect_bytes(ring.full(stage), ring.sizes.stage_bytes + more_bytes);
  for (int part = 0; part < tiles.parts; ++part) {
    copy_tile(ring.weight(stage) + part * (ring.sizes.weight_bytes / tiles.parts), tiles.map, depth,
              tiles.first_row + part * tiles.part_stride, ring.full(stage), kEvictFirst);
  }
}

__device__ void copy_rows(const Ring<>& ring, const CUtensorMap* x, int stage, int depth) {
  copy_tile(ring.x(stage), x, depth, 0, ring.full(stage), kEvictLast);
}

__device__ void copy_scales(const Ring<>& ring, const WeightTiles& tiles, const Scales& scales) {
  const int bytes = scales.width * sizeof(float);
  for (int part = 0; part < tiles.parts; ++part) {
    copy_bytes(shared_address(scales.of_columns + part * scales.width),
               scales.source + tiles.first_row + part * tiles.part_stride, bytes, ring.full(0));
  }
}

// One thread keeps the ring full.
template <bool kIsFp8>
__device__ void produce(const Ring<>& ring, const CUtensorMap* x, const WeightTiles& weight,
                        const Scales& scales, const Ahead& ahead, int first_depth, int num_steps) {
  constexpr int kElements = kStageDepth<kIsFp8>;
  const int filled = min(num_steps, ring.sizes.num_stages);
  const int scale_bytes = kIsFp8 ? weight.parts * scales.width * sizeof(float) : 0;
  for (int step = 0; step < filled; ++step) {
    copy_weight(ring, weight, step, first_depth + step * kElements, step == 0 ? scale_bytes : 0);
    if (kIsFp8 && step == 0) copy_scales(ring, weight, scales);
  }
  if (filled == num_steps) fetch_share(ahead.data, ahead.bytes);
  wait_for_prerequisites();
  for (int step = 0; step < filled; ++step) {
    copy_rows(ring, x, step, first_depth + step * kElements);
  }
  Position at;
  for (int step = filled; step < num_steps; ++step) {
    wait(ring.empty(at.stage), at.phase);
    copy_weight(ring, weight, at.stage, first_depth + step * kElements);
    copy_rows(ring, x, at.stage, first_depth + step * kElements);
    at.advance(ring);
  }
  if (filled < num_steps) fetch_share(ahead.data, ahead.bytes);
}

// A group of four warps multiplies its 64 rows by the columns of every stage. A stage has only the
// existing rows of x (and up to 7 rows of zeros). The rows behind them are arbitrary data from
// shared memory, so their sums are arbitrary too, and nothing reads them.
template <bool kIsFp8, int kParts, int kWidth>
__device__ void consume(const Ring<>& ring, int num_steps, int group,
                        float (&total)[kParts][kWidth / 2]) {
  Position at;
  int last = 0;
  for (int step = 0; step < num_steps; ++step) {
    wait(ring.full(at.stage), at.phase);
    const uint64_t left = matrix_descriptor(ring.x(at.stage) + group * kGroupRows * kRowBytes);
    const uint64_t right = matrix_descriptor(ring.weight(at.stage));
    begin_products();
#pragma unroll
    for (int k = 0; k < kRowBytes / 32; ++k) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint64_t columns = right + k * 2 + part * (kWidth * kRowBytes >> 4);
        if constexpr (kIsFp8) {
          multiply_fp8(total[part], left + k * 2, columns, step > 0 || k > 0);
        } else {
          multiply(total[part], left + k * 2, columns, step > 0 || k > 0);
        }
      }
    }
    commit_products();
    if (step > 0 && threadIdx.x % 32 == 0) arrive(ring.empty(last));
    last = at.stage;
    at.advance(ring);
  }
#pragma unroll
  for (auto& sums : total) settle(sums);
}

// The epilogue: a block's view of the result, whose columns start at `first_column`.
template <bool kIsFp8, Epilogue kEpilogue>
struct Result {
  const KernelParams& params;
  const Scales& scales;
  int first_column;

  __device__ __nv_bfloat162* place(int row, int column) const {
    return reinterpret_cast<__nv_bfloat162*>(params.out + row * params.out_stride + first_column +
                                             column);
  }

  // The values that two neighbouring sums are added to.
  __device__ __nv_bfloat162 there(int row, int column) const {
    if (kEpilogue != Epilogue::kResidual || row >= params.num_rows) return {};
    return *place(row, column);
  }

  // Sums, multiplied by the scales of fp8 operands, in the order of cuBLAS. `column` counts in the
  // block's part of the weight.
  __device__ float2 meant(float2 sums, int row, int column) const {
    if constexpr (kIsFp8) {
      const float of_row = scales.of_rows[row];
      const auto of_columns = *reinterpret_cast<const float2*>(scales.of_columns + column);
      sums.x = sums.x * of_columns.x * of_row;
      sums.y = sums.y * of_columns.y * of_row;
    }
    return sums;
  }

  __device__ void store(int row, int column, float2 sums, __nv_bfloat162 there) const {
    if (kEpilogue != Epilogue::kSiluMul && params.bias != nullptr) {
      sums.x += __bfloat162float(params.bias[first_column + column]);
      sums.y += __bfloat162float(params.bias[first_column + column + 1]);
    }
    if (kEpilogue == Epilogue::kResidual) {
      sums.x += __low2float(there);
      sums.y += __high2float(there);
    }
    *place(row, column) = __floats2bfloat162_rn(sums.x, sums.y);
  }
};

#endif

template <bool kIsFp8, int kColumns, int kSplit, int kGroups, Epilogue kEpilogue>
__global__ void __launch_bounds__(kGroups* kGroupThreads + 32, 1)
    skinny_linear_kernel(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap weight,
                         const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kTwoParts = kEpilogue == Epilogue::kSiluMul;
  static_assert(!kTwoParts || kSplit == 1, "gate and up meet in one thread");
  constexpr int kParts = kTwoParts ? 2 : 1, kWidth = kColumns / kParts;
  constexpr int kWarps = kGroups * kGroupThreads / 32;  // warps that multiply
  extern __shared__ char shared[];
  __shared__ alignas(16) float scales_of_columns[kIsFp8 ? kColumns : 4];
  __shared__ alignas(16) float scales_of_rows[kIsFp8 ? kGroups * kGroupRows : 4];
  const uint32_t base = first_stage(shared);
  const Ring<> ring{base,
                    base + params.num_stages * params.stage_bytes,
                    {params.stage_bytes, params.num_stages, kColumns * kRowBytes}};
  if (threadIdx.x == 0) ring.open(&x, &weight, 1, kWarps);
  __syncthreads();
  launch_dependents();
  // Other blocks write sums to this block's memory once it has started or, if the sums reuse the
  // stages' memory, once it has read its stages.
  const bool is_beside = params.sums > 0;
  if (kSplit > 1 && is_beside) cluster_arrive();

  const int rank = kSplit == 1 ? 0 : block_of_cluster();
  const int first_column = blockIdx.x / kSplit * (kTwoParts ? kWidth : kColumns);
  const int num_steps = params.depth / kSplit / kStageDepth<kIsFp8>;
  const Scales scales{scales_of_columns, scales_of_rows, params.weight_scales, kWidth};
  const int warp = threadIdx.x / 32;

  if (warp == kWarps) {
    if (threadIdx.x % 32 == 0) {
      const WeightTiles tiles{&weight, first_column, params.num_columns / 2, kParts};
      produce<kIsFp8>(ring, &x, tiles, scales, params.ahead, rank * num_steps * kStageDepth<kIsFp8>,
                      num_steps);
    }
    __syncwarp();
    if constexpr (kSplit > 1) {  // All threads must take part in the barriers.
      if (!is_beside) cluster_arrive();
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    return;
  }

  // Every thread that writes must wait itself.
  wait_for_prerequisites();
  if constexpr (kIsFp8) {
    if (threadIdx.x < params.num_rows) scales_of_rows[threadIdx.x] = params.x_scales[threadIdx.x];
  }
  const Result<kIsFp8, kEpilogue> result{params, scales, first_column};
  // Of every eight columns a thread has column lane % 4 * 2 and the next one, in two rows.
  const int lane = threadIdx.x % 32;
  const int first_row = warp * 16 + lane / 4;
  const int pair = lane % 4 * 2;
  float total[kParts][kWidth / 2];

  if constexpr (kSplit == 1) {
    consume<kIsFp8, kParts, kWidth>(ring, num_steps, warp / 4, total);
    if constexpr (kIsFp8) sync_first(kWarps * 32);  // the scales of the rows are loaded
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8;
      if (row >= params.num_rows) continue;
#pragma unroll
      for (int i = 0; i < kWidth / 8; ++i) {
        const int column = i * 8 + pair;
        const float* sums = &total[0][i * 4 + half * 2];
        const float2 first = result.meant(make_float2(sums[0], sums[1]), row, column);
        if constexpr (kTwoParts) {
          sums = &total[1][i * 4 + half * 2];
          const float2 up = result.meant(make_float2(sums[0], sums[1]), row, kWidth + column);
          result.store(row, column, silu_mul(first, up), {});
        } else {
          result.store(row, column, first, result.there(row, column));
        }
      }
    }
  } else {
    // Sums of every block of the cluster for this block's share, fp32 [kSplit, rows, kShare + 4].
    constexpr int kShare = kColumns / kSplit;
    constexpr int kPitch = kShare + 4;  // elements per row, so that rows start in different banks
    constexpr int kQuads = kShare / 4;
    static_assert(kColumns % kSplit == 0 && kQuads % 2 == 0, "whole vectors, and whole turns");
    constexpr int kTurns = kQuads / 2;  // iterations of all threads over the quads of all rows
    float* place = reinterpret_cast<float*>(shared + (base - shared_address(shared)) + params.sums);
    __nv_bfloat162 there[kTurns][2];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int quad = turn * kWarps * 32 + threadIdx.x;
      const int row = quad / kQuads, column = rank * kShare + quad % kQuads * 4;
      there[turn][0] = result.there(row, column);
      there[turn][1] = result.there(row, column + 2);
    }
    consume<kIsFp8, kParts, kWidth>(ring, num_steps, warp / 4, total);
    if (!is_beside) cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8;
      if (row >= params.num_rows) continue;
#pragma unroll
      for (int i = 0; i < kWidth / 8; ++i) {
        const int of_share = i * 8 % kShare + pair;
        const int slot = (rank * params.num_rows + row) * kPitch + of_share;
        store_of_block(shared_address(place + slot), i * 8 / kShare, total[0][i * 4 + half * 2],
                       total[0][i * 4 + half * 2 + 1]);
      }
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int quad = turn * kWarps * 32 + threadIdx.x;
      const int row = quad / kQuads, of_share = quad % kQuads * 4;
      const int column = rank * kShare + of_share;
      if (row >= params.num_rows) break;
      const float* sums_there = place + row * kPitch + of_share;
      float4 sums = *reinterpret_cast<const float4*>(sums_there);
#pragma unroll
      for (int block = 1; block < kSplit; ++block) {
        sums_there += params.num_rows * kPitch;
        const float4 more = *reinterpret_cast<const float4*>(sums_there);
        sums.x += more.x;
        sums.y += more.y;
        sums.z += more.z;
        sums.w += more.w;
      }
      const float2 first = result.meant(make_float2(sums.x, sums.y), row, column);
      const float2 second = result.meant(make_float2(sums.z, sums.w), row, column + 2);
      result.store(row, column, first, there[turn][0]);
      result.store(row, column + 2, second, there[turn][1]);
    }
  }
#endif
}

template <bool kIsFp8, int kColumns, int kSplit, int kGroups, Epilogue kEpilogue>
cudaError_t launch(const LinearParams& params, cudaStream_t stream) {
  constexpr bool kTwoParts = kEpilogue == Epilogue::kSiluMul;
  constexpr int kElements = kStageDepth<kIsFp8>;
  constexpr int kElementBytes = kRowBytes / kElements;
  if (params.num_columns % kColumns != 0 || params.depth % (kSplit * kElements) != 0) {
    return cudaErrorInvalidValue;
  }
  // whole groups of eight rows, as the swizzle requires
  const int rows = (params.num_rows + 7) / 8 * 8;
  CUtensorMap x, weight;
  cudaError_t error =
      describe(&x, params.x, params.num_rows, params.depth, params.x_stride, rows, kElementBytes);
  if (error != cudaSuccess) return error;
  error = describe(&weight, params.weight, params.num_columns, params.depth, params.weight_stride,
                   kTwoParts ? kColumns / 2 : kColumns, kElementBytes);
  if (error != cudaSuccess) return error;
  KernelParams kernel_params{static_cast<const __nv_bfloat16*>(params.bias),
                             params.x_scales,
                             params.weight_scales,
                             static_cast<__nv_bfloat16*>(params.out),
                             params.out_stride,
                             params.num_rows,
                             params.num_columns,
                             params.depth,
                             0,
                             0,
                             0,
                             params.ahead};
  kernel_params.stage_bytes = (kColumns + rows) * kRowBytes;
  // The multiplication of the last stage reads 64 rows of x for each group, even if there are
  // fewer.
  const int behind = (kGroups * kGroupRows - rows) * kRowBytes + kBarrierBytes;
  const int scale_bytes = (kIsFp8 ? kColumns + kGroups * kGroupRows : 8) * sizeof(float);
  const int sum_bytes = kSplit > 1 ? params.num_rows * (kColumns + 4 * kSplit) * sizeof(float) : 0;
  // If the sums of a tile are large compared with the stages, they reuse the stages' memory.
  const int beside = sum_bytes <= kMostSumBytes ? sum_bytes : 0;
  // Clusters of four blocks cannot use every multiprocessor, so two blocks must fit on one.
  constexpr int kMostBytes = kSplit > 2 ? kSharedBytes / 2 - 1024 : kSharedBytes;
  const int room = kMostBytes - scale_bytes - kAlignment - behind - beside;
  kernel_params.num_stages =
      std::min({kMaxStages, room / kernel_params.stage_bytes, params.depth / kSplit / kElements});
  const int stages = kernel_params.num_stages * kernel_params.stage_bytes;
  kernel_params.sums = beside > 0 ? stages + behind : 0;
  const int shared_bytes = kAlignment + std::max(stages + behind + beside, sum_bytes);
  const Launch launch{params.num_columns / kColumns * kSplit,
                      kGroups * kGroupThreads + 32,
                      stream,
                      params.early,
                      shared_bytes,
                      kSplit};
  return launch_kernel(skinny_linear_kernel<kIsFp8, kColumns, kSplit, kGroups, kEpilogue>, launch,
                       x, weight, kernel_params);
}

// Whether there is a kernel for a number of groups of four warps, with 64 rows each. There are
// kernels for the tilings that are the fastest ones at that number of rows.
template <bool kIsFp8, int kColumns, int kSplit, Epilogue kEpilogue>
constexpr bool has_groups(int groups) {
  if (kEpilogue == Epilogue::kSiluMul && kColumns == 96) return groups == 1;
  if (kColumns == 64) return groups <= (kIsFp8 ? 4 : 3);
  if (kColumns == 192 && kEpilogue != Epilogue::kSiluMul) {
    return kEpilogue == Epilogue::kStore && !kIsFp8 && groups <= 2;
  }
  if (kColumns == 192) return groups <= (kIsFp8 ? 1 : 2);
  if (kColumns == 96 && kSplit == 2 && !kIsFp8) return groups <= 2;
  return groups == 1 || (kIsFp8 && kColumns == 96 && kSplit == 1 && groups >= 3);
}

template <bool kIsFp8, int kColumns, int kSplit, Epilogue kEpilogue>
cudaError_t launch_groups(const LinearParams& params, cudaStream_t stream) {
  const int groups = (params.num_rows + kGroupRows - 1) / kGroupRows;
  return dispatch_value<1, 2, 3, 4>(groups, [&](auto count) {
    if constexpr (has_groups<kIsFp8, kColumns, kSplit, kEpilogue>(count)) {
      return launch<kIsFp8, kColumns, kSplit, count, kEpilogue>(params, stream);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

template <bool kIsFp8>
cudaError_t launch_skinny(const LinearParams& params, cudaStream_t stream) {
  const int columns_and_split = params.tiling.columns * 10 + params.tiling.split;
  if (params.num_rows < 1) return cudaErrorInvalidValue;
  if (params.epilogue == Epilogue::kSiluMul) {
    return dispatch_value<481, 961, 1921>(columns_and_split, [&](auto tiling) {
      return launch_groups<kIsFp8, tiling / 10, 1, Epilogue::kSiluMul>(params, stream);
    });
  }
  return dispatch_value<322, 324, 642, 961, 962, 1921>(columns_and_split, [&](auto tiling) {
    constexpr int kColumns = tiling / 10, kSplit = tiling % 10;
    return params.epilogue == Epilogue::kResidual
               ? launch_groups<kIsFp8, kColumns, kSplit, Epilogue::kResidual>(params, stream)
               : launch_groups<kIsFp8, kColumns, kSplit, Epilogue::kStore>(params, stream);
  });
}

}  // namespace
}  // namespace fused_ops
