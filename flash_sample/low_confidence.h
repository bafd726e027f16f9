// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_sample {

enum class DataType { kFloat32, kFloat16, kBFloat16 };

// Columns that one warp reduces at once. The cut of a row into segments depends on nothing else, so
// a row's result has the same bits whatever the number of rows beside it.
inline constexpr int kSegmentColumns = 2048;
inline constexpr int kMaxExcluded = 16;

struct LowConfidenceParams {
  const void* logits;  // [num_rows, num_columns] of dtype, unit column stride
  DataType dtype;
  int64_t row_stride;  // elements from one row to the next
  int64_t num_rows;
  int num_columns;             // at least 1
  int num_excluded;            // at most kMaxExcluded
  int excluded[kMaxExcluded];  // columns (of this slice) that are left out of the sum
  float* segment_max;          // workspace, [num_rows, num_segments] each
  float* segment_sum;
  int* segment_column;

  // Results, [num_rows] each: the best column and its probability, or, where sum_exp is given, the
  // parts of a vocabulary-parallel softmax: best column, its logit, and the sum of exp(logit -
  // maximum).
  int64_t* column;
  float* confidence;  // null where sum_exp is given
  float* maximum;
  float* sum_exp;
};

// Enqueues the reduction on `stream` of the current device. Neither allocates nor synchronises.
cudaError_t launch_low_confidence(const LowConfidenceParams& params, cudaStream_t stream);

}  // namespace flash_sample
