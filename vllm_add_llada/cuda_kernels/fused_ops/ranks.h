// SPDX-License-Identifier: Apache-2.0
//
// Communication between the cards of one host within a kernel.
#pragma once

#include "fused_ops.h"

namespace fused_ops {

constexpr int kMaxRanks = 8;
constexpr int kMaxRankBlocks = 528;

// Memory of every rank as this card addresses it, and the flags by which ranks wait for each other.
//
// A call is one meeting of all ranks. A block signals to the same block of the other ranks that
// everything before the call is written, and waits for the same signal from them. No rank waits at
// the end, so the data that a call reads may be overwritten only after the next call.
struct Meeting {
  const void* parts[kMaxRanks];  // data that is read from each rank, aligned to 16 bytes
  // [kMaxRankBlocks, kMaxRanks] of each rank: the latest call of each rank
  uint32_t* flags[kMaxRanks];
  uint32_t* calls;     // [kMaxRankBlocks] of this rank
  const int* is_over;  // in host memory; not zero: other ranks may not arrive, and no rank waits
  int rank;
  int num_ranks;
  int num_blocks;  // blocks of the launch, the same on all ranks
};

struct SumRanksParams {
  Meeting meeting;
  const void* residual;  // added to the sum; may be null, and may be out
  void* out;
  DataType dtype;
  int64_t count;  // elements per part
};

struct GatherRanksParams {
  Meeting meeting;
  void* out;      // [num_ranks, count] vectors of 16 bytes
  int64_t count;  // vectors per part
};

cudaError_t launch_sum_ranks(const SumRanksParams& params, cudaStream_t stream);
cudaError_t launch_gather_ranks(const GatherRanksParams& params, cudaStream_t stream);

}  // namespace fused_ops
