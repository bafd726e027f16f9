// SPDX-License-Identifier: Apache-2.0
//
// Products of up to 64 rows, where reading the weight takes most of the time. Every thread loads
// the numbers that it multiplies itself, 16 bytes of a line at a time, into registers. So warps
// wait for each other only when x arrives in shared memory. Warps of the same columns share the
// depth of a step, and add up their sums at the end of a tile.

#pragma once

#include "portable.cuh"

namespace fused_ops {
namespace {

constexpr int kLineBytes = 128;  // bytes per row of x

// The swizzle of a row's 16-byte chunks. The data that eight lanes load at once is in different
// banks, whether it is the same chunk of eight rows or four chunks of two rows.
__device__ constexpr int turn(int row) { return row % 2 * 4 + row / 2 % 4; }

__device__ inline uint32_t line(int row, int chunk) {
  return row * kLineBytes + (chunk ^ turn(row)) * 16;
}

// Loads 16 bytes of the weight, which are read once. Behind the end of the depth any address will
// do, because the numbers are multiplied by zeros of x.
__device__ inline uint4 load_once(const char* address) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(__cvta_generic_to_global(address)));
  return words;
}

// The rows of the weight that a thread reads: row lane / 4 of each eight of its warp's columns.
// Missing rows are replaced by existing ones; nothing writes their results.
struct ThreadRows {
  int first;        // first row
  int eight, next;  // rows from `first` to the rows 8 and 16 columns further

  __device__ ThreadRows(const Columns& columns, int column) {
    const int lane = threadIdx.x % 32;
    first = columns.column(column) < columns.end ? columns.row(column + lane / 4) : lane / 4;
    eight = columns.column(column + 8) < columns.end ? 8 : 0;
    next = columns.column(column + 16) >= columns.end ? 0 : columns.half == 0 ? 16 : columns.half;
  }
};

// The sums of a warp for all rows, before the sums of other warps are added.
template <typename S>
using WarpSums = float[S::kMatrices][S::kRows / 8][4];

// Bytes of shared memory in which the warps of the same columns exchange sums.
template <typename S>
constexpr int kMeetingBytes = S::kRowWarps == 1 ? 0 : S::kThreads * S::kRowWarps * 16;

// Adds up the sums of the warps of the same columns; each warp keeps the sums of its rows.
template <typename S>
__device__ void share(const WarpSums<S>& all, typename S::Sums& sums, float4* memory) {
  const int own = threadIdx.x / (32 * S::kColumnWarps),
            column_thread = threadIdx.x % (32 * S::kColumnWarps);
#pragma unroll
  for (int matrix = 0; matrix < S::kMatrices; ++matrix) {
#pragma unroll
    for (int i = 0; i < S::kEights; ++i) {
      float (&to)[4] = sums[matrix][i];
      if constexpr (S::kRowWarps == 1) {
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j] = all[matrix][i][j];
      } else {
        __syncthreads();
#pragma unroll
        for (int whose = 0; whose < S::kRowWarps; ++whose) {
          const float (&quad)[4] = all[matrix][whose * S::kEights + i];
          memory[whose * S::kThreads + threadIdx.x] =
              make_float4(quad[0], quad[1], quad[2], quad[3]);
        }
        __syncthreads();
        to[0] = to[1] = to[2] = to[3] = 0.0f;
#pragma unroll
        for (int from = 0; from < S::kRowWarps; ++from) {
          const float4 quad =
              memory[own * S::kThreads + from * 32 * S::kColumnWarps + column_thread];
          to[0] += quad.x, to[1] += quad.y, to[2] += quad.z, to[3] += quad.w;
        }
      }
    }
  }
}

// Weights without scales: a stage holds only rows of x.
template <typename S>
struct NoScales {
  static constexpr int kBytes = 0;
  __device__ void begin(const PortableParams&, const Columns&, int) {}
  __device__ void copy(const PortableParams&, uint32_t, char*, bool, bool) {}
};

template <typename W>
// bytes per stage
constexpr int kRowBytes = W::S::kRows * kLineBytes * W::kLines * W::S::kRowWarps;

template <typename W>
constexpr int kStageBytes = kRowBytes<W> + W::Scales::kBytes;

