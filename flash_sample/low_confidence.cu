// SPDX-License-Identifier: Apache-2.0
//
// Best column of each row of logits and its softmax probability, reading the logits once.
//
// reduce_segments: a warp keeps kSegmentColumns logits in registers, so the maximum is known before
// the first exp() and nothing is rescaled: (maximum, its lowest column, sum of exp(logit -
// maximum)) of the segment go to the workspace. merge_segments: a warp folds the segments of one
// row, in a fixed order.
//
// Numerics: fp32 throughout. -inf adds exactly 0. A row without a finite logit has column 0 and
// confidence 0. NaN (and +inf, of which inf - inf makes NaN) reaches the sum, so the confidence of
// its row is NaN; its column is in range and otherwise unspecified.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>

#include "low_confidence.h"

namespace flash_sample {
namespace {

constexpr int kWarpSize = 32;
constexpr int kWarpsPerBlock = 4;
constexpr unsigned kFullMask = 0xffffffffu;
constexpr int kValuesPerLane = kSegmentColumns / kWarpSize;

__device__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ float to_float(float value) { return value; }
__device__ float to_float(__half value) { return __half2float(value); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// A lane owns runs of 16 bytes, 32 runs apart: the loads of a warp are contiguous.
template <typename T>
struct Layout {
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kLoads = kValuesPerLane / kWidth;

  __device__ static int offset(int lane, int index) {
    return (index / kWidth * kWarpSize + lane) * kWidth + index % kWidth;
  }
};

template <typename T>
__device__ void load_vector(const T* source, float* values) {
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(source));
  const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < Layout<T>::kWidth; ++i) values[i] = to_float(elements[i]);
}

// Loads this lane's share of a segment; columns beyond the row read as -inf. The share of a lane is
// the same on the aligned and the scalar path, so alignment does not change the result.
template <typename T>
__device__ void load_segment(const T* segment, int num_columns, int lane, float* values) {
  using L = Layout<T>;
  const bool is_aligned = reinterpret_cast<uintptr_t>(segment) % 16 == 0;
  if (is_aligned && num_columns >= kSegmentColumns) {
#pragma unroll
    for (int load = 0; load < L::kLoads; ++load) {
      const int first = load * L::kWidth;
      load_vector(segment + L::offset(lane, first), values + first);
    }
    return;
  }
#pragma unroll
  for (int index = 0; index < kValuesPerLane; ++index) {
    const int column = L::offset(lane, index);
    values[index] = column < num_columns ? to_float(segment[column]) : negative_infinity();
  }
}

// Bit `index` is set where this lane's value `index` belongs to an excluded column.
template <typename T>
__device__ uint64_t excluded_values(const LowConfidenceParams& params, int first_column, int lane) {
  using L = Layout<T>;
  uint64_t mask = 0;
  for (int i = 0; i < params.num_excluded; ++i) {
    const int offset = params.excluded[i] - first_column;
    if (offset < 0 || offset >= kSegmentColumns) continue;
    const int run = offset / L::kWidth;
    if (run % kWarpSize == lane) {
      mask |= uint64_t{1} << (run / kWarpSize * L::kWidth + offset % L::kWidth);
    }
  }
  return mask;
}

__device__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

__device__ int warp_min(int value) { return __reduce_min_sync(kFullMask, value); }

__device__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  return value;
}

// What to subtract before exp(): -inf - -inf would be NaN where the sum must be 0.
__device__ float exp_shift(float maximum) {
  return maximum == negative_infinity() ? 0.0f : maximum;
}

