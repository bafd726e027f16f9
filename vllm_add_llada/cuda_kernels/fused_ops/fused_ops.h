// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "vllm_add_llada/cuda_kernels/common/params.h"

namespace fused_ops {

using namespace native;

struct RmsNormParams {
  Rows x;
  const void* weight;  // [num_columns]
  Rows out;            // may be x
  DataType dtype;
  int64_t num_rows;
  int num_columns;
  float eps;
};

struct RotaryTablesParams {
  Integers positions;                // [num_rows]
  const float* inverse_frequencies;  // [rotary_dim / 2]
  Rows cos;                          // [num_rows, rotary_dim]
  Rows sin;
  DataType dtype;  // dtype of the tables
  int64_t num_rows;
  int rotary_dim;  // even
};

// Caches in which keys and values of some rows are stored in addition.
struct KeptRows {
  Rows v;        // [all rows, num_kv_heads, head_dim]: inner is the number of heads
  Rows k_cache;  // [num_slots, num_kv_heads, head_dim]
  Rows v_cache;
  // [num_rows], slots of the last num_rows rows; rows whose slot is not in 0..num_slots - 1 are
  // skipped
  Integers slots;
  int64_t num_rows;
  int64_t num_slots;
  // [num_copies, num_rows], further slots of rows that have one; the first negative one ends them
  Integers copies;
  int64_t num_copies;
};

// fp8 copies (e4m3) of heads, each number divided by its scale. Elements are bytes, with the same
// strides allowed.
struct Fp8Rows {
  Rows q;  // null data: no copies of q (the same for k)
  Rows k;  // copies of the keys minus their mean
  Rows v;
  Rows values;          // [num_tokens, num_kv_heads, head_dim], copied to v
  const float* mean;    // [num_kv_heads, head_dim], contiguous
  const float* scales;  // [3 or more], powers of two: scales of q, k and v; null: no copies
};

struct RotaryParams {
  Rows q;  // [num_tokens, num_q_heads, head_dim]: inner is the number of heads
  Rows k;
  const void* cos;  // [num_tokens, rotary_dim], fp32 or the dtype of q and k
  const void* sin;
  int64_t cos_stride;  // elements from one token to the next
  int64_t sin_stride;
  DataType dtype;
  DataType table_dtype;
  int64_t num_tokens;
  int rotary_dim;  // even
  int head_dim;
  // Gains of the norm that precedes the rotation, [head_dim] each; the plain rotation does not read
  // them.
  const void* q_weight;
  const void* k_weight;
  float eps;
  KeptRows kept;  // stores the rotated k, and v
  Fp8Rows fp8;    // requires bf16 heads whose channels are all rotated, in vectors
};

struct SiluMulParams {
  Rows gate;
  Rows up;
  Rows out;  // may be gate or up
  DataType dtype;
  int64_t num_rows;
  int num_columns;
};

struct StoreKeysValuesParams {
  Rows k;  // [num_rows, num_heads, head_dim]: inner is the number of heads
  Rows v;
  Rows k_cache;  // [num_slots, num_heads, head_dim]
  Rows v_cache;
  Integers slots;  // [num_rows]; rows whose slot is not in 0..num_slots - 1 are skipped
  DataType dtype;
  int64_t num_rows;
  int64_t num_slots;
  int head_dim;
};

// Each function enqueues its kernel on `stream` of the current device, and neither allocates nor
// synchronises.
cudaError_t launch_rms_norm(const RmsNormParams& params, cudaStream_t stream);
cudaError_t launch_rotary_tables(const RotaryTablesParams& params, cudaStream_t stream);
cudaError_t launch_rotary(const RotaryParams& params, cudaStream_t stream);
cudaError_t launch_norm_rotary(const RotaryParams& params, cudaStream_t stream);
cudaError_t launch_silu_mul(const SiluMulParams& params, cudaStream_t stream);
cudaError_t launch_store_keys_values(const StoreKeysValuesParams& params, cudaStream_t stream);

}  // namespace fused_ops
