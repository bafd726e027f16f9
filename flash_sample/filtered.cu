// SPDX-License-Identifier: Apache-2.0
//
// Candidates whose tokens are drawn from the columns that min-p, top-k and top-p keep.
//
// A filter keeps the columns whose distance from the row's largest logit is at most its reach. Of
// the columns exactly at its reach, top-p keeps only the lowest ones. So nothing is sorted.
//
// One block processes one row. It reads the row for the largest logit and for the sums over all
// columns. Then it reads the row again to list the columns that may be kept, because each filter
// has a cheap upper bound of its reach:
// - top-k: the k-th largest of the threads' own maxima is no larger than the k-th largest logit.
// - top-p: weights smaller than b add up to at most sqrt(b) times the sum of the square roots of
//   all weights. If that product is the share 1 - top_p of the sum of all weights, all these
//   weights together lie beyond top-p.
//
// The exact reaches are found in the list: first by counts and sums over intervals of distances,
// then by comparing all distances in the interval that matters. If that interval holds many
// distances, the search goes over the bits of the distances. If the list does not fit into shared
// memory, the row itself is read instead, which is slower.
//
// Numerics: distances are fp32 differences. The filters add integers, and the token is the column
// of the largest noised logit in fp64 (see candidates.cu), so neither depends on the order in which
// columns are listed. Sums over the whole row are fp32 and depend only on its width.

#include <algorithm>
#include <climits>

#include "params.h"
#include "row.cuh"
#include "vllm_add_llada/cuda_kernels/common/dispatch.cuh"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"
#include "vllm_add_llada/cuda_kernels/common/vectors.cuh"

namespace flash_sample {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBins = 2 * kThreads;
constexpr int kMostListed = 16384;
constexpr int kFew = 256;              // distances, at most, of which each is compared with each
constexpr int kAtOnce = 4;             // vectors that a thread loads at once
constexpr float kMostNoise = 23.0f;    // upper bound: -log(-log U) is at most 22.9
constexpr float kUnit = 0x1p31f;       // the weight 1, in the integers that filters add up
constexpr double kSumUnit = 0x1p40;    // the weight 1, in the integers that scores add up
constexpr uint32_t kAll = 0x7f800000;  // the key of an infinite distance

struct Listed {
  float logit;
  int column;
};

// The least key up to which amounts reach a target, the amount below it and the amount at it.
struct Reach {
  uint32_t key;
  uint64_t before;
  uint64_t inside;
};

struct Shared {
  // The low words of 64-bit amounts, because shared memory adds 32 bits at a time; or a few keys.
  uint32_t low[kBins];
  uint32_t high[kBins];  // the high words of the amounts; or the amounts of the few keys
  uint64_t of_warps[kWarps];
  float numbers[kWarps];
  int columns[kWarps];
  Draw draws[kWarps];
  uint64_t before;  // amount before `bin`
  uint64_t inside;  // amount in `bin`
  int bin;
  int num_listed;
  int num_few;
  Reach reach;
};

// Reduces a value over all threads of the block by `over`, a reduction over the lanes of a warp.
// Every thread receives the result.
template <typename T, typename Over>
__device__ T over_block(T (&of_warps)[kWarps], T value, const Over& over) {
  value = over(value);
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  return over(of_warps[threadIdx.x % kWarpSize]);
}

__device__ float block_max(Shared& shared, float value) {
  return over_block(shared.numbers, value, [](float own) { return warp_max(own); });
}

__device__ float block_sum(Shared& shared, float value) {
  return over_block(shared.numbers, value, [](float own) { return warp_sum(own); });
}

__device__ uint64_t block_sum(Shared& shared, uint64_t value) {
  return over_block(shared.of_warps, value, [](uint64_t own) { return over_warp(own, Sum()); });
}

__device__ int block_min(Shared& shared, int value) {
  return over_block(shared.columns, value,
                    [](int own) { return __reduce_min_sync(kFullMask, own); });
}

__device__ Draw block_best(Shared& shared, const Noise& noise, Draw draw) {
  return over_block(shared.draws, draw, [&](const Draw& own) { return warp_best(noise, own, 0); });
}

// Finds the bin in which the amounts, counted from shared.before on, reach `target`; -1 if none
// does.
__device__ void find_bin(Shared& shared, uint64_t target) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const auto amount = [&](int bin) {
    return static_cast<uint64_t>(shared.high[bin]) << 32 | shared.low[bin];
  };
  const int bin = 2 * threadIdx.x;
  const uint64_t first = amount(bin), both = first + amount(bin + 1);
  const uint64_t upto = sum_upto_lane(both);  // amount of the warp's bins up to this lane
  if (lane == kWarpSize - 1) shared.of_warps[warp] = upto;
  const uint64_t start = shared.before;
  __syncthreads();
  const uint64_t before_warp = over_warp(lane < warp ? shared.of_warps[lane] : 0, Sum());
  const uint64_t before = start + before_warp + upto - both;
  if (before < target && before + both >= target) {
    const bool is_second = before + first < target;
    shared.bin = bin + is_second;
    shared.before = is_second ? before + first : before;
    shared.inside = is_second ? both - first : first;
  }
  __syncthreads();
}

