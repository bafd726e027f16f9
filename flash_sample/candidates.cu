// SPDX-License-Identifier: Apache-2.0
//
// From rows of logits to candidates, reading the logits once: best column, its softmax probability
// or the entropy of the row or the difference of the two largest probabilities, and, with
// Gumbel noise, a column drawn at a temperature. Of rows that are joined already, the entropy with
// its epsilon, which depends on the sum over the row.
//
// A row is cut into segments of 4 KiB and those into at most 64 shares: a share is every 64th
// segment, reduced by one warp. The maximum of a segment is known before its first exp(); further
// segments of a share rescale what was summed. What is found in a share is sent to a warp that does
// nothing but join rows, two shares to a lane. The cut depends on the width of a row alone, so the
// bits of a row depend neither on its neighbours nor on who takes the shares: a team of blocks.
//
// Few rows, no more than the card has processors, are a matter of latency. Each block has a
// processor for itself, and a team is the largest cluster (where the card has clusters) of which
// the card holds one for every row. Nothing waits for the team's blocks to start but the first
// message, messages carry their own signal (a fence of the whole card would cost as much as the
// arithmetic), and the next kernel is let in as soon as the first loads are under way.
//
// Many rows are a matter of bandwidth. A team is one block, two of them stay on each processor, and
// each goes through rows of its own; while a warp reduces one segment, the next is on its way to
// shared memory, also that of the next row. On an H200 more segments on their way, or the same
// asked for before the exponentials, took a tenth to a quarter more time.
//
// Numerics: fp32 throughout, but the noise. -inf adds exactly 0. NaN (and +inf, of which inf - inf
// makes NaN) reaches the sum, so the score of its row is NaN; its columns are in range and
// otherwise unspecified.
//
// Noise: of most columns a cheap bound shows that they cannot have the largest noised logit:
// -log(-log U) <= -log(1 - U). The rest is compared in fp32, and, where fp32 does not tell, in
// fp64. So the column is that of the largest logit - temperature * log(-log U) in fp64, whatever
// the bounds, which the warps of a block tell each other.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "params.h"
#include "row.cuh"

namespace flash_sample {
namespace {

constexpr int kVectors = 8;                          // of 16 bytes, per lane and segment
constexpr int kStages = 2;                           // segments that a warp keeps
constexpr int kShares = 64;                          // of a row, at most
constexpr int kSharesPerLane = kShares / kWarpSize;  // of the warp that joins
constexpr int kMaxBlocks = 8;                        // of a cluster
constexpr int kMinWarps = 4;                         // of a cluster's block, that reduce
constexpr int kMaxWarps = 16;                        // of a processor, that reduce

// ---- The warps that share a row ----

// This warp's place.
struct Member {
  int index;       // among the warps of the team that reduce
  int count;       // of those
  int num_shares;  // of a row: those from `index` on, in steps of `count`, are this warp's
  int64_t team;
  int64_t num_teams;
  int num_blocks;  // of the team
  bool joins;

  __device__ explicit Member(int num_segments) : num_shares(min(num_segments, kShares)) {
    const int warp = threadIdx.x / kWarpSize;
    const int num_warps = blockDim.x / kWarpSize - 1;  // the last one joins
#if __CUDA_ARCH__ >= 900
    int rank, cluster, num_clusters;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(num_blocks));
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    asm("mov.u32 %0, %%nclusterid.x;" : "=r"(num_clusters));
#else
    const int rank = 0, cluster = blockIdx.x, num_clusters = gridDim.x;
    num_blocks = 1;
#endif
    count = num_blocks * num_warps;
    index = warp < num_warps ? warp * num_blocks + rank : count;
    joins = warp == num_warps && rank == num_blocks - 1;
    team = cluster;
    num_teams = num_clusters;
  }

  __device__ bool reduces() const { return index < min(count, num_shares); }
};

// A barrier of the team in two halves, which orders the work of a block and barriers alone.
__device__ void team_arrive() {
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ void team_wait() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void init_barrier(const uint64_t& barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count)
               : "memory");
}

__device__ void arrive(const uint64_t& barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
                   shared_address(&barrier))
               : "memory");
}

// An arrival, and bytes that will come besides.
__device__ void expect_bytes([[maybe_unused]] const uint64_t& barrier,
                             [[maybe_unused]] int num_bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(num_bytes)
               : "memory");
#endif
}

__device__ void wait(const uint64_t& barrier, int phase) {
  uint32_t is_done = 0;
  while (is_done == 0) {
    asm volatile(
        "{\n.reg .pred done;\n"
#if __CUDA_ARCH__ >= 900
        "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
#else
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
#endif
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(is_done)
        : "r"(shared_address(&barrier)), "r"(phase)
        : "memory");
  }
}

