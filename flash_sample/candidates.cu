// SPDX-License-Identifier: Apache-2.0
//
// Candidates from rows of logits, which are read once. A row yields its best column and a score:
// the softmax probability, the entropy, or the difference of the two largest probabilities. With
// Gumbel noise it also yields a column sampled at a temperature. A second kernel computes the
// entropy with its epsilon from joined rows, because it depends on the sum over the whole row.
//
// Division of the work. A row is divided into segments of 4 KiB, and the segments into at most 64
// shares: a share is every 64th segment, and one warp reduces it. The maximum of a segment is
// computed before its first exp(). If a later segment of the share has a larger maximum, the sums
// so far are rescaled. The warp sends the result of the share to a warp that only joins rows, two
// shares per lane. The division depends on the width of a row alone. So the bits of a row's result
// depend neither on the other rows nor on which warps of a team of blocks reduce its shares.
//
// Few rows: if there are no more rows than the card has processors, latency decides. Each block has
// a processor for itself. A team is a cluster (if the card has clusters), the largest one for which
// the card can hold one team per row. Only the first message waits until the team's blocks have
// started. Messages carry their own signal, because a fence of the whole card would cost as much as
// the arithmetic. The next kernel may start as soon as the first loads are under way.
//
// Many rows: bandwidth decides. A team is one block, two blocks stay on each processor, and each
// block goes through its own rows. While a warp reduces one segment, the next segment is copied to
// shared memory, even if it belongs to the next row. On an H200, more segments in flight, or
// issuing the same copies before the exponentials, took 10 % to 25 % more time.
//
// Numerics: everything except the noise is fp32. -inf adds exactly 0. NaN reaches the sum, and so
// does +inf, because inf - inf is NaN. The score of such a row is NaN; its columns are in range,
// but otherwise unspecified.
//
// Noise: for most columns a cheap bound, -log(-log U) <= -log(1 - U), shows that they cannot have
// the largest noised logit. The other columns are compared in fp32, and in fp64 if fp32 cannot
// decide. So the column is always that of the largest logit - temperature * log(-log U) in fp64. It
// does not depend on the bounds, which the warps of a block share.

#include <algorithm>
#include <climits>

#include "params.h"
#include "row.cuh"
#include "segment.cuh"
#include "team.cuh"
#include "vllm_add_llada/cuda_kernels/common/dispatch.cuh"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"

namespace flash_sample {
namespace {

constexpr int kSharesPerLane = kShares / kWarpSize;  // shares per lane of the joining warp
constexpr int kMaxBlocks = 8;                        // blocks per cluster
constexpr int kMinWarps = 4;   // reducing warps per block of a cluster, at least
constexpr int kMaxWarps = 16;  // reducing warps per processor, at most

// ---- Reduction of a share ----

// Exponents to base 2: (logit - shift) * scale.
class Exponents {
 public:
  __device__ Exponents(float shift, float scale)
      : shift_(shift), scale_(scale), offset_(shift * scale) {}

  // Calls `use` (int k, float t) with the exponents of some logits, all of them too large by
  // excess().
  template <typename T, typename Use>
  __device__ void of(const Vector<T> (&vectors)[kVectors], const Use& use) const {
    if (is_small()) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int k = 0; k < Vector<T>::kWidth; ++k) {
          use(k, fmaf(vectors[v][k], scale_, -offset_));
        }
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int k = 0; k < Vector<T>::kWidth; ++k) use(k, (vectors[v][k] - shift_) * scale_);
      }
    }
  }

  // The rounding error of shift * scale, which all exponents include.
  __device__ float excess() const { return is_small() ? fmaf(shift_, scale_, -offset_) : 0.0f; }

 private:
  // Whether the product may be rounded. Then a single fma gives an exponent.
  __device__ bool is_small() const { return fabsf(offset_) < 0x1p16f; }

  const float shift_;
  const float scale_;
  const float offset_;
};

// The result of a share. Here columns count from the first column of `logits`.
struct alignas(uint4) Partial {
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

// Reduces the shares of a row to partial results.
template <typename T, Score kScore, bool kHasNoise>
struct Reducer {
  using S = Segment<T>;
  using Found = Partial;
  static constexpr int kWidth = S::kWidth;