__device__ void clear_bins(Shared& shared) {
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) shared.low[bin] = shared.high[bin] = 0;
  if (threadIdx.x == 0) shared.bin = -1;
  __syncthreads();
}

__device__ void add_to_bin(Shared& shared, uint32_t bin, uint32_t added) {
  const uint32_t old = atomicAdd(&shared.low[bin], added);
  if (old + added < old) atomicAdd(&shared.high[bin], 1u);
}

// Finds the reach over keys that are the bits of non-negative numbers. `each` passes the numbers to
// the function that it is called with. The key is kAll if the amounts do not reach `target`. If
// kIsCoarse, only the leading bits are found, and the key is at least the exact one.
template <bool kIsCoarse = false, typename Each, typename Amount>
__device__ Reach find_by_bits(Shared& shared, uint64_t target, const Each& each,
                              const Amount& amount) {
  uint32_t prefix = 0;
  int known = 31;  // number of unknown bits below the prefix of a key
  __syncthreads();
  if (threadIdx.x == 0) shared.before = 0;
  for (const int left : {20, 9, 0}) {
    clear_bins(shared);
    const uint32_t mask = (1u << (known - left)) - 1;
    each([&](float number) {
      const uint32_t key = __float_as_uint(number);
      if (key >> known != prefix) return;
      const uint32_t added = amount(number);
      if (added != 0) add_to_bin(shared, key >> left & mask, added);
    });
    __syncthreads();
    find_bin(shared, target);
    if (shared.bin < 0) return {kAll, 0, 0};
    prefix = prefix << (known - left) | static_cast<uint32_t>(shared.bin);
    known = left;
    if (kIsCoarse) return {min(((prefix + 1) << left) - 1, kAll), 0, 0};
  }
  return {prefix, shared.before, shared.inside};
}

// Finds the reach by comparing each number with each; returns false if there are more than kFew.
template <typename Each, typename Amount>
__device__ bool find_among_few(Shared& shared, uint64_t before, uint64_t target, const Each& each,
                               const Amount& amount) {
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.num_few = 0;
    shared.reach = {kAll, 0, 0};
  }
  __syncthreads();
  each([&](float number) {
    const int place = atomicAdd(&shared.num_few, 1);
    if (place >= kFew) return;
    shared.low[place] = __float_as_uint(number);
    shared.high[place] = amount(number);
  });
  __syncthreads();
  const int count = shared.num_few;
  if (count > kFew) return false;
  if (static_cast<int>(threadIdx.x) < count) {
    const uint32_t key = shared.low[threadIdx.x];
    uint64_t inside = 0;
    for (int i = 0; i < count; ++i) {
      const uint32_t other = shared.low[i], added = shared.high[i];
      if (other < key) before += added;
      if (other == key) inside += added;
    }
    if (before < target && before + inside >= target) shared.reach = {key, before, inside};
  }
  __syncthreads();
  return true;
}

