// SPDX-License-Identifier: Apache-2.0
//
// x weight^T on any card since compute capability 8.0, for so few rows that reading the weight is
// most of the time.
//
// The blocks that fit on the card at once share the work evenly, whatever its shape: all steps
// along the depth of all tiles stand in one row, and every block takes an equal run of them. Of a
// tile that several blocks computed parts of, each writes its sums to the workspace; the last one
// to do so adds them up in the order of the depth. So every sum has one order.
//
// Stages of the weight and of x pass through a ring in shared memory that never drains, from tile
// to tile. The weight is the left operand of the tensor cores: a warp has 32 of its rows, and all
// of x's. Weights do not depend on the kernel before this one and are asked for before it ends,
// where the card can do so.

#pragma once

#include "epilogue.cuh"
#include "portable.h"
#include "vllm_add_llada/cuda_kernels/common/ampere.cuh"
#include "vllm_add_llada/cuda_kernels/common/dispatch.cuh"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"

namespace fused_ops {
namespace {

using namespace native;

constexpr int kColumnWarps = 4;
constexpr int kWarpColumns = 32;  // rows of the weight
constexpr int kTileColumns = kColumnWarps * kWarpColumns;
constexpr int kLineBytes = 128;  // of a row of x, and of a weight that is not packed, in a stage

// Numbers of 16 bits, in pairs.
template <typename T>
struct Sixteen;

template <>
struct Sixteen<__nv_bfloat16> {
  static constexpr Operands kOperands = Operands::kBFloat16;
  static __device__ float wide(__nv_bfloat16 number) { return __bfloat162float(number); }
  static __device__ float2 wide(uint32_t pair) { return __bfloat1622float2(as_pair(pair)); }
  static __device__ uint32_t pair(float2 v) { return as_bits(__float22bfloat162_rn(v)); }
};

template <>
struct Sixteen<__half> {
  static constexpr Operands kOperands = Operands::kFloat16;
  static __device__ float wide(__half number) { return __half2float(number); }
  static __device__ float2 wide(uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
  static __device__ uint32_t pair(float2 v) {
    const __half2 narrow = __float22half2_rn(v);
    return *reinterpret_cast<const uint32_t*>(&narrow);
  }
};

// Of a tile of many rows half of the warps have either half. A warp's rows, and threads of a block:
template <int kRows>
constexpr int kWarpRows = kRows > 64 ? kRows / 2 : kRows;
template <int kRows>
constexpr int kThreads = kColumnWarps * 32 * (kRows / kWarpRows<kRows>);

__device__ inline int warp_column() { return threadIdx.x / 32 % kColumnWarps * kWarpColumns; }
template <int kRows>
__device__ int warp_row() {
  return threadIdx.x / (32 * kColumnWarps) * kWarpRows<kRows>;
}

// Which rows of the weight a tile has: of a gated product 16 gates and their 16 ups in each warp.
struct Columns {
  int first, half;  // half: of a gated product, the number of gates; else 0
  int end;          // columns of the result

  // Row of the weight, by the row of the tile.
  __device__ int row(int local) const {
    if (half == 0) return first + local;
    return first + local / kWarpColumns * 16 + local % 16 + local / 16 % 2 * half;
  }
  // Column of the result, by the row of the tile.
  __device__ int column(int local) const {
    return half == 0 ? first + local : first + local / kWarpColumns * 16 + local % 16;
  }
};

// The run of steps of a block. A step is of a tile: `kDepth` of the depth.
struct Work {
  int64_t num_units;
  int num_steps;                // of a tile
  int column_tiles, row_tiles;  // row tiles of the same columns follow each other

  __device__ int64_t begin(int block) const { return num_units * block / gridDim.x; }
  // The block that has a unit in its run.
  __device__ int block_of(int64_t unit) const {
    return static_cast<int>(((unit + 1) * gridDim.x - 1) / num_units);
  }
};

struct At {
  int tile, step;