  const LogitsParams& params;
  const Row row;
  const int number;  // number of the row within the team
  SharedBound& shared;
  const int lane;
  float maximum;  // This and the next two members hold the same value in all lanes of the warp.
  int column;
  float second;  // largest logit except that of `column` (margin only)
  float sum;     // This and the next two members belong to the lane.
  float weighted;
  Draw draw;

  __device__ Reducer(const LogitsParams& params, int64_t row_index, int number, SharedBound& shared)
      : params(params),
        row(params.rows, row_index),
        number(number),
        shared(shared),
        lane(threadIdx.x % kWarpSize) {}

  __device__ void begin() {
    maximum = second = negative_infinity();
    column = INT_MAX;
    sum = weighted = 0.0f;
    draw = Draw::none();
  }

  __device__ void add(S& segment) {
    segment.remove(params, row.forbidden);
    __syncwarp();
    Vector<T> vectors[kVectors];
    segment.read(vectors);
    const float segment_max = find_best(segment, vectors);
    __syncwarp();  // Lanes have read vectors that other lanes own and may overwrite from here on.
    if constexpr (kHasNoise) {
      if (row.has_noise) draw_column(segment, vectors, segment_max);
    }
    segment.remove(params, row.excluded);
    // Read again: the vectors may have changed, and keeping them through the draw costs registers.
    if (kHasNoise || row.excluded != 0) segment.read(vectors);
    add_exponentials(vectors, segment_max);
  }

  // Returns the largest logit of the segment, and updates `column` if it is the largest so far.
  __device__ float find_best(const S& segment, const Vector<T> (&vectors)[kVectors]) {
    auto best = vectors[0].maximum();
#pragma unroll
    for (int v = 1; v < kVectors; ++v) best = larger(best, vectors[v].maximum());
    const float lane_max = fmaxf(low(best), high(best));
    const float segment_max = warp_max(lane_max);
    if (segment_max > maximum || column == INT_MAX) {
      const unsigned owners = __ballot_sync(kFullMask, lane_max == segment_max);
      column = find_column(segment, segment_max, owners);
      if constexpr (kScore == Score::kMargin) {
        second = fmaxf(maximum, find_second(segment, segment_max, lane_max, owners));
      }
    } else if constexpr (kScore == Score::kMargin) {
      second = fmaxf(second, segment_max);
    }
    return segment_max;
  }

  // The lowest column that holds a value, among the columns of the given lanes.
  __device__ int find_column(const S& segment, float value, unsigned owners) const {
    int found = INT_MAX;
    for (; owners != 0; owners &= owners - 1) {
      const auto word = segment.word_of(__ffs(owners) - 1);
      if (high(word.logits) == value) found = min(found, word.last);
      if (low(word.logits) == value) found = min(found, word.first);
    }
    return __reduce_min_sync(kFullMask, found);
  }

  // The largest logit of the segment except that of `column`, which one of `owners` holds.
  __device__ float find_second(const S& segment, float segment_max, float lane_max,
                               unsigned owners) const {
    if ((owners & (owners - 1)) != 0) return segment_max;
    const int owner = __ffs(owners) - 1;
    float found = lane == owner ? negative_infinity() : lane_max;
    if (owner >= 0) {  // A segment of NaN has no owner.
      const auto word = segment.word_of(owner);
      if (word.first != column) found = fmaxf(found, low(word.logits));
      if (word.last != column) found = fmaxf(found, high(word.logits));
    }
    return warp_max(found);
  }

