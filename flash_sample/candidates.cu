// SPDX-License-Identifier: Apache-2.0
//
// From rows of logits to candidates, reading the logits once: best column, its softmax probability
// or the entropy of the row or the difference of the two largest probabilities, and, with
// Gumbel noise, a column drawn at a temperature. Of rows that are joined already, the entropy with
// its epsilon, which depends on the sum over the row.
//
// A team of warps shares a row: the warps of one block, or of a cluster of blocks where the card
// has clusters. As many teams as fit stay on the card, and each goes through rows of its own. A row
// is cut into segments of 4 KiB, which are dealt out to the warps; while a warp reduces one
// segment, the next is on its way to shared memory, also that of another row. The maximum of a
// segment is known before its first exp(); further segments of a row rescale what was summed. What
// the warps found of a row meets in the shared memory of the team's last block, whose last warp
// (the one with the fewest segments) joins it once all are through, while they reduce the next row.
// The cut into segments and the team depend on the width of a row alone, so the bits of a row do
// not depend on its neighbours.
//
// Numerics: fp32 throughout, but the noise. -inf adds exactly 0. NaN (and +inf, of which inf - inf
// makes NaN) reaches the sum, so the score of its row is NaN; its columns are in range and
// otherwise unspecified.
//
// Noise: of most columns a cheap bound shows that they cannot have the largest noised logit:
// -log(-log U) <= -log(1 - U). The rest is compared in fp32, and, where fp32 does not tell, in
// fp64. So the column is that of the largest logit - temperature * log(-log U) in fp64, whatever
// the bounds.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>

#include "params.h"
#include "row.cuh"

namespace flash_sample {
namespace {

constexpr int kVectors = 8;  // of 16 bytes, per lane and segment
constexpr int kStages = 2;   // segments that a warp keeps
// Measured on an H200: with more or larger blocks a row waits longer for its team, with fewer a
// lone row takes longer.
constexpr int kMaxWarps = 8;   // of a block
constexpr int kMaxBlocks = 4;  // of a cluster, a power of two
constexpr int kMaxMembers = kMaxBlocks * kMaxWarps;
static_assert(kMaxMembers <= kWarpSize, "one warp joins what they found");

// ---- The warps that share a row ----

// This warp's place.
struct Member {
  int index;
  int count;  // of the team
  int64_t team;
  int64_t num_teams;
  unsigned last_block;  // of the team

  __device__ Member() {
    const int warp = threadIdx.x / kWarpSize;
    const int num_warps = blockDim.x / kWarpSize;
#if __CUDA_ARCH__ >= 900
    unsigned rank, size, cluster, num_clusters;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%nclusterid.x;" : "=r"(num_clusters));
#else
    const unsigned rank = 0, size = 1, cluster = blockIdx.x, num_clusters = gridDim.x;
#endif
    index = static_cast<int>(rank) * num_warps + warp;
    count = static_cast<int>(size) * num_warps;
    team = cluster;
    num_teams = num_clusters;
    last_block = size - 1;
  }

  __device__ bool joins() const { return index == count - 1; }

