// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "vllm_add_llada/cuda_kernels/common/params.h"

namespace flash_sample {

using namespace native;

enum class Score { kConfidence, kEntropy, kMargin };

inline constexpr int kMaxColumns = 16;

// Fields of a record. A record is float64 [num_rows, kRecordFields] and summarises a slice of the
// columns for the whole row. A logit is noise-free; a noised logit is logit - temperature *
// log(-log U).
enum RecordField {
  kMaximum,     // largest logit
  kColumn,      // its lowest column, counted over the whole vocabulary
  kSumExp,      // sum of exp((logit - maximum) / temperature of the softmax)
  kWeighted,    // sum of exp(t) * t, t = (logit - maximum) / temperature of the softmax
  kSecond,      // second largest logit (the largest again where it occurs twice)
  kNoised,      // largest noised logit
  kToken,       // its lowest column, counted over the whole vocabulary
  kTokenLogit,  // the logit of that column
  kRecordFields
};

// A parameter of every row: values [num_rows] on the device, or one value for all rows.
template <typename T>
struct PerRow {
  const T* values;
  T value;

  __device__ T operator[](int64_t row) const { return values == nullptr ? value : values[row]; }
};

// Columns of the whole vocabulary; bit i of a row's masks refers to ids[i].
struct Columns {
  int64_t ids[kMaxColumns];
  int count;
};

struct RowParams {
  PerRow<double> temperature;  // temperature of the noise; 0: no noise
  PerRow<int64_t> seed;
  PerRow<int64_t> step;
  PerRow<int64_t> position;
  uint32_t purpose;
  bool is_tempered;  // the softmax is computed at the temperature too (unless that is 0)
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
  int64_t first_column;  // column of the whole vocabulary that `logits` starts with
  RowParams rows;
  Score score;
  bool has_noise;  // false only if the temperature of every row is 0
  // Records of the whole rows. If given, only the slice's share of their entropy is computed.
  const double* whole;

  // Results: `share` if `whole` is given, else every other pointer that is not null.
  float* share;     // [num_rows]
  double* record;   // [num_rows, kRecordFields]
  int64_t* token;   // [num_rows]
  float* value;     // [num_rows], the score
  int64_t* greedy;  // [num_rows]
};

// Rows whose tokens are drawn from the columns that filters keep; see `flash_sample.Filters`.
struct FilteredParams {
  const void* logits;  // [num_rows, num_columns] of dtype, unit column stride: whole rows
  DataType dtype;
  int64_t row_stride;
  int64_t num_rows;
  int num_columns;  // at least 1
  RowParams rows;   // their epsilon is ignored
  PerRow<double> min_p;
  PerRow<int64_t> top_k;
  PerRow<double> top_p;
  bool is_top_p_first;
  bool keeps_equal;
  bool has_noise;  // false only if the temperature of every row is 0
  // Scores are computed over the kept columns. Otherwise they are computed over the whole row, and
  // the margin is not supported.
  bool are_scored;
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
  double* record;  // see LogitsParams
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

// Each function enqueues work on `stream` of the current device; none allocates or synchronises.
cudaError_t launch_candidates(const LogitsParams& params, cudaStream_t stream);
cudaError_t launch_filtered(const FilteredParams& params, cudaStream_t stream);
cudaError_t launch_merge(const MergeParams& params, cudaStream_t stream);
cudaError_t launch_uniform(const UniformParams& params, cudaStream_t stream);

}  // namespace flash_sample
