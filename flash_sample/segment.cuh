// SPDX-License-Identifier: Apache-2.0
#pragma once

// The part of a row of logits that a warp holds: segments of 16-byte vectors in shared memory.

#include <cstring>

#include "team.cuh"
#include "vllm_add_llada/cuda_kernels/common/vectors.cuh"

namespace flash_sample {

constexpr int kVectors = 8;  // 16-byte vectors per lane and segment
constexpr int kStages = 2;   // segments per warp in shared memory

// One or two logits in the type of a register, for comparisons.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline __half2 larger(__half2 a, __half2 b) { return __hmax2(a, b); }
__device__ inline __nv_bfloat162 larger(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __hmax2(a, b);
}

__device__ inline float low(float a) { return a; }
__device__ inline float high(float a) { return a; }
__device__ inline float low(__half2 a) { return __low2float(a); }
__device__ inline float high(__half2 a) { return __high2float(a); }
__device__ inline float low(__nv_bfloat162 a) { return __low2float(a); }
__device__ inline float high(__nv_bfloat162 a) { return __high2float(a); }

template <typename T>
struct Vector {
  using Packed = typename Pair<T>::Type;
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
__device__ inline float Vector<float>::operator[](int k) const {
  return __uint_as_float(word(k));
}
template <>
__device__ inline float Vector<__half>::operator[](int k) const {
  const uint32_t pair = word(k / 2);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(k % 2 ? pair >> 16 : pair)));
}
template <>
__device__ inline float Vector<__nv_bfloat16>::operator[](int k) const {
  const uint32_t pair = word(k / 2);
  return __uint_as_float(k % 2 ? pair & 0xffff0000u : pair << 16);
}

__device__ inline float lowest(float) { return negative_infinity(); }
__device__ inline __half lowest(__half) { return __ushort_as_half(0xfc00); }
__device__ inline __nv_bfloat16 lowest(__nv_bfloat16) { return __ushort_as_bfloat16(0xff80); }

__device__ inline void copy_async(uint4* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)),
               "l"(source)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of copies except the last kStages - 1, which fill later stages.
__device__ inline void wait_for_stage() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
}

// A segment of a row, of which each lane owns vectors that are 32 vectors apart, so that the loads
// of a warp are contiguous. Lanes touch only their own vectors, so no barrier is needed. A lane
// owns the same columns whether the row is aligned or not, so alignment does not change the result.
template <typename T>
struct Segment {
  static constexpr int kWidth = Vector<T>::kWidth;
  static constexpr int kStride = kWarpSize * kWidth;  // columns from a lane's vector to its next
  static constexpr int kColumns = kVectors * kStride;
  uint4* mine;  // this lane's vectors in shared memory, 32 apart
  int lane;
  int first;  // column of the row that the segment starts with

  __device__ Vector<T> operator[](int v) const { return {mine[v * kWarpSize]}; }
  __device__ void read(Vector<T> (&vectors)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v] = (*this)[v];
  }
  __device__ int offset(int v) const { return offset(v, lane); }
  __device__ static int offset(int v, int lane) { return v * kStride + lane * kWidth; }

  // One of the 32 words that lane `owner` owns; each calling lane receives a different one. A
  // barrier of the warp must precede the call.
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

  // Starts to copy the columns of a row; columns beyond the row read as -inf.
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

  // Overwrites the columns that `mask` selects with -inf.
  __device__ void remove(const LogitsParams& params, int mask) {
    for (; mask != 0; mask &= mask - 1) {
      const int64_t column = params.rows.columns.ids[__ffs(mask) - 1] - params.first_column - first;
      if (column < 0 || column >= kColumns) continue;
      const int vector = static_cast<int>(column) / kWidth;
      if (vector % kWarpSize == lane) {
        value(vector / kWarpSize, static_cast<int>(column) % kWidth) = lowest(T{});
      }
    }
  }
};

// The segments of one warp, share after share of its team's rows. kStages segments are in shared
// memory or being copied there.
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

  // Starts the first copies; called before the first segment is taken.
  __device__ void start() {
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) load(stage);
  }

  // Waits for the next segment and returns it.
  __device__ S take(int index) {
    wait_for_stage();
    return at(stage_, index);
  }

  // Frees the segment that was taken, and starts to copy another one into its memory.
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
  int stage_ = 0;  // stage of the segment to take next
};

}  // namespace flash_sample