  // The last block's copy of a variable in shared memory.
  template <typename T>
  __device__ T* of_last_block(T* mine) const {
#if __CUDA_ARCH__ >= 900
    uint64_t address;
    asm("mapa.u64 %0, %1, %2;"
        : "=l"(address)
        : "l"(reinterpret_cast<uint64_t>(mine)), "r"(last_block));
    return reinterpret_cast<T*>(address);
#else
    return mine;
#endif
  }
};

// A barrier of all threads of the team in two halves; what was written before the first is seen
// after the second.
__device__ void team_arrive() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ void team_wait() {
  __syncwarp();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// ---- Sixteen bytes of logits ----

template <typename T>
struct Vector {
  static constexpr int kWidth = 16 / sizeof(T);
  uint4 raw;

  __device__ uint32_t word(int i) const {
    return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
  }
  __device__ float operator[](int k) const;
  __device__ float maximum() const;
  __device__ void set(int k, T value) {
    T elements[kWidth];
    memcpy(elements, &raw, 16);
    elements[k] = value;
    memcpy(&raw, elements, 16);
  }
};

template <>
__device__ float Vector<float>::operator[](int k) const {
  return __uint_as_float(word(k));
}
template <>
__device__ float Vector<__half>::operator[](int k) const {
  const uint32_t pair = word(k / 2);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(k % 2 ? pair >> 16 : pair)));
}
template <>
__device__ float Vector<__nv_bfloat16>::operator[](int k) const {
  const uint32_t pair = word(k / 2);
  return __uint_as_float(k % 2 ? pair & 0xffff0000u : pair << 16);
}

template <>
__device__ float Vector<float>::maximum() const {
  const Vector& v = *this;
  return fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
}
template <>
__device__ float Vector<__half>::maximum() const {
  const __half2* pairs = reinterpret_cast<const __half2*>(&raw);
  const __half2 best = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(__low2float(best), __high2float(best));
}
template <>
__device__ float Vector<__nv_bfloat16>::maximum() const {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
  const __nv_bfloat162 best = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return fmaxf(__low2float(best), __high2float(best));
}

__device__ float to_float(float value) { return value; }
__device__ float to_float(__half value) { return __half2float(value); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ float lowest(float) { return negative_infinity(); }
__device__ __half lowest(__half) { return __ushort_as_half(0xfc00); }
__device__ __nv_bfloat16 lowest(__nv_bfloat16) { return __ushort_as_bfloat16(0xff80); }

// ---- What a warp holds of a row ----

__device__ void copy_async(uint4* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(target))),
               "l"(source)
               : "memory");
}

__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of copies but the newest ones, of the stages that are not next.
__device__ void wait_for_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
}

// A lane owns vectors, 32 vectors apart: the loads of a warp are contiguous. Lanes touch nothing
// but their own, so no barrier is needed. The share of a lane is the same whether the row is
// aligned or not, so alignment does not change the result.
template <typename T>
struct Segment {
  static constexpr int kWidth = Vector<T>::kWidth;
  static constexpr int kStride = kWarpSize * kWidth;  // columns from a lane's vector to its next
  static constexpr int kColumns = kVectors * kStride;
  uint4* mine;  // in shared memory: this lane's vectors, 32 apart
  int lane;
  int first;  // column of the row that the segment starts with

  __device__ Vector<T> operator[](int v) const { return {mine[v * kWarpSize]}; }
  __device__ int offset(int v) const { return v * kStride + lane * kWidth; }
  __device__ T& value(int v, int k) { return reinterpret_cast<T*>(mine + v * kWarpSize)[k]; }

  __device__ static uint4 lowest_vector() {
    Vector<T> vector;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) vector.set(k, lowest(T{}));
    return vector.raw;
  }

  // Starts to copy the columns of a row; those beyond it read as -inf.
  __device__ void load(const T* row, int num_columns) {
    const T* source = row + first + offset(0);
    const int count = num_columns - first;
    const bool is_aligned = reinterpret_cast<uintptr_t>(row + first) % 16 == 0;
    if (is_aligned && count >= kColumns) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) copy_async(mine + v * kWarpSize, source + v * kStride);
    } else if (is_aligned && count % kWidth == 0) {
#pragma unroll 1
      for (int v = 0; v < kVectors; ++v) {
        if (offset(v) < count) {
          copy_async(mine + v * kWarpSize, source + v * kStride);
        } else {
          mine[v * kWarpSize] = lowest_vector();
        }
      }
    } else {
#pragma unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Vector<T> vector;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          vector.set(k, offset(v) + k < count ? source[v * kStride + k] : lowest(T{}));
        }
        mine[v * kWarpSize] = vector.raw;
      }
    }
  }

  // Overwrites the columns of the row that `mask` names with -inf.
  __device__ void remove(const LogitsParams& params, int mask) {
    for (; mask != 0; mask &= mask - 1) {
      const int64_t column = params.rows.columns[__ffs(mask) - 1] - params.first_column - first;
      if (column < 0 || column >= kColumns) continue;
      const int vector = static_cast<int>(column) / kWidth;
      if (vector % kWarpSize == lane) {
        value(vector / kWarpSize, static_cast<int>(column) % kWidth) = lowest(T{});
      }
    }
  }
};

// The segments of one warp, of its team's rows one after another: kStages of them are in shared
// memory or on their way there.
template <typename T>
class Feed {
  using S = Segment<T>;

