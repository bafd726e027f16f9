// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "fused_ops.h"

namespace fused_ops {

// Quantises rows to fp8 (e4m3), each with its own scale: the row's largest number becomes the
// largest number of the format. Rows are bf16, [num_rows, num_columns], a multiple of 16 bytes
// each.
struct QuantiseParams {
  Rows x;              // if gated [num_rows, 2 num_columns]: gates, then ups
  const void* weight;  // [num_columns], gains of the norm; null: no norm
  float eps;           // epsilon of the norm
  // If gated: scales of the rows [num_rows] and columns [2 num_columns] of x; null: x is not
  // scaled.
  const float* row_scales;
  const float* column_scales;
  const float* fixed_scale;  // the scale of all rows; null: each has its own
  uint8_t* out;              // [num_rows, num_columns], contiguous, written
  float* scales;             // [num_rows], written
  int64_t num_rows;
  int num_columns;
  bool is_gated;  // quantises silu(gate) * up of x
};

// out = product * row scale * column scale + bias. With `adds`, that is added to the values in
// `out`.
struct ScaleParams {
  Rows product;  // bf16 [num_rows, num_columns]
  const float* row_scales;
  const float* column_scales;
  const void* bias;  // bf16 [num_columns], or null
  Rows out;          // bf16, shaped like product
  bool adds;
  int64_t num_rows;
  int num_columns;
};

// Both functions return cudaErrorInvalidValue for rows that do not start on 16 bytes or are not a
// multiple of it.
constexpr int kMaxQuantisedColumns = 65536;
cudaError_t launch_quantise(const QuantiseParams& params, cudaStream_t stream);
cudaError_t launch_scale(const ScaleParams& params, cudaStream_t stream);

}  // namespace fused_ops
