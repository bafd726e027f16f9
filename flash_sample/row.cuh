// SPDX-License-Identifier: Apache-2.0
#pragma once

// Arithmetic shared by the kernels: warp reductions, one row's parameters, noised scores, and the
// functions that join records and turn them into a token and a score.

#include <climits>

#include "params.h"
#include "philox.cuh"
#include "vllm_add_llada/cuda_kernels/common/reduce.cuh"

namespace flash_sample {

constexpr int kWarpSize = 32;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ inline float negative_infinity() { return __int_as_float(0xff800000); }

__device__ inline float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ inline float log2_approx(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Maps floats to integers of the same order; the value must not be NaN.
__device__ inline int ordered(float value) {
  const int bits = __float_as_int(value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

__device__ inline float from_ordered(int bits) {
  return __int_as_float(bits ^ ((bits >> 31) & 0x7fffffff));
}

__device__ inline float warp_max(float value) {
  return from_ordered(__reduce_max_sync(kFullMask, ordered(value)));
}

__device__ inline float warp_sum(float value) { return over_warp(value, Sum()); }

// The number to subtract before exp(): -inf - -inf would be NaN where the sum must be 0.
__device__ inline float exp_shift(float maximum) {
  return maximum == negative_infinity() ? 0.0f : maximum;
}

// exp2(t) * t, and 0 if t is -inf; `exponential` is exp2(t).
__device__ inline float weigh(float exponential, float t) { return exponential * fmaxf(t, -1e4f); }

// The noise of a row: a logit becomes logit - temperature * log(-log U).
struct Noise {
  Stream stream;
  double temperature;
  float tau;
  float inverse;  // converts a difference of logits to the exponent of 2 at the temperature

  __device__ double exact(float logit, int64_t column) const {
    const double u = to_uniform(stream.word(column));
    // Two rounded operations, because the reference rounds them separately.
    return __dsub_rn(static_cast<double>(logit), __dmul_rn(temperature, log(-log(u))));
  }

  // Within margin() of exact().
  __device__ float approximate(float logit, uint32_t word) const {
    const float rest = (static_cast<float>(~word) + 0.5f) * 0x1p-32f;  // 1 - U, precise near 0
    const float series =
        rest * (1.0f + rest * (0.5f + rest * (0.33333333f + rest * (0.25f + rest * 0.2f))));
    const float direct = -kLn2 * log2_approx((static_cast<float>(word) + 0.5f) * 0x1p-32f);
    return logit - tau * kLn2 * log2_approx(rest < 0.03125f ? series : direct);
  }

  // The approximate logarithms are accurate to 2e-5, and sums are rounded.
  __device__ float margin(float score) const { return tau * 1e-4f + fabsf(score) * 1e-6f; }
};

// The best of some noised logits; its score is approximate.
struct Draw {
  float score;
  float logit;
  int column;  // INT_MAX: none yet

  __device__ static Draw none() { return {negative_infinity(), negative_infinity(), INT_MAX}; }
};

// Compares two draws whose approximate scores are too close to decide.
static __device__ __noinline__ bool exactly_better(Noise noise, Draw a, Draw b,
                                                   int64_t first_column) {
  const double score_a = noise.exact(a.logit, first_column + a.column);
  const double score_b = noise.exact(b.logit, first_column + b.column);
  return score_a > score_b || (score_a == score_b && a.column < b.column);
}

__device__ inline Draw better(const Noise& noise, const Draw& a, const Draw& b,
                              int64_t first_column) {
  if (b.column == INT_MAX || a.column == b.column) return a;
  if (a.column == INT_MAX) return b;
  const float margin = noise.margin(a.score) + noise.margin(b.score);
  if (a.score > b.score + margin) return a;
  if (b.score > a.score + margin) return b;
  return exactly_better(noise, a, b, first_column) ? a : b;
}

// The best of the draws of a warp's lanes; every lane receives it.
__device__ inline Draw warp_best(const Noise& noise, Draw draw, int64_t first_column) {
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

struct Row {
  Noise noise;
  bool has_noise;
  float scale;  // converts a difference of logits to the exponent of 2
  int forbidden;
  int excluded;

  __device__ Row(const RowParams& params, int64_t row) {
    noise.temperature = params.temperature[row];
    noise.tau = static_cast<float>(noise.temperature);
    // The bound prevents an infinite scale, which would make NaN of a difference of 0.
    noise.inverse = fminf(kLog2E / noise.tau, 1e30f);
    has_noise = noise.temperature > 0.0;
    noise.stream = {static_cast<uint64_t>(params.seed[row]), params.purpose,
                    static_cast<uint32_t>(params.step[row]),
                    static_cast<uint32_t>(params.position[row])};
    scale = params.is_tempered && has_noise ? noise.inverse : kLog2E;
    const int known = (1 << params.columns.count) - 1;  // other bits name no column
    forbidden = params.forbidden[row] & known;
    excluded = params.excluded[row] & known;
  }
};

// A record in registers; the sums are in units of log2.
struct Summary {
  float maximum;
  int64_t column;
  float sum;
  float weighted;
  float second;
  double noised;
  int64_t token;
  float token_logit;
};

__device__ inline void write_record(double* record, const Summary& s) {
  record[kMaximum] = s.maximum;
  record[kColumn] = static_cast<double>(s.column);
  record[kSumExp] = s.sum;
  record[kWeighted] = s.weighted * kLn2;
  record[kSecond] = s.second;
  record[kNoised] = s.noised;
  record[kToken] = static_cast<double>(s.token);
  record[kTokenLogit] = s.token_logit;
}

__device__ inline float score_of(const Summary& s, const Row& row, const RowParams& params,
                                 Score score) {
  if (s.sum != s.sum) return s.sum;
  // The sum is 0 too if only excluded columns are within reach of the maximum (87 in fp32).
  const bool is_empty = s.maximum == negative_infinity() || s.sum == 0.0f;
  if (score == Score::kEntropy) {
    return is_empty ? -negative_infinity() : kLn2 * (log2f(s.sum) - s.weighted / s.sum);
  }
  if (is_empty) return 0.0f;
  if (score == Score::kMargin) {
    return (1.0f - exp2_approx((s.second - s.maximum) * row.scale)) / s.sum;
  }
  for (int i = 0; i < params.columns.count; ++i) {
    if ((row.excluded >> i & 1) && params.columns.ids[i] == s.token) return 0.0f;
  }
  return exp2_approx((s.token_logit - s.maximum) * row.scale) / s.sum;
}

}  // namespace flash_sample