 public:
  __device__ Feed(const LogitsParams& params, const Member& member, int num_segments,
                  uint4* vectors)
      : params_(params),
        member_(member),
        num_segments_(num_segments),
        lane_(threadIdx.x % kWarpSize),
        vectors_(vectors + threadIdx.x / kWarpSize * kStages * kVectors * kWarpSize + lane_),
        row_(member.index < num_segments ? member.team : params.num_rows),
        index_(member.index) {
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) load(stage);
  }

  // The next segment.
  __device__ S take(int index) {
    wait_for_stage();
    return at(stage_, index);
  }

  // What was taken is no longer needed: another one takes its place.
  __device__ void release() {
    load(stage_);
    stage_ = (stage_ + 1) % kStages;
  }

 private:
  __device__ S at(int stage, int index) const {
    return {vectors_ + stage * kVectors * kWarpSize, lane_, index * S::kColumns};
  }

  __device__ void load(int stage) {
    if (row_ < params_.num_rows) {
      const T* logits = static_cast<const T*>(params_.logits) + row_ * params_.row_stride;
      at(stage, index_).load(logits, params_.num_columns);
      index_ += member_.count;
      if (index_ >= num_segments_) {
        index_ = member_.index;
        row_ += member_.num_teams;
      }
    }
    commit_copies();
  }

  const LogitsParams& params_;
  const Member& member_;
  const int num_segments_;
  const int lane_;
  uint4* const vectors_;
  int64_t row_;  // of the segment to load next
  int index_;
  int stage_ = 0;  // of the segment to take next
};

// What one warp found; columns count from the first of `logits` here.
struct Partial {
  float maximum;
  int column;
  float sum;
  float weighted;
  float second;
  Draw draw;

  __device__ static Partial none() {
    return {negative_infinity(), INT_MAX, 0.0f, 0.0f, negative_infinity(), Draw::none()};
  }
};

__device__ Draw warp_best(const Noise& noise, Draw draw, int64_t first_column) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const Draw other{__shfl_xor_sync(kFullMask, draw.score, distance),
                     __shfl_xor_sync(kFullMask, draw.logit, distance),
                     __shfl_xor_sync(kFullMask, draw.column, distance)};
    draw = better(noise, draw, other, first_column);
  }
  return draw;
}

// A warp's part of a row's record.
template <typename T, Score kScore, bool kHasNoise>
struct Reducer {
  using S = Segment<T>;
  using Found = Partial;
  static constexpr int kWidth = S::kWidth;

  const LogitsParams& params;
  const Row row;
  const int lane;
  float maximum = negative_infinity();  // of the warp
  int column = INT_MAX;                 // of the warp
  float sum = 0.0f;                     // of the lane, as what follows
  float weighted = 0.0f;
  float first = negative_infinity();  // largest logit (margin only)
  float second = negative_infinity();
  Draw draw = Draw::none();

  __device__ Reducer(const LogitsParams& params, int64_t row_index)
      : params(params), row(params.rows, row_index), lane(threadIdx.x % kWarpSize) {}

  __device__ void add(S& segment) {
    segment.remove(params, row.forbidden);
    const float segment_max = find_best(segment);
    if constexpr (kHasNoise) {
      if (row.has_noise) draw_column(segment, segment_max);
    }
    segment.remove(params, row.excluded);
    add_exponentials(segment, segment_max);
  }

