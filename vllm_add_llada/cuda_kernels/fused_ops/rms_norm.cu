// SPDX-License-Identifier: Apache-2.0
#include "rms_norm.cuh"

namespace fused_ops {

cudaError_t launch_rms_norm(const RmsNormParams& params, cudaStream_t stream) {
  return launch_norm</*kHasResidual=*/false>(params, stream);
}

}  // namespace fused_ops
