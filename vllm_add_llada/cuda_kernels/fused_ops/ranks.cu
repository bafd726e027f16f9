// SPDX-License-Identifier: Apache-2.0
//
// Sums over the ranks of one host, with the residual in one pass, and what they know side by side.
// Every rank reads the parts of all others over the links between the cards and adds them in the
// order of the ranks, in fp32 and rounded once, so all have the same bits.

#include <type_traits>

#include "launch.cuh"
#include "ranks.h"
#include "row_sum.cuh"
#include "rows.cuh"

namespace fused_ops {
namespace {

constexpr int kThreads = 512;
constexpr unsigned kPatience = 1024;  // looks at a flag between two at the host's memory

__device__ inline void tell(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ inline uint32_t heard(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Returns when what all ranks wrote before this call can be read.
__device__ void meet(const Meeting& meeting) {
  const int other = threadIdx.x;
  const uint32_t call = meeting.calls[blockIdx.x] + 1;
  if (other < meeting.num_ranks && other != meeting.rank) {
    tell(meeting.flags[other] + blockIdx.x * kMaxRanks + meeting.rank, call);
    const uint32_t* flag = meeting.flags[meeting.rank] + blockIdx.x * kMaxRanks + other;
    for (unsigned looks = 1; static_cast<int32_t>(heard(flag) - call) < 0; ++looks) {
      if (looks % kPatience == 0 && *static_cast<const volatile int*>(meeting.is_over)) break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) meeting.calls[blockIdx.x] = call;
}

template <typename T, int kWidth>
__device__ Vector<T, kWidth> part_of(const Meeting& meeting, int rank, int64_t index) {
  return static_cast<const Vector<T, kWidth>*>(meeting.parts[rank])[index];
}

// The parts of all ranks in their order, then the residual, if there is one.
template <typename T, int kWidth, int kRanks>
__device__ Vector<T, kWidth> added(const Vector<T, kWidth> (&parts)[kRanks],
                                   const Vector<T, kWidth>* residual) {
  float sums[kWidth], values[kWidth];
  to_floats(parts[0], sums);
#pragma unroll
  for (int rank = 1; rank < kRanks; ++rank) {
    to_floats(parts[rank], values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sums[j] += values[j];
  }
  if (residual != nullptr) {
    to_floats(*residual, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sums[j] += values[j];
  }
  return from_floats<T>(sums);
}

// A thread has kBatch vectors of every rank on their way at a time.
template <typename T, int kWidth, int kRanks, int kBatch>
__global__ void __launch_bounds__(kThreads)
    sum_ranks(const __grid_constant__ SumRanksParams params) {
  using Part = Vector<T, kWidth>;
  launch_dependents();
  wait_for_prerequisites();
  meet(params.meeting);
  const int64_t count = params.count / kWidth;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const Part* residual = static_cast<const Part*>(params.residual);
  for (int64_t start = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; start < count;
       start += kBatch * step) {
    Part parts[kBatch][kRanks], rest[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t index = start + i * step;
      if (index >= count) continue;
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) {
        parts[i][rank] = part_of<T, kWidth>(params.meeting, rank, index);
      }
      if (residual != nullptr) rest[i] = residual[index];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t index = start + i * step;
      if (index >= count) continue;
      static_cast<Part*>(params.out)[index] =
          added<T>(parts[i], residual == nullptr ? nullptr : &rest[i]);
    }
  }
}

// A block has a row at a time, spread as in `norm_rows`, so the bits are those of both apart.
template <typename T, int kWidth, int kRanks>
__global__ void __launch_bounds__(kThreads)
    sum_norm_ranks(const __grid_constant__ SumNormRanksParams params) {
  using Part = Vector<T, kWidth>;
  constexpr int kVectors = 2;
  launch_dependents();
  const int count = params.num_columns / kWidth;
  const Part* weight = static_cast<const Part*>(params.weight);
  if (blockIdx.x == 0) {
    for (int index = threadIdx.x; index < count; index += blockDim.x) prefetch(weight + index);
  }
  wait_for_prerequisites();
  meet(params.meeting);
  Part gains[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int index = threadIdx.x + i * blockDim.x;
    if (index < count) gains[i] = weight[index];
  }
  for (int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    Part* x = static_cast<Part*>(params.out) + row * count;
    Part parts[kVectors][kRanks], rest[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int index = threadIdx.x + i * blockDim.x;
      if (index >= count) continue;
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) {
        parts[i][rank] = part_of<T, kWidth>(params.meeting, rank, row * count + index);
      }
      rest[i] = x[index];
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int index = threadIdx.x + i * blockDim.x;
      if (index >= count) continue;
      rest[i] = added<T>(parts[i], &rest[i]);
      x[index] = rest[i];
      squares += sum_of_squares(rest[i]);
    }
    const float scale = rsqrtf(row_sum(squares) / params.num_columns + params.eps);
    Part* normed = static_cast<Part*>(params.normed) + row * count;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int index = threadIdx.x + i * blockDim.x;
      if (index < count) normed[index] = product_of(scaled(rest[i], scale), gains[i]);
    }
    __syncthreads();  // the sums of this row are read
  }
}

__global__ void __launch_bounds__(kThreads)
    gather_ranks(const __grid_constant__ GatherRanksParams params) {
  launch_dependents();
  wait_for_prerequisites();
  meet(params.meeting);
  const int64_t count = params.count * params.meeting.num_ranks;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < count;
       index += static_cast<int64_t>(gridDim.x) * kThreads) {
    const auto* part = static_cast<const uint4*>(params.meeting.parts[index / params.count]);
    static_cast<uint4*>(params.out)[index] = part[index % params.count];
  }
}

template <typename T, int kWidth, int kRanks>
cudaError_t launch_sum(const SumRanksParams& params, cudaStream_t stream) {
  constexpr int kBatch = kRanks <= 2 ? 4 : 2;
  const auto blocks = static_cast<unsigned>(params.meeting.num_blocks);
  const bool is_small = params.count / kWidth <= static_cast<int64_t>(blocks) * kThreads;
  auto* kernel = is_small ? sum_ranks<T, kWidth, kRanks, 1> : sum_ranks<T, kWidth, kRanks, kBatch>;
  return launch_kernel(kernel, blocks, kThreads, params, stream);
}

template <typename T, int kWidth, int kRanks>
cudaError_t launch_sum_norm(const SumNormRanksParams& params, cudaStream_t stream) {
  const int count = params.num_columns / kWidth;
  if (params.num_columns % kWidth != 0 || count <= 32 || count > 2 * kThreads) {
    return cudaErrorInvalidValue;
  }
  const auto blocks = static_cast<unsigned>(params.meeting.num_blocks);
  const int threads = threads_per_row((count - 1) / 2 + 1);
  return launch_kernel(sum_norm_ranks<T, kWidth, kRanks>, blocks, threads, params, stream);
}

// Calls `launch` with the number of ranks as a constant.
template <typename Launch>
cudaError_t with_ranks(int num_ranks, Launch launch) {
  switch (num_ranks) {
    case 2:
      return launch(std::integral_constant<int, 2>{});
    case 4:
      return launch(std::integral_constant<int, 4>{});
    case 8:
      return launch(std::integral_constant<int, 8>{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_sum_ranks(const SumRanksParams& params, cudaStream_t stream) {
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int kWidth = kVectorWidth<T>;
    if (params.count % kWidth != 0) return cudaErrorInvalidValue;
    return with_ranks(params.meeting.num_ranks, [&](auto ranks) {
      return launch_sum<T, kWidth, decltype(ranks)::value>(params, stream);
    });
  });
}

cudaError_t launch_sum_norm_ranks(const SumNormRanksParams& params, cudaStream_t stream) {
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    return with_ranks(params.meeting.num_ranks, [&](auto ranks) {
      return launch_sum_norm<T, kVectorWidth<T>, decltype(ranks)::value>(params, stream);
    });
  });
}

cudaError_t launch_gather_ranks(const GatherRanksParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.meeting.num_blocks);
  return launch_kernel(gather_ranks, blocks, kThreads, params, stream);
}

}  // namespace fused_ops