  // The largest logit of the segment; keeps its column where it is the largest so far.
  __device__ float find_best(const S& segment) {
    float lane_max = negative_infinity();
    int best = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float top = segment[v].maximum();
      if (top > lane_max) {
        lane_max = top;
        best = v;
      }
    }
    if constexpr (kScore == Score::kMargin) add_two_best(segment);
    const float segment_max = warp_max(lane_max);
    if (segment_max > maximum || column == INT_MAX) {
      int found = INT_MAX;
      if (lane_max == segment_max) {
        const Vector<T> vector = segment[best];
#pragma unroll
        for (int k = kWidth - 1; k >= 0; --k) {
          if (vector[k] == segment_max) found = segment.first + segment.offset(best) + k;
        }
      }
      column = __reduce_min_sync(kFullMask, found);
    }
    return segment_max;
  }

  __device__ void add_two_best(const S& segment) {
#pragma unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Vector<T> vector = segment[v];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        second = fmaxf(second, fminf(first, vector[k]));
        first = fmaxf(first, vector[k]);
      }
    }
  }

  __device__ void add_exponentials(const S& segment, float segment_max) {
    if (segment_max > maximum) {
      if (maximum > negative_infinity()) {
        const float distance = (maximum - segment_max) * row.scale;
        const float weight = exp2_approx(distance);
        weighted = weighted * weight + sum * weigh(weight, distance);
        sum *= weight;
      }
      maximum = segment_max;
    }
    const float shift = exp_shift(maximum);
    float sums[4] = {}, weights[4] = {};
#pragma unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Vector<T> vector = segment[v];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float t = (vector[k] - shift) * row.scale;
        const float exponential = exp2_approx(t);
        sums[k % 4] += exponential;
        if constexpr (kScore == Score::kEntropy) weights[k % 4] += weigh(exponential, t);
      }
    }
    sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if constexpr (kScore == Score::kEntropy) {
      weighted += (weights[0] + weights[1]) + (weights[2] + weights[3]);
    }
  }

  __device__ void draw_column(S& segment, float segment_max) {
    const Noise& noise = row.noise;
    const float tau_ln2 = noise.tau * kLn2;
    const float reach = 33.0f * tau_ln2;  // more than the noise of any word
    const bool is_aligned = params.first_column % 4 == 0;
    float bound = seed_bound(segment, segment_max);
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      const Vector<T> vector = segment[v];
      if (!__any_sync(kFullMask, vector.maximum() + reach >= bound)) continue;
      const int64_t start = params.first_column + segment.first + segment.offset(v);
      unsigned candidates = 0;
      if (is_aligned) {
        // Where logit - temperature * log(1 - U) < bound, the column cannot be the best; 1 - U is
        // ~word / 2^32.
        const float floor = bound - 32.0f * tau_ln2 - noise.margin(bound);
#pragma unroll
        for (int k = 0; k < kWidth; k += 4) {
          const Words words = noise.stream.words(static_cast<uint32_t>((start + k) >> 2));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float rest = log2_approx(static_cast<float>(~words.word[i]));
            if (fmaf(-tau_ln2, rest, vector[k + i]) >= floor) candidates |= 1u << (k + i);
          }
        }
      } else {
        candidates = (1u << kWidth) - 1;  // the words of a counter do not lie in one vector
      }
      if (!__any_sync(kFullMask, candidates != 0)) continue;
      for (; candidates != 0; candidates &= candidates - 1) {
        const int k = __ffs(candidates) - 1;
        try_column(to_float(segment.value(v, k)), segment.first + segment.offset(v) + k);
      }
      bound = fmaxf(bound, warp_max(draw.score - noise.margin(draw.score)));
    }
  }

  __device__ void try_column(float logit, int candidate) {
    if (!(logit > negative_infinity())) return;
    const uint32_t word = row.noise.stream.word(params.first_column + candidate);
    const Draw other{row.noise.approximate(logit, word), logit, candidate};
    draw = better(row.noise, draw, other, params.first_column);
  }

  // A number that the best noised logit reaches: those of the best column, of one column per lane,
  // and of what was drawn so far.
  __device__ float seed_bound(const S& segment, float segment_max) {
    const Noise& noise = row.noise;
    const bool has_best = segment_max > maximum || maximum == negative_infinity();
    const bool takes_best = has_best && lane == 0;
    const float logit = takes_best ? segment_max : segment[0][0];
    const int candidate = takes_best ? column : segment.first + segment.offset(0);
    float found = draw.score - noise.margin(draw.score);
    if (logit > negative_infinity()) {
      const uint32_t word = noise.stream.word(params.first_column + candidate);
      const float score = noise.approximate(logit, word);
      found = fmaxf(found, score - noise.margin(score));
    }
    return warp_max(found);
  }

  __device__ Partial result() {
    if constexpr (kHasNoise) draw = warp_best(row.noise, draw, params.first_column);
    float two = negative_infinity();
    if constexpr (kScore == Score::kMargin) {
      // Of the lanes that hold the maximum, one gives its second, the others the maximum itself.
      const unsigned holders = __ballot_sync(kFullMask, first == maximum);
      const bool is_owner = holders != 0 && lane == __ffs(holders) - 1;
      two = warp_max(is_owner ? second : first);
    }
    const float entropy_sum = kScore == Score::kEntropy ? warp_sum(weighted) : 0.0f;
    return {maximum, column, warp_sum(sum), entropy_sum, two, draw};
  }

  __device__ static void finish(const LogitsParams& params, int64_t row_index,
                                const Partial* partials, int count);
};

