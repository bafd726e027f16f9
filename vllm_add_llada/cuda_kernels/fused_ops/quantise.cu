// SPDX-License-Identifier: Apache-2.0
//
// The operations around fp8 products. Rows and their scales are made in one pass with the operation
// before (a norm, or silu(gate) * up), and another pass applies the scales to a product. A block
// keeps a row in its registers from the search for the largest number to the result. Numbers are
// rounded to bf16 before they are quantised, as if they were stored.

#include <cuda_fp8.h>

#include <algorithm>

#include "epilogue.cuh"
#include "quantise.h"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"
#include "vllm_add_llada/cuda_kernels/common/reduce.cuh"
#include "vllm_add_llada/cuda_kernels/common/vectors.cuh"

namespace fused_ops {
namespace {

using Element = __nv_bfloat16;
constexpr int kWidth = kVectorWidth<Element>;
using Part = Vector<Element, kWidth>;
constexpr int kMaxThreads = 1024;
constexpr float kLargest = 448.0f;  // the largest number of e4m3
// lower bound for the largest number of a row: its reciprocal must be finite
constexpr float kSmallest = 1e-30f;

constexpr int kFewRows = 256;  // up to this number of rows, more threads per row are busy

enum class Source { kRows, kNorm, kGated };

// Reduces over all threads of a block, which are whole warps. Each `Combine` may be used once per
// kernel, because it has its own shared memory.
template <typename Combine>
__device__ float over_block(float value, Combine combine) {
  __shared__ float of_warps[32];
  value = over_warp(value, combine);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  return over_warps(of_warps, combine);
}

// The factors of a block's neighbouring gates and ups.
struct GateScales {
  float gates[kWidth], ups[kWidth];
};

__device__ GateScales load_scales(const QuantiseParams& params, int column) {
  GateScales scales;
  load(params.column_scales + column, scales.gates);
  load(params.column_scales + params.num_columns + column, scales.ups);
  return scales;
}

// silu(gate) * up of eight columns, with every operation rounded.
__device__ Part gated_part(const Part& gate, const Part& up, const GateScales* scales,
                           float row_scale) {
  float gates[kWidth], ups[kWidth];
  to_floats(gate, gates);
  to_floats(up, ups);
  if (scales != nullptr) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      gates[i] *= row_scale * scales->gates[i];
      ups[i] *= row_scale * scales->ups[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    const float2 gate = make_float2(gates[i], gates[i + 1]), up = make_float2(ups[i], ups[i + 1]);
    const float2 pair = scales != nullptr ? silu_mul(gate, up) : silu_mul_of_rounded(gate, up);
    gates[i] = pair.x;
    gates[i + 1] = pair.y;
  }
  return from_floats<Element>(gates);
}

// The parts of a row that a thread has. A thread with fewer parts has its last part again, so that
// no load waits for a comparison: all loads are issued before the first is needed.
template <int kParts>
struct Places {
  int num_parts;

  __device__ bool has(int i) const { return threadIdx.x + i * blockDim.x < num_parts; }
  __device__ int operator[](int i) const {
    return min(static_cast<int>(threadIdx.x + i * blockDim.x), num_parts - 1);
  }
};

template <int kParts>
__device__ void load_parts(const Element* row, const Places<kParts>& places,
                           Part (&parts)[kParts]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = load_vector<kWidth>(row + places[i] * kWidth);
}

// Loads a row; for a gated source it becomes silu(gate) * up.
template <Source kSource, bool kIsScaled, int kParts>
__device__ void load_row(const QuantiseParams& params, int64_t row, const Places<kParts>& places,
                         Part (&parts)[kParts]) {
  const Element* x = row_address<Element>(params.x, row, 0);
  load_parts(x, places, parts);
  if constexpr (kSource == Source::kGated) {
    Part ups[kParts];
    load_parts(x + params.num_columns, places, ups);
    const float row_scale = kIsScaled ? params.row_scales[row] : 1.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if constexpr (kIsScaled) {
        const GateScales scales = load_scales(params, places[i] * kWidth);
        parts[i] = gated_part(parts[i], ups[i], &scales, row_scale);
      } else {
        parts[i] = gated_part(parts[i], ups[i], nullptr, row_scale);
      }
    }
  }
}

// Replaces a row by its norm.
template <int kParts>
__device__ void normalise(const QuantiseParams& params, const Places<kParts>& places,
                          Part (&parts)[kParts]) {
  Part weights[kParts];
  load_parts(static_cast<const Element*>(params.weight), places, weights);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (places.has(i)) sum += sum_of_squares(parts[i]);
  }
  const float scale = rsqrtf(over_block(sum, Sum()) / params.num_columns + params.eps);
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = product_of(scaled(parts[i], scale), weights[i]);
}

