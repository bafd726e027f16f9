// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "vllm_add_llada/cuda_kernels/common/params.h"

namespace flash_sample {

using namespace native;

enum class Score { kConfidence, kEntropy, kMargin };

inline constexpr int kMaxColumns = 16;

// Fields of a record, the float64 [num_rows, kRecordFields] that tells what a slice of the columns
// means for the whole row. A logit is noise-free; noised is logit - temperature * log(-log U).
enum RecordField {
  kMaximum,     // largest logit
  kColumn,      // its lowest column, counted over the whole vocabulary
  kSumExp,      // sum of exp((logit - maximum) / temperature of the softmax)
  kWeighted,    // sum of exp(t) * t, t = (logit - maximum) / temperature of the softmax
  kSecond,      // second largest logit (the largest again where it occurs twice)
  kNoised,      // largest noised logit
  kToken,       // its lowest column, counted over the whole vocabulary
  kTokenLogit,  // the logit there
  kRecordFields
};

// A parameter of every row: [num_rows] on the device, or one value for all.
template <typename T>
struct PerRow {
  const T* values;
  T value;

  __device__ T operator[](int64_t row) const { return values == nullptr ? value : values[row]; }
};

// Columns of the whole vocabulary, which the bits of a row's masks stand for.
struct Columns {
  int64_t ids[kMaxColumns];
  int count;
};

struct RowParams {
  PerRow<double> temperature;  // of the noise; 0: none
  PerRow<int64_t> seed;
  PerRow<int64_t> step;
  PerRow<int64_t> position;
  uint32_t purpose;
  bool is_tempered;  // the softmax is taken at the temperature too (where that is not 0)
  PerRow<float> epsilon;
  Columns columns;
  PerRow<int32_t> forbidden;  // columns that read as -inf
  PerRow<int32_t> excluded;   // columns that are left out of the softmax but may be chosen
};

struct LogitsParams {
  const void* logits;  // [num_rows, num_columns] of dtype, unit column stride
  DataType dtype;
  int64_t row_stride;  // elements from one row to the next
  int64_t num_rows;
  int num_columns;       // at least 1
  int64_t first_column;  // of the whole vocabulary
  RowParams rows;
  Score score;
  bool has_noise;       // a row's temperature may not be 0
  const double* whole;  // records of the whole rows: only their entropy's share is summed

  // Results: share with whole, else those of the others that are not null.
  float* share;     // [num_rows]
  double* record;   // [num_rows, kRecordFields]
  int64_t* token;   // [num_rows]
  float* value;     // [num_rows], the score
  int64_t* greedy;  // [num_rows]
};

// Rows whose tokens are drawn from what filters keep of them; see `flash_sample.rows.Filters`.
struct FilteredParams {
  const void* logits;  // [num_rows, num_columns] of dtype, unit column stride: whole rows
  DataType dtype;
  int64_t row_stride;
  int64_t num_rows;
  int num_columns;  // at least 1
  RowParams rows;   // their epsilon is left out
  PerRow<double> min_p;
  PerRow<int64_t> top_k;
  PerRow<double> top_p;
  bool is_top_p_first;
  bool keeps_equal;
  bool has_noise;   // a row's temperature may not be 0
  bool are_scored;  // scores are of what is left; else of the whole row, and none is the margin
  Score score;
  int64_t* token;   // [num_rows]
  float* value;     // [num_rows], the score
  int64_t* greedy;  // [num_rows]
};

struct MergeParams {
  const double* records;  // [num_slices, num_rows, kRecordFields]
  int num_slices;
  int64_t num_rows;
  RowParams rows;
  Score score;
  double* record;  // as in LogitsParams
  int64_t* token;
  float* value;
  int64_t* greedy;
};

struct UniformParams {
  RowParams rows;  // seed, step, position, purpose
  int64_t num_rows;
  int64_t first_column;
  int64_t num_columns;
  double* numbers;  // [num_rows, num_columns]
};

// Each enqueues work on `stream` of the current device; none allocates or synchronises.
cudaError_t launch_candidates(const LogitsParams& params, cudaStream_t stream);
cudaError_t launch_filtered(const FilteredParams& params, cudaStream_t stream);
cudaError_t launch_merge(const MergeParams& params, cudaStream_t stream);
cudaError_t launch_uniform(const UniformParams& params, cudaStream_t stream);

}  // namespace flash_sample
