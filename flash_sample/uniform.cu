// SPDX-License-Identifier: Apache-2.0
//
// Uniform random numbers for rows and columns. One thread writes the four columns of a counter.

#include <climits>

#include "params.h"
#include "philox.cuh"

namespace flash_sample {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    write_uniform(const __grid_constant__ UniformParams p, int64_t groups_per_row) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.num_rows * groups_per_row) return;
  const int64_t row = index / groups_per_row;
  const int64_t group = p.first_column / 4 + index % groups_per_row;
  const Stream stream{static_cast<uint64_t>(p.rows.seed[row]), p.rows.purpose,
                      static_cast<uint32_t>(p.rows.step[row]),
                      static_cast<uint32_t>(p.rows.position[row])};
  const Words words = stream.words(static_cast<uint32_t>(group));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t column = 4 * group + i - p.first_column;
    if (column < 0 || column >= p.num_columns) continue;
    p.numbers[row * p.num_columns + column] = to_uniform(words.word[i]);
  }
}

}  // namespace

cudaError_t launch_uniform(const UniformParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.num_columns == 0) return cudaSuccess;
  const int64_t first_group = params.first_column / 4;
  const int64_t end_group = (params.first_column + params.num_columns + 3) / 4;
  const int64_t groups_per_row = end_group - first_group;
  const int64_t num_blocks = (params.num_rows * groups_per_row + kThreads - 1) / kThreads;
  if (num_blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  write_uniform<<<static_cast<unsigned>(num_blocks), kThreads, 0, stream>>>(params, groups_per_row);
  return cudaGetLastError();
}

}  // namespace flash_sample
