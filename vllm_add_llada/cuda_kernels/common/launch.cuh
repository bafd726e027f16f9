// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch (Hopper and later). A kernel is scheduled while the previous kernel
// of the stream ends. It then waits until that kernel is complete and its writes are visible. This
// saves the time from the end of a kernel to the start of the next one.
//
// Every thread waits before it touches memory that other kernels use. So a kernel completes only
// after all kernels before it.
#pragma once

#include <cuda_runtime.h>

namespace native {

// Allows the next kernel to be scheduled as soon as all blocks of this one are running.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Every thread calls this before it reads memory that another kernel may have written, and before
// it writes.
__device__ inline void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Prefetches data that a kernel reads first, so that weights arrive from memory while the kernel
// waits. Another kernel may still write the data, because all kernels share the second-level cache.
__device__ inline void prefetch(const void* address) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
#endif
}

// Prefetches into the cache of this multiprocessor.
__device__ inline void prefetch_near(const void* address) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(address)));
#endif
}

// Finds whether the code that runs on the current device contains the wait. A card may also run
// older PTX, and then the kernel must not start early. All kernels of the module are compiled for
// the same targets, so the answer is cached per device.
template <typename Params>
cudaError_t find_overlap(void (*kernel)(Params), bool* overlaps) {
  thread_local int known_device = -1;
  thread_local bool known = false;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device != known_device) {
    cudaFuncAttributes attributes{};
    error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error == cudaSuccess) {
      known = attributes.ptxVersion >= 90;
      known_device = device;
    }
  }
  *overlaps = known;
  return error;
}

// The configuration of a launch.
struct Launch {
  dim3 blocks;
  dim3 threads;
  cudaStream_t stream;
  bool overlaps;                // the kernel is scheduled while the previous kernel ends
  int shared_bytes = 0;         // bytes of dynamic shared memory
  unsigned cluster_blocks = 1;  // blocks per cluster
};

template <typename... Params>
cudaError_t launch_kernel(void (*kernel)(Params...), const Launch& launch,
                          const Params&... params) {
  if (launch.shared_bytes > 0) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, launch.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = launch.blocks;
  config.blockDim = launch.threads;
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  if (launch.overlaps) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cluster_blocks > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {launch.cluster_blocks, 1, 1};
  }
  return cudaLaunchKernelEx(&config, kernel, params...);
}

// Launches a kernel that waits for its prerequisites; works on any card.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), dim3 blocks, dim3 threads, const Params& params,
                          cudaStream_t stream) {
  bool overlaps = false;
  const cudaError_t error = find_overlap(kernel, &overlaps);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, Launch{blocks, threads, stream, overlaps}, params);
}

}  // namespace native