  __device__ void advance(int num_steps) {
    if (++step == num_steps) step = 0, ++tile;
  }
};

__device__ inline uint32_t line(uint32_t base, int row, int chunk) {
  return base + row * kLineBytes + ((chunk ^ row) & 7) * 16;  // rows apart in the banks
}

template <int kRows>
__device__ Columns columns_of(const PortableParams& params, const Work& work, int tile) {
  const bool is_gated = params.epilogue == Epilogue::kSiluMul;
  const int width = is_gated ? kTileColumns / 2 : kTileColumns;
  const int half = is_gated ? params.num_columns / 2 : 0;
  return {tile / work.row_tiles * width, half, is_gated ? half : params.num_columns};
}

// Lines of x of a step, `kParts` of each row.
template <int kRows, int kParts>
__device__ void copy_x(const PortableParams& params, const Work& work, const At& at,
                       uint32_t target, int row_bytes, int64_t stride_bytes) {
  const int first_row = at.tile % work.row_tiles * kRows;
  constexpr int kPass = kThreads<kRows> / (8 * kParts);  // rows at once
  const int chunk = threadIdx.x % (8 * kParts);
  const int byte = at.step * kLineBytes * kParts + chunk * 16;
#pragma unroll
  for (int i = 0; i < kRows / kPass; ++i) {
    const int local = threadIdx.x / (8 * kParts) + i * kPass;
    const int row = first_row + local;
    const bool is_there = row < params.num_rows && byte < row_bytes;
    const char* source = static_cast<const char*>(params.x);
    if (is_there) source += row * stride_bytes + byte;
    copy_later<16>(line(target + chunk / 8 * kRows * kLineBytes, local, chunk % 8), source,
                   is_there);
  }
}

// Sums of a thread: of weight rows lane / 4 and 8 further of each 16 of the warp's, and of every
// eight rows of x lane % 4 * 2 and the next.
template <int kRows>
using Sums = float[2][kWarpRows<kRows> / 8][4];

template <typename T, int kRows>
__device__ void write(const PortableParams& params, const Work& work, int tile,
                      const Sums<kRows>& sums) {
  using S = Sixteen<T>;
  constexpr int kEights = kWarpRows<kRows> / 8;
  const int lane = threadIdx.x % 32;
  const int first_row = tile % work.row_tiles * kRows + warp_row<kRows>();
  const Columns columns = columns_of<kRows>(params, work, tile);
  const bool is_gated = params.epilogue == Epilogue::kSiluMul;
  const bool adds = params.epilogue == Epilogue::kResidual;

  // Pairs of the result, by eight rows, 16 columns and eight of these: null where there is none.
  auto place = [&](int eight, int i) -> uint32_t* {
    const int row = first_row + eight * 8 + lane / 4;
    const int column = columns.column(warp_column() + i * 8);
    if (row >= params.num_rows || column >= columns.end || (is_gated && i > 1)) return nullptr;
    return reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + row * params.out_stride +
                                       column + lane % 4 * 2);
  };
  uint32_t there[kEights][4] = {};  // asked for all at once
  if (adds) {
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (const uint32_t* from = place(eight, i)) there[eight][i] = __ldcg(from);
      }
    }
  }
  float more[4] = {}, own[4] = {1.0f, 1.0f, 1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int local = warp_column() + i * 8 + lane / 4, column = columns.column(local);
    if (column >= columns.end) continue;
    if (params.bias != nullptr)
      more[i] = S::wide(__ldg(static_cast<const T*>(params.bias) + column));
    if (params.weight_scales != nullptr) own[i] = __ldg(params.weight_scales + columns.row(local));
  }
#pragma unroll
  for (int eight = 0; eight < kEights; ++eight) {
    const int row = first_row + eight * 8 + lane % 4 * 2;
    float2 of_rows = make_float2(1.0f, 1.0f);
    if (params.x_scales != nullptr) {
      if (row < params.num_rows) of_rows.x = __ldg(params.x_scales + row);
      if (row + 1 < params.num_rows) of_rows.y = __ldg(params.x_scales + row + 1);
    }
    auto meant = [&](int i) {
      const float* quad = &sums[i / 2][eight][i % 2 * 2];
      return make_float2(quad[0] * (own[i] * of_rows.x) + more[i],
                         quad[1] * (own[i] * of_rows.y) + more[i]);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (is_gated && i > 1) break;
      float2 v = meant(i);
      if (is_gated) {  // rounded as PyTorch rounds them one by one
        const float2 up = S::wide(S::pair(meant(i + 2 & 3)));
        v = S::wide(S::pair(v));
        v = S::wide(S::pair(make_float2(silu(v.x), silu(v.y))));
        v = make_float2(v.x * up.x, v.y * up.y);
      }
      if (adds) {
        const float2 before = S::wide(transposed(there[eight][i]));
        v.x += before.x, v.y += before.y;
      }
      const uint32_t pair = transposed(S::pair(v));
      if (uint32_t* to = place(eight, i)) *to = pair;
    }
  }
}

