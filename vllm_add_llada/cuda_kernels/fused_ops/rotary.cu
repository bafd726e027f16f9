// SPDX-License-Identifier: Apache-2.0
#include "rotary.cuh"

namespace fused_ops {

cudaError_t launch_rotary(const RotaryParams& params, cudaStream_t stream) {
  return dispatch_tables(params, [&](auto* tag, auto* table_tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    using Table = std::remove_pointer_t<decltype(table_tag)>;
    return has_vectors<T, Table>(params)
               ? launch_vectors_and_keep<T, Table, /*kHasNorm=*/false>(params, stream)
               : keep_apart(params, stream, launch_heads<T, Table, 1, 1, /*kHasNorm=*/false>);
  });
}

}  // namespace fused_ops
