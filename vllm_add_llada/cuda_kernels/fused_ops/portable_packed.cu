// SPDX-License-Identifier: Apache-2.0
//
// Portable products with weights of 4-bit numbers, which are read as they are stored.

#include "packed_numbers.cuh"
#include "portable_few.cuh"

namespace fused_ops {
namespace {

constexpr int kMostGroups = kStrip / 32;  // groups per strip, at most

// Like `subtract` and `TwoPartScale`, in fp16.
struct HalfNumbers {
  static constexpr uint32_t kBase = 0x64006400;  // 1024
  static __device__ void subtract(uint32_t base, uint32_t zero, uint32_t word,
                                  uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t sum = above(base, word, i);
      const __half2 number = __hsub2(*reinterpret_cast<const __half2*>(&sum),
                                     *reinterpret_cast<const __half2*>(&zero));
      pairs[i] = *reinterpret_cast<const uint32_t*>(&number);
    }
  }
  static __device__ uint32_t scaled(uint32_t pair, float scale) {
    const __half2 upper = __float2half2_rn(scale);
    const __half2 lower = __float2half2_rn(scale - __low2float(upper));
    const __half2 plain = *reinterpret_cast<const __half2*>(&pair);
    const __half2 number = __hfma2(plain, upper, __hmul2(plain, lower));
    return *reinterpret_cast<const uint32_t*>(&number);
  }
};

struct BFloat16Numbers {
  static constexpr uint32_t kBase = 0x43004300;  // 128
  static __device__ void subtract(uint32_t base, uint32_t zero, uint32_t word,
                                  uint32_t (&pairs)[4]) {
    fused_ops::subtract(base, zero, word, pairs);
  }
  static __device__ uint32_t scaled(uint32_t pair, float scale) {
    return TwoPartScale(scale)(pair);
  }
};

// The types that a product of 4-bit numbers uses.
template <typename Numbers_, Operands kOperands_, typename Number_, bool kIsTable_>
struct PackedKind {
  using Numbers = Numbers_;
  using Number = Number_;  // dtype of x and of the result
  static constexpr Operands kOperands = kOperands_;
  static constexpr bool kIsTable = kIsTable_;
};

// Copies the scales and zero points of a stage's strips to shared memory, one strip for each of the
// warps that share the depth. Groups that are larger than a strip have one scale per strip.
template <typename S, bool kIsTable, int kGroups, int kStrips_>
struct StripScales {
  static constexpr int kScaleBytes = kTileColumns * kGroups * 4;  // bytes of scales per strip
  static constexpr int kStripBytes = kScaleBytes + kTileColumns * kMostGroups;
  static constexpr int kBytes = kStrips_ * kStripBytes;

  int strip;   // strip to copy next
  int64_t at;  // index of the first group of this thread's row of the tile
  bool is_there;
  uint32_t zeros = 0;  // zero points of the strip to copy next

  // Number of groups that begin in a strip. It is 1 if a strip has one group, and may be 0 if a
  // group is larger than a strip.
  static __device__ int groups(const PortableParams& params) {
    return kGroups == 1 ? 1 : kStrip / params.group;
  }

  // The index of the strip's first group.
  __device__ int64_t place(const PortableParams& params) const {
    if (groups(params) > 1) return at + strip * groups(params);
    return at + (params.group == kStrip ? strip : strip / (params.group / kStrip));
  }

  __device__ void load_zeros(const PortableParams& params) {
    if (kIsTable || !is_there || strip * kStrip >= params.depth) return;
    const uint8_t* source = params.zeros + place(params);
    switch (groups(params)) {
      case 2:
        zeros = __ldg(reinterpret_cast<const uint16_t*>(source));
        break;
      case 4:
        zeros = __ldg(reinterpret_cast<const uint32_t*>(source));
        break;
      default:
        zeros = __ldg(source);
    }
  }

