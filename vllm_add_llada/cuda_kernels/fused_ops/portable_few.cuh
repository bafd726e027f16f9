// SPDX-License-Identifier: Apache-2.0
//
// Products of up to 64 rows: reading the weight is most of the time.

#pragma once

#include "portable.cuh"

namespace fused_ops {
namespace {

constexpr int kLineBytes = 128;  // of a row of x, and of a weight that is not packed, in a stage

__device__ inline uint32_t line(int row, int chunk) {
  return row * kLineBytes + ((chunk ^ row) & 7) * 16;  // rows apart in the banks
}

// How a weight is stored: what a stage of it is, how it comes there and is multiplied.
//
// static: Shape, Number (of the result), kDepth, kParts (lines of a row of x), kRowElementBytes,
// kStageBytes, kStages (at most), kBlocks (of a multiprocessor that have enough registers)
// void begin(params, work, tile, step): before the first copy, and at each further tile
// void copy(params, target, memory): the weight of the next step, to an address of shared memory
// void multiply(params, stage, memory, x, sums)
template <typename W>
__global__ void __launch_bounds__(W::S::kThreads, W::kBlocks)
    portable_few(const PortableParams params, const Work work) {
  using S = typename W::S;
  constexpr int kChunks = 8 * W::kParts;  // of a row of x
  constexpr int kApart = S::kThreads / kChunks;
  constexpr int kLines = S::kRows / kApart;
  constexpr int kStageBytes = W::kStageBytes + S::kRows * kLineBytes * W::kParts;
  extern __shared__ __align__(1024) char shared[];
  __shared__ int arrived;
  const uint32_t ring = shared_place(shared);
  const int num_stages = static_cast<int>(work.pending) + 2;
  const int begin = work.begin(blockIdx.x), count = work.begin(blockIdx.x + 1) - begin;
  int tile = begin / work.num_steps, step = begin - tile * work.num_steps;
  W weight;
  weight.begin(params, work, tile, step);
  RowLines<kApart, kLines> rows;
  rows.begin(params, threadIdx.x / kChunks, params.x_stride * W::kRowElementBytes);
  const int chunk = threadIdx.x % kChunks, row_bytes = params.depth * W::kRowElementBytes;
  const uint32_t row_target =
      W::kStageBytes + chunk / 8 * S::kRows * kLineBytes + line(threadIdx.x / kChunks, chunk % 8);
  int weight_tile = tile, weight_step = step, row_step = step;
  auto copy_rows = [&](int stage) {
    const int byte = row_step * kLineBytes * W::kParts + chunk * 16;
    const uint32_t target = ring + stage * kStageBytes + row_target;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      copy_later<16>(target + i * kApart * kLineBytes, rows.first + i * rows.next + byte,
                     rows.is_there(i) && byte < row_bytes);
    }
    if (++row_step == work.num_steps) row_step = 0;
  };
  auto copy_weight = [&](int stage) {
    weight.copy(params, ring + stage * kStageBytes, shared + stage * kStageBytes);
    if (++weight_step == work.num_steps) {
      weight_step = 0;
      weight.begin(params, work, ++weight_tile, 0);
    }
  };
  for (int i = 0; i < num_stages - 1; ++i) {
    if (i < count) copy_weight(i);
  }
  wait_for_prerequisites();
  launch_dependents();
  for (int i = 0; i < num_stages - 1; ++i) {
    if (i < count) copy_rows(i);
    end_copies();
  }
  typename S::Sums sums;
  clear(sums);
  int stage = 0, filled = num_stages - 1;
  for (int i = 0; i < count; ++i) {
    wait_for_stage(work.pending);
    __syncthreads();
    if (i + num_stages - 1 < count) {
      copy_weight(filled);
      copy_rows(filled);
    }
    end_copies();
    const uint32_t base = ring + stage * kStageBytes;
    weight.multiply(params, base, shared + stage * kStageBytes, base + W::kStageBytes, sums);
    if (++stage == num_stages) stage = 0;
    if (++filled == num_stages) filled = 0;
    if (++step == work.num_steps || i + 1 == count) {
      finish<typename W::Number, S>(params, work, tile, sums, &arrived);
      step = 0;
      ++tile;
    }
  }
}

template <typename W>
cudaError_t launch_few(const PortableParams& params, cudaStream_t stream) {
  constexpr int kStageBytes = W::kStageBytes + W::S::kRows * kLineBytes * W::kParts;
  constexpr Sizes kSizes{W::S::kThreads, W::S::kRows, W::kDepth, kStageBytes, 0,
                         W::kStages,     W::kBlocks};
  static_assert(2 * kStageBytes < kMostShared);
  return launch_portable_kernel<portable_few<W>>(params, kSizes, stream);
}

}  // namespace
}  // namespace fused_ops
