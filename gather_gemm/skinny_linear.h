// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace gather_gemm {

constexpr int kMaxRows = 192;  // of a product: three groups of 64

// out = x weight^T, bf16. What is done with the product before it is written:
enum class Epilogue {
  kStore,     // out = product
  kResidual,  // out += product, in fp32 and rounded once
  kSiluMul,   // out = silu(product of the gate's rows) * product of the other half
};

// Tile of one cluster. Its `split` blocks share the depth, and each keeps its own pipeline.
struct Tiling {
  int columns;  // of the weight's rows: kSiluMul takes half from either part
  int split;    // blocks along the depth
};

struct SkinnyLinearParams {
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

// Enqueues the product. cudaErrorInvalidValue: no kernel for the tiling, or a shape that it does
// not divide; cudaErrorNotSupported: not a card of compute capability 9.0, or no such driver call.
cudaError_t launch_skinny_linear(const SkinnyLinearParams& params, cudaStream_t stream);

}  // namespace gather_gemm
