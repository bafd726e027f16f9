// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "fused_ops.h"

namespace fused_ops {

// Rows become fp8 (e4m3), each with a scale of its own: the row's largest number becomes the
// largest of the format. All are bf16, [num_rows, num_columns], whole 16 bytes a row.
struct QuantiseParams {
  Rows x;              // where gated [num_rows, 2 num_columns]: gates, then ups
  const void* weight;  // [num_columns] of the norm; null: no norm
  float eps;           // of the norm
  // Where gated: scales of the rows [num_rows] and columns [2 num_columns] of x; null: it is as
  // meant.
  const float* row_scales;
  const float* column_scales;
  const float* fixed_scale;  // the scale of all rows; null: each has its own
  uint8_t* out;              // [num_rows, num_columns], contiguous, written
  float* scales;             // [num_rows], written
  int64_t num_rows;
  int num_columns;
  bool is_gated;  // silu(gate) * up of x is quantised
};

// out = product * row scale * column scale + bias; with `adds`, that is added to what is there.
struct ScaleParams {
  Rows product;  // bf16 [num_rows, num_columns]
  const float* row_scales;
  const float* column_scales;
  const void* bias;  // bf16 [num_columns], or null
  Rows out;          // bf16, as product
  bool adds;
  int64_t num_rows;
  int num_columns;
};

// Both return cudaErrorInvalidValue for rows that do not lie on whole 16 bytes.
constexpr int kMaxQuantisedColumns = 65536;
cudaError_t launch_quantise(const QuantiseParams& params, cudaStream_t stream);
cudaError_t launch_scale(const ScaleParams& params, cudaStream_t stream);

}  // namespace fused_ops
