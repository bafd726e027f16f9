// SPDX-License-Identifier: Apache-2.0
//
// Half-split rotary embedding of q and k in place: u' = u * cos + turn(u) * sin, where turn swaps
// the halves of the rotated channels and negates the first. A thread owns a run of pairs (j, j +
// rotary_dim / 2) in several heads of a token, and reads the table entries of the run once.
//
// With fp32 tables the arithmetic is fp32, rounded once. With tables in the model dtype every
// product and the sum are rounded to it. Products are never contracted into fused multiply-adds, so
// the bits are those of the separate operations.
//
// With weights, each head is first normalised as rms_norm does it: the threads of a head are
// neighbouring lanes, which add up its squares. The last of these lanes have the channels that are
// not rotated.

#pragma once

#include <cuda_fp8.h>

#include <algorithm>

#include "fused_ops.h"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"
#include "vllm_add_llada/cuda_kernels/common/reduce.cuh"
#include "vllm_add_llada/cuda_kernels/common/vectors.cuh"

namespace fused_ops {
constexpr int kRotaryThreads = 256;

// The table entries of a run of pairs, and the rotation with them.
template <typename T, typename Table, int kWidth>
struct Rotation {  // fp32 tables, with arithmetic in fp32
  float lower_cos[kWidth], upper_cos[kWidth], lower_sin[kWidth], upper_sin[kWidth];

  __device__ Rotation(const Table* cos, const Table* sin, int half) {
    load(cos, lower_cos);
    load(cos + half, upper_cos);
    load(sin, lower_sin);
    load(sin + half, upper_sin);
  }

  __device__ void apply(Vector<T, kWidth>& lower, Vector<T, kWidth>& upper) const {
    float low[kWidth], high[kWidth];
    to_floats(lower, low);
    to_floats(upper, high);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float turned = turn(low[i], lower_cos[i], -high[i], lower_sin[i]);
      high[i] = turn(high[i], upper_cos[i], low[i], upper_sin[i]);
      low[i] = turned;
    }
    lower = from_floats<T>(low);
    upper = from_floats<T>(high);
  }

  static __device__ float turn(float first, float cos, float second, float sin) {
    return __fadd_rn(__fmul_rn(first, cos), __fmul_rn(second, sin));
  }
};

template <typename T, int kWidth>
struct Rotation<T, T, kWidth> {  // tables in the model dtype, with arithmetic in that dtype
  Vector<T, kWidth> lower_cos, upper_cos, lower_sin, upper_sin;

  __device__ Rotation(const T* cos, const T* sin, int half)
      : lower_cos(load_vector<kWidth>(cos)),
        upper_cos(load_vector<kWidth>(cos + half)),
        lower_sin(load_vector<kWidth>(sin)),
        upper_sin(load_vector<kWidth>(sin + half)) {}

  __device__ void apply(Vector<T, kWidth>& lower, Vector<T, kWidth>& upper) const {
    const auto turned = sum_of(product_of(lower, lower_cos), product_of(negated(upper), lower_sin));
    upper = sum_of(product_of(upper, upper_cos), product_of(lower, upper_sin));
    lower = turned;
  }
};

// Number of heads to visit. Heads of v count only if they are kept or copied.
__host__ __device__ inline int64_t num_heads_of(const RotaryParams& params) {
  const bool has_values = params.kept.num_rows > 0 || params.fp8.v.data != nullptr;
  return params.q.inner + params.k.inner + (has_values ? params.k.inner : 0);
}

// Heads are numbered consecutively: first those of q, then of k, then of v.
template <typename T>
__device__ T* head_address(const RotaryParams& params, int64_t token, int head) {
  const int num_q_heads = static_cast<int>(params.q.inner);
  const int num_rotated = num_q_heads + static_cast<int>(params.k.inner);
  if (head < num_q_heads) return row_address<T>(params.q, token, head);
  if (head < num_rotated) return row_address<T>(params.k, token, head - num_q_heads);
  const Rows& values = params.kept.num_rows > 0 ? params.kept.v : params.fp8.values;
  return row_address<T>(values, token, head - num_rotated);
}

// The cache row in which k and v of a token are kept, or -1.
__device__ inline int64_t slot_of(const RotaryParams& params, int64_t token) {
  const int64_t row = token - (params.num_tokens - params.kept.num_rows);
  if (params.kept.num_rows == 0 || row < 0) return -1;
  const int64_t slot = at(params.kept.slots, row);
  return slot < params.kept.num_slots ? slot : -1;
}