__device__ float largest_of(const Part& part) {
  float values[kWidth];
  to_floats(part, values);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, fabsf(values[i]));
  return largest;
}

// Converts eight numbers to bytes.
__device__ uint2 as_fp8(const Part& part, float inverse) {
  float values[kWidth];
  to_floats(part, values);
  unsigned short pairs[kWidth / 2];
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    const float2 pair = make_float2(values[i] * inverse, values[i + 1] * inverse);
    pairs[i / 2] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3);
  }
  return make_uint2(pairs[0] | static_cast<unsigned>(pairs[1]) << 16,
                    pairs[2] | static_cast<unsigned>(pairs[3]) << 16);
}

template <Source kSource, bool kIsScaled, int kParts>
__global__ void __launch_bounds__(kMaxThreads)
    quantise_rows(const __grid_constant__ QuantiseParams params) {
  launch_dependents();
  const int64_t row = blockIdx.x;
  const Places<kParts> places{params.num_columns / kWidth};
  if (kSource == Source::kNorm && row == 0) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      prefetch(static_cast<const Element*>(params.weight) + places[i] * kWidth);
    }
  }
  wait_for_prerequisites();
  Part parts[kParts];
  load_row<kSource, kIsScaled>(params, row, places, parts);
  if constexpr (kSource == Source::kNorm) normalise(params, places, parts);
  float scale, inverse;
  if (params.fixed_scale != nullptr) {
    scale = *params.fixed_scale;
    inverse = 1.0f / scale;
  } else {
    float largest = kSmallest;
#pragma unroll
    for (int i = 0; i < kParts; ++i) largest = fmaxf(largest, largest_of(parts[i]));
    largest = over_block(largest, Largest());
    scale = largest / kLargest;
    inverse = kLargest / largest;
  }
  uint2* out = reinterpret_cast<uint2*>(params.out + row * params.num_columns);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (places.has(i)) out[places[i]] = as_fp8(parts[i], inverse);
  }
  if (threadIdx.x == 0) params.scales[row] = scale;
}

template <Source kSource, int kParts>
cudaError_t launch_parts(const QuantiseParams& params, cudaStream_t stream) {
  const int num_parts = params.num_columns / kWidth;
  const int threads = ((num_parts - 1) / kParts + 32) / 32 * 32;
  const auto blocks = static_cast<unsigned>(params.num_rows);
  const bool is_scaled = kSource == Source::kGated && params.column_scales != nullptr;
  const auto kernel = is_scaled ? quantise_rows<kSource, kSource == Source::kGated, kParts>
                                : quantise_rows<kSource, false, kParts>;
  return launch_kernel(kernel, blocks, threads, params, stream);
}

