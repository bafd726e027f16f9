// SPDX-License-Identifier: Apache-2.0
//
// Portable products with weights of 4-bit numbers, read as they are stored.
//
// Up to 64 rows products of a group of numbers are summed alone and then multiplied by its scale,
// in fp32. Sums of more rows take all registers, and a number meets many of them: there it is
// multiplied by its scale and rounded, as `unpack` does.

#include "packed_numbers.cuh"
#include "portable.cuh"

namespace fused_ops {
namespace {

constexpr int kMostGroups = kStrip / 32;  // of a strip

// The same as `subtract` and `TwoPartScale`, in fp16.
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

template <typename Numbers, Operands kOperands, bool kIsTable, int kMostRows>
struct PackedWeight {
  static constexpr int kRowElementBytes = 2;  // of x
  static constexpr int kDepth = kStrip;
  static constexpr int kParts = 2;
  static constexpr int kBlocks = kMostRows > 64 ? 1 : 2;
  static constexpr int kWeightBytes = kTileColumns * kStrip / 2;
  static constexpr int kScaleBytes = kTileColumns * kMostGroups * 4;
  static constexpr int kStageBytes = kWeightBytes + kScaleBytes + kTileColumns * 4;
  static constexpr int kStages = kMostRows > 64 ? 2 : kMostRows > 32 ? 3 : 4;

  uint32_t zeros = 0;  // of this thread's row of the tile, in the step that is copied next

  __device__ PackedWeight(const PortableParams& params, const Work& work, const At& at) {
    if (work.begin(blockIdx.x) < work.begin(blockIdx.x + 1)) load_zeros(params, work, at);
  }

  // Groups of a strip, one at least, and the place of its first.
  static __device__ int groups(const PortableParams& params) {
    return max(kStrip / params.group, 1);
  }
  static __device__ int64_t place(const PortableParams& params, const Columns& columns, int step) {
    return columns.row(threadIdx.x) * params.scales_stride + int64_t{step} * kStrip / params.group;
  }

  __device__ void load_zeros(const PortableParams& params, const Work& work, const At& at) {
    if (kIsTable || threadIdx.x >= kTileColumns) return;
    if (at.tile >= work.column_tiles * work.row_tiles) return;
    const Columns columns = columns_of<kMostRows>(params, work, at.tile);
    if (columns.column(threadIdx.x) >= columns.end) return;
    const uint8_t* source = params.zeros + place(params, columns, at.step);
    switch (groups(params)) {
      case 1:
        zeros = __ldg(source);
        break;
      case 2:
        zeros = __ldg(reinterpret_cast<const uint16_t*>(source));
        break;
      default:
        zeros = __ldg(reinterpret_cast<const uint32_t*>(source));
    }
  }

  __device__ void copy(const PortableParams& params, const Work& work, const At& at,
                       uint32_t target, char* memory) {
    const Columns columns = columns_of<kMostRows>(params, work, at.tile);
#pragma unroll
    for (int i = 0; i < kTileColumns / (kThreads<kMostRows> / 4); ++i) {
      const int local = threadIdx.x / 4 + i * (kThreads<kMostRows> / 4), chunk = threadIdx.x % 4;
      const bool is_there = columns.column(local) < columns.end;
      const char* source = static_cast<const char*>(params.weight);
      if (is_there) {
        source += columns.row(local) * params.weight_stride + at.step * (kStrip / 2) + chunk * 16;
      }
      copy_later<16>(target + local * (kStrip / 2) + chunk * 16, source, is_there);
    }
    if (threadIdx.x >= kTileColumns) return;
    const bool is_there = columns.column(threadIdx.x) < columns.end;
    const float* scales = params.scales;
    if (is_there) scales += place(params, columns, at.step);
    const uint32_t scale_target = target + kWeightBytes + threadIdx.x * (kMostGroups * 4);
    switch (groups(params)) {
      case 1:
        copy_later<4>(scale_target, scales, is_there);
        break;
      case 2:
        copy_later<8>(scale_target, scales, is_there);
        break;
      default:
        copy_later<16>(scale_target, scales, is_there);
    }
    if (!kIsTable) {
      reinterpret_cast<uint32_t*>(memory + kWeightBytes + kScaleBytes)[threadIdx.x] = zeros;
      At next = at;
      next.advance(work.num_steps);
      load_zeros(params, work, next);
    }
  }