// Finds the reach among numbers that are at most `most`. It first looks at intervals of equal
// length, then at the numbers of one interval if they are few, else at the bits of all numbers.
template <typename Each, typename Amount>
__device__ Reach find_reach(Shared& shared, uint64_t target, float most, const Each& each,
                            const Amount& amount) {
  const float scale = kBins / most;
  const auto bin_of = [&](float number) {
    return min(static_cast<int>(number * scale), kBins - 1);
  };
  if (most > 0.0f && scale > 0.0f && scale < -negative_infinity()) {
    __syncthreads();
    if (threadIdx.x == 0) shared.before = 0;
    clear_bins(shared);
    each([&](float number) {
      const uint32_t added = amount(number);
      if (added != 0) add_to_bin(shared, bin_of(number), added);
    });
    __syncthreads();
    find_bin(shared, target);
    const int bin = shared.bin;
    if (bin < 0) return {kAll, 0, 0};
    const auto inside = [&](auto use) {
      each([&](float number) {
        if (bin_of(number) == bin) use(number);
      });
    };
    if (find_among_few(shared, shared.before, target, inside, amount)) return shared.reach;
  }
  return find_by_bits(shared, target, each, amount);
}

// One row, processed by one block.
template <typename T>
struct FilteredRow {
  static constexpr int kWidth = kVectorWidth<T>;

  const FilteredParams& params;
  Shared& shared;
  Listed* const list;
  const int capacity;
  const Row row;
  const T* const logits;
  const float mass_scale;  // converts a distance to the exponent of 2 at the temperature

  float shift;  // the largest logit; 0 if no logit is finite
  int greedy;
  float own_max;       // largest logit of the thread
  float total;         // sum of the weights of the whole row at the temperature
  float roots;         // sum of the square roots of these weights
  float sum;           // sum of the weights that scores use
  float weighted;      // sum of weight times exponent, for the entropy
  float bound;         // columns at a larger distance are not kept
  int last = INT_MAX;  // last column that top_p keeps among those at its reach
  bool is_listed = false;

  __device__ FilteredRow(const FilteredParams& params, Shared& shared, Listed* list, int capacity,
                         int64_t row_index)
      : params(params),
        shared(shared),
        list(list),
        capacity(capacity),
        row(params.rows, row_index),
        logits(static_cast<const T*>(params.logits) + row_index * params.row_stride),
        mass_scale(row.has_noise ? row.noise.inverse : kLog2E),
        bound(-negative_infinity()) {}

  __device__ bool is_in(int mask, int column) const {
    for (; mask != 0; mask &= mask - 1) {
      if (params.rows.columns.ids[__ffs(mask) - 1] == column) return true;
    }
    return false;
  }

