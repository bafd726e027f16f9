// SPDX-License-Identifier: Apache-2.0
//
// Sums over the ranks of one host, fused with the residual in one pass, and gathers of their data.
// Every rank reads the parts of all other ranks over the links between the cards. It adds them in
// the order of the ranks, in fp32 and rounded once, so all ranks have the same bits.

#include "ranks.h"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"
#include "vllm_add_llada/cuda_kernels/common/vectors.cuh"

namespace fused_ops {
namespace {

constexpr int kThreads = 512;
constexpr unsigned kPatience = 1024;  // polls of a flag between two reads of host memory

__device__ inline void tell(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ inline uint32_t heard(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Returns when everything that all ranks wrote before this call can be read.
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

// A thread loads kBatch vectors of every rank at a time.
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
      float sums[kWidth], values[kWidth];
      to_floats(parts[i][0], sums);
#pragma unroll
      for (int rank = 1; rank < kRanks; ++rank) {
        to_floats(parts[i][rank], values);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[j] += values[j];
      }
      if (residual != nullptr) {
        to_floats(rest[i], values);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sums[j] += values[j];
      }
      static_cast<Part*>(params.out)[index] = from_floats<T>(sums);
    }
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

}  // namespace

cudaError_t launch_sum_ranks(const SumRanksParams& params, cudaStream_t stream) {
  return dispatch(params.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    constexpr int kWidth = kVectorWidth<T>;
    if (params.count % kWidth != 0) return cudaErrorInvalidValue;
    return dispatch_value<2, 4, 8>(params.meeting.num_ranks, [&](auto ranks) {
      return launch_sum<T, kWidth, ranks>(params, stream);
    });
  });
}

cudaError_t launch_gather_ranks(const GatherRanksParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(params.meeting.num_blocks);
  return launch_kernel(gather_ranks, blocks, kThreads, params, stream);
}

}  // namespace fused_ops