// Adds up the parts of a tile, if this block is the last to bring one; returns whether it is.
template <int kRows>
__device__ bool gather(const PortableParams& params, const Work& work, int tile, Sums<kRows>& sums,
                       int* shared) {
  constexpr int kQuads = kWarpRows<kRows> / 4;  // of a thread
  const int64_t first_unit = int64_t{tile} * work.num_steps;
  const int first = work.block_of(first_unit);
  const int last = work.block_of(first_unit + work.num_steps - 1);
  if (first == last) return true;
  // A block has two places: for the tile that it begins with, and for the one that it ends with.
  auto place = [&](int block) {
    const bool is_begun = work.begin(block) / work.num_steps == tile;
    return reinterpret_cast<float4*>(params.parts) +
           (int64_t{block} * 2 + (is_begun ? 0 : 1)) * kQuads * kThreads<kRows> + threadIdx.x;
  };
  float4* own = place(blockIdx.x);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    float (&quad)[4] = sums[i / (kQuads / 2)][i % (kQuads / 2)];
    __stcg(own + i * kThreads<kRows>, make_float4(quad[0], quad[1], quad[2], quad[3]));
    quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *shared = atomicAdd(params.counts + tile, 1);
  __syncthreads();
  if (*shared != last - first) return false;
  __threadfence();
  if (threadIdx.x == 0) params.counts[tile] = 0;
  constexpr int kAtOnce = kRows > 64 ? 1 : kRows > 32 ? 2 : 4;  // parts
  for (int block = first; block <= last; block += kAtOnce) {
    float4 parts[kAtOnce][kQuads];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float4* there = place(min(block + i, last));
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        parts[i][quad] = __ldcg(there + quad * kThreads<kRows>);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (block + i > last) break;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        float (&to)[4] = sums[quad / (kQuads / 2)][quad % (kQuads / 2)];
        const float4& part = parts[i][quad];
        to[0] += part.x, to[1] += part.y, to[2] += part.z, to[3] += part.w;
      }
    }
  }
  return true;
}