// A further cache row of a token that has a slot, or -1.
__device__ inline int64_t copy_of(const RotaryParams& params, int64_t token, int64_t number) {
  const int64_t row = token - (params.num_tokens - params.kept.num_rows);
  const int64_t slot = at(params.kept.copies, number * params.kept.num_rows + row);
  return slot < params.kept.num_slots ? slot : -1;
}

template <typename T>
__device__ T* kept_address(const RotaryParams& params, int64_t slot, int head) {
  const int key_head = head - static_cast<int>(params.q.inner);
  const int num_kv_heads = static_cast<int>(params.k.inner);
  return key_head < num_kv_heads
             ? row_address<T>(params.kept.k_cache, slot, key_head)
             : row_address<T>(params.kept.v_cache, slot, key_head - num_kv_heads);
}

// Stores neighbouring channels of a head, divided by their scale, as fp8. Larger numbers are
// clipped to the largest of the format.
template <typename T, int kWidth>
__device__ void store_fp8(uint8_t* target, const Vector<T, kWidth>& vector, const float* mean,
                          float inverse) {
  static_assert(kWidth == 8);
  float values[kWidth];
  to_floats(vector, values);
  __nv_fp8x2_storage_t pairs[kWidth / 2];
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    float2 pair = {values[i], values[i + 1]};
    if (mean != nullptr) pair = {pair.x - mean[i], pair.y - mean[i + 1]};
    pair = {pair.x * inverse, pair.y * inverse};
    pairs[i / 2] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
  }
  *reinterpret_cast<uint2*>(target) = *reinterpret_cast<const uint2*>(pairs);
}

// Copies a run of a head to fp8 in its present state.
template <typename T, int kWidth>
__device__ void copy_run(const RotaryParams& params, int64_t token, int head, int channel, int gap,
                         const Vector<T, kWidth>& lower, const Vector<T, kWidth>& upper) {
  const Fp8Rows& fp8 = params.fp8;
  const int num_q_heads = static_cast<int>(params.q.inner);
  const int num_rotated = num_q_heads + static_cast<int>(params.k.inner);
  const int kind = head < num_q_heads ? 0 : head < num_rotated ? 1 : 2;
  const int of_kind = kind == 0 ? head : kind == 1 ? head - num_q_heads : head - num_rotated;
  const Rows& rows = kind == 0 ? fp8.q : kind == 1 ? fp8.k : fp8.v;
  if (rows.data == nullptr) return;
  uint8_t* channels = row_address<uint8_t>(rows, token, of_kind) + channel;
  const float* mean =
      kind == 1 ? fp8.mean + static_cast<int64_t>(of_kind) * params.head_dim + channel : nullptr;
  const float inverse = 1.0f / fp8.scales[kind];
  store_fp8(channels, lower, mean, inverse);
  store_fp8(channels + gap, upper, mean == nullptr ? nullptr : mean + gap, inverse);
}

// Both channels of each pair of a run.
template <typename T, int kWidth>
struct Run {
  Vector<T, kWidth> lower, upper;
};

template <int kWidth, typename T>
__device__ Run<T, kWidth> load_run(const T* channels, int gap) {
  return {load_vector<kWidth>(channels), load_vector<kWidth>(channels + gap)};
}

// Number of runs per head: runs of its rotated pairs or, with a norm, of all its channels.
template <int kWidth, bool kHasNorm>
__host__ __device__ int num_runs_of(const RotaryParams& params) {
  return (kHasNorm ? params.head_dim : params.rotary_dim) / (2 * kWidth);
}

