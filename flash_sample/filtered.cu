// SPDX-License-Identifier: Apache-2.0
//
// Candidates whose tokens are drawn from what min-p, top-k and top-p keep of a row.
//
// A filter keeps what is not farther from the row's largest logit than some distance: its reach;
// top-p, of what lies just there, the lowest columns. So nothing is sorted. A block takes a row. It
// reads the row for the largest logit and for the sums over all of it, and then for a list of the
// columns that may be kept: each filter has a bound of its reach that costs nothing. The k-th
// largest of the threads' own maxima is no larger than the k-th largest logit. Weights smaller than
// b sum up to no more than sqrt(b) times the sum of the square roots of all; where that is the
// share 1 - top_p of the weights' own sum, they lie, even all together, beyond top-p. In the list
// the reaches are found exactly: by counts and sums over intervals of distances, and then of each
// distance in the one that matters; where these are many, by the bits of the distances. A list that
// does not fit is not kept: the row itself is read in its place, which is slower.
//
// Numerics: distances are fp32 differences. What the filters add up are integers, and what is drawn
// is that of the largest noised logit in fp64 (see candidates.cu): neither depends on the order in
// which columns are listed. Sums over the whole row are fp32 and depend on its width alone.

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
constexpr int kFew = 256;              // distances that are compared each with each
constexpr int kAtOnce = 4;             // vectors that a thread has on their way
constexpr float kMostNoise = 23.0f;    // -log(-log U) is 22.9 at most
constexpr float kUnit = 0x1p31f;       // of the weights that filters add up: 1
constexpr double kSumUnit = 0x1p40;    // of those that scores add up
constexpr uint32_t kAll = 0x7f800000;  // the key of an infinite distance

struct Listed {
  float logit;
  int column;
};

// The least key up to which amounts reach a target, with the amounts before it and at it.
struct Reach {
  uint32_t key;
  uint64_t before;
  uint64_t inside;
};

struct Shared {
  uint32_t low[kBins];   // amounts of 64 bits: shared memory adds 32 at a time; or few keys
  uint32_t high[kBins];  // and their amounts
  uint64_t of_warps[kWarps];
  float numbers[kWarps];
  int columns[kWarps];
  Draw draws[kWarps];
  uint64_t before;  // amount before `bin`
  uint64_t inside;  // and in it
  int bin;
  int num_listed;
  int num_few;
  Reach reach;
};

// Over all threads of the block, by a function over the lanes of a warp; each has the result.
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

// Finds the bin with which the amounts reach `target`, counted from shared.before on; -1: none.
__device__ void find_bin(Shared& shared, uint64_t target) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const auto amount = [&](int bin) {
    return static_cast<uint64_t>(shared.high[bin]) << 32 | shared.low[bin];
  };
  const int bin = 2 * threadIdx.x;
  const uint64_t first = amount(bin), both = first + amount(bin + 1);
  const uint64_t upto = sum_upto_lane(both);  // of the warp's bins
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

// Keys are the bits of numbers without a sign; kAll where the amounts do not reach `target`. `each`
// gives numbers to what it is called with. Where it is coarse, the key is no smaller than the exact
// one, by the leading bits alone.
template <bool kIsCoarse = false, typename Each, typename Amount>
__device__ Reach find_by_bits(Shared& shared, uint64_t target, const Each& each,
                              const Amount& amount) {
  uint32_t prefix = 0;
  int known = 31;  // bits of a key below its prefix
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

// Compares each of few numbers with each; false where there are more.
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

// Finds the reach among numbers of at most `most`, by intervals of equal lengths, if those that lie
// in one of them are few.
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

// A row of a block.
template <typename T>
struct FilteredRow {
  static constexpr int kWidth = kVectorWidth<T>;

  const FilteredParams& params;
  Shared& shared;
  Listed* const list;
  const int capacity;
  const Row row;
  const T* const logits;
  const float mass_scale;  // from a distance to the exponent of 2 at the temperature

  float shift;  // the largest logit; 0 where there is none
  int greedy;
  float own_max;       // of the thread
  float total;         // of the weights of the whole row at the temperature
  float roots;         // of their square roots
  float sum;           // what scores add up
  float weighted;      // of exponents too, for the entropy
  float bound;         // nothing farther away is kept
  int last = INT_MAX;  // of the columns at the reach of top_p that are kept
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

  // Gives `use` (const float (&logits)[kWidth], int first) the thread's columns in ascending order,
  // the same ones whether the row is aligned or not; beyond the row they read as -inf.
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
    int v = threadIdx.x;  // all lanes of a warp take part in every turn
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

  // Gives `use` (float distance, float logit, int column) what may be kept.
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

  // The weight of a column at the temperature, as a whole number.
  __device__ uint32_t mass(float distance) const {
    return __float2uint_rn(exp2_approx(-distance * mass_scale) * kUnit);
  }

  // The largest logit, and sums over the whole row, as far as they are wanted.
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
    if (greedy == INT_MAX) greedy = 0;  // of a row without a finite logit
    const float mine = own_max;
    rescale(maximum);
    own_max = mine;
    total = block_sum(shared, total);
    roots = block_sum(shared, roots);
    sum = block_sum(shared, sum);
    weighted = block_sum(shared, weighted);
  }

  // Makes the thread's sums relative to a larger logit.
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

  // Lists what is not farther away than `bound`, if it fits.
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

  // Finds the reach of amounts of what is not farther away than `bound`, which `each` gives.
  template <typename Each, typename Amount>
  __device__ Reach reach_of(uint64_t target, const Each& each, const Amount& amount) const {
    const bool are_few = is_listed && shared.num_listed <= kFew;
    if (are_few && find_among_few(shared, 0, target, each, amount)) return shared.reach;
    return find_reach(shared, target, bound, each, amount);
  }

  // The distance up to which all filters keep; reads the row.
  __device__ float find(double min_p, int64_t top_k, double top_p) {
    const bool has_k = top_k > 0, has_p = top_p < 1.0;
    // Whether top_p is of the whole row's sum; else of what the filters before it leave.
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
        if (wanted < found.inside / weight) {  // columns are keys without a sign, too
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

  // The token, and the sums and the second distance of what is kept.
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
