// SPDX-License-Identifier: Apache-2.0
//
// x weight^T for few rows of x, where reading the weight is (nearly) all the time there is.
//
// The weight is read once, through the copy engine into a deep ring of shared-memory stages: what
// counts is the number of bytes in flight, so one block has (almost) all of a multiprocessor's
// shared memory, and the tilings make about one block for each multiprocessor. A cluster of `split`
// blocks computes one tile: each sums a part of the depth on the tensor cores (rows padded to 64;
// the padding costs no traffic), then each adds up its share of the columns out of the shared
// memory of all, in the order of the blocks. Every sum has one order, whatever the number of rows:
// results are deterministic and do not depend on the rows beside a row.
//
// Weights do not depend on the kernel before this one: a launch marked `early` starts to read them
// while that kernel ends, and waits for it before it reads x. And when all of its own weight is on
// its way, memory would have nothing to do until the next product begins: `ahead` names what that
// one reads, the start of which comes to the cache meanwhile.
//
// Operands are bf16, or fp8 (e4m3) with a scale for each row of x and for each row of the weight,
// by which the sums are multiplied before anything else is done with them. A stage has as many
// bytes of either, so fp8 goes twice as deep.
//
// Tried and slower: half of the shared memory, so that the next product's weights find room beside
// these (32 rows); rows of x that the blocks of two tiles bring each other (multicast, fp8, at any
// number of rows: twice the time).

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

// Elements of a stage's depth.
template <bool kIsFp8>
constexpr int kStageDepth = kIsFp8 ? kRowBytes : kDepth;

