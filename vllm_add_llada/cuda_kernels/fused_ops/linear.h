// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "fused_ops.h"

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

// What is read next, by the kernel after this one: the start of a matrix, fetched into the cache
// once all of this product's weight is on its way.
struct Ahead {
  const void* data;  // whole 128 bytes, or null
  int64_t bytes;
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
  bool early;   // let the launch overlap the end of the kernel before it
  Ahead ahead;  // not of the gated product of any number
};

// Enqueue the product: any of few rows (`Tiling` in Python says how many), and the gated one of any
// number. All return cudaErrorInvalidValue where there is no kernel for the tiling, or it does not
// divide the shape; cudaErrorNotSupported without the driver's call that describes a matrix.
cudaError_t launch_skinny_linear(const LinearParams& params, cudaStream_t stream);
cudaError_t launch_skinny_linear_fp8(const LinearParams& params, cudaStream_t stream);
cudaError_t launch_gated_linear(const LinearParams& params, cudaStream_t stream);

// Enqueues out += x weight^T of any number of fp8 rows, by cuBLASLt: no bias, nothing but
// kResidual. cudaErrorNotSupported where that library has no such product, as where
// `has_add_linear` is false: it is not loaded, or too old.
bool has_add_linear();
cudaError_t launch_add_linear(const LinearParams& params, cudaStream_t stream);

// A table of 16 bf16 numbers as bytes that registers are permuted by: those of the numbers' upper
// and lower halves, of the first eight numbers ("low") and of the others ("high"). Of two numbers
// eight apart, these bytes have the same sign each; where it is set, the later one is inverted.
struct LookUp {
  uint32_t upper_low[2], upper_high[2], lower_low[2], lower_high[2];
};

// out = x weight^T, bf16, of a weight of 4-bit numbers q in groups along the depth, each of which
// means (q - zero) * scale, or an entry of the table times the scale.
struct PackedLinearParams {
  const void* x;         // [num_rows, depth], rows x_stride apart
  const void* values;    // bytes [num_columns, depth / 2], values_stride apart
  const float* scales;   // [num_columns, depth / group], scales_stride apart
  const uint8_t* zeros;  // likewise; null with a table
  LookUp table;
  const void* bias;  // [num_columns], or null; not with kSiluMul
  void* out;         // as of LinearParams
  int64_t x_stride, values_stride, scales_stride, out_stride;  // elements
  int num_rows, num_columns, depth, group;
  Epilogue epilogue;
  Tiling tiling;  // no rows: blocks of 64
  bool early;
  Ahead ahead;
};

// As the others, of any number of rows; every block of them reads the weight again.
cudaError_t launch_packed_linear(const PackedLinearParams& params, cudaStream_t stream);

// A matrix [num_rows, depth] of groups of `group` numbers, 4 bits or fp8, made bf16.
struct UnpackParams {
  const void* values;    // bytes, rows values_stride apart
  const float* scales;   // [num_rows, depth / group], scales_stride apart
  const uint8_t* zeros;  // likewise, or null
  const float* table;    // [16], of 4 bits without zeros
  void* out;             // contiguous
  int64_t values_stride, scales_stride;
  int num_rows, depth, group;
  bool is_fp8;
};

// cudaErrorInvalidValue unless 128 divides the depth and 32 the group.
cudaError_t launch_unpack(const UnpackParams& params, cudaStream_t stream);

}  // namespace fused_ops