// Joins what the warps of a team found, one to a lane.
template <bool kHasNoise>
__device__ Summary join(const Partial* partials, int count, const Row& row, int64_t first_column,
                        int num_columns, int lane) {
  const Partial mine = lane < count ? partials[lane] : Partial::none();
  const float maximum = warp_max(mine.maximum);
  const bool has_maximum = mine.maximum == maximum;
  int column = __reduce_min_sync(kFullMask, has_maximum ? mine.column : INT_MAX);
  const float distance = (mine.maximum - exp_shift(maximum)) * row.scale;
  const float weight = exp2f(distance);
  float weighted = mine.weighted * weight;
  if (mine.maximum > negative_infinity()) weighted += mine.sum * weigh(weight, distance);
  const bool is_best = has_maximum && mine.column == column;
  const float second = is_best ? mine.second : mine.maximum;
  // A row of NaN: no column equals the maximum, or only those beyond the row's end.
  if (column >= num_columns) column = 0;
  Summary whole{maximum,
                first_column + column,
                warp_sum(mine.sum * weight),
                warp_sum(weighted),
                warp_max(second),
                maximum,
                first_column + column,
                maximum};
  if constexpr (kHasNoise) {
    const Draw draw = warp_best(row.noise, mine.draw, first_column);
    if (draw.column < num_columns) {  // also none
      whole.token = first_column + draw.column;
      whole.token_logit = draw.logit;
      whole.noised = row.noise.exact(draw.logit, whole.token);
    }
  }
  return whole;
}

template <typename T, Score kScore, bool kHasNoise>
__device__ void Reducer<T, kScore, kHasNoise>::finish(const LogitsParams& params, int64_t row_index,
                                                      const Partial* partials, int count) {
  const int lane = threadIdx.x % kWarpSize;
  const Row row(params.rows, row_index);
  const Summary whole =
      join<kHasNoise>(partials, count, row, params.first_column, params.num_columns, lane);
  if (lane != 0) return;
  if (params.record != nullptr) write_record(params.record + row_index * kRecordFields, whole);
  if (params.token != nullptr) params.token[row_index] = whole.token;
  if (params.greedy != nullptr) params.greedy[row_index] = whole.column;
  if (params.value != nullptr) params.value[row_index] = score_of(whole, row, params.rows, kScore);
}

// A warp's part of -sum p log(p + epsilon), p = exp(logit - maximum) / sum.
template <typename T>
struct EntropyShare {
  using Found = float;

  const LogitsParams& params;
  const Row row;
  const float shift;
  const float inverse;
  const float epsilon;
  float shares[4] = {};  // of the lane

  __device__ static const double* record(const LogitsParams& params, int64_t row_index) {
    return params.whole + row_index * kRecordFields;
  }

  __device__ EntropyShare(const LogitsParams& params, int64_t row_index)
      : params(params),
        row(params.rows, row_index),
        shift(exp_shift(static_cast<float>(record(params, row_index)[kMaximum]))),
        inverse(1.0f / static_cast<float>(record(params, row_index)[kSumExp])),
        epsilon(params.rows.epsilon[row_index]) {}

  __device__ void add(Segment<T>& segment) {
    segment.remove(params, row.forbidden | row.excluded);
#pragma unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Vector<T> vector = segment[v];
#pragma unroll
      for (int k = 0; k < Vector<T>::kWidth; ++k) {
        const float t = (vector[k] - shift) * row.scale;
        const float p = exp2_approx(t) * inverse;
        shares[k % 4] -= p * log2_approx(p + epsilon);
      }
    }
  }

  __device__ float result() const {
    return kLn2 * warp_sum((shares[0] + shares[1]) + (shares[2] + shares[3]));
  }

  __device__ static void finish(const LogitsParams& params, int64_t row_index, const float* found,
                                int count) {
    const int lane = threadIdx.x % kWarpSize;
    const float total = warp_sum(lane < count ? found[lane] : 0.0f);
    if (lane != 0) return;
    const double* whole = record(params, row_index);
    const bool is_empty = whole[kMaximum] == negative_infinity() || whole[kSumExp] == 0.0;
    params.share[row_index] = is_empty ? -negative_infinity() : total;
  }
};

