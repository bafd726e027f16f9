// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "fused_ops.h"

namespace fused_ops {

constexpr int kMaxSequences = 1024;  // their tiles are counted in shared memory
constexpr int kAttentionPage = 64;   // keys of a page
constexpr int kAttentionWidth = 128;

// Assigns keys to the rows that attend to them. The arrays are int32 on the device, with one entry
// per sequence.
struct Attended {
  const int* query_ends;     // [num_sequences + 1], the first 0
  const int* key_starts;     // the first key: a row, or with page_rows a position in the pages
  const int* key_counts;     // number of keys
  const int* block_lengths;  // keys per block, 0 if every query reads all keys; or null
  const int* firsts;         // position of the first query among the keys; or null
  const int* page_rows;      // the first row of each page of keys; or null
  int num_sequences;
};

// out = softmax(scale q k^T) v of every sequence: bf16 heads kAttentionWidth wide, [rows, heads,
// width]. Query head h reads KV head h / (heads of q / heads of k). The KV heads of a row are
// contiguous.
struct AttentionParams {
  Rows q, k, v;
  void* out;  // contiguous
  Attended attended;
  int num_keys, num_values;  // rows of k and of v
  float scale;               // includes the factor log2(e)
  int num_blocks;            // one for each multiprocessor
};

// Returns cudaErrorInvalidValue for an unsupported shape, and cudaErrorNotSupported if the card
// does not have compute capability 9.0 or the driver lacks the call that describes a matrix.
cudaError_t launch_attention(const AttentionParams& params, cudaStream_t stream);

}  // namespace fused_ops
