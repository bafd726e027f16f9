// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fused_ops {

// out = x weight^T, bf16, of bf16 operands or fp8 ones (e4m3) with scales. What is done with the
// product before it is written:
enum class Epilogue {
  kStore,     // out = product
  kResidual,  // out += product, in fp32 and rounded once
  kSiluMul,   // out = silu(product of the gate's rows) * product of the other half
};

// What one block computes, or a cluster of `split` blocks that share the depth.
struct Tiling {
  int rows;     // of x; 0: all there are, which are few
  int columns;  // of the weight's rows: kSiluMul takes half from either part
  int split;
};

struct LinearParams {
  const void* x;          // [num_rows, depth], rows x_stride apart
  const void* weight;     // [num_columns, depth], rows weight_stride apart
  const void* bias;       // [num_columns], or null; not with kSiluMul
  void* out;              // [num_rows, num_columns] (half as many with kSiluMul), out_stride apart
  const float* x_scales;  // [num_rows], of fp8
  const float* weight_scales;                   // [num_columns], of fp8
  int64_t x_stride, weight_stride, out_stride;  // elements
  int num_rows, num_columns, depth;
  Epilogue epilogue;
  Tiling tiling;
  bool early;  // let the launch overlap the end of the kernel before it
};

// Enqueue the product: any of few rows, at most 192 or 256 of fp8, and the gated one of any number.
// All return cudaErrorInvalidValue where there is no kernel for the tiling, or it does not divide
// the shape; cudaErrorNotSupported without the driver's call that describes a matrix.
cudaError_t launch_skinny_linear(const LinearParams& params, cudaStream_t stream);
cudaError_t launch_skinny_linear_fp8(const LinearParams& params, cudaStream_t stream);
cudaError_t launch_gated_linear(const LinearParams& params, cudaStream_t stream);

}  // namespace fused_ops
