// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "fused_ops.h"

namespace fused_ops {

// out = x weight^T, bf16, from bf16 operands or fp8 ones (e4m3) with scales. The epilogue is the
// operation on the product before it is written.
enum class Epilogue {
  kStore,     // out = product
  kResidual,  // out += product, in fp32 and rounded once
  kSiluMul,   // out = silu(product of the gate's rows) * product of the other half
};

// The tile of one block, or of a cluster of `split` blocks that share the depth.
struct Tiling {
  int rows;     // rows of x; 0: all rows, which must be few
  int columns;  // rows of the weight; kSiluMul takes half of them from each part
  int split;
};

// Data that the next kernel reads first: the start of a matrix. It is fetched into the cache once
// all of this product's weight has been requested.
struct Ahead {
  const void* data;  // a multiple of 128 bytes, or null
  int64_t bytes;
};

// A second product x weight^T of the same shape, which is added to the sums. Bf16 only.
struct Tail {
  const void* x;                    // [num_rows, depth], rows x_stride apart
  const void* weight;               // [num_columns, depth], rows weight_stride apart
  int64_t x_stride, weight_stride;  // elements
  int depth;                        // a multiple of 8, or 0: nothing is added
};

struct LinearParams {
  const void* x;       // [num_rows, depth], rows x_stride apart
  const void* weight;  // [num_columns, depth], rows weight_stride apart
  const void* bias;    // [num_columns], or null; not with kSiluMul
  void* out;           // [num_rows, num_columns] (half the columns with kSiluMul), out_stride apart
  const float* x_scales;                        // [num_rows], for fp8
  const float* weight_scales;                   // [num_columns], for fp8
  int64_t x_stride, weight_stride, out_stride;  // elements
  int num_rows, num_columns, depth;
  Epilogue epilogue;
  Tiling tiling;
  bool early;   // the launch may overlap the end of the previous kernel
  Ahead ahead;  // not supported by launch_gated_linear
  Tail tail;    // supported only by launch_gated_linear
};

// Enqueue the product: the first two for few rows (`Tiling` in Python states the limits), the gated
// one for any number of rows. All return cudaErrorInvalidValue if there is no kernel for the tiling
// or it does not divide the shape, and cudaErrorNotSupported if the driver lacks the call that
// describes a matrix.
cudaError_t launch_skinny_linear(const LinearParams& params, cudaStream_t stream);
cudaError_t launch_skinny_linear_fp8(const LinearParams& params, cudaStream_t stream);
cudaError_t launch_gated_linear(const LinearParams& params, cudaStream_t stream);

// Enqueues out += x weight^T of any number of fp8 rows, by cuBLASLt: no bias, and kResidual only.
// Returns cudaErrorNotSupported if the library has no such product, for example because
// `has_add_linear` is false: the library is not loaded, or too old.
bool has_add_linear();
cudaError_t launch_add_linear(const LinearParams& params, cudaStream_t stream);

// A table of 16 bf16 numbers, stored as bytes from which a byte permutation of registers selects:
// the upper and lower bytes of the numbers, of the first eight numbers ("low") and of the others
// ("high"). In two numbers that are eight apart, corresponding bytes have the same sign bit. If it
// is set, the byte of the later number is inverted.
struct LookUp {
  uint32_t upper_low[2], upper_high[2], lower_low[2], lower_high[2];
};

// out = x weight^T, bf16, with a weight of 4-bit numbers q in groups along the depth. A number
// represents (q - zero) * scale, or an entry of the table times the scale.
struct PackedLinearParams {
  const void* x;         // [num_rows, depth], rows x_stride apart
  const void* values;    // bytes [num_columns, depth / 2], values_stride apart
  const float* scales;   // [num_columns, depth / group], scales_stride apart
  const uint8_t* zeros;  // shaped like scales; null with a table
  LookUp table;
  const void* bias;  // [num_columns], or null; not with kSiluMul
  void* out;         // see LinearParams
  int64_t x_stride, values_stride, scales_stride, out_stride;  // elements
  int num_rows, num_columns, depth, group;
  Epilogue epilogue;
  Tiling tiling;  // rows 0: blocks of 64 rows
  bool early;
  Ahead ahead;
};

// Like the other products, for any number of rows. Every block of rows reads the weight again.
cudaError_t launch_packed_linear(const PackedLinearParams& params, cudaStream_t stream);

// Converts a matrix [num_rows, depth] of 4-bit or fp8 numbers in groups of `group` numbers to bf16.
struct UnpackParams {
  const void* values;    // bytes, rows values_stride apart
  const float* scales;   // [num_rows, depth / group], scales_stride apart
  const uint8_t* zeros;  // shaped like scales, or null
  const float* table;    // [16], for 4-bit numbers without zeros
  void* out;             // contiguous
  int64_t values_stride, scales_stride;
  int num_rows, depth, group;
  bool is_fp8;
};

// Returns cudaErrorInvalidValue unless the depth is a multiple of 128 and the group of 32.
cudaError_t launch_unpack(const UnpackParams& params, cudaStream_t stream);

}  // namespace fused_ops
