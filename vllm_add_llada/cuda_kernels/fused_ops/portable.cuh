// SPDX-License-Identifier: Apache-2.0
//
// x weight^T on any card of compute capability 8.0 or later: the code that products of few and of
// many rows share.
//
// The blocks that fit on the card at once share the work, whatever its shape. The steps along the
// depth of all tiles form one sequence, and every block takes a run of it. If several blocks
// compute parts of a tile, each writes its sums to the workspace. The last block to do so adds them
// up in the order of the depth, so the order of every sum is fixed.
//
// Stages of the weight and of x pass through a ring in shared memory that never drains from tile to
// tile. The weight is the left operand of the tensor cores.
//
// No product starts before the previous kernel ends. A block uses all registers of a
// multiprocessor, so it would start late on any multiprocessor where a block of that kernel still
// has some.

#pragma once

#include <algorithm>

#include "epilogue.cuh"
#include "portable.h"
#include "vllm_add_llada/cuda_kernels/common/ampere.cuh"
#include "vllm_add_llada/cuda_kernels/common/dispatch.cuh"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"

namespace fused_ops {
namespace {

using namespace native;

constexpr int kTileColumns = 128;  // rows of the weight
constexpr int kGateColumns = 32;   // a gated product has 16 gates and their 16 ups in each
// steps per block, at least; with fewer, start-up and adding up parts would dominate
constexpr int kLeastSteps = 4;
// bytes per block, on any card, in addition to static shared memory
constexpr int kMostShared = 98 * 1024;

// Conversions of pairs of 16-bit numbers.
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

// How the warps of a block share a tile: each has `kMatrices` * 16 of its columns.
template <int kColumnWarps_, int kRowWarps_, int kRows_>
struct Shape {
  static constexpr int kColumnWarps = kColumnWarps_, kRowWarps = kRowWarps_, kRows = kRows_;
  static constexpr int kThreads = 32 * kColumnWarps * kRowWarps;
  static constexpr int kWarpColumns = kTileColumns / kColumnWarps, kWarpRows = kRows / kRowWarps;
  static constexpr int kMatrices = kWarpColumns / 16, kEights = kWarpRows / 8;
  // Sums of a thread. Of each 16 weight rows of the warp it has row lane / 4 and the row 8 further.
  // Of every eight rows of x it has row lane % 4 * 2 and the next one.
  using Sums = float[kMatrices][kEights][4];

  static __device__ int column() { return threadIdx.x / 32 % kColumnWarps * kWarpColumns; }
  static __device__ int row() { return threadIdx.x / (32 * kColumnWarps) * kWarpRows; }
};

template <int kMatrices, int kEights>
__device__ void clear(float (&sums)[kMatrices][kEights][4]) {
#pragma unroll
  for (auto& matrix : sums) {
#pragma unroll
    for (auto& quad : matrix) quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
  }
}

// The rows of the weight that belong to a tile.
struct Columns {
  int first, half;  // half: the number of gates of a gated product, else 0
  int end;          // columns of the result

  // The row of the weight for a row of the tile.
  __device__ int row(int local) const {
    if (half == 0) return first + local;
    return first + local / kGateColumns * 16 + local % 16 + local / 16 % 2 * half;
  }
  // The column of the result for a row of the tile.
  __device__ int column(int local) const {
    return half == 0 ? first + local : first + local / kGateColumns * 16 + local % 16;
  }
};

// The runs of steps of the blocks. Tiles form groups, and each group is shared by the
// same number of blocks.
struct Work {
  int num_steps;        // steps per tile
  int row_tiles;        // number of row tiles; those of the same columns follow each other
  int num_units;        // steps per group
  unsigned num_blocks;  // blocks per group

  __device__ int begin(unsigned block) const {
    const unsigned group = block / num_blocks;
    return group * num_units + (block - group * num_blocks) * num_units / num_blocks;
  }
  // The block whose run contains a unit.
  __device__ int block_of(unsigned unit) const {
    const unsigned group = unit / num_units;
    unit -= group * num_units;
    return group * num_blocks + ((unit + 1) * num_blocks - 1) / num_units;
  }
};

__device__ inline Columns columns_of(const PortableParams& params, const Work& work, int tile) {
  const bool is_gated = params.epilogue == Epilogue::kSiluMul;
  const int width = is_gated ? kTileColumns / 2 : kTileColumns;
  const int half = is_gated ? params.num_columns / 2 : 0;
  return {tile / work.row_tiles * width, half, is_gated ? half : params.num_columns};
}

// A thread's lines of the weight: `kLines` rows of a tile, `kApart` rows apart.
template <int kApart, int kLines>
struct WeightLines {
  const char* first;
  // bytes from a row of the tile to the row 32 further, and to the row 16 further
  int64_t next, other;
  uint32_t there;  // bit i: line i exists