// How a weight is stored: what a stage of it is, how it comes there and is multiplied.
//
// static: kDepth, kParts (lines of a row of x), kStageBytes, kStages, kBlocks (of a multiprocessor
// that have enough registers)
// void copy(params, work, at, target, memory): the weight of a step, to an address of shared memory
// void multiply(params, stage, memory, x, sums)
template <typename W, typename T, int kRows>
__global__ void __launch_bounds__(kThreads<kRows>, W::kBlocks)
    portable_kernel(const PortableParams params, const Work work) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ int arrived;
  constexpr int kStageBytes = W::kStageBytes + kRows * kLineBytes * W::kParts;
  const uint32_t ring = shared_place(shared);
  const int64_t begin = work.begin(blockIdx.x), end = work.begin(blockIdx.x + 1);
  const int count = static_cast<int>(end - begin);
  At loaded{static_cast<int>(begin / work.num_steps), static_cast<int>(begin % work.num_steps)};
  At at = loaded, rows_of = loaded;
  W weight(params, work, loaded);
  const int row_bytes = params.depth * W::kRowElementBytes;
  const int64_t stride_bytes = params.x_stride * W::kRowElementBytes;
  auto copy_rows = [&](int stage) {
    copy_x<kRows, W::kParts>(params, work, rows_of, ring + stage * kStageBytes + W::kStageBytes,
                             row_bytes, stride_bytes);
    rows_of.advance(work.num_steps);
  };
  auto copy_weight = [&](int stage) {
    weight.copy(params, work, loaded, ring + stage * kStageBytes, shared + stage * kStageBytes);
    loaded.advance(work.num_steps);
  };
  for (int i = 0; i < W::kStages - 1; ++i) {
    if (i < count) copy_weight(i);
  }
  wait_for_prerequisites();
  launch_dependents();
  for (int i = 0; i < W::kStages - 1; ++i) {
    if (i < count) copy_rows(i);
    end_copies();
  }
  Sums<kRows> sums = {};
  int stage = 0, filled = W::kStages - 1;
  for (int i = 0; i < count; ++i) {
    wait_for_copies<W::kStages - 2>();
    __syncthreads();
    if (i + W::kStages - 1 < count) {
      copy_weight(filled);
      copy_rows(filled);
    }
    end_copies();
    const uint32_t base = ring + stage * kStageBytes;
    weight.template multiply<kRows>(params, base, shared + stage * kStageBytes,
                                    base + W::kStageBytes, sums);
    if (++stage == W::kStages) stage = 0;
    if (++filled == W::kStages) filled = 0;
    const int tile = at.tile;
    at.advance(work.num_steps);
    if (at.step == 0 || i + 1 == count) {
      if (gather<kRows>(params, work, tile, sums, &arrived)) {
        write<T, kRows>(params, work, tile, sums);
      }
#pragma unroll
      for (auto& matrix : sums) {
#pragma unroll
        for (auto& quad : matrix) quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
      }
    }
  }
}

// Blocks of a kernel that the current device holds at once, at most `most` each multiprocessor.
template <typename Kernel>
cudaError_t count_blocks(Kernel kernel, int threads, int shared_bytes, int most, int* count) {
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared_bytes);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  *count = std::min(each, most) * multiprocessors;
  return error;
}

template <typename W, typename T, int kRows>
cudaError_t launch_rows(const PortableParams& params, cudaStream_t stream) {
  const int width = params.epilogue == Epilogue::kSiluMul ? kTileColumns / 2 : kTileColumns;
  const int columns = params.num_columns / (params.epilogue == Epilogue::kSiluMul ? 2 : 1);
  Work work{};
  work.num_steps = (params.depth + W::kDepth - 1) / W::kDepth;
  work.column_tiles = (columns + width - 1) / width;
  work.row_tiles = (params.num_rows + kRows - 1) / kRows;
  const int64_t num_tiles = int64_t{work.column_tiles} * work.row_tiles;
  work.num_units = num_tiles * work.num_steps;
  constexpr int kSharedBytes = W::kStages * (W::kStageBytes + kRows * kLineBytes * W::kParts);
  static_assert(kSharedBytes <= 99 * 1024);
  const auto kernel = portable_kernel<W, T, kRows>;
  int blocks = 0;
  const cudaError_t error =
      count_blocks(kernel, kThreads<kRows>, kSharedBytes, params.most_blocks, &blocks);
  if (error != cudaSuccess) return error;
  blocks = static_cast<int>(std::min<int64_t>(blocks, work.num_units));
  if (num_tiles > params.num_counts ||
      int64_t{blocks} * 2 * kTileColumns * kRows * 4 > params.parts_bytes) {
    return cudaErrorInvalidValue;
  }
  const Launch launch{static_cast<unsigned>(blocks), kThreads<kRows>, stream, params.early,
                      kSharedBytes};
  return launch_kernel(kernel, launch, params, work);
}

template <template <int> typename W, typename T>
cudaError_t launch_of(const PortableParams& params, cudaStream_t stream) {
  if (params.num_rows <= 32) return launch_rows<W<32>, T, 32>(params, stream);
  if (params.num_rows <= 64) return launch_rows<W<64>, T, 64>(params, stream);
  return launch_rows<W<128>, T, 128>(params, stream);
}

}  // namespace
}  // namespace fused_ops
