// SPDX-License-Identifier: Apache-2.0
//
// Stores keys and values of a chunk in the rows of a cache. The parts of both, row after row, are
// numbered consecutively and distributed over the blocks.

#include "fused_ops.h"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"
#include "vllm_add_llada/cuda_kernels/common/vectors.cuh"

namespace fused_ops {
namespace {

constexpr int kThreads = 256;

// A part has type T; a thread copies kParts of them.
template <typename T, int kParts>
__global__ void __launch_bounds__(kThreads)
    store_rows(const __grid_constant__ StoreKeysValuesParams params) {
  launch_dependents();
  wait_for_prerequisites();
  // parts of k per row, and of v
  const int num_parts = static_cast<int>(params.k.inner) * params.head_dim;
  const int64_t first_part = int64_t{blockIdx.x} * (kThreads * kParts);
  const int64_t first_row = first_part / (2 * num_parts);
  const int first = static_cast<int>(first_part - first_row * (2 * num_parts)) + threadIdx.x;

  T parts[kParts];
  T* targets[kParts] = {};
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int place = first + i * kThreads;
    const int64_t row = first_row + place / (2 * num_parts);
    if (row >= params.num_rows) continue;
    const int part = place % (2 * num_parts);
    const bool is_key = part < num_parts;
    const int head = (is_key ? part : part - num_parts) / params.head_dim;
    const int column = part % params.head_dim;
    const int64_t slot = at(params.slots, row);
    parts[i] = row_address<T>(is_key ? params.k : params.v, row, head)[column];
    if (slot < 0 || slot >= params.num_slots) continue;
    targets[i] = row_address<T>(is_key ? params.k_cache : params.v_cache, slot, head) + column;
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (targets[i] != nullptr) *targets[i] = parts[i];
  }
}

template <typename T, int kParts>
cudaError_t launch_parts(const StoreKeysValuesParams& params, int64_t num_parts,
                         cudaStream_t stream) {
  const int64_t blocks = (num_parts - 1) / (kThreads * kParts) + 1;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  return launch_kernel(store_rows<T, kParts>, static_cast<unsigned>(blocks), kThreads, params,
                       stream);
}

// Up to this number of parts, each thread has one part, so that the work is spread over all
// threads.
constexpr int64_t kFewParts = int64_t{1} << 17;

// The same rows with strides in parts of `width` elements.
Rows in_parts(const Rows& rows, int width) {
  return {rows.data, rows.inner, rows.outer_stride / width, rows.inner_stride / width};
}

template <typename T>
cudaError_t launch_rows(StoreKeysValuesParams params, int width, cudaStream_t stream) {
  for (Rows* rows : {&params.k, &params.v, &params.k_cache, &params.v_cache}) {
    *rows = in_parts(*rows, width);
  }
  params.head_dim /= width;
  const int64_t parts_per_row = 2 * params.k.inner * params.head_dim;
  if (parts_per_row > INT_MAX / 2) return cudaErrorInvalidConfiguration;
  const int64_t num_parts = params.num_rows * parts_per_row;
  return num_parts <= kFewParts ? launch_parts<T, 1>(params, num_parts, stream)
                                : launch_parts<T, 4>(params, num_parts, stream);
}

}  // namespace

cudaError_t launch_store_keys_values(const StoreKeysValuesParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.k.inner == 0) return cudaSuccess;
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int kWidth = kVectorWidth<T>;
    const bool is_vector = params.head_dim % kWidth == 0 && has_aligned_rows<T>(params.k) &&
                           has_aligned_rows<T>(params.v) && has_aligned_rows<T>(params.k_cache) &&
                           has_aligned_rows<T>(params.v_cache);
    return is_vector ? launch_rows<uint4>(params, kWidth, stream)
                     : launch_rows<T>(params, 1, stream);
  });
}

}  // namespace fused_ops