  __device__ void begin(const PortableParams& params, const Columns& columns, int step) {
    const int local = threadIdx.x % kTileColumns;
    strip = step * kStrips_ + min(static_cast<int>(threadIdx.x) / kTileColumns, kStrips_ - 1);
    is_there = threadIdx.x < kStrips_ * kTileColumns && columns.column(local) < columns.end;
    at = columns.row(local) * params.scales_stride;
    load_zeros(params);
  }

  // `is_last`: whether this is the last strip of the tile.
  __device__ void copy(const PortableParams& params, uint32_t target, char* memory, bool is_more,
                       bool is_last) {
    if (S::kThreads == kStrips_ * kTileColumns || threadIdx.x < kStrips_ * kTileColumns) {
      const int local = threadIdx.x % kTileColumns, own = threadIdx.x / kTileColumns * kStripBytes;
      const bool is_deep = is_more && is_there && strip * kStrip < params.depth;
      const float* source = params.scales + place(params);
      const uint32_t to = target + own + local * (kGroups * 4);
      switch (groups(params)) {
        case 2:
          copy_later<8>(to, source, is_deep);
          break;
        case 4:
          copy_later<16>(to, source, is_deep);
          break;
        default:
          copy_later<4>(to, source, is_deep);
      }
      if (!kIsTable) reinterpret_cast<uint32_t*>(memory + own + kScaleBytes)[local] = zeros;
    }
    strip += kStrips_;
    if (!is_last) load_zeros(params);
  }

  // Loads scale and zero point of a group for each of a thread's rows.
  template <typename Kind>
  static __device__ void load_group(const char* strip, int group, float (&scale)[S::kMatrices * 2],
                                    uint32_t (&zero)[S::kMatrices * 2]) {
#pragma unroll
    for (int i = 0; i < S::kMatrices * 2; ++i) {
      const int local = S::column() + i * 8 + threadIdx.x % 32 / 4;
      scale[i] = reinterpret_cast<const float*>(strip)[local * kGroups + group];
      const auto* zeros = reinterpret_cast<const uint8_t*>(strip + kScaleBytes);
      zero[i] =
          kIsTable ? 0 : Kind::Numbers::kBase + zeros[local * kMostGroups + group] * 0x00010001u;
    }
  }
};

constexpr int kValueBytes = kTileColumns * kStrip / 2;

// Copies the strips of a tile, with their scales and zero points, to shared memory.
template <typename S, bool kIsTable>
struct Strips {
  using Scales = StripScales<S, kIsTable, kMostGroups, 1>;
  static constexpr int kBytes = kValueBytes + Scales::kBytes;
  static constexpr int kApart = S::kThreads / 4;
  static constexpr int kLines = kTileColumns / kApart;

  WeightLines<kApart, kLines> lines;
  Scales scales;

  __device__ void begin(const PortableParams& params, const Work& work, int tile, int step) {
    const Columns columns = columns_of(params, work, tile);
    lines.begin(params, columns, threadIdx.x / 4, params.weight_stride);
    scales.begin(params, columns, step);
  }

  // `is_last`: whether this is the last strip of the tile.
  __device__ void copy(const PortableParams& params, uint32_t target, char* memory, bool is_last) {
    const int byte = scales.strip * (kStrip / 2) + threadIdx.x % 4 * 16;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      copy_later<16>(target + (threadIdx.x + i * S::kThreads) * 16, lines.line(i) + byte,
                     lines.is_there(i));
    }
    scales.copy(params, target + kValueBytes, memory + kValueBytes, true, is_last);
  }
};

// Converts one word (32 of the depth) of each of a thread's rows to left operands, by 16 of the
// depth and by 16 columns.
template <typename Kind, int kMatrices>
__device__ void widen_words(const PortableParams& params, const uint4 (&numbers)[kMatrices * 2],
                            int word, const uint32_t (&zero)[kMatrices * 2],
                            uint32_t (&left)[2][kMatrices][4]) {
#pragma unroll
  for (int i = 0; i < kMatrices * 2; ++i) {
    const uint4& quad = numbers[i];
    const uint32_t bits = word == 0 ? quad.x : word == 1 ? quad.y : word == 2 ? quad.z : quad.w;
    uint32_t pairs[4];
    if constexpr (Kind::kIsTable) {
      look_up(params.table, bits, pairs);
    } else {
      Kind::Numbers::subtract(Kind::Numbers::kBase, zero[i], bits, pairs);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) left[j / 2][i / 2][i % 2 + j % 2 * 2] = pairs[j];
  }
}

