// SPDX-License-Identifier: Apache-2.0
//
// Half-split rotary embedding of q and k in place: u' = u * cos + turn(u) * sin, where turn swaps
// the halves of the rotated channels and negates the first. A thread owns a run of pairs (j, j +
// rotary_dim / 2). fp32 tables: computed in fp32, rounded once. Tables in the model dtype: every
// product and the sum are rounded to it. Products are never contracted into fused multiply-adds, so
// the bits are those of the separate operations.

#include "rows.cuh"

namespace fused_ops {
namespace {

constexpr int kThreads = 256;

template <typename Accumulator>
__device__ float rotate(float first, float cos, float second, float sin) {
  const float left = rounded<Accumulator>(__fmul_rn(first, cos));
  const float right = rounded<Accumulator>(__fmul_rn(second, sin));
  return rounded<Accumulator>(__fadd_rn(left, right));
}

// Table is also the dtype that intermediate results are rounded to.
template <typename T, typename Table, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rotate_heads(const __grid_constant__ RotaryParams params) {
  const int half = params.rotary_dim / 2;
  const int num_runs = half / kWidth;
  const int num_q_heads = static_cast<int>(params.q.inner);
  const int num_heads = num_q_heads + static_cast<int>(params.k.inner);
  const int64_t token = blockIdx.x;
  const int item = blockIdx.y * kThreads + threadIdx.x;
  const int head = item / num_runs;
  if (head >= num_heads) return;
  const int channel = item % num_runs * kWidth;
  T* channels = head < num_q_heads ? row_address<T>(params.q, token, head)
                                   : row_address<T>(params.k, token, head - num_q_heads);
  const Table* cos = static_cast<const Table*>(params.cos) + token * params.cos_stride;
  const Table* sin = static_cast<const Table*>(params.sin) + token * params.sin_stride;

  float lower[kWidth], upper[kWidth];
  float lower_cos[kWidth], upper_cos[kWidth], lower_sin[kWidth], upper_sin[kWidth];
  load<kWidth>(channels + channel, lower);
  load<kWidth>(channels + half + channel, upper);
  load<kWidth>(cos + channel, lower_cos);
  load<kWidth>(cos + half + channel, upper_cos);
  load<kWidth>(sin + channel, lower_sin);
  load<kWidth>(sin + half + channel, upper_sin);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float turned = rotate<Table>(lower[i], lower_cos[i], -upper[i], lower_sin[i]);
    upper[i] = rotate<Table>(upper[i], upper_cos[i], lower[i], upper_sin[i]);
    lower[i] = turned;
  }
  store<kWidth>(channels + channel, lower);
  store<kWidth>(channels + half + channel, upper);
}

template <typename T, typename Table, int kWidth>
cudaError_t launch_heads(const RotaryParams& params, cudaStream_t stream) {
  const int64_t num_items = (params.q.inner + params.k.inner) * (params.rotary_dim / 2 / kWidth);
  if (params.num_tokens == 0 || num_items == 0) return cudaSuccess;
  const dim3 blocks = row_grid(params.num_tokens, num_items, kThreads);
  if (blocks.x == 0) return cudaErrorInvalidConfiguration;
  rotate_heads<T, Table, kWidth><<<blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename T, typename Table>
cudaError_t launch_tables(const RotaryParams& params, cudaStream_t stream) {
  constexpr int kWidth = kVectorWidth<T>;
  constexpr int kTableWidth = kVectorWidth<Table>;
  const bool is_vector = params.rotary_dim % (2 * kWidth) == 0 && has_aligned_rows<T>(params.q) &&
                         has_aligned_rows<T>(params.k) && is_aligned(params.cos) &&
                         is_aligned(params.sin) && params.cos_stride % kTableWidth == 0 &&
                         params.sin_stride % kTableWidth == 0;
  return is_vector ? launch_heads<T, Table, kWidth>(params, stream)
                   : launch_heads<T, Table, 1>(params, stream);
}

}  // namespace

cudaError_t launch_rotary(const RotaryParams& params, cudaStream_t stream) {
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (params.table_dtype == DataType::kFloat32) return launch_tables<T, float>(params, stream);
    if (params.table_dtype == params.dtype) return launch_tables<T, T>(params, stream);
    return cudaErrorInvalidValue;
  });
}

}  // namespace fused_ops
