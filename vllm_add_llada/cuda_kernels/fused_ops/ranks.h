// SPDX-License-Identifier: Apache-2.0
//
// What crosses the cards of one host within a kernel.
#pragma once

#include "fused_ops.h"

namespace fused_ops {

constexpr int kMaxRanks = 8;
constexpr int kMaxRankBlocks = 528;

// Memory of every rank as this card addresses it, and how ranks wait for each other in it.
//
// A call is one meeting of all ranks: a block tells the same block of the others that what came
// before the call is written, and waits for the same of them. Nobody waits at the end, so what a
// call reads may be written again only after the next call.
struct Meeting {
  const void* parts[kMaxRanks];  // what is read of each rank, on 16 bytes
  uint32_t* flags[kMaxRanks];    // [kMaxRankBlocks, kMaxRanks] of each rank: calls, by who came
  uint32_t* calls;               // [kMaxRankBlocks] of this rank
  const int* is_over;            // in memory of the host: others may not come; nobody waits
  int rank;
  int num_ranks;
  int num_blocks;  // the same on all ranks
};

struct SumRanksParams {
  Meeting meeting;
  const void* residual;  // is added; may be null, and may be out
  void* out;
  DataType dtype;
  int64_t count;  // elements of a part
};

struct GatherRanksParams {
  Meeting meeting;
  void* out;      // [num_ranks, count] vectors of 16 bytes
  int64_t count;  // of a part
};

cudaError_t launch_sum_ranks(const SumRanksParams& params, cudaStream_t stream);
cudaError_t launch_gather_ranks(const GatherRanksParams& params, cudaStream_t stream);

}  // namespace fused_ops
