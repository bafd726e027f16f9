// SPDX-License-Identifier: Apache-2.0
//
// What fp8 products take: rows and their scales, each in one pass with what comes before (a norm,
// or silu(gate) * up), and the pass that gives a product its scales. A block has a row in its
// registers between the largest number and the result. What is quantised is rounded to bf16 before,
// as where it is stored.

#include <cuda_fp8.h>

#include <algorithm>

#include "epilogue.cuh"
#include "launch.cuh"
#include "quantise.h"
#include "rows.cuh"

namespace fused_ops {
namespace {

using Element = __nv_bfloat16;
constexpr int kWidth = kVectorWidth<Element>;
using Part = Vector<Element, kWidth>;
constexpr int kMaxThreads = 1024;
constexpr int kManyRows = 512;       // from which on blocks of more than one keep the card busy
constexpr float kLargest = 448.0f;   // of e4m3
constexpr float kSmallest = 1e-30f;  // largest number of a row: its reciprocal must be finite

enum class Source { kRows, kNorm, kGated };

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Largest {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over all threads of a block of whole warps. May be called twice in a row.
template <typename Combine>
__device__ float over_block(float value, Combine combine) {
  __shared__ float of_warps[32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, distance));
  }
  const int lane = threadIdx.x % 32;
  __syncthreads();  // what was there before is read
  if (lane == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = lane < blockDim.x / 32 ? of_warps[lane] : 0.0f;  // sums, or what is not negative
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, distance));
  }
  return value;
}

// What a block multiplies neighbouring gates and ups of its rows by.
struct GateScales {
  float gates[kWidth], ups[kWidth];
};

__device__ GateScales load_scales(const QuantiseParams& params, int column) {
  GateScales scales;
  load(params.column_scales + column, scales.gates);
  load(params.column_scales + params.num_columns + column, scales.ups);
  return scales;
}

// Eight of silu(gate) * up, rounded one by one.
__device__ Part gated_part(const QuantiseParams& params, int64_t row, int column,
                           const GateScales& scales) {
  const Element* x = row_address<Element>(params.x, row, 0);
  float gates[kWidth], ups[kWidth];
  load(x + column, gates);
  load(x + params.num_columns + column, ups);
  if (params.column_scales != nullptr) {
    const float row_scale = params.row_scales[row];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      gates[i] *= row_scale * scales.gates[i];
      ups[i] *= row_scale * scales.ups[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; i += 2) {
    const float2 pair =
        silu_mul(make_float2(gates[i], gates[i + 1]), make_float2(ups[i], ups[i + 1]));
    gates[i] = pair.x;
    gates[i + 1] = pair.y;
  }
  return from_floats<Element>(gates);
}

// The rows from `first` on, or the norms of them.
template <Source kSource, int kRows, int kParts>
__device__ void load_rows(const QuantiseParams& params, int64_t first,
                          Part (&parts)[kRows][kParts]) {
  const int num_parts = params.num_columns / kWidth;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int index = threadIdx.x + i * blockDim.x;
    if (index >= num_parts) continue;
    GateScales scales{};
    if (kSource == Source::kGated && params.column_scales != nullptr) {
      scales = load_scales(params, index * kWidth);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (first + row >= params.num_rows) continue;
      if constexpr (kSource == Source::kGated) {
        parts[row][i] = gated_part(params, first + row, index * kWidth, scales);
      } else {
        const Element* x = row_address<Element>(params.x, first + row, 0);
        parts[row][i] = load_vector<kWidth>(x + index * kWidth);
      }
    }
  }
  if constexpr (kSource == Source::kNorm) {
    static_assert(kRows == 1);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (threadIdx.x + i * blockDim.x < num_parts) sum += sum_of_squares(parts[0][i]);
    }
    const float scale = rsqrtf(over_block(sum, Sum()) / params.num_columns + params.eps);
    const Part* weight = static_cast<const Part*>(params.weight);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int index = threadIdx.x + i * blockDim.x;
      if (index < num_parts) parts[0][i] = product_of(scaled(parts[0][i], scale), weight[index]);
    }
  }
}

__device__ float largest_of(const Part& part) {
  float values[kWidth];
  to_floats(part, values);
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, fabsf(values[i]));
  return largest;
}

// Eight numbers as bytes.
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