template <typename S>
__device__ void load_numbers(const char* strip, uint4 (&numbers)[S::kMatrices * 2]) {
#pragma unroll
  for (int i = 0; i < S::kMatrices * 2; ++i) {
    const int row = S::column() + i * 8 + threadIdx.x % 32 / 4;
    numbers[i] = *reinterpret_cast<const uint4*>(strip + row * (kStrip / 2) + threadIdx.x % 4 * 16);
  }
}

// Multiplies each number by its scale and rounds it, as `unpack` does.
template <typename Kind, int kMatrices>
__device__ void scale_words(const float (&scale)[kMatrices * 2],
                            uint32_t (&left)[2][kMatrices][4]) {
#pragma unroll
  for (int i = 0; i < kMatrices * 8; ++i) {
    uint32_t& pair = left[i % 2][i / 8][i / 2 % 4];
    pair = Kind::Numbers::scaled(pair, scale[i / 8 * 2 + i / 2 % 2]);
  }
}

// Products of up to 64 rows. `kGroups` is the maximum number of groups per strip.
template <typename Kind, int kGroups, int kRows>
struct PackedFew {
  using S = Shape<4, (kRows > 32 ? 1 : 2), kRows>;
  using Scales = StripScales<S, Kind::kIsTable, kGroups, S::kRowWarps>;
  using Number = typename Kind::Number;
  static constexpr int kRowElementBytes = 2, kStrideBytes = 1;
  static constexpr int kDepth = S::kRowWarps * kStrip;
  static constexpr int kLines = 2;
  static constexpr int kBlocks = S::kRowWarps == 1 ? 3 : 2;
  static constexpr int kStages = 2;
  using Numbers = uint4[S::kMatrices * 2];

  const char* from;  // address of the strip to load next
  int eight, next;   // bytes from `from` to the other rows
  int left;          // depth from `from` on; 0 or less if there is no next step
  Numbers numbers = {};