template <typename T, typename Table, int kWidth, int kHeads, bool kHasNorm, bool kCopies>
__global__ void __launch_bounds__(kRotaryThreads)
    rotate_heads(const __grid_constant__ RotaryParams params) {
  launch_dependents();
  const int num_rotated = params.rotary_dim / (2 * kWidth);
  const int num_runs = num_runs_of<kWidth, kHasNorm>(params);
  const int num_q_heads = static_cast<int>(params.q.inner);
  const int num_turned = num_q_heads + static_cast<int>(params.k.inner);
  const int num_heads = static_cast<int>(num_heads_of(params));
  const int head_step = (num_heads - 1) / kHeads + 1;
  const int64_t token = blockIdx.x;
  const int item = blockIdx.y * blockDim.x + threadIdx.x;
  const int run = item % num_runs;
  const bool is_rotated = !kHasNorm || run < num_rotated;
  const int channel = is_rotated ? run * kWidth : 2 * run * kWidth;
  const int gap = is_rotated ? params.rotary_dim / 2 : kWidth;  // distance of the run's two parts
  // A thread without work has no heads, but its lane takes part in the sums of the others.
  const int first_head = item / num_runs < head_step ? item / num_runs : num_heads;
  const T* q_weights = static_cast<const T*>(params.q_weight) + channel;
  const T* k_weights = static_cast<const T*>(params.k_weight) + channel;
  if (kHasNorm && token == 0) {
    prefetch(q_weights);
    prefetch(q_weights + gap);
    prefetch(k_weights);
    prefetch(k_weights + gap);
  }
  wait_for_prerequisites();

  const int64_t slot = slot_of(params, token);
  Run<T, kWidth> runs[kHeads] = {}, q_weight = {}, k_weight = {};
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first_head + i * head_step;
    if (head >= num_heads) continue;
    runs[i] = load_run<kWidth>(head_address<T>(params, token, head) + channel, gap);
  }
  if (kHasNorm) {
    q_weight = load_run<kWidth>(q_weights, gap);
    k_weight = load_run<kWidth>(k_weights, gap);
  }
  const int entry = is_rotated ? channel : 0;
  const Rotation<T, Table, kWidth> rotation(
      static_cast<const Table*>(params.cos) + token * params.cos_stride + entry,
      static_cast<const Table*>(params.sin) + token * params.sin_stride + entry,
      params.rotary_dim / 2);

#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    auto& [lower, upper] = runs[i];
    const int head = first_head + i * head_step;
    if (kHasNorm) {
      const float sum = over_lanes(sum_of_squares(lower) + sum_of_squares(upper), num_runs, Sum());
      const float scale = rsqrtf(sum / params.head_dim + params.eps);
      const Run<T, kWidth> weight = head < num_q_heads ? q_weight : k_weight;
      if (head < num_turned) {
        lower = product_of(scaled(lower, scale), weight.lower);
        upper = product_of(scaled(upper, scale), weight.upper);
      }
    }
    if (head >= num_heads) continue;
    if (head < num_turned) {
      if (is_rotated) rotation.apply(lower, upper);
      T* channels = head_address<T>(params, token, head) + channel;
      store_vector(channels, lower);
      store_vector(channels + gap, upper);
    }
    if constexpr (kCopies) copy_run(params, token, head, channel, gap, lower, upper);
    if (slot < 0 || head < num_q_heads) continue;
    int64_t place = slot;
    for (int64_t number = 0; place >= 0; ++number) {
      T* kept = kept_address<T>(params, place, head) + channel;
      store_vector(kept, lower);
      store_vector(kept + gap, upper);
      place = number < params.kept.num_copies ? copy_of(params, token, number) : -1;
    }
  }
}

template <typename T, typename Table, int kWidth, int kHeads, bool kHasNorm, bool kCopies = false>
cudaError_t launch_heads(const RotaryParams& params, cudaStream_t stream) {
  const int64_t num_heads = num_heads_of(params);
  const int64_t num_items = ((num_heads - 1) / kHeads + 1) * num_runs_of<kWidth, kHasNorm>(params);
  const int threads =
      static_cast<int>(std::min<int64_t>(kRotaryThreads, (num_items + 31) / 32 * 32));
  const dim3 blocks = row_grid(params.num_tokens, num_items, threads);
  if (blocks.x == 0) return cudaErrorInvalidConfiguration;
  return launch_kernel(rotate_heads<T, Table, kWidth, kHeads, kHasNorm, kCopies>, blocks, threads,
                       params, stream);
}

template <typename T, typename Table>
bool has_vectors(const RotaryParams& params) {
  constexpr int kTableWidth = kVectorWidth<Table>;
  return params.rotary_dim % (2 * kVectorWidth<T>) == 0 && has_aligned_rows<T>(params.q) &&
         has_aligned_rows<T>(params.k) && is_aligned(params.cos) && is_aligned(params.sin) &&
         params.cos_stride % kTableWidth == 0 && params.sin_stride % kTableWidth == 0;
}

