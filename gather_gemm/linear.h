// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace gather_gemm {

// out = x weight^T, bf16. What is done with the product before it is written:
enum class Epilogue {
  kStore,     // out = product
  kResidual,  // out += product, in fp32 and rounded once
  kSiluMul,   // out = silu(product of the gate's rows) * product of the other half
};

// What a cluster of blocks computes. Its blocks keep pipelines of their own.
struct Tiling {
  int rows;     // of x; 0: all there are, which are few
  int columns;  // of the weight's rows: kSiluMul takes half from either part
  int split;    // blocks along the depth
};

struct LinearParams {
  const void* x;       // [num_rows, depth], rows x_stride apart
  const void* weight;  // [num_columns, depth], rows weight_stride apart
  const void* bias;    // [num_columns], or null; not with kSiluMul
  void* out;           // [num_rows, num_columns] (half as many with kSiluMul), out_stride apart
  int64_t x_stride, weight_stride, out_stride;  // elements
  int num_rows, num_columns, depth;
  Epilogue epilogue;
  Tiling tiling;
  bool early;  // let the launch overlap the end of the kernel before it
};

// Enqueue the product: of few rows, at most kMaxSkinnyRows, and of any number. Both return
// cudaErrorInvalidValue where there is no kernel for the tiling, or it does not divide the shape;
// cudaErrorNotSupported without a card of compute capability 9.0, or without a driver call.
constexpr int kMaxSkinnyRows = 192;
cudaError_t launch_skinny_linear(const LinearParams& params, cudaStream_t stream);
cudaError_t launch_wide_linear(const LinearParams& params, cudaStream_t stream);

}  // namespace gather_gemm