  static __device__ uint32_t place(int lane) {
    return line(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  __device__ void begin(const PortableParams& params, const Columns& columns, int step) {
    const ThreadRows rows(columns, S::column());
    const int strip = step * S::kRowWarps + threadIdx.x / (32 * S::kColumnWarps);
    from = static_cast<const char*>(params.weight) + rows.first * params.weight_stride +
           strip * (kStrip / 2) + threadIdx.x % 4 * 16;
    eight = static_cast<int>(rows.eight * params.weight_stride);
    next = static_cast<int>(rows.next * params.weight_stride);
    left = params.depth - strip * kStrip;
  }

  __device__ void advance() { from += S::kRowWarps * (kStrip / 2), left -= S::kRowWarps * kStrip; }
  __device__ void end() { left = 0; }

  __device__ void load(const PortableParams& params, Numbers& to) const {
    const char* first = left > 0 ? from : static_cast<const char*>(params.weight);
#pragma unroll
    for (int i = 0; i < S::kMatrices * 2; ++i) {
      to[i] = load_once(first + i % 2 * eight + i / 2 * next);
    }
  }

  __device__ void load(const PortableParams& params) { load(params, numbers); }

  __device__ void multiply(const PortableParams& params, uint32_t x, const char* scales,
                           WarpSums<S>& all) {
    const char* strip = scales + threadIdx.x / (32 * S::kColumnWarps) * Scales::kStripBytes;
    const int words_of_group = kGroups == 1 ? 4 : params.group / 32;
    float scale[S::kMatrices * 2];
    uint32_t zero[S::kMatrices * 2];
    Numbers following;
    load(params, following);
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      if (word == 0 || (kGroups > 1 && word % words_of_group == 0)) {
        Scales::template load_group<Kind>(strip, word / words_of_group, scale, zero);
      }
      uint32_t left[2][S::kMatrices][4];
      widen_words<Kind, S::kMatrices>(params, numbers, word, zero, left);
      scale_words<Kind, S::kMatrices>(scale, left);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t lines = (x ^ (word % 2 * 4 + k * 2) * 16) + word / 2 * kRows * kLineBytes;
#pragma unroll
        for (int pair = 0; pair < kRows / 16; ++pair) {
          uint32_t right[4];
          load_matrices(lines + pair * 16 * kLineBytes, right);
#pragma unroll
          for (int m = 0; m < S::kMatrices; ++m) {
            multiply_add<Kind::kOperands>(all[m][pair * 2], left[k][m], right[0], right[1]);
            multiply_add<Kind::kOperands>(all[m][pair * 2 + 1], left[k][m], right[2], right[3]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < S::kMatrices * 2; ++i) numbers[i] = following[i];
  }
};

// Products of more rows. Strips pass through shared memory in a ring of their own, because a
// stage of x holds only half the depth of a strip.
constexpr int kStrips = 3;

template <typename Kind, int kRows>
struct PackedMany {
  using S = Shape<4, 2, kRows>;
  static constexpr int kStageBytes = kRows * kLineBytes;
  static constexpr int kStripBytes = kStrips * Strips<S, Kind::kIsTable>::kBytes;
};

template <typename Kind, int kRows>
__global__ void __launch_bounds__(PackedMany<Kind, kRows>::S::kThreads)
    portable_packed_many(const PortableParams params, const Work work) {
  using W = PackedMany<Kind, kRows>;
  using S = typename W::S;
  constexpr int kApart = S::kThreads / 8, kLines = kRows / kApart;
  extern __shared__ __align__(1024) char shared[];
  __shared__ int arrived;
  using OfTile = Strips<S, Kind::kIsTable>;
  const uint32_t ring = shared_place(shared) + kStrips * OfTile::kBytes;
  const int begin = work.begin(blockIdx.x), count = work.begin(blockIdx.x + 1) - begin;
  int tile = begin / work.num_steps, step = begin - tile * work.num_steps;
  OfTile strips;
  strips.begin(params, work, tile, step);
  int strip_tile = tile, strip_slot = 0;
  auto copy_strip = [&] {
    char* memory = shared + strip_slot * OfTile::kBytes;
    const bool is_last = strips.scales.strip + 1 == work.num_steps;
    strips.copy(params, shared_place(memory), memory, is_last);
    if (is_last) strips.begin(params, work, ++strip_tile, 0);
    if (++strip_slot == kStrips) strip_slot = 0;
  };
  RowLines<kApart, kLines> rows;
  auto begin_rows = [&](int of) {
    rows.begin(params, of % work.row_tiles * kRows + threadIdx.x / 8, params.x_stride * 2);
  };
  begin_rows(tile);
  const int chunk_byte = threadIdx.x % 8 * 16, row_bytes = params.depth * 2;
  const uint32_t row_target = ring + line(threadIdx.x / 8, threadIdx.x % 8);
  int row_tile = tile, row_byte = step * (kStrip * 2) + chunk_byte;
  // no branch, so that the copies run between products
  auto copy_rows = [&](int stage, bool is_more) {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      copy_later<16>(row_target + stage * W::kStageBytes + i * kApart * kLineBytes,
                     rows.first + i * rows.next + row_byte, rows.is_there(i) && is_more);
    }
    row_byte += kLineBytes;
  };

  copy_strip();
  end_copies();
  if (count > 1) copy_strip();
  launch_dependents();
  copy_rows(0, true);
  end_copies();
  typename S::Sums sums;
  clear(sums);
  const int lane = threadIdx.x % 32;
  // converts the index of a word to that of a group
  const int shift = params.group >= kStrip ? 2 : params.group / 64;
  uint4 numbers[S::kMatrices * 2];
  int slot = 0;
  for (int i = 0; i < count; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0) {
        wait_for_copies<0>();
      } else {
        wait_for_copies<1>();  // a copy of a strip may still run
      }
      __syncthreads();
      if (half == 1 && row_byte >= row_bytes) row_byte = chunk_byte, begin_rows(++row_tile);
      copy_rows(1 - half, half == 0 || i + 1 < count);
      end_copies();
      if (half == 0) {
        if (i + 2 < count) copy_strip();
        end_copies();
        load_numbers<S>(shared + slot * OfTile::kBytes, numbers);
      }
#pragma unroll
      for (int some = 0; some < 2; ++some) {
        const int word = half * 2 + some;
        float scale[S::kMatrices * 2];
        uint32_t zero[S::kMatrices * 2], left[2][S::kMatrices][4];
        OfTile::Scales::template load_group<Kind>(shared + slot * OfTile::kBytes + kValueBytes,
                                                  word >> shift, scale, zero);
        widen_words<Kind, S::kMatrices>(params, numbers, word, zero, left);
        scale_words<Kind, S::kMatrices>(scale, left);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int chunk = some * 4 + k * 2 + lane / 8 % 2;
#pragma unroll
          for (int pair = 0; pair < S::kEights / 2; ++pair) {
            uint32_t right[4];
            load_matrices(ring + half * W::kStageBytes +
                              line(S::row() + pair * 16 + lane / 16 * 8 + lane % 8, chunk),
                          right);
#pragma unroll
            for (int m = 0; m < S::kMatrices; ++m) {
              multiply_add<Kind::kOperands>(sums[m][pair * 2], left[k][m], right[0], right[1]);
              multiply_add<Kind::kOperands>(sums[m][pair * 2 + 1], left[k][m], right[2], right[3]);
            }
          }
        }
      }
    }
    if (++slot == kStrips) slot = 0;
    if (++step == work.num_steps || i + 1 == count) {
      finish<typename Kind::Number, S>(params, work, tile, sums, &arrived);
      step = 0;
      ++tile;
    }
  }
}

