// SPDX-License-Identifier: Apache-2.0
//
// silu(gate) * up. silu is computed in fp32 and rounded to the model dtype; the product is computed
// in that dtype.

#include "fused_ops.h"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"
#include "vllm_add_llada/cuda_kernels/common/vectors.cuh"

namespace fused_ops {
namespace {

constexpr int kThreads = 256;

template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    silu_mul_rows(const __grid_constant__ SiluMulParams params) {
  launch_dependents();
  wait_for_prerequisites();
  const int64_t row = blockIdx.x;
  const int column = (blockIdx.y * kThreads + threadIdx.x) * kWidth;
  if (column >= params.num_columns) return;

  const auto gate = load_vector<kWidth>(row_address<T>(params.gate, row, 0) + column);
  const auto up = load_vector<kWidth>(row_address<T>(params.up, row, 0) + column);
  float values[kWidth];
  to_floats(gate, values);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] = values[i] / (1.0f + expf(-values[i]));
  store_vector(row_address<T>(params.out, row, 0) + column, product_of(from_floats<T>(values), up));
}

template <typename T, int kWidth>
cudaError_t launch_rows(const SiluMulParams& params, cudaStream_t stream) {
  const dim3 blocks = row_grid(params.num_rows, params.num_columns / kWidth, kThreads);
  if (blocks.x == 0) return cudaErrorInvalidConfiguration;
  return launch_kernel(silu_mul_rows<T, kWidth>, blocks, kThreads, params, stream);
}

}  // namespace

cudaError_t launch_silu_mul(const SiluMulParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int kWidth = kVectorWidth<T>;
    const bool is_vector = params.num_columns % kWidth == 0 && has_aligned_rows<T>(params.gate) &&
                           has_aligned_rows<T>(params.up) && has_aligned_rows<T>(params.out);
    return is_vector ? launch_rows<T, kWidth>(params, stream) : launch_rows<T, 1>(params, stream);
  });
}

}  // namespace fused_ops
