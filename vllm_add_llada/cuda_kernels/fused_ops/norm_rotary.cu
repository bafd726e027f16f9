// SPDX-License-Identifier: Apache-2.0
#include "rotary.cuh"

namespace fused_ops {
namespace {

// Whether the threads of a head are lanes of one warp and hold all of its channels.
template <typename T, typename Table>
bool is_head_in_lanes(const RotaryParams& params) {
  const int num_lanes = num_runs_of<kVectorWidth<T>, /*kHasNorm=*/true>(params);
  return params.head_dim % (2 * kVectorWidth<T>) == 0 && has_vectors<T, Table>(params) &&
         num_lanes <= 32 && (num_lanes & (num_lanes - 1)) == 0 && is_aligned(params.q_weight) &&
         is_aligned(params.k_weight);
}

cudaError_t launch_head_norm(const Rows& heads, const void* weight, const RotaryParams& params,
                             cudaStream_t stream) {
  return launch_rms_norm(
      RmsNormParams{heads, weight, heads, params.dtype, params.num_tokens * heads.inner,
                    params.head_dim, params.eps},
      stream);
}

cudaError_t launch_one_by_one(const RotaryParams& params, cudaStream_t stream) {
  cudaError_t error = launch_head_norm(params.q, params.q_weight, params, stream);
  if (error == cudaSuccess) {
    error = launch_head_norm(params.k, params.k_weight, params, stream);
  }
  return error == cudaSuccess ? launch_rotary(params, stream) : error;
}

}  // namespace

cudaError_t launch_norm_rotary(const RotaryParams& params, cudaStream_t stream) {
  return dispatch_tables(params, [&](auto* tag, auto* table_tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    using Table = std::remove_pointer_t<decltype(table_tag)>;
    return is_head_in_lanes<T, Table>(params)
               ? launch_vectors_and_keep<T, Table, /*kHasNorm=*/true>(params, stream)
               : launch_one_by_one(params, stream);
  });
}

}  // namespace fused_ops