  __device__ void add_exponentials(const Vector<T> (&vectors)[kVectors], float segment_max) {
    if (segment_max > maximum) {
      if (maximum > negative_infinity()) {
        const float distance = (maximum - segment_max) * row.scale;
        const float weight = exp2_approx(distance);
        weighted = weighted * weight + sum * weigh(weight, distance);
        sum *= weight;
      }
      maximum = segment_max;
    }
    const Exponents exponents(exp_shift(maximum), row.scale);
    float sums[4] = {}, weights[4] = {};
    exponents.of(vectors, [&](int k, float t) {
      const float exponential = exp2_approx(t);
      sums[k % 4] += exponential;
      if constexpr (kScore == Score::kEntropy) weights[k % 4] += weigh(exponential, t);
    });
    const float excess = exponents.excess();
    const float weight = exp2_approx(-excess);
    const float segment_sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * weight;
    sum += segment_sum;
    if constexpr (kScore == Score::kEntropy) {
      const float total = (weights[0] + weights[1]) + (weights[2] + weights[3]);
      weighted += total * weight - excess * segment_sum;
    }
  }

  __device__ void draw_column(S& segment, const Vector<T> (&vectors)[kVectors], float segment_max) {
    float bound = shared.of(number);
    if (bound == negative_infinity()) bound = raise_bound(seed(segment, segment_max));
    const float floor = bound - row.noise.margin(bound);
    unsigned wanted = 0;  // vectors that could win with the best possible word; bit v is vector v
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float limit = rest_limit(vectors[v].top(), floor);
      wanted |= static_cast<unsigned>(limit > 0.499f) << v;  // ~word + 0.5 is at least 0.5
    }
    wanted = __reduce_or_sync(kFullMask, wanted);
    unsigned able = 0;  // vectors that can win with their actual words
#pragma unroll 1
    for (int v = 0; v < kVectors; v += 2) {  // two at a time, so that a warp waits less
      if ((wanted >> v & 3) == 0) continue;
      able |= may_win(segment, v, floor) << v | may_win(segment, v + 1, floor) << (v + 1);
    }
    able = __reduce_or_sync(kFullMask, able);
    if (able == 0) return;
    for (; able != 0; able &= able - 1) try_vector(segment, __ffs(able) - 1, floor);
    raise_bound(draw.score - row.noise.margin(draw.score));
  }

  // Whether the four words of a counter belong to one vector.
  __device__ bool is_aligned() const { return params.first_column % 4 == 0; }

  // Whether a column of a vector may be the best, judged by the vector's best word and largest
  // logit.
  __device__ unsigned may_win(const S& segment, int v, float floor) const {
    if (!is_aligned()) return 1;
    uint32_t words[kWidth], best = 0;
    draw_words(words, segment, v);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) best = max(best, words[k]);
    return static_cast<float>(~best) <= rest_limit(segment[v].top(), floor);
  }

  __device__ void try_vector(S& segment, int v, float floor) {
    unsigned candidates = (1u << kWidth) - 1;
    if (is_aligned()) {
      uint32_t words[kWidth];
      draw_words(words, segment, v);
      const Vector<T> vector = segment[v];
      candidates = 0;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float rest = static_cast<float>(~words[k]);
        candidates |= static_cast<unsigned>(rest <= rest_limit(vector[k], floor)) << k;
      }
    }
    for (; candidates != 0; candidates &= candidates - 1) {
      const int k = __ffs(candidates) - 1;
      try_column(to_float(segment.value(v, k)), segment.first + segment.offset(v) + k);
    }
  }

  // The largest 2^32 * (1 - U), which is ~word + 0.5, with which the noised logit can reach
  // `reached`: -log(-log U) <= -log(1 - U).
  __device__ float rest_limit(float logit, float reached) const {
    return exp2_approx(fmaf(logit - reached, row.noise.inverse, 32.0f));
  }

  // Generates the random words of the columns of a vector.
  __device__ void draw_words(uint32_t (&words)[kWidth], const S& segment, int v) const {
    const int64_t start = params.first_column + segment.first + segment.offset(v);
#pragma unroll
    for (int k = 0; k < kWidth; k += 4) {
      const Words found = row.noise.stream.words(static_cast<uint32_t>((start + k) >> 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) words[k + i] = found.word[i];
    }
  }

  // Raises the shared bound to the best bound of the lanes; returns the best bound of the block.
  __device__ float raise_bound(float found) {
    const float bound = warp_max(found);
    if (lane == 0) shared.raise(number, bound);
    __syncwarp();
    return fmaxf(bound, shared.of(number));
  }

  __device__ void try_column(float logit, int candidate) {
    if (!(logit > negative_infinity())) return;
    const uint32_t word = row.noise.stream.word(params.first_column + candidate);
    const Draw other{row.noise.approximate(logit, word), logit, candidate};
    draw = better(row.noise, draw, other, params.first_column);
  }

  // A lower bound of the best noised logit: the best of a few columns, which are the best column so
  // far and one column per lane.
  __device__ float seed(const S& segment, float segment_max) {
    const bool has_best = segment_max > maximum || maximum == negative_infinity();
    const bool takes_best = has_best && lane == 0;
    const float logit = takes_best ? segment_max : segment[0][0];
    if (!(logit > negative_infinity())) return negative_infinity();
    const int candidate = takes_best ? column : segment.first + segment.offset(0);
    const uint32_t word = row.noise.stream.word(params.first_column + candidate);
    const float score = row.noise.approximate(logit, word);
    return score - row.noise.margin(score);
  }

  __device__ Partial result() {
    if constexpr (kHasNoise) draw = warp_best(row.noise, draw, params.first_column);
    const float entropy_sum = kScore == Score::kEntropy ? warp_sum(weighted) : 0.0f;
    return {maximum, column, warp_sum(sum), entropy_sum, second, draw};
  }

  __device__ static void finish(const LogitsParams& params, const Row& row, int64_t row_index,
                                const Partial* partials, int count);
};