  template <int kRows>
  __device__ void multiply(const PortableParams& params, uint32_t, const char* stage, uint32_t x,
                           Sums<kRows>& sums) const {
    constexpr bool kScalesWeight = kRows > 64;  // not its products
    const int lane = threadIdx.x % 32, first = warp_column(), first_row = warp_row<kRows>();
    uint4 numbers[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + i * 8 + lane / 4;
      numbers[i / 2][i % 2] =
          *reinterpret_cast<const uint4*>(stage + row * (kStrip / 2) + lane % 4 * 16);
    }
    const int words_of_group = min(params.group / 32, kMostGroups);
    const float* scales = reinterpret_cast<const float*>(stage + kWeightBytes);
    const uint8_t* zeros = reinterpret_cast<const uint8_t*>(stage + kWeightBytes + kScaleBytes);
    float scale[2][2];
    uint32_t zero[2][2];
    Sums<kScalesWeight ? 8 : kRows> part;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      if (word % words_of_group == 0) {
        const int group = word / words_of_group;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first + i * 8 + lane / 4;
          scale[i / 2][i % 2] = scales[row * kMostGroups + group];
          zero[i / 2][i % 2] = Numbers::kBase + zeros[row * 4 + group] * 0x00010001u;
        }
        if constexpr (!kScalesWeight) {
#pragma unroll
          for (auto& matrix : part) {
#pragma unroll
            for (auto& quad : matrix) quad[0] = quad[1] = quad[2] = quad[3] = 0.0f;
          }
        }
      }
      uint32_t left[2][2][4];  // by 16 of the depth, by 16 columns
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4& quad = numbers[i / 2][i % 2];
        const uint32_t bits = word == 0 ? quad.x : word == 1 ? quad.y : word == 2 ? quad.z : quad.w;
        uint32_t pairs[4];
        if constexpr (kIsTable) {
          look_up(params.table, bits, pairs);
        } else {
          Numbers::subtract(Numbers::kBase, zero[i / 2][i % 2], bits, pairs);
        }
        if constexpr (kScalesWeight) {
#pragma unroll
          for (uint32_t& pair : pairs) pair = Numbers::scaled(pair, scale[i / 2][i % 2]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) left[j / 2][i / 2][i % 2 + j % 2 * 2] = pairs[j];
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t lines = x + word / 2 * kRows * kLineBytes;
        const int chunk = word % 2 * 4 + k * 2 + lane / 8 % 2;
#pragma unroll
        for (int pair = 0; pair < kWarpRows<kRows> / 16; ++pair) {
          uint32_t right[4];
          load_matrices(line(lines, first_row + pair * 16 + lane / 16 * 8 + lane % 8, chunk),
                        right);
#pragma unroll
          for (int matrix = 0; matrix < 2; ++matrix) {
            if constexpr (kScalesWeight) {
              multiply_add<kOperands>(sums[matrix][pair * 2], left[k][matrix], right[0], right[1]);
              multiply_add<kOperands>(sums[matrix][pair * 2 + 1], left[k][matrix], right[2],
                                      right[3]);
            } else {
              multiply_add<kOperands>(part[matrix][pair * 2], left[k][matrix], right[0], right[1]);
              multiply_add<kOperands>(part[matrix][pair * 2 + 1], left[k][matrix], right[2],
                                      right[3]);
            }
          }
        }
      }
      if constexpr (!kScalesWeight) {
        if ((word + 1) % words_of_group == 0) {
#pragma unroll
          for (int matrix = 0; matrix < 2; ++matrix) {
#pragma unroll
            for (int eight = 0; eight < kWarpRows<kRows> / 8; ++eight) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[matrix][eight][i] += part[matrix][eight][i] * scale[matrix][i / 2];
              }
            }
          }
        }
      }
    }
  }
};

template <int kRows>
using BFloat16Whole = PackedWeight<BFloat16Numbers, Operands::kBFloat16, false, kRows>;
template <int kRows>
using BFloat16Table = PackedWeight<BFloat16Numbers, Operands::kBFloat16, true, kRows>;
template <int kRows>
using Float16Whole = PackedWeight<HalfNumbers, Operands::kFloat16, false, kRows>;

}  // namespace

cudaError_t launch_portable_packed(const PortableParams& params, cudaStream_t stream) {
  const bool has_groups =
      params.group >= 32 && (kStrip % params.group == 0 || params.group % kStrip == 0);
  if (params.num_columns % 16 != 0 || params.depth % kStrip != 0 || !has_groups) {
    return cudaErrorInvalidValue;
  }
  if (params.dtype == DataType::kFloat16) {
    if (params.zeros == nullptr) return cudaErrorInvalidValue;
    return launch_of<Float16Whole, __half>(params, stream);
  }
  if (params.zeros == nullptr) return launch_of<BFloat16Table, __nv_bfloat16>(params, stream);
  return launch_of<BFloat16Whole, __nv_bfloat16>(params, stream);
}

}  // namespace fused_ops
