// SPDX-License-Identifier: Apache-2.0
//
// Keys and values of a chunk, scattered to the rows of a cache. A block takes a row of both.

#include <algorithm>

#include "launch.cuh"
#include "rows.cuh"

namespace fused_ops {
namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 4;  // of 16 bytes, per thread and walk

// T: what is copied at once.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    store_rows(const __grid_constant__ StoreKeysValuesParams params) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const int num_units = static_cast<int>(params.k.inner) * params.head_dim;  // of k, and of v
  const int64_t slot = at(params.slots, row);
  if (slot < 0 || slot >= params.num_slots) return;
  const int first = blockIdx.y * kThreads * kUnits + threadIdx.x;

  T units[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = first + i * kThreads;
    if (unit >= 2 * num_units) continue;
    const bool is_key = unit < num_units;
    const int place = is_key ? unit : unit - num_units;
    units[i] = row_address<T>(is_key ? params.k : params.v, row,
                              place / params.head_dim)[place % params.head_dim];
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = first + i * kThreads;
    if (unit >= 2 * num_units) continue;
    const bool is_key = unit < num_units;
    const int place = is_key ? unit : unit - num_units;
    row_address<T>(is_key ? params.k_cache : params.v_cache, slot,
                   place / params.head_dim)[place % params.head_dim] = units[i];
  }
}

// The same rows, counted in parts of `factor` elements.
Rows in_parts(const Rows& rows, int factor) {
  return {rows.data, rows.inner, rows.outer_stride / factor, rows.inner_stride / factor};
}

template <typename T>
cudaError_t launch_rows(StoreKeysValuesParams params, int factor, cudaStream_t stream) {
  for (Rows* rows : {&params.k, &params.v, &params.k_cache, &params.v_cache}) {
    *rows = in_parts(*rows, factor);
  }
  params.head_dim /= factor;
  const int64_t num_units = 2 * params.k.inner * params.head_dim;
  if (num_units > INT_MAX) return cudaErrorInvalidConfiguration;
  const dim3 blocks = row_grid(params.num_rows, num_units, kThreads * kUnits);
  if (blocks.x == 0) return cudaErrorInvalidConfiguration;
  return launch_kernel(store_rows<T>, blocks, dim3(kThreads), params, stream);
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
