// SPDX-License-Identifier: Apache-2.0
//
// Choice and commit of a step's candidates, one block for each request: which candidates are
// chosen, the canvas with their tokens, and how much of it is still masked.
//
// Scores are compared as unsigned integers in their order (`certainty`). The most certain of few
// candidates are found by counting for each how many come before it; of many, by the digits of
// the last score that is taken (radix selection), from the highest digit down.

#include <cfloat>

#include "launch.cuh"
#include "rows.cuh"

namespace fused_ops {
namespace {

constexpr int kFew = 256;  // candidates whose order is counted out, a thread for each
constexpr int kThreads = kFew;
constexpr int kThreadsOfMany = 1024;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
constexpr unsigned kFullMask = 0xffffffffu;

// What a block shares. Its phases use the members one after the other.
struct Shared {
  unsigned long long certainty[kFew];
  int histogram[kDigits];
  unsigned long long cutoff;  // certainty of the last candidate that is taken
  int num_wanted;             // of the candidates that have the cutoff's digits so far
  unsigned long long best;
  int best_index;
  int warp_counts[32];
  int num_masked;
  int first_masked;
};

struct Segment {
  int64_t first;
  int count;
};

// Larger for more certain candidates. As in most_certain_first of the decoding rules: infinite
// scores count as the largest finite ones, and NaN below all; -0 equals 0.
__device__ unsigned long long certainty(double score) {
  if (isnan(score)) return 0;
  score = fmin(fmax(score, -DBL_MAX), DBL_MAX) + 0.0;
  const long long bits = __double_as_longlong(score);
  return bits < 0 ? ~static_cast<unsigned long long>(bits)
                  : static_cast<unsigned long long>(bits) | (1ull << 63);
}

__device__ void take(const CommitParams& params, int64_t candidate, bool is_chosen) {
  params.chosen[candidate] = is_chosen;
  if (is_chosen) params.canvas[at(params.rows, candidate)] = params.tokens[candidate];
}

// Calls function(index, score, whether it is a candidate) for all candidates, in their order over
// the calls. All threads of the block make equally many calls.
template <typename Function>
__device__ void for_each_score(const CommitParams& params, Segment segment, Function function) {
  constexpr int kLoads = 4;  // in flight
  for (int start = 0; start < segment.count; start += kLoads * blockDim.x) {
    double scores[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = start + i * blockDim.x + threadIdx.x;
      scores[i] = index < segment.count ? params.scores[segment.first + index] : 0.0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = start + i * blockDim.x + threadIdx.x;
      if (index - static_cast<int>(threadIdx.x) >= segment.count) break;
      function(index, scores[i], index < segment.count);
    }
  }
}

// The `quota` most certain of up to kFew candidates; ties by ascending index.
__device__ void take_of_few(const CommitParams& params, Segment segment, int quota,
                            Shared& shared) {
  const int index = threadIdx.x;
  const bool is_candidate = index < segment.count;
  unsigned long long own = 0;
  if (is_candidate) {
    shared.certainty[index] = own = certainty(params.scores[segment.first + index]);
  }
  __syncthreads();
  if (!is_candidate) return;
  int num_before = 0;
#pragma unroll 8
  for (int other = 0; other < segment.count; ++other) {
    const unsigned long long value = shared.certainty[other];
    num_before += value > own || (value == own && other < index);
  }
  take(params, segment.first + index, num_before < quota);
}

// Sets shared.cutoff to the certainty of the quota-th candidate in their order, and
// shared.num_wanted to how many candidates of exactly that certainty are taken.
__device__ void find_cutoff(const CommitParams& params, Segment segment, int quota,
                            Shared& shared) {
  const int lane = threadIdx.x % 32;
  unsigned long long known_bits = 0;
  if (threadIdx.x == 0) {
    shared.cutoff = 0;
    shared.num_wanted = quota;
  }
  for (int shift = 64 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int digit = threadIdx.x; digit < kDigits; digit += blockDim.x) {
      shared.histogram[digit] = 0;
    }
    __syncthreads();
    const unsigned long long cutoff = shared.cutoff;
    for_each_score(params, segment, [&](int, double score, bool is_candidate) {
      const unsigned long long value = certainty(score);
      const bool counts = is_candidate && (value & known_bits) == cutoff;
      const int digit = counts ? static_cast<int>(value >> shift & (kDigits - 1)) : kDigits;
      // Many scores share their highest digits: one addition for all equal ones of a warp.
      const unsigned equal = __match_any_sync(kFullMask, digit);
      if (counts && (equal & ((1u << lane) - 1)) == 0) {
        atomicAdd(&shared.histogram[digit], __popc(equal));
      }
    });
    __syncthreads();
    if (threadIdx.x < 32) {
      // A lane sums the digits of its share; lane 0 has the highest ones.
      constexpr int kShare = kDigits / 32;
      const int highest = kDigits - 1 - static_cast<int>(threadIdx.x) * kShare;
      int sum = 0;
      for (int i = 0; i < kShare; ++i) sum += shared.histogram[highest - i];
      int sum_up_to = sum;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(kFullMask, sum_up_to, distance);
        if (threadIdx.x >= distance) sum_up_to += before;
      }
      const int num_wanted = shared.num_wanted;
      __syncwarp();
      int above = sum_up_to - sum;
      if (above < num_wanted && num_wanted <= sum_up_to) {
        int digit = highest;
        while (above + shared.histogram[digit] < num_wanted) above += shared.histogram[digit--];
        shared.cutoff = cutoff | static_cast<unsigned long long>(digit) << shift;
        shared.num_wanted = num_wanted - above;
      }
    }
    known_bits |= static_cast<unsigned long long>(kDigits - 1) << shift;
    __syncthreads();
  }
}

