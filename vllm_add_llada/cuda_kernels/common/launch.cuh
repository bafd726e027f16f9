// SPDX-License-Identifier: Apache-2.0
//
// Programmatic dependent launch (Hopper and later): a kernel gets onto the card while the one
// before it in the stream ends, and waits there until that one is complete and its writes can be
// seen. What is saved is the time from the end of a kernel to the start of the next.
//
// As every thread waits before it touches what other kernels touch, a kernel is complete only
// after all those before it are.
#pragma once

#include <cuda_runtime.h>

namespace native {

// Lets the next kernel get onto the card as soon as all blocks of this one are there.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Every thread calls it, before it reads what another kernel may have written and before it writes.
__device__ inline void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For what a kernel reads first: weights come from memory while it waits. It need not be written
// yet, as all kernels see the same second-level cache.
__device__ inline void prefetch(const void* address) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
#endif
}

// The same to the cache of this multiprocessor.
__device__ inline void prefetch_near(const void* address) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(address)));
#endif
}

// Whether the code that the current device runs has the wait: a card may also run older PTX, and
// must not be told to start that early. All kernels of the room are compiled for the same targets.
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

// Where a kernel runs, and with what.
struct Launch {
  dim3 blocks;
  dim3 threads;
  cudaStream_t stream;
  bool overlaps;                // gets onto the card while the kernel before it ends
  int shared_bytes = 0;         // dynamic shared memory
  unsigned cluster_blocks = 1;  // of a cluster
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

// Starts a kernel that waits for its prerequisites, on any card.
template <typename Params>
cudaError_t launch_kernel(void (*kernel)(Params), dim3 blocks, dim3 threads, const Params& params,
                          cudaStream_t stream) {
  bool overlaps = false;
  const cudaError_t error = find_overlap(kernel, &overlaps);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, Launch{blocks, threads, stream, overlaps}, params);
}

}  // namespace native