// Joins the shares of a row; each lane takes kSharesPerLane of them.
template <bool kHasNoise>
__device__ Summary join(const Partial* partials, int count, const Row& row, int64_t first_column,
                        int num_columns, int lane) {
  Partial mine[kSharesPerLane];
  float maximum = negative_infinity();
#pragma unroll
  for (int i = 0; i < kSharesPerLane; ++i) {
    const int share = i * kWarpSize + lane;
    mine[i] = share < count ? partials[share] : Partial::none();
    maximum = fmaxf(maximum, mine[i].maximum);
  }
  maximum = warp_max(maximum);
  const float shift = exp_shift(maximum);
  int column = INT_MAX;
  float sum = 0.0f, weighted = 0.0f;
  Draw draw = Draw::none();
#pragma unroll
  for (int i = 0; i < kSharesPerLane; ++i) {
    const Partial& p = mine[i];
    if (p.maximum == maximum) column = min(column, p.column);
    const float distance = (p.maximum - shift) * row.scale;
    const float weight = exp2f(distance);
    sum += p.sum * weight;
    weighted += p.weighted * weight;
    if (p.maximum > negative_infinity()) weighted += p.sum * weigh(weight, distance);
    if constexpr (kHasNoise) draw = better(row.noise, draw, p.draw, first_column);
  }
  column = __reduce_min_sync(kFullMask, column);
  float second = negative_infinity();
#pragma unroll
  for (int i = 0; i < kSharesPerLane; ++i) {
    const bool is_best = mine[i].maximum == maximum && mine[i].column == column;
    second = fmaxf(second, is_best ? mine[i].second : mine[i].maximum);
  }
  // In a row of NaN no column equals the maximum, or only columns beyond the row's end do.
  if (column >= num_columns) column = 0;
  Summary whole{maximum, first_column + column, warp_sum(sum), warp_sum(weighted), warp_max(second),
                maximum, first_column + column, maximum};
  if constexpr (kHasNoise) {
    draw = warp_best(row.noise, draw, first_column);
    if (draw.column < num_columns) {  // false too if no column was drawn
      whole.token = first_column + draw.column;
      whole.token_logit = draw.logit;
      whole.noised = row.noise.exact(draw.logit, whole.token);
    }
  }
  return whole;
}

template <typename T, Score kScore, bool kHasNoise>
__device__ void Reducer<T, kScore, kHasNoise>::finish(const LogitsParams& params, const Row& row,
                                                      int64_t row_index, const Partial* partials,
                                                      int count) {
  const int lane = threadIdx.x % kWarpSize;
  const Summary whole =
      join<kHasNoise>(partials, count, row, params.first_column, params.num_columns, lane);
  if (lane != 0) return;
  if (params.record != nullptr) write_record(params.record + row_index * kRecordFields, whole);
  if (params.token != nullptr) params.token[row_index] = whole.token;
  if (params.greedy != nullptr) params.greedy[row_index] = whole.column;
  if (params.value != nullptr) params.value[row_index] = score_of(whole, row, params.rows, kScore);
}

