// SPDX-License-Identifier: Apache-2.0
//
// x weight^T on any card since compute capability 8.0: what products of few and of many rows share.
//
// The blocks that fit on the card at once share the work, whatever its shape: all steps along the
// depth of all tiles stand in one row, and every block takes a run of them. Of a tile that several
// blocks computed parts of, each writes its sums to the workspace; the last one to do so adds them
// up in the order of the depth. So every sum has one order.
//
// Stages of the weight and of x pass through a ring in shared memory that never drains, from tile
// to tile. The weight is the left operand of the tensor cores.
//
// No product starts before the kernel in front of it ends: a block has all registers of a
// multiprocessor, and would begin late wherever a block of that kernel still has some.

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

constexpr int kTileColumns = 128;       // rows of the weight
constexpr int kGateColumns = 32;        // of a gated product 16 gates and their 16 ups in each
constexpr int kLeastSteps = 4;          // of a block: fewer mostly start, and add up parts
constexpr int kMostShared = 98 * 1024;  // of a block, on any card, beside what is static

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

// How the warps of a block share a tile: each has `kMatrices` times 16 of its columns.
template <int kColumnWarps_, int kRowWarps_, int kRows_>
struct Shape {
  static constexpr int kColumnWarps = kColumnWarps_, kRowWarps = kRowWarps_, kRows = kRows_;
  static constexpr int kThreads = 32 * kColumnWarps * kRowWarps;
  static constexpr int kWarpColumns = kTileColumns / kColumnWarps, kWarpRows = kRows / kRowWarps;
  static constexpr int kMatrices = kWarpColumns / 16, kEights = kWarpRows / 8;
  // Of a thread: of weight rows lane / 4 and 8 further of each 16 of the warp's, and of every eight
  // rows of x lane % 4 * 2 and the next.
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

// Which rows of the weight a tile has.
struct Columns {
  int first, half;  // half: of a gated product, the number of gates; else 0
  int end;          // columns of the result

  // Row of the weight, by the row of the tile.
  __device__ int row(int local) const {
    if (half == 0) return first + local;
    return first + local / kGateColumns * 16 + local % 16 + local / 16 % 2 * half;
  }
  // Column of the result, by the row of the tile.
  __device__ int column(int local) const {
    return half == 0 ? first + local : first + local / kGateColumns * 16 + local % 16;
  }
};

// The runs of steps of the blocks. Tiles come in groups, each shared by equally many blocks.
struct Work {
  int num_steps;        // of a tile
  int row_tiles;        // those of the same columns follow each other
  int num_units;        // steps of a group
  unsigned num_blocks;  // of a group

  __device__ int begin(unsigned block) const {
    const unsigned group = block / num_blocks;
    return group * num_units + (block - group * num_blocks) * num_units / num_blocks;
  }
  // The block that has a unit in its run.
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

// A thread's lines of the weight: every `kApart`th of a tile's rows, `kLines` of them.
template <int kApart, int kLines>
struct WeightLines {
  const char* first;
  int64_t next, other;  // bytes from a row of the tile to the one 32 further, and 16 further
  uint32_t there;       // a bit each

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

// A thread's lines of x, likewise; those that are not there are zeros.
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
  constexpr int kGroups = S::kMatrices * 2;  // of eight columns
  constexpr int kAtOnce = S::kEights < 32 / kGroups ? S::kEights : 32 / kGroups;
  const int lane = threadIdx.x % 32;
  const int first_row = tile % work.row_tiles * S::kRows + S::row();
  const Columns columns = columns_of(params, work, tile);
  const bool is_gated = params.epilogue == Epilogue::kSiluMul;
  const bool adds = params.epilogue == Epilogue::kResidual;

  // Pairs of the result, by eight rows and eight columns: null where there is none.
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
    uint32_t there[kAtOnce][kGroups] = {};  // asked for all at once
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
        if (is_gated) {  // rounded as PyTorch rounds them one by one
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

// Adds up the parts of a tile, if this block is the last to bring one; returns whether it is.
template <typename S>
__device__ bool gather(const PortableParams& params, const Work& work, int tile,
                       typename S::Sums& sums, int* shared) {
  constexpr int kQuads = S::kMatrices * S::kEights;  // of a thread
  const int first_unit = tile * work.num_steps;
  const int first = work.block_of(first_unit);
  const int last = work.block_of(first_unit + work.num_steps - 1);
  if (first == last) return true;
  // A block has two places: for the tile that it begins with, and for the one that it ends with.
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
  if (threadIdx.x == 0) {  // for all threads, which the barriers bind to it
    __threadfence();
    const bool is_last = atomicAdd(params.counts + tile, 1) == last - first;
    __threadfence();
    if (is_last) params.counts[tile] = 0;
    *shared = is_last;
  }
  __syncthreads();
  if (*shared == 0) return false;
  clear(sums);
  // Of so many quads at once so many parts.
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

// Writes what a block has of a tile, or leaves it to the last one that has; clears the sums.
template <typename T, typename S>
__device__ void finish(const PortableParams& params, const Work& work, int tile,
                       typename S::Sums& sums, int* shared) {
  if (gather<S>(params, work, tile, sums, shared)) write<T, S>(params, work, tile, sums);
  clear(sums);
}

// How many blocks of a kernel a multiprocessor of the current device can have at once; asked for
// once a thread and device.
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

// Whether tiles of 256 rows would be cut into three parts or more: their sums take longer to add up
// than two tiles of 128 rows take to read the weight twice, the second time from the cache.
inline bool takes_short_tiles(const PortableParams& params) {
  const int tiles = (params.num_columns + kTileColumns - 1) / kTileColumns;
  return tiles * ((params.num_rows + 255) / 256) * 3 <= params.multiprocessors;
}

// Starts a kernel whose warps share tiles as S says, of so much depth a step.
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
  // A block has one part of one tile where that leaves few multiprocessors idle.
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
