// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "fused_ops.h"

namespace fused_ops {

constexpr int kMaxSequences = 1024;  // their tiles are counted in shared memory
constexpr int kAttentionPage = 64;   // keys of a page
constexpr int kAttentionWidth = 128;

// Which rows attend to which keys; arrays of int32 on the device, an entry a sequence.
struct Attended {
  const int* query_ends;     // [num_sequences + 1], the first 0
  const int* key_starts;     // the first key: a row, or by the table of pages
  const int* key_counts;     //
  const int* block_lengths;  // keys of a block, 0 where all are read; or null
  const int* firsts;         // the key beside the first query; or null
  const int* page_rows;      // the first row of the keys of every page, or null
  int num_sequences;
};

// out = softmax(scale q k^T) v of every sequence: bf16 heads kAttentionWidth wide, [rows, heads,
// width]. Query head h reads the head h / (heads of q / heads of k) of the keys. Those of a row
// follow one another.
struct AttentionParams {
  Rows q, k, v;
  void* out;  // contiguous
  Attended attended;
  int num_keys, num_values;  // rows of k and of v
  float scale;               // log2(e) in it
  int num_blocks;            // one for each multiprocessor
};

// cudaErrorInvalidValue: a shape that it does not take; cudaErrorNotSupported: not a card of
// compute capability 9.0, or no such driver call.
cudaError_t launch_attention(const AttentionParams& params, cudaStream_t stream);

}  // namespace fused_ops