  __device__ void begin(const PortableParams& params, const Columns& columns, int local,
                        int64_t stride) {
    first = static_cast<const char*>(params.weight) + columns.row(local) * stride;
    next = (columns.half == 0 ? 32 : 16) * stride;
    other = (columns.half == 0 ? 16 : columns.half) * stride;
    there = 0;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (columns.column(local + i * kApart) < columns.end) there |= 1u << i;
    }
  }
  __device__ const char* line(int i) const {
    return first + (i * kApart / 32) * next + (i * kApart / 16 % 2) * other;
  }
  __device__ bool is_there(int i) const { return (there >> i & 1) != 0; }
};

// A thread's lines of x, in the same way. Missing lines read as zeros.
template <int kApart, int kLines>
struct RowLines {
  const char* first;
  int64_t next;
  uint32_t there;

  __device__ void begin(const PortableParams& params, int row, int64_t stride) {
    first = static_cast<const char*>(params.x) + row * stride;
    next = kApart * stride;
    there = 0;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (row + i * kApart < params.num_rows) there |= 1u << i;
    }
  }
  __device__ bool is_there(int i) const { return (there >> i & 1) != 0; }
};

template <typename T, typename S>
__device__ void write(const PortableParams& params, const Work& work, int tile,
                      const typename S::Sums& sums) {
  using N = Sixteen<T>;
  constexpr int kGroups = S::kMatrices * 2;  // groups of eight columns
  constexpr int kAtOnce = S::kEights < 32 / kGroups ? S::kEights : 32 / kGroups;
  const int lane = threadIdx.x % 32;
  const int first_row = tile % work.row_tiles * S::kRows + S::row();
  const Columns columns = columns_of(params, work, tile);
  const bool is_gated = params.epilogue == Epilogue::kSiluMul;
  const bool adds = params.epilogue == Epilogue::kResidual;

  // The address of a pair of the result, by groups of eight rows and eight columns; null if it is
  // outside.
  auto place = [&](int eight, int i) -> uint32_t* {
    const int row = first_row + eight * 8 + lane / 4;
    const int column = columns.column(S::column() + i * 8);
    if (row >= params.num_rows || column >= columns.end) return nullptr;
    return reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + row * params.out_stride +
                                       column + lane % 4 * 2);
  };
  float more[kGroups], own[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int local = S::column() + i * 8 + lane / 4, column = columns.column(local);
    const bool is_there = column < columns.end;
    more[i] = 0.0f, own[i] = 1.0f;
    if (is_there && params.bias != nullptr) {
      more[i] = N::wide(__ldg(static_cast<const T*>(params.bias) + column));
    }
    if (is_there && params.weight_scales != nullptr) {
      own[i] = __ldg(params.weight_scales + columns.row(local));
    }
  }
#pragma unroll
  for (int begin = 0; begin < S::kEights; begin += kAtOnce) {
    uint32_t there[kAtOnce][kGroups] = {};  // loaded all at once
    if (adds) {
#pragma unroll
      for (int eight = 0; eight < kAtOnce; ++eight) {
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          if (const uint32_t* from = place(begin + eight, i)) there[eight][i] = __ldcg(from);
        }
      }
    }
#pragma unroll
    for (int eight = begin; eight < begin + kAtOnce; ++eight) {
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
      for (int i = 0; i < kGroups; ++i) {
        if (is_gated && i % 4 > 1) continue;
        float2 v = meant(i);
        if (is_gated) {  // rounded like PyTorch's separate operations
          const float2 up = N::wide(N::pair(meant((i + 2) % kGroups)));
          v = N::wide(N::pair(v));
          v = N::wide(N::pair(make_float2(silu(v.x), silu(v.y))));
          v = make_float2(v.x * up.x, v.y * up.y);
        }
        if (adds) {
          const float2 before = N::wide(transposed(there[eight - begin][i]));
          v.x += before.x, v.y += before.y;
        }
        const uint32_t pair = transposed(N::pair(v));
        if (uint32_t* to = place(eight, i)) *to = pair;
      }
    }
  }
}

// Adds up the parts of a tile if this block is the last one to contribute; returns whether it is.
template <typename S>
__device__ bool gather(const PortableParams& params, const Work& work, int tile,
                       typename S::Sums& sums, int* shared) {
  constexpr int kQuads = S::kMatrices * S::kEights;  // quads per thread
  const int first_unit = tile * work.num_steps;
  const int first = work.block_of(first_unit);
  const int last = work.block_of(first_unit + work.num_steps - 1);
  if (first == last) return true;
  // A block has two places in the workspace: one for the tile that it begins with, and
  // one for the tile that it ends with.
  const bool is_begun = work.begin(first) == first_unit;
  auto place = [&](int block) {
    return reinterpret_cast<float4*>(params.parts) +
           (int64_t{block} * 2 + (block > first || is_begun ? 0 : 1)) * kQuads * S::kThreads +
           threadIdx.x;
  };
  float4* own = place(blockIdx.x);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float (&quad)[4] = sums[i / S::kEights][i % S::kEights];
    __stcg(own + i * S::kThreads, make_float4(quad[0], quad[1], quad[2], quad[3]));
  }
  __syncthreads();
  if (threadIdx.x == 0) {  // on behalf of all threads, which the barriers order with this one
    __threadfence();
    const bool is_last = atomicAdd(params.counts + tile, 1) == last - first;
    __threadfence();
    if (is_last) params.counts[tile] = 0;
    *shared = is_last;
  }
  __syncthreads();
  if (*shared == 0) return false;
  clear(sums);
  // Add kParts parts of kSome quads at once.
  constexpr int kSome = kQuads < 8 ? kQuads : 8;
  constexpr int kParts = kQuads > 16 ? 2 : 4;