inline Rows rows_from(const Rows& rows, int64_t first, DataType dtype) {
  const int64_t element_bytes = dtype == DataType::kFloat32 ? 4 : 2;
  char* data = static_cast<char*>(rows.data) + first * rows.outer_stride * element_bytes;
  return {data, rows.inner, rows.outer_stride, rows.inner_stride};
}

// With few tokens every thread has one head, so that the work is spread over all threads.
// With many tokens a thread has enough heads to keep the memory busy with loads. A norm needs more
// heads per thread, because its threads use more registers and fewer of them run at a time.
constexpr int64_t kFewTokens = 512;
template <bool kHasNorm>
constexpr int kHeadsOfMany = kHasNorm ? 4 : 2;

inline Integers integers_from(const Integers& integers, int64_t first) {
  const int64_t bytes = integers.is_wide ? sizeof(int64_t) : sizeof(int);
  return {static_cast<const char*>(integers.data) + first * bytes, integers.is_wide};
}

// Rotates by `launch`, then stores the kept rows, and each of their copies, in further launches.
template <typename Launch>
cudaError_t keep_apart(const RotaryParams& params, cudaStream_t stream, Launch launch) {
  const KeptRows& kept = params.kept;
  RotaryParams rotation = params;
  rotation.kept.num_rows = 0;
  cudaError_t error = launch(rotation, stream);
  if (error != cudaSuccess || kept.num_rows == 0) return error;
  const int64_t first = params.num_tokens - kept.num_rows;
  StoreKeysValuesParams stored{rows_from(params.k, first, params.dtype),
                               rows_from(kept.v, first, params.dtype),
                               kept.k_cache,
                               kept.v_cache,
                               kept.slots,
                               params.dtype,
                               kept.num_rows,
                               kept.num_slots,
                               params.head_dim};
  error = launch_store_keys_values(stored, stream);
  for (int64_t number = 0; number < kept.num_copies && error == cudaSuccess; ++number) {
    stored.slots = integers_from(kept.copies, number * kept.num_rows);
    error = launch_store_keys_values(stored, stream);
  }
  return error;
}

template <typename T, typename Table, bool kHasNorm>
cudaError_t launch_vectors(const RotaryParams& params, cudaStream_t stream) {
  constexpr int kWidth = kVectorWidth<T>;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (params.fp8.scales != nullptr) {
      return launch_heads<T, Table, kWidth, kHeadsOfMany<kHasNorm>, kHasNorm, /*kCopies=*/true>(
          params, stream);
    }
  }
  return params.num_tokens <= kFewTokens
             ? launch_heads<T, Table, kWidth, 1, kHasNorm>(params, stream)
             : launch_heads<T, Table, kWidth, kHeadsOfMany<kHasNorm>, kHasNorm>(params, stream);
}

// Whether the rotation visits all elements that are kept, in vectors.
template <typename T, bool kHasNorm>
bool can_keep(const RotaryParams& params) {
  return (kHasNorm || params.rotary_dim == params.head_dim) && has_aligned_rows<T>(params.kept.v) &&
         has_aligned_rows<T>(params.kept.k_cache) && has_aligned_rows<T>(params.kept.v_cache);
}

// Rotates and keeps rows in one launch if that is possible, else in two.
template <typename T, typename Table, bool kHasNorm>
cudaError_t launch_vectors_and_keep(const RotaryParams& params, cudaStream_t stream) {
  if (params.kept.num_rows == 0 || can_keep<T, kHasNorm>(params)) {
    return launch_vectors<T, Table, kHasNorm>(params, stream);
  }
  return keep_apart(params, stream, launch_vectors<T, Table, kHasNorm>);
}

template <typename Function>
cudaError_t dispatch_tables(const RotaryParams& params, Function function) {
  if (params.num_tokens == 0) return cudaSuccess;
  if (params.rotary_dim == 0) {
    return params.kept.num_rows == 0 ? cudaSuccess : cudaErrorInvalidValue;
  }
  if (params.q.inner + params.k.inner == 0) return cudaSuccess;
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (params.table_dtype == DataType::kFloat32)
      return function(tag, static_cast<float*>(nullptr));
    if (params.table_dtype == params.dtype) return function(tag, static_cast<T*>(nullptr));
    return cudaErrorInvalidValue;
  });
}

}  // namespace fused_ops