template <typename T, typename Work>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, 2)
    reduce_rows(const __grid_constant__ LogitsParams params, int num_segments) {
  using Found = typename Work::Found;
  __shared__ Found found[2][kMaxMembers];  // of a row and of the one before, in the last block
  extern __shared__ uint4 vectors[];       // kStages * kVectors * 32 of each warp
#if __CUDA_ARCH__ >= 900
  // The logits may be the work of the kernel before, which this one need not wait for to start.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const Member member;
  team_arrive();  // shared memory of the last block may be written once all blocks have started
  Feed<T> feed(params, member, num_segments, vectors);
  auto* const gathered = member.of_last_block(&found);
  const auto finish = [&](int64_t row, int half) {
    if (member.joins()) Work::finish(params, row, found[half], member.count);
  };

  int half = 0;
  int64_t row = member.team;
  for (; row < params.num_rows; row += member.num_teams) {
    Work work(params, row);
    for (int index = member.index; index < num_segments; index += member.count) {
      Segment<T> segment = feed.take(index);
      work.add(segment);
      feed.release();
    }
    const Found mine = work.result();
    team_wait();  // all have arrived with what they found of the row before
    if (row != member.team) finish(row - member.num_teams, half ^ 1);
    if (threadIdx.x % kWarpSize == 0) (*gathered)[half][member.index] = mine;
    team_arrive();
    half ^= 1;
  }
  team_wait();
  finish(row - member.num_teams, half ^ 1);
}

// ---- Launch ----

struct Team {
  int num_blocks;
  int num_warps;  // of each block
};

// Depends on the width of a row (and the card) alone.
Team choose_team(int num_segments, bool has_clusters) {
  int num_blocks = 1;
  while (has_clusters && num_blocks < kMaxBlocks && num_segments > 4 * num_blocks) num_blocks *= 2;
  const int num_warps = (num_segments + num_blocks - 1) / num_blocks;
  return {num_blocks, std::min(num_warps, kMaxWarps)};
}

template <typename T, typename Work>
cudaError_t launch(const LogitsParams& params, cudaStream_t stream) {
  const auto kernel = reduce_rows<T, Work>;
  cudaFuncAttributes compiled{};
  cudaError_t error = cudaFuncGetAttributes(&compiled, kernel);
  if (error != cudaSuccess) return error;
  // Of what the card runs, not of the card: a later one may run code that was made for 8.0.
  const bool has_clusters = compiled.ptxVersion >= 90;
  const int num_segments = (params.num_columns - 1) / Segment<T>::kColumns + 1;
  const Team team = choose_team(num_segments, has_clusters);

  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(team.num_blocks);
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(team.num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(team.num_warps * kWarpSize));
  config.dynamicSmemBytes = team.num_warps * kStages * kVectors * kWarpSize * sizeof(uint4);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = has_clusters ? 1 : 0;

  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(config.dynamicSmemBytes));
  if (error != cudaSuccess) return error;
  int num_teams = 0;  // that the card holds
  if (has_clusters) {
    error = cudaOccupancyMaxActiveClusters(&num_teams, kernel, &config);
    config.numAttrs = 2;
  } else {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &num_teams, kernel, static_cast<int>(config.blockDim.x), config.dynamicSmemBytes);
    if (error != cudaSuccess) return error;
    int device = 0, num_processors = 0;
    error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, device);
    num_teams *= num_processors;
  }
  if (error != cudaSuccess) return error;
  const int64_t count = std::min<int64_t>(params.num_rows, std::max(num_teams, 1));
  config.gridDim.x = static_cast<unsigned>(count * team.num_blocks);
  return cudaLaunchKernelEx(&config, kernel, params, num_segments);
}

template <typename T, Score kScore>
cudaError_t launch(const LogitsParams& params, cudaStream_t stream) {
  return params.has_noise ? launch<T, Reducer<T, kScore, true>>(params, stream)
                          : launch<T, Reducer<T, kScore, false>>(params, stream);
}

template <typename T>
cudaError_t launch(const LogitsParams& params, cudaStream_t stream) {
  if (params.whole != nullptr) return launch<T, EntropyShare<T>>(params, stream);
  switch (params.score) {
    case Score::kConfidence:
      return launch<T, Score::kConfidence>(params, stream);
    case Score::kEntropy:
      return launch<T, Score::kEntropy>(params, stream);
    case Score::kMargin:
      return launch<T, Score::kMargin>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_candidates(const LogitsParams& params, cudaStream_t stream) {
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