#pragma unroll
  for (int begin = 0; begin < kQuads; begin += kSome) {
    for (int block = first; block <= last; block += kParts) {
      float4 parts[kParts][kSome];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float4* there = place(min(block + i, last)) + begin * S::kThreads;
#pragma unroll
        for (int quad = 0; quad < kSome; ++quad) {
          parts[i][quad] = __ldcg(there + quad * S::kThreads);
        }
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (block + i > last) break;
#pragma unroll
        for (int quad = 0; quad < kSome; ++quad) {
          float (&to)[4] = sums[(begin + quad) / S::kEights][(begin + quad) % S::kEights];
          const float4& part = parts[i][quad];
          to[0] += part.x, to[1] += part.y, to[2] += part.z, to[3] += part.w;
        }
      }
    }
  }
  return true;
}

// Writes a block's sums of a tile, or leaves them to the last block that contributes; clears the
// sums.
template <typename T, typename S>
__device__ void finish(const PortableParams& params, const Work& work, int tile,
                       typename S::Sums& sums, int* shared) {
  if (gather<S>(params, work, tile, sums, shared)) write<T, S>(params, work, tile, sums);
  clear(sums);
}

// Finds how many blocks of a kernel fit on a multiprocessor of the current device. The driver is
// asked once per thread and device.
template <auto kKernel>
cudaError_t find_residents(int threads, int shared_bytes, int* found) {
  thread_local int known_device = -1, known_bytes = 0, known = 0;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && (device != known_device || shared_bytes != known_bytes)) {
    error =
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&known, kKernel, threads, shared_bytes);
    }
    known_device = error == cudaSuccess ? device : -1;
    known_bytes = shared_bytes;
  }
  *found = known;
  return error;
}

// Whether tiles of 256 rows would be divided into three parts or more. Adding up their sums takes
// longer than reading the weight twice for two tiles of 128 rows, because the second time it comes
// from the cache.
inline bool takes_short_tiles(const PortableParams& params) {
  const int tiles = (params.num_columns + kTileColumns - 1) / kTileColumns;
  return tiles * ((params.num_rows + 255) / 256) * 3 <= params.multiprocessors;
}

// Launches a kernel whose warps share tiles according to S, with steps of `depth`.
template <typename S, auto kKernel>
cudaError_t launch_portable_kernel(const PortableParams& params, int depth, int shared_bytes,
                                   cudaStream_t stream) {
  const bool is_gated = params.epilogue == Epilogue::kSiluMul;
  const int width = is_gated ? kTileColumns / 2 : kTileColumns;
  const int columns = params.num_columns / (is_gated ? 2 : 1);
  const int64_t row_tiles = (params.num_rows + S::kRows - 1) / S::kRows;
  const int64_t num_tiles = (columns + width - 1) / width * row_tiles;
  const int64_t num_steps = (params.depth + depth - 1) / depth;
  int residents = 0;
  const cudaError_t error = find_residents<kKernel>(S::kThreads, shared_bytes, &residents);
  if (error != cudaSuccess) return error;
  const int each =
      std::min({residents, params.most_blocks, params.shared_bytes / (shared_bytes + 1024)});
  int64_t blocks = std::min<int64_t>(std::max(each, 1) * params.multiprocessors,
                                     std::max(num_tiles, num_tiles * num_steps / kLeastSteps));
  Work work{};
  work.num_steps = static_cast<int>(num_steps);
  work.row_tiles = static_cast<int>(row_tiles);
  // A block gets one part of one tile if this leaves few multiprocessors idle.
  const int64_t whole = blocks - blocks % num_tiles;
  const bool is_apart = num_tiles < blocks && whole * 10 >= blocks * 9;
  if (is_apart) blocks = whole;
  const int64_t num_units = (is_apart ? 1 : num_tiles) * num_steps;
  work.num_units = static_cast<int>(num_units);
  work.num_blocks = static_cast<unsigned>(is_apart ? blocks / num_tiles : blocks);
  if (num_tiles > params.num_counts || (num_units + 1) * blocks > INT32_MAX ||
      num_tiles * num_steps > INT32_MAX ||
      blocks * 2 * kTileColumns * S::kRows * 4 > params.parts_bytes) {
    return cudaErrorInvalidValue;
  }
  const Launch launch{static_cast<unsigned>(blocks), S::kThreads, stream, /*overlaps=*/false,
                      shared_bytes};
  return launch_kernel(kKernel, launch, params, work);
}

}  // namespace
}  // namespace fused_ops