// What was found in the shares of a row and of the one before; rows are numbered within the team.
// The last block's copy counts. Other blocks send messages of counted bytes there; a team of one
// block writes, and counts the shares.
template <typename Found>
struct Mail {
  static_assert(sizeof(Found) % sizeof(uint4) == 0, "sent in vectors");
  Found found[2][kShares];
  uint64_t full[2];   // barriers: all shares have come
  uint64_t empty[2];  // they have been read

  // To be followed by a barrier of the team.
  __device__ void open(const Member& member) {
    if (threadIdx.x != 0) return;
    const int num_arrivals = member.num_blocks > 1 ? 1 : member.num_shares;
    for (const uint64_t& barrier : full) init_barrier(barrier, num_arrivals);
    for (const uint64_t& barrier : empty) init_barrier(barrier, 1);
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Of one lane.
  __device__ void send(int number, int share, const Found& mine, const Member& member) {
    const int half = number % 2;
    if (number >= 2) wait(empty[half], (number / 2 - 1) % 2);
    if (member.num_blocks > 1) {
      send_to_last_block(half, share, mine, member);
    } else {
      found[half][share] = mine;
      arrive(full[half]);
    }
  }

  // Of the warp that joins: the shares of a row, once all are there.
  __device__ const Found* receive(int number, const Member& member) {
    const int half = number % 2;
    if (member.num_blocks > 1 && threadIdx.x % kWarpSize == 0) {
      expect_bytes(full[half], member.num_shares * static_cast<int>(sizeof(Found)));
    }
    __syncwarp();
    wait(full[half], number / 2 % 2);
    __syncwarp();
    return found[half];
  }

  // Of the warp that joins, in a team of one block: what was received may be overwritten.
  __device__ void release(int number) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) arrive(empty[number % 2]);
  }

 private:
  __device__ void send_to_last_block([[maybe_unused]] int half, [[maybe_unused]] int share,
                                     [[maybe_unused]] const Found& mine,
                                     [[maybe_unused]] const Member& member) {
#if __CUDA_ARCH__ >= 900
    const uint32_t barrier = in_last_block(&full[half], member);
    const uint32_t target = in_last_block(&found[half][share], member);
    constexpr int kCount = sizeof(Found) / sizeof(uint4);
    uint4 vectors[kCount];
    memcpy(vectors, &mine, sizeof(Found));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
          "[%5];" ::"r"(target + i * static_cast<uint32_t>(sizeof(uint4))),
          "r"(vectors[i].x), "r"(vectors[i].y), "r"(vectors[i].z), "r"(vectors[i].w), "r"(barrier)
          : "memory");
    }
#endif
  }

#if __CUDA_ARCH__ >= 900
  __device__ static uint32_t in_last_block(const void* mine, const Member& member) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(shared_address(mine)), "r"(member.num_blocks - 1));
    return address;
  }
#endif
};

// A bound of the largest noised logit of a row, from what the warps of a block have drawn so far.
// Where they are in several rows, the last one counts.
class SharedBound {
 public:
  __device__ void open() {
    if (threadIdx.x == 0) best_ = 0;
  }

  // -inf: none is known. The same for all lanes, which may well read different values.
  __device__ float of(int number) const {
    const uint64_t best = *static_cast<const volatile uint64_t*>(&best_);
    const bool is_known = static_cast<int>(best >> 32) == number + 1;
    const float bound = from_ordered(static_cast<int>(static_cast<uint32_t>(best) ^ kSign));
    return __shfl_sync(kFullMask, is_known ? bound : negative_infinity(), 0);
  }

  // Of one lane; a number that the best noised logit reaches.
  __device__ void raise(int number, float bound) {
    const uint32_t key = static_cast<uint32_t>(ordered(bound)) ^ kSign;
    atomicMax(reinterpret_cast<unsigned long long*>(&best_),
              static_cast<unsigned long long>(number + 1) << 32 | key);
  }

 private:
  static constexpr uint32_t kSign = 0x80000000u;
  uint64_t best_;  // number of the row, from 1 on, and the ordered bits of the bound
};

// The logits may be the work of the kernel before, which this one need not wait for to start.
__device__ void await_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel after this one may start, up to where it waits for the end of this one.
__device__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Sixteen bytes of logits ----

// Logits as they lie in a register, one or two of them, for comparisons.
__device__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __half2 larger(__half2 a, __half2 b) { return __hmax2(a, b); }
__device__ __nv_bfloat162 larger(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmax2(a, b); }

__device__ float low(float a) { return a; }
__device__ float high(float a) { return a; }
__device__ float low(__half2 a) { return __low2float(a); }
__device__ float high(__half2 a) { return __high2float(a); }
__device__ float low(__nv_bfloat162 a) { return __low2float(a); }
__device__ float high(__nv_bfloat162 a) { return __high2float(a); }