// A share of -sum p log(p + epsilon), with p = exp(logit - maximum) / sum.
template <typename T>
struct EntropyShare {
  struct alignas(uint4) Found {
    float share;
  };

  const LogitsParams& params;
  const Row row;
  const Exponents exponents;
  const float inverse;
  const float epsilon;
  float sums[4];  // sums of the lane

  __device__ static const double* record(const LogitsParams& params, int64_t row_index) {
    return params.whole + row_index * kRecordFields;
  }

  __device__ EntropyShare(const LogitsParams& params, int64_t row_index, int, SharedBound&)
      : params(params),
        row(params.rows, row_index),
        exponents(exp_shift(static_cast<float>(record(params, row_index)[kMaximum])), row.scale),
        inverse(exp2f(-exponents.excess()) /
                static_cast<float>(record(params, row_index)[kSumExp])),
        epsilon(params.rows.epsilon[row_index]) {}

  __device__ void begin() { sums[0] = sums[1] = sums[2] = sums[3] = 0.0f; }

  __device__ void add(Segment<T>& segment) {
    segment.remove(params, row.forbidden | row.excluded);
    Vector<T> vectors[kVectors];
    segment.read(vectors);
    exponents.of(vectors, [&](int k, float t) {
      const float p = exp2_approx(t) * inverse;
      sums[k % 4] -= p * log2_approx(p + epsilon);
    });
  }

  __device__ Found result() const {
    return {kLn2 * warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]))};
  }

  __device__ static void finish(const LogitsParams& params, const Row&, int64_t row_index,
                                const Found* found, int count) {
    const int lane = threadIdx.x % kWarpSize;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kSharesPerLane; ++i) {
      const int share = i * kWarpSize + lane;
      if (share < count) total += found[share].share;
    }
    total = warp_sum(total);
    if (lane != 0) return;
    const double* whole = record(params, row_index);
    const bool is_empty = whole[kMaximum] == negative_infinity() || whole[kSumExp] == 0.0;
    params.share[row_index] = is_empty ? -negative_infinity() : total;
  }
};

template <typename T, typename Work>
__global__ void __launch_bounds__((kMaxWarps + 1) * kWarpSize, 1)
    reduce_rows(const __grid_constant__ LogitsParams params, int num_segments) {
  __shared__ Mail<typename Work::Found> mail;
  __shared__ SharedBound bound;
  extern __shared__ uint4 vectors[];  // kStages segments of each warp
  const Member member(num_segments);
  mail.open(member);
  bound.open();
  team_arrive();
  Feed<T> feed(params, member, num_segments, vectors);
  wait_for_prerequisites();
  feed.start();
  launch_dependents();
  team_wait();  // All blocks have started and opened their mail.

  int number = 0;  // number of a row within the team
  if (member.joins) {
    for (int64_t row_index = member.team; row_index < params.num_rows;
         row_index += member.num_teams, ++number) {
      const Row row(params.rows, row_index);
      Work::finish(params, row, row_index, mail.receive(number, member), member.num_shares);
      mail.release(number);
    }
  } else if (member.reduces()) {
    for (int64_t row_index = member.team; row_index < params.num_rows;
         row_index += member.num_teams, ++number) {
      Work work(params, row_index, number, bound);
      for (int share = member.index; share < member.num_shares; share += member.count) {
        work.begin();
        for (int index = share; index < num_segments; index += kShares) {
          Segment<T> segment = feed.take(index);
          work.add(segment);
          feed.release();
        }
        const auto mine = work.result();
        if (threadIdx.x % kWarpSize == 0) mail.send(number, share, mine, member);
        __syncwarp();
      }
    }
  }
}

// ---- Launch ----

