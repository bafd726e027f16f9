// SPDX-License-Identifier: Apache-2.0
//
// silu(x gate^T) * (x up^T) for enough rows to keep the tensor cores busy, in tiles that fill the
// card evenly. The products themselves are never stored.
//
// A block computes 256 (or 128) rows of 96 gates and of the 96 corresponding ups, because this is
// the largest number of sums that registers hold. The fewer times an operand is read, the less
// traffic the second-level cache has. Gate and up of a column meet in one thread. One thread copies
// the weight and one copies x, through a ring of shared-memory stages that continues from tile to
// tile. Two groups of four warps multiply.
//
// As in skinny_linear.cuh an `early` launch reads its first weights while the previous kernel ends.
// Operands are bf16, or fp8 with scales, for which a stage is twice as deep. The last stages of a
// tile of bf16 operands may come from another pair of matrices (`Tail`).
//
// Tried, and slower: copies that the blocks of a cluster share (multicast); such tiles for products
// without a gate, where cuBLAS needs less power and so runs at a higher clock.

#include <algorithm>

#include "epilogue.cuh"
#include "linear.h"
#include "vllm_add_llada/cuda_kernels/common/dispatch.cuh"
#include "vllm_add_llada/cuda_kernels/common/ring.cuh"

namespace fused_ops {
namespace {

constexpr int kColumns = 96;               // columns of the result per tile
constexpr int kWeightRows = 2 * kColumns;  // rows of the weight per tile: gates, then ups
constexpr int kGroups = 2;  // groups of four warps that multiply; a third group copies
constexpr int kThreads = (kGroups + 1) * kGroupThreads;

// Sizes of a block whose groups multiply `kTall` * 64 rows each.
template <int kTall>
struct Sizes {
  static constexpr int rows = kGroups * kTall * kGroupRows;
  static constexpr int weight_bytes = kWeightRows * kRowBytes;
  static constexpr int stage_bytes = rows * kRowBytes + weight_bytes;
  static constexpr int num_stages = (kSharedBytes - kAlignment) / (stage_bytes + 16);
  static constexpr int shared_bytes = kAlignment + num_stages * (stage_bytes + 16);
};

// Depth of a stage in elements.
template <bool kIsFp8>
constexpr int kStageDepth = kIsFp8 ? kRowBytes : kDepth;

struct KernelParams {
  const float* x_scales;  // for fp8 only, like weight_scales
  const float* weight_scales;
  __nv_bfloat16* out;
  int64_t out_stride;
  int num_rows;
  int width;      // columns of out
  int num_steps;  // stages per tile, including those of the tail
  int tail_step;  // the first stage of the tail
  int row_tiles, column_tiles;
  uint64_t weight_hint;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kBand = 8;  // row tiles whose products run at the same time
// Registers of a thread that multiplies, and of one that copies. Together they use the registers of
// a multiprocessor.
constexpr int kMultiplyRegisters = 232;
constexpr int kCopyRegisters = 40;

struct Tile {
  int row, column;  // first row and column in the result
};

// Finds the position of a tile. Tiles that run at the same time form a square of rows and
// columns, so that the operands of both stay in the cache.
template <int kTall>
__device__ Tile locate(const KernelParams& params, int tile) {
  const int band = tile / (kBand * params.column_tiles);
  const int in_band = tile - band * kBand * params.column_tiles;
  const int rows = min(kBand, params.row_tiles - band * kBand);
  const int row_tile = band * kBand + in_band % rows;
  return {row_tile * Sizes<kTall>::rows, in_band / rows * kColumns};
}

// Calls `visit` for every tile of this block.
template <int kTall, typename Visit>
__device__ void for_each_tile(const KernelParams& params, Visit visit) {
  const int num_tiles = params.row_tiles * params.column_tiles;
  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    visit(locate<kTall>(params, tile));
  }
}

// One thread keeps one operand in the ring; `copy` enqueues its `bytes` of a stage, from the
// operand or from its tail. The wait for a stage that was never filled returns at once.
template <bool kIsFp8, int kTall, typename Copy>
__device__ void produce(const Ring<Sizes<kTall>>& ring, const KernelParams& params,
                        const CUtensorMap* operand, const CUtensorMap* tail, int bytes, Copy copy) {
  Position at;
  for_each_tile<kTall>(params, [&](Tile tile) {
    for (int step = 0; step < params.num_steps; ++step) {
      wait(ring.empty(at.stage), at.phase ^ 1);
      expect_bytes(ring.full(at.stage), bytes);
      const bool is_tail = step >= params.tail_step;
      const int depth = (is_tail ? step - params.tail_step : step) * kStageDepth<kIsFp8>;
      copy(at.stage, tile, is_tail ? tail : operand, depth);
      at.advance(ring);
    }
  });
}

// A group of four warps multiplies its rows with the columns of every stage of a tile.
template <bool kIsFp8, int kTall>
__device__ void multiply_tile(const Ring<Sizes<kTall>>& ring, Position& at, int num_steps,
                              int group, float (&total)[kTall][kWeightRows / 2]) {
  const int last = consume(ring, at, num_steps, [&](int stage, bool accumulate) {
    const uint64_t left = matrix_descriptor(ring.x(stage) + group * kTall * kGroupRows * kRowBytes);
    const uint64_t right = matrix_descriptor(ring.weight(stage));
    begin_products();
#pragma unroll
    for (int k = 0; k < kRowBytes / 32; ++k) {
#pragma unroll
      for (int tall = 0; tall < kTall; ++tall) {
        const uint64_t rows = left + k * 2 + tall * (kGroupRows * kRowBytes >> 4);
        if constexpr (kIsFp8) {
          multiply_fp8(total[tall], rows, right + k * 2, accumulate || k > 0);
        } else {
          multiply(total[tall], rows, right + k * 2, accumulate || k > 0);
        }
      }
    }
  });
#pragma unroll
  for (auto& sums : total) settle(sums);
  if (threadIdx.x % 32 == 0) arrive(ring.empty(last));
}

// Prefetches the scales of a tile to this multiprocessor while its sums are computed.
template <int kTall>
__device__ void prefetch_scales(const KernelParams& params, Tile tile) {
  constexpr int kLine = 32;  // floats
  constexpr int kLines = kColumns / kLine;
  const int line = threadIdx.x % kGroupThreads;
  if (line < 2 * kLines) {
    const int column = min(tile.column + line % kLines * kLine, params.width - 1);
    prefetch_near(params.weight_scales + line / kLines * params.width + column);
  } else if (line < 2 * kLines + Sizes<kTall>::rows / kLine) {
    const int row = tile.row + (line - 2 * kLines) * kLine;
    prefetch_near(params.x_scales + min(row, params.num_rows - 1));
  }
}

// Writes a tile from registers, 16 bytes at a time.
template <bool kIsFp8, int kTall>
__device__ void store(const KernelParams& params, Tile tile, int group,
                      const float (&total)[kTall][kWeightRows / 2]) {
  constexpr int kRows = kTall * 2;  // rows of a thread
  const int lane = threadIdx.x % 32;
  const int first_row =
      tile.row + group * kTall * kGroupRows + threadIdx.x % kGroupThreads / 32 * 16 + lane / 4;
  const auto row_of = [&](int i) { return first_row + i / 2 * kGroupRows + i % 2 * 8; };
  float row_scales[kRows];
  if constexpr (kIsFp8) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row_scales[i] = params.x_scales[min(row_of(i), params.num_rows - 1)];
    }
  }
#pragma unroll
  for (int quarter = 0; quarter < kColumns / 32; ++quarter) {
    uint32_t packed[kRows][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int eighth = quarter * 4 + j;
      float2 gate_scales, up_scales;
      // Columns beyond the last one read other scales; their results are never written.
      if constexpr (kIsFp8) {
        const int column = min(tile.column + eighth * 8 + lane % 4 * 2, params.width - 2);
        const float* scales = params.weight_scales + column;
        gate_scales = *reinterpret_cast<const float2*>(scales);
        up_scales = *reinterpret_cast<const float2*>(scales + params.width);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float* sums = &total[i / 2][eighth * 4 + i % 2 * 2];
        float2 gate = make_float2(sums[0], sums[1]);
        float2 up = make_float2(sums[kColumns / 2], sums[kColumns / 2 + 1]);
        if constexpr (kIsFp8) {
          gate.x = gate.x * gate_scales.x * row_scales[i];
          gate.y = gate.y * gate_scales.y * row_scales[i];
          up.x = up.x * up_scales.x * row_scales[i];
          up.y = up.y * up_scales.y * row_scales[i];
        }
        packed[i][j] = as_bits(__float22bfloat162_rn(silu_mul(gate, up)));
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Afterwards a lane has eight neighbouring columns of a row instead of four pairs.
      transpose(packed[i]);
      const int row = row_of(i), column = tile.column + (quarter * 4 + lane % 4) * 8;
      if (row < params.num_rows && column < params.width) {
        *reinterpret_cast<uint4*>(params.out + row * params.out_stride + column) =
            make_uint4(packed[i][0], packed[i][1], packed[i][2], packed[i][3]);
      }
    }
  }
}

#endif

template <bool kIsFp8, int kTall>
__global__ void __launch_bounds__(kThreads, 1)
    gated_linear_kernel(const __grid_constant__ CUtensorMap x,
                        const __grid_constant__ CUtensorMap weight,
                        const __grid_constant__ CUtensorMap tail_x,
                        const __grid_constant__ CUtensorMap tail_weight,
                        const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Sizes<kTall>;
  extern __shared__ char shared[];
  const uint32_t base = first_stage(shared);
  const Ring<S> ring{base, base + S::num_stages * S::stage_bytes};
  if (threadIdx.x == 0) ring.open(&x, &weight, 2, kGroups * 4);
  __syncthreads();
  launch_dependents();

  const int group = threadIdx.x / kGroupThreads;
  if (group == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
    const int thread = threadIdx.x % kGroupThreads;
    if (thread == 0) {
      const auto copy = [&](int stage, Tile tile, const CUtensorMap* map, int depth) {
        const uint32_t gate = ring.weight(stage), up = gate + kColumns * kRowBytes;
        const uint32_t barrier = ring.full(stage);
        copy_tile(gate, map, depth, tile.column, barrier, params.weight_hint);
        copy_tile(up, map, depth, params.width + tile.column, barrier, params.weight_hint);
      };
      produce<kIsFp8, kTall>(ring, params, &weight, &tail_weight, S::weight_bytes, copy);
    } else if (thread == 32) {
      wait_for_prerequisites();
      const auto copy = [&](int stage, Tile tile, const CUtensorMap* map, int depth) {
        copy_tile(ring.x(stage), map, depth, tile.row, ring.full(stage), kEvictLast);
      };
      produce<kIsFp8, kTall>(ring, params, &x, &tail_x, S::rows * kRowBytes, copy);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
    wait_for_prerequisites();  // Every thread that writes must wait itself.
    Position at;
    for_each_tile<kTall>(params, [&](Tile tile) {
      float total[kTall][kWeightRows / 2];
      if constexpr (kIsFp8) prefetch_scales<kTall>(params, tile);
      multiply_tile<kIsFp8, kTall>(ring, at, params.num_steps, group, total);
      store<kIsFp8, kTall>(params, tile, group, total);
    });
  }
#endif
}

template <bool kIsFp8, int kTall>
cudaError_t launch(const LinearParams& params, cudaStream_t stream) {
  using S = Sizes<kTall>;
  constexpr int kElements = kStageDepth<kIsFp8>;
  const int width = params.num_columns / 2;
  if (params.depth % kElements != 0 || width % 8 != 0) return cudaErrorInvalidValue;
  const Tail& tail = params.tail;
  if (tail.depth % 8 != 0 || (kIsFp8 && tail.depth != 0)) return cudaErrorInvalidValue;
  CUtensorMap x, weight;
  cudaError_t error = describe(&x, params.x, params.num_rows, params.depth, params.x_stride,
                               S::rows, kRowBytes / kElements);
  if (error != cudaSuccess) return error;
  error = describe(&weight, params.weight, params.num_columns, params.depth, params.weight_stride,
                   kColumns, kRowBytes / kElements);
  if (error != cudaSuccess) return error;
  CUtensorMap tail_x = x, tail_weight = weight;  // Without a tail no thread reads them.
  if (tail.depth > 0) {
    // Copies that reach beyond the depth fill their stage with zeros.
    error = describe(&tail_x, tail.x, params.num_rows, tail.depth, tail.x_stride, S::rows);
    if (error != cudaSuccess) return error;
    error = describe(&tail_weight, tail.weight, params.num_columns, tail.depth, tail.weight_stride,
                     kColumns);
    if (error != cudaSuccess) return error;
  }
  int device = 0, blocks = 0;
  error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;

  KernelParams kernel_params{};
  kernel_params.x_scales = params.x_scales;
  kernel_params.weight_scales = params.weight_scales;
  kernel_params.out = static_cast<__nv_bfloat16*>(params.out);
  kernel_params.out_stride = params.out_stride;
  kernel_params.num_rows = params.num_rows;
  kernel_params.width = width;
  kernel_params.tail_step = params.depth / kElements;
  kernel_params.num_steps = kernel_params.tail_step + (tail.depth + kElements - 1) / kElements;
  kernel_params.row_tiles = (params.num_rows + S::rows - 1) / S::rows;
  kernel_params.column_tiles = (width + kColumns - 1) / kColumns;
  kernel_params.weight_hint = kernel_params.row_tiles == 1 ? kEvictFirst : kEvictNormal;

  const int num_tiles = kernel_params.row_tiles * kernel_params.column_tiles;
  const Launch launch{std::min(num_tiles, blocks), kThreads, stream, params.early, S::shared_bytes};
  return launch_kernel(gated_linear_kernel<kIsFp8, kTall>, launch, x, weight, tail_x, tail_weight,
                       kernel_params);
}

}  // namespace

cudaError_t launch_gated_linear(const LinearParams& params, cudaStream_t stream) {
  const bool is_gated = params.epilogue == Epilogue::kSiluMul;
  if (params.num_rows < 1 || !is_gated || params.tiling.columns != kWeightRows) {
    return cudaErrorInvalidValue;
  }
  return dispatch_value<Sizes<1>::rows, Sizes<2>::rows>(params.tiling.rows, [&](auto rows) {
    constexpr int kTall = rows / Sizes<1>::rows;
    return params.x_scales != nullptr ? launch<true, kTall>(params, stream)
                                      : launch<false, kTall>(params, stream);
  });
}

}  // namespace fused_ops