template <typename T>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize)
    reduce_segments(const __grid_constant__ LowConfidenceParams params, int num_segments) {
  const int lane = threadIdx.x % kWarpSize;
  // The blocks of a row follow one another, so that neighbours in time read neighbours in memory.
  const unsigned blocks_per_row = (num_segments - 1) / kWarpsPerBlock + 1;
  const int64_t row = blockIdx.x / blocks_per_row;
  const int segment_index =
      (blockIdx.x % blocks_per_row) * kWarpsPerBlock + threadIdx.x / kWarpSize;
  if (segment_index >= num_segments) return;
  const int64_t item = row * num_segments + segment_index;
  const int first_column = segment_index * kSegmentColumns;
  const T* segment = static_cast<const T*>(params.logits) + row * params.row_stride + first_column;

  float values[kValuesPerLane];
  load_segment(segment, params.num_columns - first_column, lane, values);

  float lane_max = values[0];
#pragma unroll
  for (int index = 1; index < kValuesPerLane; ++index) lane_max = fmaxf(lane_max, values[index]);
  const float maximum = warp_max(lane_max);

  int column = INT_MAX;
  if (lane_max == maximum) {
#pragma unroll
    for (int index = kValuesPerLane - 1; index >= 0; --index) {
      if (values[index] == maximum) column = first_column + Layout<T>::offset(lane, index);
    }
  }
  column = warp_min(column);

  const float shift = exp_shift(maximum);
  const uint64_t excluded = excluded_values<T>(params, first_column, lane);
  if (__any_sync(kFullMask, excluded != 0)) {
#pragma unroll
    for (int index = 0; index < kValuesPerLane; ++index) {
      if (excluded >> index & 1) values[index] = negative_infinity();
    }
  }
  float sums[4] = {};
#pragma unroll
  for (int index = 0; index < kValuesPerLane; ++index) {
    sums[index % 4] += __expf(values[index] - shift);
  }
  const float sum = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));

  if (lane == 0) {
    params.segment_max[item] = maximum;
    params.segment_sum[item] = sum;
    params.segment_column[item] = column;
  }
}

__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize)
    merge_segments(const __grid_constant__ LowConfidenceParams params, int num_segments) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarpSize;
  if (row >= params.num_rows) return;
  const float* segment_max = params.segment_max + row * num_segments;
  const float* segment_sum = params.segment_sum + row * num_segments;
  const int* segment_column = params.segment_column + row * num_segments;

  float lane_max = negative_infinity();
  for (int i = lane; i < num_segments; i += kWarpSize) lane_max = fmaxf(lane_max, segment_max[i]);
  const float maximum = warp_max(lane_max);
  const float shift = exp_shift(maximum);

  int column = INT_MAX;
  float sum = 0.0f;
  for (int i = lane; i < num_segments; i += kWarpSize) {
    if (segment_max[i] == maximum) column = min(column, segment_column[i]);
    sum += segment_sum[i] * expf(segment_max[i] - shift);
  }
  column = warp_min(column);
  sum = warp_sum(sum);
  if (lane != 0) return;

  // A row of NaN: no column equals the maximum, or only those beyond the end of its last segment.
  if (column >= params.num_columns) column = 0;
  params.column[row] = column;
  if (params.sum_exp != nullptr) {
    params.maximum[row] = maximum;
    params.sum_exp[row] = sum;
    return;
  }
  bool is_zero = maximum == negative_infinity();
  for (int i = 0; i < params.num_excluded; ++i) is_zero |= params.excluded[i] == column;
  params.confidence[row] = is_zero && sum == sum ? 0.0f : 1.0f / sum;
}

template <typename T>
cudaError_t launch(const LowConfidenceParams& params, cudaStream_t stream) {
  const int num_segments = (params.num_columns - 1) / kSegmentColumns + 1;
  const auto num_blocks = [](int64_t num_warps) { return (num_warps - 1) / kWarpsPerBlock + 1; };
  const int64_t segment_blocks = params.num_rows * num_blocks(num_segments);
  if (segment_blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  const int num_threads = kWarpsPerBlock * kWarpSize;
  reduce_segments<T>
      <<<static_cast<unsigned>(segment_blocks), num_threads, 0, stream>>>(params, num_segments);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  merge_segments<<<static_cast<unsigned>(num_blocks(params.num_rows)), num_threads, 0, stream>>>(
      params, num_segments);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_low_confidence(const LowConfidenceParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  switch (params.dtype) {
    case DataType::kFloat32:
      return launch<float>(params, stream);
    case DataType::kFloat16:
      return launch<__half>(params, stream);
    case DataType::kBFloat16:
      return launch<__nv_bfloat16>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flash_sample
