// SPDX-License-Identifier: Apache-2.0
//
// Launches that overlap with the end of the kernel before them (programmatic dependent launch):
// where the device can (compute capability 9.0), the blocks of a kernel are brought in while those
// of its predecessor run out, and wait there for its results.
#pragma once

#include <cuda_runtime.h>

namespace fused_ops {

// First statement of every kernel, before any access to global memory: what earlier kernels of the
// stream wrote is complete and visible after it.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  // The next kernel, if it is launched likewise, may be brought in as soon as all blocks run.
#ifndef FO_TRIGGER
#define FO_TRIGGER 1
#endif
#if FO_TRIGGER == 1
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  asm volatile("griddepcontrol.wait;" ::: "memory");
#if FO_TRIGGER == 2
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#endif
}

template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), dim3 blocks, dim3 threads, const Params& params,
                          cudaStream_t stream) {
  int device = 0;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace fused_ops