template <Source kSource, int kRows, int kParts>
__global__ void __launch_bounds__(kMaxThreads / kRows)
    quantise_rows(const __grid_constant__ QuantiseParams params) {
  launch_dependents();
  wait_for_prerequisites();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows;
  const int num_parts = params.num_columns / kWidth;
  Part parts[kRows][kParts];
  load_rows<kSource>(params, first, parts);
#pragma unroll
  for (int next = 0; next < kRows; ++next) {
    const int64_t row = first + next;
    if (row >= params.num_rows) return;
    float scale, inverse;
    if (params.fixed_scale != nullptr) {
      scale = *params.fixed_scale;
      inverse = 1.0f / scale;
    } else {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const bool is_there = threadIdx.x + i * blockDim.x < num_parts;
        if (is_there) largest = fmaxf(largest, largest_of(parts[next][i]));
      }
      largest = fmaxf(over_block(largest, Largest()), kSmallest);
      scale = largest / kLargest;
      inverse = kLargest / largest;
    }
    uint2* out = reinterpret_cast<uint2*>(params.out + row * params.num_columns);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int index = threadIdx.x + i * blockDim.x;
      if (index < num_parts) out[index] = as_fp8(parts[next][i], inverse);
    }
    if (threadIdx.x == 0) params.scales[row] = scale;
  }
}

template <Source kSource, int kRows, int kParts>
cudaError_t launch_parts(const QuantiseParams& params, cudaStream_t stream) {
  const int num_parts = params.num_columns / kWidth;
  const int threads = ((num_parts - 1) / kParts + 32) / 32 * 32;
  const auto blocks = static_cast<unsigned>((params.num_rows - 1) / kRows + 1);
  return launch_kernel(quantise_rows<kSource, kRows, kParts>, blocks, threads, params, stream);
}

template <Source kSource>
cudaError_t launch_source(const QuantiseParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const bool is_aligned_row = params.num_columns % (2 * kWidth) == 0 && is_aligned(params.out) &&
                              has_aligned_rows<Element>(params.x) && is_aligned(params.weight);
  if (!is_aligned_row || params.num_rows > INT_MAX || params.num_columns > kMaxQuantisedColumns) {
    return cudaErrorInvalidValue;
  }
  const int num_parts = params.num_columns / kWidth;
  if (num_parts <= 128) return launch_parts<kSource, 1, 1>(params, stream);
  if (num_parts > 4 * kMaxThreads) return launch_parts<kSource, 1, 8>(params, stream);
  // Whatever the number of rows, the squares of one are summed in the same order.
  const bool fits = num_parts <= 2 * kMaxThreads;
  const bool is_many = params.num_rows >= kManyRows;
  if (fits && (kSource == Source::kNorm || !is_many)) {
    return launch_parts<kSource, 1, 2>(params, stream);
  }
  if constexpr (kSource == Source::kGated) {  // several rows share the scales of their columns
    if (fits && is_many) return launch_parts<kSource, 2, 4>(params, stream);
  }
  return launch_parts<kSource, 1, 4>(params, stream);
}

constexpr int kScaleThreads = 256;

__global__ void __launch_bounds__(kScaleThreads)
    scale_rows(const __grid_constant__ ScaleParams params) {
  launch_dependents();
  wait_for_prerequisites();
  const int64_t row = blockIdx.x;
  const int column = (blockIdx.y * kScaleThreads + threadIdx.x) * kWidth;
  if (column >= params.num_columns) return;
  Element* out = row_address<Element>(params.out, row, 0) + column;
  float values[kWidth], added[kWidth];
  load(row_address<Element>(params.product, row, 0) + column, values);
  const float row_scale = params.row_scales[row];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) values[i] *= row_scale * params.column_scales[column + i];
  if (params.bias != nullptr) {
    load(static_cast<const Element*>(params.bias) + column, added);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] += added[i];
  }
  if (params.adds) {
    load(out, added);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] += added[i];
  }
  store_vector(out, from_floats<Element>(values));
}

}  // namespace

cudaError_t launch_quantise(const QuantiseParams& params, cudaStream_t stream) {
  return launch_source<Source::kRows>(params, stream);
}

cudaError_t launch_norm_quantise(const QuantiseParams& params, cudaStream_t stream) {
  return launch_source<Source::kNorm>(params, stream);
}

cudaError_t launch_gated_quantise(const QuantiseParams& params, cudaStream_t stream) {
  return launch_source<Source::kGated>(params, stream);
}

cudaError_t launch_scale(const ScaleParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const bool is_aligned_row = params.num_columns % kWidth == 0 && is_aligned(params.bias) &&
                              has_aligned_rows<Element>(params.product) &&
                              has_aligned_rows<Element>(params.out);
  if (!is_aligned_row) return cudaErrorInvalidValue;
  const dim3 blocks = row_grid(params.num_rows, params.num_columns / kWidth, kScaleThreads);
  if (blocks.x == 0) return cudaErrorInvalidConfiguration;
  return launch_kernel(scale_rows, blocks, kScaleThreads, params, stream);
}

}  // namespace fused_ops
