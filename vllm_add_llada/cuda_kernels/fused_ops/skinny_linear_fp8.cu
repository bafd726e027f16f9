// SPDX-License-Identifier: Apache-2.0
//
// The product of few rows with fp8 operands.

#include "skinny_linear.cuh"

namespace fused_ops {

cudaError_t launch_skinny_linear_fp8(const LinearParams& params, cudaStream_t stream) {
  return launch_skinny<true>(params, stream);
}

}  // namespace fused_ops
