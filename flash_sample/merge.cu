// SPDX-License-Identifier: Apache-2.0
//
// Joins the records of disjoint slices of the columns; one warp joins the records of one row.

#include "params.h"
#include "row.cuh"

namespace flash_sample {
namespace {

constexpr int kWarpsPerBlock = 4;

__device__ double warp_max(double value) { return over_warp(value, Largest()); }

__device__ double warp_min(double value) { return -warp_max(-value); }

__global__ void __launch_bounds__(kWarpsPerBlock* kWarpSize)
    merge_records(const __grid_constant__ MergeParams p) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t row_index = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarpSize;
  if (row_index >= p.num_rows) return;
  const Row row(p.rows, row_index);
  const auto field = [&](int slice, RecordField name) {
    return p.records[(slice * p.num_rows + row_index) * kRecordFields + name];
  };
  const double infinity = -static_cast<double>(negative_infinity());

  double maximum = -infinity, noised = -infinity;
  for (int i = lane; i < p.num_slices; i += kWarpSize) {
    maximum = fmax(maximum, field(i, kMaximum));
    noised = fmax(noised, field(i, kNoised));
  }
  maximum = warp_max(maximum);
  noised = warp_max(noised);

  double column = infinity, token = infinity;
  for (int i = lane; i < p.num_slices; i += kWarpSize) {
    if (field(i, kMaximum) == maximum) column = fmin(column, field(i, kColumn));
    if (field(i, kNoised) == noised) token = fmin(token, field(i, kToken));
  }
  column = warp_min(column);
  token = warp_min(token);

  const float shift = exp_shift(static_cast<float>(maximum));
  float sum = 0.0f, weighted = 0.0f;
  double second = -infinity, token_logit = -infinity;
  for (int i = lane; i < p.num_slices; i += kWarpSize) {
    const double slice_max = field(i, kMaximum);
    const float distance = (static_cast<float>(slice_max) - shift) * row.scale;
    const float weight = exp2f(distance);
    const float slice_sum = static_cast<float>(field(i, kSumExp));
    sum += slice_sum * weight;
    weighted += static_cast<float>(field(i, kWeighted)) * kLog2E * weight;
    if (slice_max > -infinity) weighted += slice_sum * weigh(weight, distance);
    const bool is_best = slice_max == maximum && field(i, kColumn) == column;
    second = fmax(second, is_best ? field(i, kSecond) : slice_max);
    if (field(i, kNoised) == noised && field(i, kToken) == token) {
      token_logit = field(i, kTokenLogit);
    }
  }
  const Summary whole{static_cast<float>(maximum),
                      column < infinity ? static_cast<int64_t>(column) : 0,
                      warp_sum(sum),
                      warp_sum(weighted),
                      static_cast<float>(warp_max(second)),
                      noised,
                      token < infinity ? static_cast<int64_t>(token) : 0,
                      static_cast<float>(warp_max(token_logit))};
  if (lane != 0) return;
  if (p.record != nullptr) {
    write_record(p.record + row_index * kRecordFields, whole);
    return;
  }
  p.token[row_index] = whole.token;
  p.value[row_index] = score_of(whole, row, p.rows, p.score);
  if (p.greedy != nullptr) p.greedy[row_index] = whole.column;
}

}  // namespace

cudaError_t launch_merge(const MergeParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const int64_t num_blocks = (params.num_rows + kWarpsPerBlock - 1) / kWarpsPerBlock;
  if (num_blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  merge_records<<<static_cast<unsigned>(num_blocks), kWarpsPerBlock * kWarpSize, 0, stream>>>(
      params);
  return cudaGetLastError();
}

}  // namespace flash_sample
