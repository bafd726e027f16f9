// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "fused_ops.h"

namespace fused_ops {

constexpr int kMaxRoutedExperts = 128;  // 64 or 128
constexpr int kMaxRouterGroups = 32;
constexpr int kMaxRoutedRows = 64;
constexpr int kMaxRouterDepth = 2048;
constexpr int kRouterDepthStep = 512;  // the depth is a multiple of this

// How logits are turned into a choice and weights; see `gather_gemm.Scoring`.
struct RouterScoring {
  bool is_sigmoid;
  int num_groups, num_kept_groups;
  bool is_normalised;
  float scale;
  bool in_fp32;  // logits stay unrounded, and weights are fp32
};

// Routes few bf16 rows to experts: the product with the router, the choice, and the order of the
// rows.
struct RouterParams {
  const void* x;      // [num_rows, depth], rows x_stride apart
  const void* gate;   // [num_experts, depth], rows gate_stride apart; read while the kernel
                      // before this one ends
  const float* bias;  // [num_experts], or null
  void* weights;  // [num_rows, num_chosen], written: in ascending order of experts; bf16 or fp32
  int* slots;     // [num_rows * num_chosen], written: sorted by expert, then by row
  int* ends;      // [num_experts], written: ends of the experts' parts of slots
  int64_t x_stride, gate_stride;  // elements
  int num_rows, num_experts, num_chosen, depth;
  RouterScoring scoring;
};

// Enqueues the kernel. Returns cudaErrorInvalidValue for an unsupported shape, and
// cudaErrorNotSupported if the card does not have compute capability 9.0 or the driver lacks the
// call that describes a matrix.
cudaError_t launch_router(const RouterParams& params, cudaStream_t stream);

}  // namespace fused_ops