// The properties of the card and the kernel that a launch depends on.
struct Card {
  int num_processors;
  int bytes_per_processor;  // bytes of shared memory
  int bytes_per_block;
  bool has_clusters;
};

template <typename Kernel>
cudaError_t describe(Card* card, Kernel kernel) {
  int device = 0;
  cudaFuncAttributes compiled{};
  cudaError_t error = cudaGetDevice(&device);
  const auto ask = [&](int* value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  };
  ask(&card->num_processors, cudaDevAttrMultiProcessorCount);
  ask(&card->bytes_per_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ask(&card->bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&compiled, kernel);
  card->bytes_per_block -= static_cast<int>(compiled.sharedSizeBytes);
  // Ask for the code that runs, not for the card: a later card may run code that was compiled for
  // 8.0.
  card->has_clusters = compiled.ptxVersion >= 90;
  return error;
}

template <typename T, typename Work>
cudaError_t launch(const LogitsParams& params, cudaStream_t stream) {
  const auto kernel = reduce_rows<T, Work>;
  Card card{};
  cudaError_t error = describe(&card, kernel);
  if (error != cudaSuccess) return error;
  const int num_segments = (params.num_columns - 1) / Segment<T>::kColumns + 1;
  const int num_shares = std::min(num_segments, kShares);
  constexpr int kBytesPerWarp = kStages * kVectors * kWarpSize * static_cast<int>(sizeof(uint4));
  // If there are few rows, all of them run at once, and each block has a processor for itself.
  const bool are_few = params.num_rows <= card.num_processors;
  const int blocks_per_processor = are_few ? 1 : 2;
  const int most_warps =
      std::min(kMaxWarps / blocks_per_processor, card.bytes_per_block / kBytesPerWarp);

  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = stream;
  config.attrs = attributes;

  // Search the largest team for which the card can hold one team per row.
  int num_blocks = 1, num_teams = 0;
  if (card.has_clusters && are_few) {
    const int share_of_card = card.num_processors / static_cast<int>(params.num_rows);
    num_blocks = std::max(std::min({share_of_card, num_shares / kMinWarps, kMaxBlocks}), 1);
  }
  for (;; --num_blocks) {
    const int per_block = (num_shares - 1) / num_blocks + 1;
    const int per_warp = (per_block - 1) / most_warps + 1;
    const int num_warps = (per_block - 1) / per_warp + 1;
    int num_bytes = num_warps * kBytesPerWarp;
    if (are_few || per_warp > 1) {  // Request so much shared memory that no further block fits.
      num_bytes = std::max(num_bytes, card.bytes_per_processor / (blocks_per_processor + 1));
    }
    attributes[0].val.clusterDim.x = static_cast<unsigned>(num_blocks);
    config.gridDim = dim3(static_cast<unsigned>(num_blocks));
    config.blockDim = dim3(static_cast<unsigned>((num_warps + 1) * kWarpSize));
    config.dynamicSmemBytes = static_cast<size_t>(num_bytes);
    config.numAttrs = card.has_clusters ? 1 : 0;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, num_bytes);
    if (error != cudaSuccess) return error;
    if (card.has_clusters) {
      error = cudaOccupancyMaxActiveClusters(&num_teams, kernel, &config);
    } else {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &num_teams, kernel, static_cast<int>(config.blockDim.x), config.dynamicSmemBytes);
      num_teams *= card.num_processors;
    }
    if (error != cudaSuccess) return error;
    if (num_blocks == 1 || num_teams >= params.num_rows) break;
  }
  if (card.has_clusters) config.numAttrs = 2;
  const int64_t count = std::min<int64_t>(params.num_rows, std::max(num_teams, 1));
  config.gridDim.x = static_cast<unsigned>(count * num_blocks);
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
  return dispatch_value<Score::kConfidence, Score::kEntropy, Score::kMargin>(
      params.score, [&](auto score) { return launch<T, score>(params, stream); });
}

}  // namespace

cudaError_t launch_candidates(const LogitsParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return dispatch(params.dtype, [&](auto* tag) {
    return launch<std::remove_pointer_t<decltype(tag)>>(params, stream);
  });
}

}  // namespace flash_sample