template <Source kSource>
cudaError_t launch_source(const QuantiseParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const bool is_aligned_row = params.num_columns % (2 * kWidth) == 0 && is_aligned(params.out) &&
                              has_aligned_rows<Element>(params.x) && is_aligned(params.weight);
  if (!is_aligned_row || params.num_rows > INT_MAX || params.num_columns > kMaxQuantisedColumns) {
    return cudaErrorInvalidValue;
  }
  // The number of rows never changes the order in which the squares of a row are summed.
  const int num_parts = params.num_columns / kWidth;
  if (kSource == Source::kRows && params.num_rows <= kFewRows) {
    if (num_parts <= kMaxThreads) return launch_parts<kSource, 1>(params, stream);
    if (num_parts <= 2 * kMaxThreads) return launch_parts<kSource, 2>(params, stream);
  }
  if (num_parts <= 128) return launch_parts<kSource, 1>(params, stream);
  // Gated rows, which need only the largest number, keep more threads busy.
  constexpr int kTwoParts = kSource == Source::kGated ? 2 * kMaxThreads : kMaxThreads;
  if (num_parts <= kTwoParts) return launch_parts<kSource, 2>(params, stream);
  if (num_parts <= 4 * kMaxThreads) return launch_parts<kSource, 4>(params, stream);
  return launch_parts<kSource, 8>(params, stream);
}

constexpr int kScaleThreads = 256;
constexpr int kScaledRows = 4;  // rows per block
// Up to this number of rows a block has one row, so that the whole card works.
constexpr int kFewScaledRows = 512;

template <int kRows>
__global__ void __launch_bounds__(kScaleThreads)
    scale_rows(const __grid_constant__ ScaleParams params) {
  launch_dependents();
  wait_for_prerequisites();
  const int column = (blockIdx.y * kScaleThreads + threadIdx.x) * kWidth;
  if (column >= params.num_columns) return;
  // All loads are issued before the first is needed. A block with fewer rows has its last row
  // again.
  auto row_of = [&](int i) {
    return min(static_cast<int64_t>(blockIdx.x) * kRows + i, params.num_rows - 1);
  };
  Part products[kRows], there[kRows];
  float row_scales[kRows], column_scales[kWidth], bias[kWidth]{};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = row_of(i);
    products[i] = load_vector<kWidth>(row_address<Element>(params.product, row, 0) + column);
    if (params.adds) {
      there[i] = load_vector<kWidth>(row_address<Element>(params.out, row, 0) + column);
    }
    row_scales[i] = params.row_scales[row];
  }
  load(params.column_scales + column, column_scales);
  if (params.bias != nullptr) load(static_cast<const Element*>(params.bias) + column, bias);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float values[kWidth], added[kWidth]{};
    to_floats(products[i], values);
    if (params.adds) to_floats(there[i], added);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[j] = values[j] * (row_scales[i] * column_scales[j]) + bias[j] + added[j];
    }
    store_vector(row_address<Element>(params.out, row_of(i), 0) + column,
                 from_floats<Element>(values));
  }
}

template <int kRows>
cudaError_t launch_scaled(const ScaleParams& params, cudaStream_t stream) {
  const int64_t blocks_of_rows = (params.num_rows + kRows - 1) / kRows;
  const dim3 blocks = row_grid(blocks_of_rows, params.num_columns / kWidth, kScaleThreads);
  if (blocks.x == 0) return cudaErrorInvalidConfiguration;
  return launch_kernel(scale_rows<kRows>, blocks, kScaleThreads, params, stream);
}

}  // namespace

cudaError_t launch_quantise(const QuantiseParams& params, cudaStream_t stream) {
  if (params.is_gated) return launch_source<Source::kGated>(params, stream);
  return params.weight == nullptr ? launch_source<Source::kRows>(params, stream)
                                  : launch_source<Source::kNorm>(params, stream);
}

cudaError_t launch_scale(const ScaleParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const bool is_aligned_row = params.num_columns % kWidth == 0 && is_aligned(params.bias) &&
                              has_aligned_rows<Element>(params.product) &&
                              has_aligned_rows<Element>(params.out);
  if (!is_aligned_row) return cudaErrorInvalidValue;
  return params.num_rows <= kFewScaledRows ? launch_scaled<1>(params, stream)
                                           : launch_scaled<kScaledRows>(params, stream);
}

}  // namespace fused_ops
