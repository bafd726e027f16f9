// SPDX-License-Identifier: Apache-2.0
//
// Cosines and sines of position * inverse frequency; one thread per pair of channels. The angle is
// rounded to fp32 in a separate product; cosf and sinf reduce large angles exactly.

#include <algorithm>

#include "fused_ops.h"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"
#include "vllm_add_llada/cuda_kernels/common/vectors.cuh"

namespace fused_ops {
namespace {

constexpr int kMaxThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    fill_tables(const __grid_constant__ RotaryTablesParams params) {
  launch_dependents();
  wait_for_prerequisites();
  const int64_t row = blockIdx.x;
  const int half = params.rotary_dim / 2;
  const int pair = blockIdx.y * blockDim.x + threadIdx.x;
  if (pair >= half) return;

  const auto position = static_cast<float>(at(params.positions, row));
  const float angle = __fmul_rn(position, params.inverse_frequencies[pair]);
  T* cos = row_address<T>(params.cos, row, 0) + pair;
  T* sin = row_address<T>(params.sin, row, 0) + pair;
  cos[0] = cos[half] = from_float<T>(cosf(angle));
  sin[0] = sin[half] = from_float<T>(sinf(angle));
}

}  // namespace

cudaError_t launch_rotary_tables(const RotaryTablesParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const int half = params.rotary_dim / 2;
  const int threads = std::min(kMaxThreads, (half + 31) / 32 * 32);
  const dim3 blocks = row_grid(params.num_rows, half, threads);
  if (blocks.x == 0) return cudaErrorInvalidConfiguration;
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    return launch_kernel(fill_tables<T>, blocks, threads, params, stream);
  });
}

}  // namespace fused_ops