// The interface of a class that describes how a weight is stored, read and multiplied:
//
//   S                     shape, whose warps of rows share the depth
//   Number                dtype of the result
//   Scales                scales in a stage, in addition to x
//   kDepth                depth of a step
//   kLines                lines of a row of x in a step, for each warp that shares the depth
//   kRowElementBytes      bytes per element of x
//   kStrideBytes          bytes per unit of the weight's stride
//   kBlocks               blocks per multiprocessor for which there are enough registers
//   kStages               stages of x
//   place(lane)           offset at which a lane begins in the lines of x
//   begin(params, columns, step), advance(), end()
//                         go to a step of a tile, to the next step, to no step
//   load(params)          load the numbers of the first step
//   multiply(params, x, scales, all)
//                         multiply by a stage, and load the numbers of the step that was gone
//                         to; without a branch, so that loads run between products
template <typename W>
__global__ void __launch_bounds__(W::S::kThreads, W::kBlocks)
    portable_few(const PortableParams params, const Work work) {
  using S = typename W::S;
  constexpr int kChunks = 8 * W::kLines * S::kRowWarps;  // 16-byte chunks per row of x
  constexpr int kApart = S::kThreads / kChunks;
  constexpr int kCopies = S::kRows / kApart;
  extern __shared__ __align__(1024) char shared[];
  __shared__ int arrived;
  char* const memory = shared + kMeetingBytes<S>;
  const uint32_t ring = shared_place(memory);
  const int begin = work.begin(blockIdx.x), count = work.begin(blockIdx.x + 1) - begin;
  int tile = begin / work.num_steps, step = begin - tile * work.num_steps;
  W weight;
  weight.begin(params, columns_of(params, work, tile), step);
  weight.load(params);
  const int chunk = threadIdx.x % kChunks, row = threadIdx.x / kChunks;
  const uint32_t target = ring + chunk / 8 * S::kRows * kLineBytes + line(row, chunk % 8);
  const char* source =
      static_cast<const char*>(params.x) + row * params.x_stride * W::kRowElementBytes + chunk * 16;
  const int next_rows = kApart * static_cast<int>(params.x_stride) * W::kRowElementBytes;
  const int row_bytes = params.depth * W::kRowElementBytes;
  typename W::Scales scales;
  scales.begin(params, columns_of(params, work, tile), step);
  int copied_tile = tile, copied_step = step;
  auto copy_stage = [&](int stage, bool is_more) {
    const bool is_deep = is_more && (copied_step * kChunks + chunk) * 16 < row_bytes;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copy_later<16>(target + stage * kStageBytes<W> + i * kApart * kLineBytes,
                     source + copied_step * (kChunks * 16) + i * next_rows,
                     is_deep && row + i * kApart < params.num_rows);
    }
    const bool is_last = ++copied_step == work.num_steps;
    scales.copy(params, ring + stage * kStageBytes<W> + kRowBytes<W>,
                memory + stage * kStageBytes<W> + kRowBytes<W>, is_more, is_last);
    if (is_last) {
      copied_step = 0;
      scales.begin(params, columns_of(params, work, ++copied_tile), 0);
    }
  };
  launch_dependents();
  for (int i = 0; i < W::kStages - 1; ++i) {
    copy_stage(i, i < count);
    end_copies();
  }
  WarpSums<S> all;
  clear(all);
  const uint32_t own = ring +
                       threadIdx.x / (32 * S::kColumnWarps) * W::kLines * S::kRows * kLineBytes +
                       W::place(threadIdx.x % 32);
  int stage = 0, filled = W::kStages - 1;
  for (int i = 0; i < count; ++i) {
    wait_for_copies<W::kStages - 2>();
    __syncthreads();
    copy_stage(filled, i + W::kStages - 1 < count);
    end_copies();
    const bool is_last = step + 1 == work.num_steps;
    weight.advance();
    if (i + 1 == count) {
      weight.end();
    } else if (is_last) {
      weight.begin(params, columns_of(params, work, tile + 1), 0);
    }
    weight.multiply(params, own + stage * kStageBytes<W>,
                    memory + stage * kStageBytes<W> + kRowBytes<W>, all);
    if (++stage == W::kStages) stage = 0;
    if (++filled == W::kStages) filled = 0;
    if (is_last || i + 1 == count) {
      typename S::Sums sums;
      share<S>(all, sums, reinterpret_cast<float4*>(shared));
      finish<typename W::Number, S>(params, work, tile, sums, &arrived);
      clear(all);
      ++tile;
      step = -1;
    }
    ++step;
  }
}

template <typename W>
cudaError_t launch_few(const PortableParams& params, cudaStream_t stream) {
  using S = typename W::S;
  constexpr int kShared = kMeetingBytes<S> + W::kStages * kStageBytes<W>;
  static_assert(kShared <= kMostShared);
  const int64_t most_rows = params.epilogue == Epilogue::kSiluMul ? params.num_columns / 2 : 16;
  if (most_rows * params.weight_stride * W::kStrideBytes > INT32_MAX) return cudaErrorInvalidValue;
  return launch_portable_kernel<S, portable_few<W>>(params, W::kDepth, kShared, stream);
}

}  // namespace
}  // namespace fused_ops
