// SPDX-License-Identifier: Apache-2.0
//
// Portable products with weights of bf16, fp16 or fp8.

#include "portable.cuh"

namespace fused_ops {
namespace {

template <Operands kOperands, int kMostRows>
struct PlainWeight {
  static constexpr int kRowElementBytes = kOperands == Operands::kFp8 ? 1 : 2;
  static constexpr int kDepth = kLineBytes / kRowElementBytes;
  static constexpr int kParts = 1;
  static constexpr int kBlocks = 2;
  static constexpr int kStageBytes = kTileColumns * kLineBytes;
  static constexpr int kStages = kMostRows > 64 ? 3 : 4;

  __device__ PlainWeight(const PortableParams&, const Work&, const At&) {}

  __device__ void copy(const PortableParams& params, const Work& work, const At& at,
                       uint32_t target, char*) const {
    const Columns columns = columns_of<kMostRows>(params, work, at.tile);
    const int chunk = threadIdx.x % 8;
    const int byte = at.step * kLineBytes + chunk * 16;
    const bool is_deep = byte < params.depth * kRowElementBytes;
#pragma unroll
    for (int i = 0; i < kTileColumns / (kThreads<kMostRows> / 8); ++i) {
      const int local = threadIdx.x / 8 + i * (kThreads<kMostRows> / 8);
      const bool is_there = is_deep && columns.column(local) < columns.end;
      const char* source = static_cast<const char*>(params.weight);
      if (is_there) {
        source += columns.row(local) * params.weight_stride * kRowElementBytes + byte;
      }
      copy_later<16>(line(target, local, chunk), source, is_there);
    }
  }

  template <int kRows>
  __device__ void multiply(const PortableParams&, uint32_t stage, const char*, uint32_t x,
                           Sums<kRows>& sums) const {
    const int lane = threadIdx.x % 32, first = warp_column(), first_row = warp_row<kRows>();
#pragma unroll
    for (int k = 0; k < kLineBytes / 32; ++k) {
      uint32_t left[2][4];
#pragma unroll
      for (int matrix = 0; matrix < 2; ++matrix) {
        load_matrices(line(stage, first + matrix * 16 + lane % 16, k * 2 + lane / 16),
                      left[matrix]);
      }
#pragma unroll
      for (int pair = 0; pair < kWarpRows<kRows> / 16; ++pair) {
        uint32_t right[4];
        load_matrices(
            line(x, first_row + pair * 16 + lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2), right);
#pragma unroll
        for (int matrix = 0; matrix < 2; ++matrix) {
          multiply_add<kOperands>(sums[matrix][pair * 2], left[matrix], right[0], right[1]);
          multiply_add<kOperands>(sums[matrix][pair * 2 + 1], left[matrix], right[2], right[3]);
        }
      }
    }
  }
};

template <int kRows>
using BFloat16Weight = PlainWeight<Operands::kBFloat16, kRows>;
template <int kRows>
using Float16Weight = PlainWeight<Operands::kFloat16, kRows>;
template <int kRows>
using Fp8Weight = PlainWeight<Operands::kFp8, kRows>;

}  // namespace

cudaError_t launch_portable(const PortableParams& params, cudaStream_t stream) {
  const bool is_fp8 = params.x_scales != nullptr;
  if (params.num_columns % 16 != 0 || params.depth % (is_fp8 ? 16 : 8) != 0) {
    return cudaErrorInvalidValue;
  }
  if (is_fp8) {
    cudaFuncAttributes attributes{};
    const auto kernel = portable_kernel<Fp8Weight<32>, __nv_bfloat16, 32>;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    if (attributes.ptxVersion < 89) return cudaErrorNotSupported;  // code without these products
    if (params.dtype != DataType::kBFloat16) return cudaErrorInvalidValue;
    return launch_of<Fp8Weight, __nv_bfloat16>(params, stream);
  }
  if (params.dtype == DataType::kFloat16) return launch_of<Float16Weight, __half>(params, stream);
  return launch_of<BFloat16Weight, __nv_bfloat16>(params, stream);
}

}  // namespace fused_ops