template <typename T>
struct PackedOf {
  using Type = float;
};
template <>
struct PackedOf<__half> {
  using Type = __half2;
};
template <>
struct PackedOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};

template <typename T>
struct Vector {
  using Packed = typename PackedOf<T>::Type;
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kWords = 4;
  uint4 raw;

  __device__ uint32_t word(int i) const {
    return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
  }
  __device__ Packed packed(int i) const {
    const uint32_t bits = word(i);
    Packed result;
    memcpy(&result, &bits, sizeof(bits));
    return result;
  }
  __device__ Packed maximum() const {
    return larger(larger(packed(0), packed(1)), larger(packed(2), packed(3)));
  }
  __device__ float top() const { return fmaxf(low(maximum()), high(maximum())); }
  __device__ float operator[](int k) const;
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

__device__ float to_float(float value) { return value; }
__device__ float to_float(__half value) { return __half2float(value); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ float lowest(float) { return negative_infinity(); }
__device__ __half lowest(__half) { return __ushort_as_half(0xfc00); }
__device__ __nv_bfloat16 lowest(__nv_bfloat16) { return __ushort_as_bfloat16(0xff80); }

// ---- What a warp holds of a row ----

__device__ void copy_async(uint4* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)),
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
  __device__ void read(Vector<T> (&vectors)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v] = (*this)[v];
  }
  __device__ int offset(int v) const { return offset(v, lane); }
  __device__ static int offset(int v, int lane) { return v * kStride + lane * kWidth; }

  // One of the 32 words that a lane owns, a different one for each lane that asks; after a barrier
  // of the warp.
  struct Word {
    typename Vector<T>::Packed logits;
    int first;  // column of the row
    int last;
  };
  __device__ Word word_of(int owner) const {
    static_assert(kVectors * Vector<T>::kWords == kWarpSize, "one word a lane");
    constexpr int kPerWord = kWidth / Vector<T>::kWords;
    const int v = lane / Vector<T>::kWords, word = lane % Vector<T>::kWords;
    const uint4* vector = mine + v * kWarpSize + owner - lane;
    const int column = first + offset(v, owner) + word * kPerWord;
    return {reinterpret_cast<const typename Vector<T>::Packed*>(vector)[word], column,
            column + kPerWord - 1};
  }
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
    const bool is_aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;
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

// The segments of one warp, share after share of its team's rows: kStages of them are in shared
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
        logits_(static_cast<const T*>(params.logits) + member.team * params.row_stride),
        row_(member.reduces() ? member.team : params.num_rows),
        share_(member.index),
        index_(member.index) {}

  // To be called before the first segment is taken.
  __device__ void start() {
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
      at(stage, index_).load(logits_, params_.num_columns);
      index_ += kShares;
      if (index_ >= num_segments_) next_share();
    }
    commit_copies();
  }

  __device__ void next_share() {
    share_ += member_.count;
    if (share_ >= member_.num_shares) {
      share_ = member_.index;
      logits_ += member_.num_teams * params_.row_stride;
      row_ += member_.num_teams;
    }
    index_ = share_;
  }

  const LogitsParams& params_;
  const Member& member_;
  const int num_segments_;
  const int lane_;
  uint4* const vectors_;
  const T* logits_;  // row of the segment to load next
  int64_t row_;
  int share_;
  int index_;
  int stage_ = 0;  // of the segment to take next
};

// Exponents of 2: (logit - shift) * scale.
class Exponents {
 public:
  __device__ Exponents(float shift, float scale)
      : shift_(shift), scale_(scale), offset_(shift * scale) {}

  // Gives `use` (int k, float t) the exponents of some logits, all of them larger by excess().
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

  // What the rounding of shift * scale left out.
  __device__ float excess() const { return is_small() ? fmaf(shift_, scale_, -offset_) : 0.0f; }

 private:
  // Whether the product may be rounded: one fma gives an exponent then.
  __device__ bool is_small() const { return fabsf(offset_) < 0x1p16f; }

  const float shift_;
  const float scale_;
  const float offset_;
};

// What is found in a share; columns count from the first of `logits` here.
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

__device__ Draw warp_best(const Noise& noise, Draw draw, int64_t first_column) {
  const float margin = noise.margin(draw.score);
  const float reached = warp_max(draw.score - margin);
  const unsigned able =
      __ballot_sync(kFullMask, draw.column != INT_MAX && draw.score + margin >= reached);
  const auto of_lane = [&](int lane) {
    return Draw{__shfl_sync(kFullMask, draw.score, lane), __shfl_sync(kFullMask, draw.logit, lane),
                __shfl_sync(kFullMask, draw.column, lane)};
  };
  Draw best = Draw::none();
  for (unsigned left = able; left != 0; left &= left - 1) {
    best = better(noise, best, of_lane(__ffs(left) - 1), first_column);
  }
  return best;
}

