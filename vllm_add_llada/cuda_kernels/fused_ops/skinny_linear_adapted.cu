// SPDX-License-Identifier: Apache-2.0
//
// The product of few rows with bf16 operands, and with LoRA adapters.

#include "skinny_linear.cuh"

namespace fused_ops {

cudaError_t launch_skinny_linear_adapted(const LinearParams& params, cudaStream_t stream) {
  return launch_skinny<false, true>(params, stream);
}

}  // namespace fused_ops
