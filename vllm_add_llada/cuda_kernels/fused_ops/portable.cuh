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

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kWarpColumns = 32;  // rows of the weight
constexpr int kTileColumns = kWarps * kWarpColumns;
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
  constexpr int kPass = kThreads / (8 * kParts);  // rows at once
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
using Sums = float[2][kRows / 8][4];

template <typename T, int kRows>
__device__ void write(const PortableParams& params, const Work& work, int tile,
                      const Sums<kRows>& sums) {
  using S = Sixteen<T>;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpColumns;
  const int first_row = tile % work.row_tiles * kRows;
  const Columns columns = columns_of<kRows>(params, work, tile);
  const bool is_gated = params.epilogue == Epilogue::kSiluMul;
  const bool adds = params.epilogue == Epilogue::kResidual;
  const T* bias = static_cast<const T*>(params.bias);
  auto meant = [&](int matrix, int eight, int half) {
    float2 v = make_float2(sums[matrix][eight][half * 2], sums[matrix][eight][half * 2 + 1]);
    const int local = first + matrix * 16 + half * 8 + lane / 4;
    if (params.weight_scales != nullptr) {
      const int row = first_row + eight * 8 + lane % 4 * 2;
      const float own =
          columns.column(local) < columns.end ? params.weight_scales[columns.row(local)] : 0.0f;
      v.x *= own * (row < params.num_rows ? params.x_scales[row] : 0.0f);
      v.y *= own * (row + 1 < params.num_rows ? params.x_scales[row + 1] : 0.0f);
    }
    if (bias != nullptr && columns.column(local) < columns.end) {
      const float more = S::wide(bias[columns.column(local)]);
      v.x += more, v.y += more;
    }
    return v;
  };
#pragma unroll
  for (int eight = 0; eight < kRows / 8; ++eight) {
    const int row = first_row + eight * 8 + lane / 4;
    if (first_row + eight * 8 >= params.num_rows) break;
#pragma unroll
    for (int matrix = 0; matrix < 2; ++matrix) {
      if (is_gated && matrix == 1) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = columns.column(first + matrix * 16 + half * 8);
        const bool is_written = row < params.num_rows && column < columns.end;
        uint32_t* place = reinterpret_cast<uint32_t*>(
            static_cast<T*>(params.out) + row * params.out_stride + column + lane % 4 * 2);
        float2 v = meant(matrix, eight, half);
        if (is_gated) {  // rounded as PyTorch rounds them one by one
          const float2 up = S::wide(S::pair(meant(1, eight, half)));
          v = S::wide(S::pair(v));
          v = S::wide(S::pair(make_float2(silu(v.x), silu(v.y))));
          v = make_float2(v.x * up.x, v.y * up.y);
        }
        if (adds) {
          const float2 there = S::wide(transposed(is_written ? *place : 0u));
          v.x += there.x, v.y += there.y;
        }
        const uint32_t pair = transposed(S::pair(v));
        if (is_written) *place = pair;
      }
    }
  }
}

// Adds up the parts of a tile, if this block is the last to bring one; returns whether it is.
template <int kRows>
__device__ bool gather(const PortableParams& params, const Work& work, int tile, Sums<kRows>& sums,
                       int* shared) {
  constexpr int kQuads = kRows / 4;  // of a thread
  const int64_t first_unit = int64_t{tile} * work.num_steps;
  const int first = work.block_of(first_unit);
  const int last = work.block_of(first_unit + work.num_steps - 1);
  if (first == last) return true;
  // A block has two places: for the tile that it begins with, and for the one that it ends with.
  auto place = [&](int block) {
    const bool is_begun = work.begin(block) / work.num_steps == tile;
    return reinterpret_cast<float4*>(params.parts) +
           (int64_t{block} * 2 + (is_begun ? 0 : 1)) * kQuads * kThreads + threadIdx.x;
  };
  float4* own = place(blockIdx.x);
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const float (&quad)[4] = sums[i / (kQuads / 2)][i % (kQuads / 2)];
    __stcg(own + i * kThreads, make_float4(quad[0], quad[1], quad[2], quad[3]));
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *shared = atomicAdd(params.counts + tile, 1);
  __syncthreads();
  if (*shared != last - first) return false;
  __threadfence();
  if (threadIdx.x == 0) params.counts[tile] = 0;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    float (&quad)[4] = sums[i / (kQuads / 2)][i % (kQuads / 2)];
    quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
  }
  for (int block = first; block <= last; ++block) {
    const float4* there = place(block);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 part = __ldcg(there + i * kThreads);
      float (&quad)[4] = sums[i / (kQuads / 2)][i % (kQuads / 2)];
      quad[0] += part.x, quad[1] += part.y, quad[2] += part.z, quad[3] += part.w;
    }
  }
  return true;
}

// How a weight is stored: what a stage of it is, how it comes there and is multiplied.
//
// static: kDepth, kParts (lines of a row of x), kStageBytes, kStages
// void copy(params, work, at, stage, next): the weight of a step; `next` is the step after it
// void multiply(stage, x, sums)
template <typename W, typename T, int kRows>
__global__ void __launch_bounds__(kThreads, 2)
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

// Blocks of a kernel that the current device holds at once.
template <typename Kernel>
cudaError_t count_blocks(Kernel kernel, int shared_bytes, int* count) {
  thread_local int known_device = -1, known = 0;
  int device = 0, multiprocessors = 0, each = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device != known_device) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, shared_bytes);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    known = std::min(each, 2) * multiprocessors;
    known_device = device;
  }
  *count = known;
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
  const cudaError_t error = count_blocks(kernel, kSharedBytes, &blocks);
  if (error != cudaSuccess) return error;
  blocks = static_cast<int>(std::min<int64_t>(blocks, work.num_units));
  if (num_tiles > params.num_counts ||
      int64_t{blocks} * 2 * kTileColumns * kRows * 4 > params.parts_bytes) {
    return cudaErrorInvalidValue;
  }
  const Launch launch{static_cast<unsigned>(blocks), kThreads, stream, params.early, kSharedBytes};
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