// A share of a row's record.
template <typename T, Score kScore, bool kHasNoise>
struct Reducer {
  using S = Segment<T>;
  using Found = Partial;
  static constexpr int kWidth = S::kWidth;

  const LogitsParams& params;
  const Row row;
  const int number;  // of the row within the team
  SharedBound& shared;
  const int lane;
  float maximum;  // of the warp, as what follows
  int column;
  float second;  // largest logit but that of `column` (margin only)
  float sum;     // of the lane, as what follows
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
    __syncwarp();  // lanes have read what others own, which may be overwritten now
    if constexpr (kHasNoise) {
      if (row.has_noise) draw_column(segment, vectors, segment_max);
    }
    segment.remove(params, row.excluded);
    if (kHasNoise || row.excluded != 0) segment.read(vectors);  // not kept so long, or changed
    add_exponentials(vectors, segment_max);
  }

  // The largest logit of the segment; keeps its column where it is the largest so far.
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

  // The lowest column with a value, among those of some lanes.
  __device__ int find_column(const S& segment, float value, unsigned owners) const {
    int found = INT_MAX;
    for (; owners != 0; owners &= owners - 1) {
      const auto word = segment.word_of(__ffs(owners) - 1);
      if (high(word.logits) == value) found = min(found, word.last);
      if (low(word.logits) == value) found = min(found, word.first);
    }
    return __reduce_min_sync(kFullMask, found);
  }

  // The largest logit of the segment but that of `column`, which is among those of `owners`.
  __device__ float find_second(const S& segment, float segment_max, float lane_max,
                               unsigned owners) const {
    if ((owners & (owners - 1)) != 0) return segment_max;
    const int owner = __ffs(owners) - 1;
    float found = lane == owner ? negative_infinity() : lane_max;
    if (owner >= 0) {  // not of a segment of NaN
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
    unsigned wanted = 0;  // the vectors that some word would let win; a bit each, as below
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float limit = rest_limit(vectors[v].top(), floor);
      wanted |= static_cast<unsigned>(limit > 0.499f) << v;  // the rest is 0.5 at least
    }
    wanted = __reduce_or_sync(kFullMask, wanted);
    unsigned able = 0;  // those that their words let win
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

  // Whether the words of a counter lie in one vector.
  __device__ bool is_aligned() const { return params.first_column % 4 == 0; }

  // Whether some column of a vector may be the best: by its best word and the largest logit.
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

  // What 2^32 * (1 - U), which is ~word + 0.5, is at most where the noised logit reaches a number:
  // -log(-log U) <= -log(1 - U).
  __device__ float rest_limit(float logit, float reached) const {
    return exp2_approx(fmaf(logit - reached, row.noise.inverse, 32.0f));
  }

  // Of the columns of a vector.
  __device__ void draw_words(uint32_t (&words)[kWidth], const S& segment, int v) const {
    const int64_t start = params.first_column + segment.first + segment.offset(v);
#pragma unroll
    for (int k = 0; k < kWidth; k += 4) {
      const Words found = row.noise.stream.words(static_cast<uint32_t>((start + k) >> 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) words[k + i] = found.word[i];
    }
  }

  // The best bound that a lane or another warp has, for all.
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

  // A number that the best noised logit reaches: that of the best column so far, or of one column
  // per lane.
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

// Joins the shares of a row, kSharesPerLane to a lane.
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
  // A row of NaN: no column equals the maximum, or only those beyond the row's end.
  if (column >= num_columns) column = 0;
  Summary whole{maximum, first_column + column, warp_sum(sum), warp_sum(weighted), warp_max(second),
                maximum, first_column + column, maximum};
  if constexpr (kHasNoise) {
    draw = warp_best(row.noise, draw, first_column);
    if (draw.column < num_columns) {  // also none
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

// A share of -sum p log(p + epsilon), p = exp(logit - maximum) / sum.
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
  float sums[4];  // of the lane

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
  extern __shared__ uint4 vectors[];  // kStages of each warp's segments
  const Member member(num_segments);
  mail.open(member);
  bound.open();
  team_arrive();
  Feed<T> feed(params, member, num_segments, vectors);
  await_kernel_before();
  feed.start();
  let_next_kernel_start();
  team_wait();  // all blocks have started and opened their mail

  int number = 0;  // of a row within the team
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

// What a launch depends on besides its arguments.
struct Card {
  int num_processors;
  int bytes_per_processor;  // of shared memory
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
  // Of what the card runs, not of the card: a later one may run code that was made for 8.0.
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
  // All of few rows are under way at once, and each block has a processor for itself.
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

  // The largest team of which the card holds one for every row.
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
    if (are_few || per_warp > 1) {  // so much that no more blocks fit
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