struct KernelParams {
  const __nv_bfloat16* bias;
  const float* x_scales;  // of fp8, as the next
  const float* weight_scales;
  __nv_bfloat16* out;
  int64_t out_stride;
  int num_rows, num_columns, depth;
  int stage_bytes, num_stages;
  Ahead ahead;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A sum of fp8 products as it is meant.
template <bool kIsFp8>
__device__ float2 scaled_pair(const KernelParams& params, int row, int column, const float* sums) {
  if constexpr (!kIsFp8) return make_float2(sums[0], sums[1]);
  const float scale = params.x_scales[row];
  return make_float2(sums[0] * (scale * params.weight_scales[column]),
                     sums[1] * (scale * params.weight_scales[column + 1]));
}

// The scales of a tile's columns are on their way to the cache while its sums are computed.
template <bool kTwoParts, int kColumns>
__device__ void prefetch_scales(const KernelParams& params, int tile) {
  constexpr int kLine = 32;  // floats
  constexpr int kWidth = kTwoParts ? kColumns / 2 : kColumns;
  const int place = threadIdx.x * kLine;
  if (place >= kColumns) return;
  const int part = place / kWidth;
  prefetch(params.weight_scales + part * (params.num_columns / 2) + tile * kWidth + place % kWidth);
}

// Adds the bias, and for kResidual what is there already.
template <Epilogue kEpilogue>
__device__ void store_pair(const KernelParams& params, int row, int column, float first,
                           float second) {
  if (kEpilogue != Epilogue::kSiluMul && params.bias != nullptr) {
    first += __bfloat162float(params.bias[column]);
    second += __bfloat162float(params.bias[column + 1]);
  }
  auto* target = reinterpret_cast<__nv_bfloat162*>(params.out + row * params.out_stride + column);
  if (kEpilogue == Epilogue::kResidual) {
    const __nv_bfloat162 there = *target;
    first += __low2float(there);
    second += __high2float(there);
  }
  *target = __floats2bfloat162_rn(first, second);
}

// What a block reads of the weight: `parts` tiles of rows, `part_stride` rows apart.
struct WeightTiles {
  const CUtensorMap* map;
  int first_row, part_stride, parts;
};

__device__ void copy_weight(const Ring<>& ring, const WeightTiles& tiles, int stage, int depth) {
  expect_bytes(ring.full(stage), ring.sizes.stage_bytes);
  for (int part = 0; part < tiles.parts; ++part) {
    copy_tile(ring.weight(stage) + part * (ring.sizes.weight_bytes / tiles.parts), tiles.map, depth,
              tiles.first_row + part * tiles.part_stride, ring.full(stage), kEvictFirst);
  }
}

__device__ void copy_rows(const Ring<>& ring, const CUtensorMap* x, int stage, int depth) {
  copy_tile(ring.x(stage), x, depth, 0, ring.full(stage), kEvictLast);
}

// One thread keeps the ring full.
template <int kElements>
__device__ void produce(const Ring<>& ring, const CUtensorMap* x, const WeightTiles& weight,
                        const Ahead& ahead, int first_depth, int num_steps) {
  const int filled = min(num_steps, ring.sizes.num_stages);
  for (int step = 0; step < filled; ++step) {
    copy_weight(ring, weight, step, first_depth + step * kElements);
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

// A group of four warps multiplies its 64 rows with the columns of every stage. A stage has only
// the rows of x there are (and up to 7 of zeros); the rows behind them are whatever follows in
// shared memory, and so are their sums, which nothing reads.
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
  extern __shared__ char shared[];
  const uint32_t base = first_stage(shared);
  const Ring<> ring{base,
                    base + params.num_stages * params.stage_bytes,
                    {params.stage_bytes, params.num_stages, kColumns * kRowBytes}};
  if (threadIdx.x == 0) ring.open(&x, &weight, 1, kGroups * kGroupThreads / 32);
  __syncthreads();
  launch_dependents();
  if constexpr (kIsFp8) prefetch_scales<kTwoParts, kColumns>(params, blockIdx.x / kSplit);

  const int rank = kSplit == 1 ? 0 : block_of_cluster();
  const int tile = blockIdx.x / kSplit;
  const int first_column = tile * (kTwoParts ? kWidth : kColumns);
  const int num_steps = params.depth / kSplit / kStageDepth<kIsFp8>;
  const int first_depth = rank * num_steps * kStageDepth<kIsFp8>;
  const int warp = threadIdx.x / 32;
  float total[kParts][kWidth / 2];

  if (warp == kGroups * kGroupThreads / 32) {
    if (threadIdx.x % 32 == 0) {
      const WeightTiles tiles{&weight, first_column, params.num_columns / 2, kTwoParts ? 2 : 1};
      produce<kStageDepth<kIsFp8>>(ring, &x, tiles, params.ahead, first_depth, num_steps);
    }
    __syncwarp();
  } else {
    consume<kIsFp8, kParts, kWidth>(ring, num_steps, warp / 4, total);
  }
  // Every thread that writes waits itself, those beside the producing one too.
  wait_for_prerequisites();

  // A thread of a group has columns lane % 4 * 2 (and the next) of every eight, of two rows.
  const int lane = threadIdx.x % 32;
  const int first_row = warp * 16 + lane / 4;
  const int pair = lane % 4 * 2;
  const bool multiplies = warp < kGroups * 4;

  if constexpr (kSplit == 1) {
    if (!multiplies) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8;
      if (row >= params.num_rows) continue;
      if constexpr (kTwoParts) {
#pragma unroll
        for (int i = 0; i < kWidth / 8; ++i) {
          const int column = first_column + i * 8 + pair;
          const int of_up = params.num_columns / 2 + column;
          const float* sums = &total[0][i * 4 + half * 2];
          const float2 gate = scaled_pair<kIsFp8>(params, row, column, sums);
          const float2 up = scaled_pair<kIsFp8>(params, row, of_up, &total[1][i * 4 + half * 2]);
          const float2 product = silu_mul(gate, up);
          store_pair<kEpilogue>(params, row, column, product.x, product.y);
        }
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int i = 0; i < kWidth / 8; ++i) {
            const int column = first_column + part * kWidth + i * 8 + pair;
            const float2 sums =
                scaled_pair<kIsFp8>(params, row, column, &total[part][i * 4 + half * 2]);
            store_pair<kEpilogue>(params, row, column, sums.x, sums.y);
          }
        }
      }
    }
  } else {
    // The stages are read; their place takes the sums, fp32 [rows, kColumns + 4].
    constexpr int kPitch = kColumns + 4;  // rows apart in the banks
    constexpr int kShare = kColumns / kSplit;
    __syncthreads();
    if (multiplies) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + half * 8;
        if (row >= params.num_rows) continue;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int i = 0; i < kWidth / 8; ++i) {
            const uint32_t address =
                ring.stages + (row * kPitch + part * kWidth + i * 8 + pair) * 4;
            asm volatile("st.shared::cta.v2.f32 [%0], {%1, %2};" ::"r"(address),
                         "f"(total[part][i * 4 + half * 2]), "f"(total[part][i * 4 + half * 2 + 1])
                         : "memory");
          }
        }
      }
    }
    cluster_sync();
    constexpr int kQuads = kShare / 4;
    for (int i = threadIdx.x; i < params.num_rows * kQuads; i += blockDim.x) {
      const int row = i / kQuads;
      const int column = rank * kShare + i % kQuads * 4;
      float4 values[kSplit];
#pragma unroll
      for (int block = 0; block < kSplit; ++block) {
        values[block] = load_of_block(ring.stages + (row * kPitch + column) * 4, block);
      }
#pragma unroll
      for (int block = 1; block < kSplit; ++block) {
        values[0].x += values[block].x;
        values[0].y += values[block].y;
        values[0].z += values[block].z;
        values[0].w += values[block].w;
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int place = first_column + column + i;
        const float2 sums = scaled_pair<kIsFp8>(params, row, place, &values[0].x + i);
        store_pair<kEpilogue>(params, row, place, sums.x, sums.y);
      }
    }
    cluster_sync();  // no block ends while others read its shared memory
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
  const int rows = (params.num_rows + 7) / 8 * 8;  // whole groups, as the swizzle has them
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
                             params.ahead};
  kernel_params.stage_bytes = (kColumns + rows) * kRowBytes;
  // The multiplication of the last stage reads 64 rows of x for each group, present or not.
  const int overhead = kAlignment + (kGroups * kGroupRows - rows) * kRowBytes + kBarrierBytes;
  kernel_params.num_stages =
      std::min({kMaxStages, (kSharedBytes - overhead) / kernel_params.stage_bytes,
                params.depth / kSplit / kElements});
  // The sums of a tile take the place of the stages.
  const int sum_bytes = kSplit > 1 ? params.num_rows * (kColumns + 4) * 4 : 0;
  const int shared_bytes =
      std::max(kernel_params.num_stages * kernel_params.stage_bytes, sum_bytes) + overhead;
  const Launch launch{params.num_columns / kColumns * kSplit,
                      kGroups * kGroupThreads + 32,
                      stream,
                      params.early,
                      shared_bytes,
                      kSplit};
  return launch_kernel(skinny_linear_kernel<kIsFp8, kColumns, kSplit, kGroups, kEpilogue>, launch,
                       x, weight, kernel_params);
}