template <typename Kind, int kRows>
cudaError_t launch_many(const PortableParams& params, cudaStream_t stream) {
  using W = PackedMany<Kind, kRows>;
  constexpr int kShared = W::kStripBytes + 2 * W::kStageBytes;
  static_assert(kShared <= kMostShared);
  return launch_portable_kernel<typename W::S, portable_packed_many<Kind, kRows>>(params, kStrip,
                                                                                  kShared, stream);
}

template <typename Kind>
cudaError_t launch_any(const PortableParams& params, cudaStream_t stream) {
  if (params.num_rows > 64) {
    return params.num_rows > 128 && !takes_short_tiles(params)
               ? launch_many<Kind, 256>(params, stream)
               : launch_many<Kind, 128>(params, stream);
  }
  return dispatch_value<1, kMostGroups>(params.group >= kStrip ? 1 : kMostGroups, [&](auto groups) {
    if (params.num_rows > 32) return launch_few<PackedFew<Kind, groups, 64>>(params, stream);
    return launch_few<PackedFew<Kind, groups, 32>>(params, stream);
  });
}

using BFloat16Whole = PackedKind<BFloat16Numbers, Operands::kBFloat16, __nv_bfloat16, false>;
using BFloat16Table = PackedKind<BFloat16Numbers, Operands::kBFloat16, __nv_bfloat16, true>;
using Float16Whole = PackedKind<HalfNumbers, Operands::kFloat16, __half, false>;

}  // namespace

cudaError_t launch_portable_packed(const PortableParams& params, cudaStream_t stream) {
  const bool has_groups =
      params.group >= 32 && (kStrip % params.group == 0 || params.group % kStrip == 0);
  if (params.num_columns % 16 != 0 || params.depth % kStrip != 0 || !has_groups) {
    return cudaErrorInvalidValue;
  }
  if (params.dtype == DataType::kFloat16) {
    if (params.zeros == nullptr) return cudaErrorInvalidValue;
    return launch_any<Float16Whole>(params, stream);
  }
  if (params.zeros == nullptr) return launch_any<BFloat16Table>(params, stream);
  return launch_any<BFloat16Whole>(params, stream);
}

}  // namespace fused_ops