// The `quota` most certain of any number of candidates, 0 < quota < their number; ties by
// ascending index.
__device__ void take_of_many(const CommitParams& params, Segment segment, int quota,
                             Shared& shared) {
  find_cutoff(params, segment, quota, shared);
  const unsigned long long cutoff = shared.cutoff;
  int num_left = shared.num_wanted;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  for_each_score(params, segment, [&](int index, double score, bool is_candidate) {
    const unsigned long long value = certainty(score);
    const bool is_tie = is_candidate && value == cutoff;
    const unsigned ties = __ballot_sync(kFullMask, is_tie);
    __syncthreads();  // the counts of the walk before have been read
    if (lane == 0) shared.warp_counts[warp] = __popc(ties);
    __syncthreads();
    int num_before = __popc(ties & ((1u << lane) - 1));
    int num_ties = 0;
    for (int other = 0; other < blockDim.x / 32; ++other) {
      const int count = shared.warp_counts[other];
      if (other < warp) num_before += count;
      num_ties += count;
    }
    if (is_candidate) {
      take(params, segment.first + index, value > cutoff || (is_tie && num_before < num_left));
    }
    num_left -= min(num_left, num_ties);
  });
}

__device__ void take_all_or_none(const CommitParams& params, Segment segment, bool is_chosen) {
  for (int index = threadIdx.x; index < segment.count; index += blockDim.x) {
    take(params, segment.first + index, is_chosen);
  }
}

// Those that reach the threshold, and in any case the most certain (the first of equal ones).
__device__ void take_by_threshold(const CommitParams& params, Segment segment, double threshold,
                                  bool is_strict, Shared& shared) {
  if (threadIdx.x == 0) {
    shared.best = 0;
    shared.best_index = INT_MAX;
  }
  __syncthreads();
  unsigned long long own_best = 0;
  int own_index = INT_MAX;
  for_each_score(params, segment, [&](int index, double score, bool is_candidate) {
    const unsigned long long value = certainty(score);
    if (is_candidate && (own_index == INT_MAX || value > own_best)) {
      own_best = value;
      own_index = index;
    }
  });
  if (own_index != INT_MAX) atomicMax(&shared.best, own_best);
  __syncthreads();
  if (own_index != INT_MAX && own_best == shared.best) atomicMin(&shared.best_index, own_index);
  __syncthreads();
  for_each_score(params, segment, [&](int index, double score, bool is_candidate) {
    const bool is_sure = is_strict ? score > threshold : score >= threshold;
    if (!is_candidate) return;
    take(params, segment.first + index, is_sure || index == shared.best_index);
  });
}

// Masked positions of the request's canvas, and those before the first of them.
__device__ void report(const CommitParams& params, int request, Shared& shared) {
  const int start = params.ranges[2 * request];
  const int length = max(params.ranges[2 * request + 1] - start, 0);
  if (threadIdx.x == 0) {
    shared.num_masked = 0;
    shared.first_masked = length;
  }
  __syncthreads();  // with it, the block's writes to the canvas are visible to the block
  int num_masked = 0;
  int first_masked = length;
#pragma unroll 4
  for (int position = threadIdx.x; position < length; position += blockDim.x) {
    if (params.canvas[start + position] != params.mask_id) continue;
    ++num_masked;
    first_masked = min(first_masked, position);
  }
  num_masked = __reduce_add_sync(kFullMask, num_masked);
  first_masked = __reduce_min_sync(kFullMask, first_masked);
  if (threadIdx.x % 32 == 0 && num_masked > 0) {
    atomicAdd(&shared.num_masked, num_masked);
    atomicMin(&shared.first_masked, first_masked);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    params.num_masked[request] = shared.num_masked;
    params.prefix[request] = shared.first_masked;
  }
}

__global__ void __launch_bounds__(kThreadsOfMany)
    commit_requests(const __grid_constant__ CommitParams params) {
  __shared__ Shared shared;
  launch_dependents();
  wait_for_prerequisites();
  const int request = blockIdx.x;
  const int first = params.ends[request];
  const Segment segment{first, max(params.ends[request + 1] - first, 0)};
  const int quota = params.quota[request];
  if (quota < 0) {
    take_by_threshold(params, segment, params.threshold[request], quota == kAboveThreshold, shared);
  } else if (quota == 0 || quota >= segment.count) {
    take_all_or_none(params, segment, quota > 0);
  } else if (segment.count <= kFew) {
    take_of_few(params, segment, quota, shared);
  } else {
    take_of_many(params, segment, quota, shared);
  }
  report(params, request, shared);
}

}  // namespace

cudaError_t launch_commit(const CommitParams& params, cudaStream_t stream) {
  if (params.num_requests == 0) return cudaSuccess;
  // Requests are seldom of one size; their mean tells which number of threads suits most.
  const bool has_many = params.num_candidates > int64_t{4} * kFew * params.num_requests ||
                        params.num_positions > int64_t{8} * kThreads * params.num_requests;
  const int threads = has_many ? kThreadsOfMany : kThreads;
  return launch_kernel(commit_requests, params.num_requests, threads, params, stream);
}

}  // namespace fused_ops
