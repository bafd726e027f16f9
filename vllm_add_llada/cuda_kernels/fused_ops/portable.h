// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "linear.h"

namespace fused_ops {

// Products for every card of compute capability 8.0 or later: out = x weight^T of any number of
// rows, with fp32 sums. The order of a sum depends on the sizes of the weight, on the card, and on
// whether there are more than 32, 64, 128 or 256 rows.
struct PortableParams {
  // dtype of x and out: bf16 or fp16. With x_scales it is the dtype of out alone, and bf16.
  DataType dtype;
  const void* x;       // [num_rows, depth], rows x_stride apart
  const void* weight;  // [num_columns, depth], or bytes [num_columns, depth / 2] of 4-bit numbers
  const float* x_scales;       // [num_rows], for fp8 operands
  const float* weight_scales;  // [num_columns], for fp8 operands
  const float* scales;         // [num_columns, depth / group], for 4-bit numbers
  const uint8_t* zeros;        // shaped like scales; null with a table
  LookUp table;                // a table of bf16 numbers
  const void* bias;            // [num_columns], or null; not with kSiluMul
  void* out;                   // see LinearParams
  float* parts;                // workspace: sums of parts of tiles
  int* counts;  // workspace, zeros before and after: number of finished parts of each tile
  int64_t parts_bytes, num_counts;
  int64_t x_stride, weight_stride, scales_stride, out_stride;  // elements
  int num_rows, num_columns, depth, group;
  int multiprocessors;
  int most_blocks;   // blocks per multiprocessor, at most
  int shared_bytes;  // bytes of shared memory per multiprocessor
  Epilogue epilogue;
};

// Both return cudaErrorInvalidValue if sizes or types have no kernel, or the workspace is too
// small.
cudaError_t launch_portable(const PortableParams& params, cudaStream_t stream);
cudaError_t launch_portable_packed(const PortableParams& params, cudaStream_t stream);

}  // namespace fused_ops