// Numbers of groups of four warps, for 64 rows each, for which there are kernels: those of tilings
// that are the fastest for so many rows.
template <bool kIsFp8, int kColumns, int kSplit>
constexpr bool has_groups(int groups) {
  if (kColumns == 64) return groups <= (kIsFp8 ? 4 : 3);
  if (kColumns == 192) return groups <= (kIsFp8 ? 1 : 2);
  return groups == 1 || (kIsFp8 && kColumns == 96 && kSplit == 1 && groups >= 3);
}

template <bool kIsFp8, int kColumns, int kSplit, Epilogue kEpilogue>
cudaError_t launch_groups(const LinearParams& params, cudaStream_t stream) {
  const int groups = (params.num_rows + kGroupRows - 1) / kGroupRows;
  return dispatch_value<1, 2, 3, 4>(groups, [&](auto count) {
    if constexpr (has_groups<kIsFp8, kColumns, kSplit>(count)) {
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
    return columns_and_split == 1921
               ? launch_groups<kIsFp8, 192, 1, Epilogue::kSiluMul>(params, stream)
               : cudaErrorInvalidValue;
  }
  return dispatch_value<322, 642, 961, 962>(columns_and_split, [&](auto tiling) {
    constexpr int kColumns = tiling / 10, kSplit = tiling % 10;
    return params.epilogue == Epilogue::kResidual
               ? launch_groups<kIsFp8, kColumns, kSplit, Epilogue::kResidual>(params, stream)
               : launch_groups<kIsFp8, kColumns, kSplit, Epilogue::kStore>(params, stream);
  });
}

}  // namespace
}  // namespace fused_ops