  // Calls `use` (const float (&logits)[kWidth], int first) with the thread's columns in ascending
  // order. They are the same columns whether the row is aligned or not. Columns beyond the row
  // yield -inf.
  template <typename Use>
  __device__ void over_row(const Use& use) const {
    const auto give = [&](float (&values)[kWidth], int first) {
      for (int mask = row.forbidden; mask != 0; mask &= mask - 1) {
        const int64_t column = params.rows.columns.ids[__ffs(mask) - 1] - first;
        if (column < 0 || column >= kWidth) continue;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          if (column == k) values[k] = negative_infinity();
        }
      }
      use(values, first);
    };
    const bool is_aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0;
    const int num_whole = is_aligned ? params.num_columns / kWidth : 0;
    int v = threadIdx.x;  // all lanes of a warp take part in every iteration
    for (; (v | kWarpSize - 1) + (kAtOnce - 1) * kThreads < num_whole; v += kAtOnce * kThreads) {
      Vector<T, kWidth> vectors[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        vectors[i] = load_vector<kWidth>(logits + (v + i * kThreads) * kWidth);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float values[kWidth];
        to_floats(vectors[i], values);
        give(values, (v + i * kThreads) * kWidth);
      }
    }
    for (; (v & -kWarpSize) * kWidth < params.num_columns; v += kThreads) {
      float values[kWidth];
      if (v < num_whole) {
        load(logits + v * kWidth, values);
      } else {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const int column = v * kWidth + k;
          values[k] = column < params.num_columns ? to_float(logits[column]) : negative_infinity();
        }
      }
      give(values, v * kWidth);
    }
  }

  // Calls `use` (float distance, float logit, int column) for the columns that may be kept.
  template <typename Use>
  __device__ void over_kept(float reach, const Use& use) const {
    if (is_listed) {
      for (int i = threadIdx.x; i < shared.num_listed; i += kThreads) {
        const Listed listed = list[i];
        const float distance = shift - listed.logit;
        if (distance <= reach) use(distance, listed.logit, listed.column);
      }
    } else {
      over_row([&](const float (&values)[kWidth], int first) {
        if (shift - top(values) > reach) return;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float distance = shift - values[k];
          if (distance <= reach) use(distance, values[k], first + k);
        }
      });
    }
  }

  __device__ static float top(const float (&values)[kWidth]) {
    float found = values[0];
#pragma unroll
    for (int k = 1; k < kWidth; ++k) found = fmaxf(found, values[k]);
    return found;
  }

  // The weight of a column at the temperature, as an integer.
  __device__ uint32_t mass(float distance) const {
    return __float2uint_rn(exp2_approx(-distance * mass_scale) * kUnit);
  }

  // Finds the largest logit and computes the sums over the whole row that are needed.
  __device__ void read(bool wants_total) {
    const bool is_entropy = params.score == Score::kEntropy;
    own_max = negative_infinity();
    total = roots = sum = weighted = 0.0f;
    int column = INT_MAX;
    over_row([&](const float (&values)[kWidth], int first) {
      const float maximum = top(values);
      if (maximum > own_max) {
        rescale(maximum);
#pragma unroll
        for (int k = kWidth - 1; k >= 0; --k) {
          if (values[k] == maximum) column = first + k;
        }
      }
      const float base = exp_shift(own_max);
      if (wants_total) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const float root = exp2_approx((values[k] - base) * (0.5f * mass_scale));
          roots += root;
          total += root * root;
        }
      }
      if (params.are_scored) return;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (row.excluded != 0 && is_in(row.excluded, first + k)) continue;
        const float t = (values[k] - base) * row.scale, weight = exp2_approx(t);
        sum += weight;
        if (is_entropy) weighted += weigh(weight, t);
      }
    });
    const float maximum = block_max(shared, own_max);
    shift = exp_shift(maximum);
    greedy = block_min(shared, own_max == maximum ? column : INT_MAX);
    if (greedy == INT_MAX) greedy = 0;  // the row has no finite logit
    const float mine = own_max;
    rescale(maximum);
    own_max = mine;
    total = block_sum(shared, total);
    roots = block_sum(shared, roots);
    sum = block_sum(shared, sum);
    weighted = block_sum(shared, weighted);
  }

  // Rescales the thread's sums to a larger maximum.
  __device__ void rescale(float maximum) {
    if (own_max > negative_infinity()) {
      const float root = exp2_approx((own_max - maximum) * (0.5f * mass_scale));
      roots *= root;
      total *= root * root;
      const float t = (own_max - maximum) * row.scale, weight = exp2_approx(t);
      weighted = weighted * weight + sum * weigh(weight, t);
      sum *= weight;
    }
    own_max = maximum;
  }

  // Lists the columns whose distance is at most `bound`, if they fit.
  __device__ void collect() {
    __syncthreads();
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
    const int lane = threadIdx.x % kWarpSize;
    const auto is_near = [&](float logit) {
      return logit > negative_infinity() && shift - logit <= bound;
    };
    over_row([&](const float (&values)[kWidth], int first) {
      int count = 0;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) count += is_near(values[k]);
      if (__all_sync(kFullMask, count == 0)) return;
      const int upto = sum_upto_lane(count);
      int place = 0;
      if (lane == kWarpSize - 1) place = atomicAdd(&shared.num_listed, upto);
      place = __shfl_sync(kFullMask, place, kWarpSize - 1) + upto - count;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (!is_near(values[k])) continue;
        if (place < capacity) list[place] = {values[k], first + k};
        ++place;
      }
    });
    __syncthreads();
    is_listed = shared.num_listed <= capacity;
  }

  // Finds the reach over the numbers that `each` passes, whose distance is at most `bound`.
  template <typename Each, typename Amount>
  __device__ Reach reach_of(uint64_t target, const Each& each, const Amount& amount) const {
    const bool are_few = is_listed && shared.num_listed <= kFew;
    if (are_few && find_among_few(shared, 0, target, each, amount)) return shared.reach;
    return find_reach(shared, target, bound, each, amount);
  }

  // Finds the distance up to which all filters keep columns; reads the row.
  __device__ float find(double min_p, int64_t top_k, double top_p) {
    const bool has_k = top_k > 0, has_p = top_p < 1.0;
    // Whether top_p is a share of the whole row's sum. Otherwise it is a share of the columns that
    // the filters before it keep.
    const bool is_of_all = has_p && min_p <= 0.0 && (params.is_top_p_first || !has_k);
    read(is_of_all);
    float least = -negative_infinity();  // the reach of min_p
    if (min_p > 0.0) {
      const double temperature = row.has_noise ? row.noise.temperature : 1.0;
      least = fmaxf(__double2float_rd(-log(min_p) * temperature), 0.0f);
    }
    bound = least;
    const auto one = [](float) { return 1u; };
    if (has_k && top_k <= kThreads && !(has_p && params.is_top_p_first && !is_of_all)) {
      const float distance = shift - own_max;
      const auto its = [&](auto use) { use(distance); };
      const Reach own = find_by_bits<true>(shared, top_k, its, one);
      bound = fminf(bound, __uint_as_float(own.key));
    }
    if (is_of_all) {
      const float least_root = static_cast<float>(1.0 - top_p) * total / roots;
      bound = fminf(bound, (0.01f - 2.0f * log2f(least_root)) / mass_scale);
    }
    collect();
    float reach = bound;
    const auto each = [&](auto use) {
      over_kept(bound, [&](float distance, float, int) { use(distance); });
    };
    if (has_k) {
      const Reach found = reach_of(top_k, each, one);
      reach = fminf(reach, __uint_as_float(found.key));
    }
    if (has_p) {
      double whole = static_cast<double>(total) * kUnit;
      if (!is_of_all) {
        uint64_t left = 0;
        over_kept(params.is_top_p_first ? least : reach,
                  [&](float distance, float, int) { left += mass(distance); });
        whole = static_cast<double>(block_sum(shared, left));
      }
      const double limit = top_p * whole;
      const double least_sum = params.keeps_equal ? floor(limit) + 1.0 : ceil(limit);
      const uint64_t target = static_cast<uint64_t>(fmax(least_sum, 1.0));
      const Reach found = reach_of(target, each, [&](float distance) { return mass(distance); });
      const float farthest = __uint_as_float(found.key);
      if (farthest <= reach && found.key != kAll) {
        reach = farthest;
        const uint64_t weight = mass(reach), wanted = (target - found.before - 1) / weight + 1;
        // Column numbers serve as keys, because they are non-negative too.
        if (wanted < found.inside / weight) {
          const auto equals = [&](auto use) {
            over_kept(reach, [&](float distance, float, int column) {
              if (distance == reach) use(__int_as_float(column));
            });
          };
          const bool are_few = find_among_few(shared, 0, wanted, equals, one);
          last = static_cast<int>(are_few ? shared.reach.key
                                          : find_by_bits(shared, wanted, equals, one).key);
        }
      }
    }
    return reach;
  }

  // Draws the token, and sums up the kept columns for the score.
  __device__ void finish(int64_t row_index, float reach) {
    const bool is_drawn = params.has_noise && row.has_noise;
    Draw draw = Draw::none();
    uint64_t kept_sum = 0, kept_weighted = 0;
    float second = -negative_infinity();
    over_kept(reach, [&](float distance, float logit, int column) {
      if (!(logit > negative_infinity()) || (distance == reach && column > last)) return;
      if (is_drawn) {
        const float most = logit + row.noise.tau * kMostNoise;
        if (draw.column == INT_MAX || !(most < draw.score - row.noise.margin(draw.score))) {
          const float score = row.noise.approximate(logit, row.noise.stream.word(column));
          draw = better(row.noise, draw, Draw{score, logit, column}, 0);
        }
      }
      if (!params.are_scored || is_in(row.excluded, column)) return;
      const float t = -distance * row.scale, weight = exp2_approx(t);
      kept_sum += static_cast<uint64_t>(weight * static_cast<float>(kSumUnit));
      kept_weighted += static_cast<uint64_t>(-weigh(weight, t) * static_cast<float>(kSumUnit));
      if (column != greedy) second = fminf(second, distance);
    });
    int token = greedy;
    float distance = 0.0f;
    if (is_drawn) {
      draw = block_best(shared, row.noise, draw);
      if (draw.column != INT_MAX) {
        token = draw.column;
        distance = shift - draw.logit;
      }
    }
    if (params.are_scored) {
      sum = static_cast<float>(block_sum(shared, kept_sum) / kSumUnit);
      weighted = -static_cast<float>(block_sum(shared, kept_weighted) / kSumUnit);
      second = -block_max(shared, -second);
    }
    if (threadIdx.x != 0) return;
    params.token[row_index] = token;
    params.greedy[row_index] = greedy;
    const Summary whole{shift,          greedy, sum,   weighted,
                        shift - second, shift,  token, shift - distance};
    params.value[row_index] = score_of(whole, row, params.rows, params.score);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    filter_rows(const __grid_constant__ FilteredParams params, int capacity) {
  __shared__ Shared shared;
  extern __shared__ Listed list[];
  wait_for_prerequisites();
  launch_dependents();
  const int64_t row_index = blockIdx.x;
  FilteredRow<T> own(params, shared, list, capacity, row_index);
  const float reach =
      own.find(params.min_p[row_index], params.top_k[row_index], params.top_p[row_index]);
  own.finish(row_index, reach);
}

template <typename T>
cudaError_t launch_of(const FilteredParams& params, cudaStream_t stream) {
  const auto kernel = filter_rows<T>;
  int device = 0, bytes = 0;
  cudaFuncAttributes compiled{};
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&compiled, kernel);
  if (error != cudaSuccess) return error;
  const int room =
      (bytes - static_cast<int>(compiled.sharedSizeBytes)) / static_cast<int>(sizeof(Listed));
  const int capacity = std::min({room, kMostListed, params.num_columns});
  const Launch launch{dim3(static_cast<unsigned>(params.num_rows)), dim3(kThreads), stream,
                      compiled.ptxVersion >= 90, capacity * static_cast<int>(sizeof(Listed))};
  return launch_kernel(kernel, launch, params, capacity);
}

}  // namespace

cudaError_t launch_filtered(const FilteredParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  if (params.num_rows > INT_MAX) return cudaErrorInvalidConfiguration;
  return dispatch(params.dtype, [&](auto* tag) {
    return launch_of<std::remove_pointer_t<decltype(tag)>>(params, stream);
  });
}

}  // namespace flash_sample
