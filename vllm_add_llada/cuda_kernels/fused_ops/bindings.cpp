// SPDX-License-Identifier: Apache-2.0
//
// The module registers no C++ type, so it may be imported under both of its names.

#include <algorithm>
#include <stdexcept>

#include "attention.h"
#include "fused_ops.h"
#include "grouped_gemm.h"
#include "linear.h"
#include "portable.h"
#include "quantise.h"
#include "ranks.h"
#include "router.h"
#include "vllm_add_llada/cuda_kernels/common/bind.h"

namespace native {

using namespace fused_ops;

template <>
struct Given<Ahead> : GivenMembers<Ahead, const void*, int64_t> {};
template <>
struct Given<Tail> : GivenMembers<Tail, const void*, const void*, int64_t, int64_t, int> {};
template <>
struct Given<Tiling> : GivenMembers<Tiling, int, int, int> {};
template <>
struct Given<RouterScoring> : GivenMembers<RouterScoring, bool, int, int, bool, float, bool> {};

template <>
struct Given<KeptRows>
    : GivenMembers<KeptRows, Rows, Rows, Rows, Integers, int64_t, int64_t, Integers, int64_t> {};

template <>
struct Given<Fp8Rows> : GivenMembers<Fp8Rows, Rows, Rows, Rows, Rows, const float*, const float*> {
};

template <>
struct Given<Attended> : GivenMembers<Attended, const int*, const int*, const int*, const int*,
                                      const int*, const int*, int> {};

template <>
struct Given<LookUp> {
  using Type = std::array<uint32_t, 8>;
  static LookUp of(const Type& t) {
    return {{t[0], t[1]}, {t[2], t[3]}, {t[4], t[5]}, {t[6], t[7]}};
  }
};

template <>
// tuple: parts and flags of all ranks, calls, is_over, rank, number of blocks
struct Given<Meeting> {
  using Addresses = std::vector<uintptr_t>;
  using Type = std::tuple<Addresses, Addresses, uintptr_t, uintptr_t, int, int>;
  static Meeting of(const Type& given) {
    const auto& [parts, flags, calls, is_over, rank, num_blocks] = given;
    Meeting meeting{};
    meeting.num_ranks = static_cast<int>(std::min<size_t>(parts.size(), kMaxRanks));
    for (int other = 0; other < meeting.num_ranks; ++other) {
      meeting.parts[other] = reinterpret_cast<void*>(parts[other]);
      meeting.flags[other] = reinterpret_cast<uint32_t*>(flags.at(other));
    }
    meeting.calls = reinterpret_cast<uint32_t*>(calls);
    meeting.is_over = reinterpret_cast<int*>(is_over);
    meeting.rank = rank;
    meeting.num_blocks = std::min(num_blocks, kMaxRankBlocks);
    return meeting;
  }
};

}  // namespace native

namespace fused_ops {
namespace {

cudaError_t launch_linear(const LinearParams& params, cudaStream_t stream) {
  if (params.tiling.rows > 0) return launch_gated_linear(params, stream);
  if (params.tail.depth != 0) return cudaErrorInvalidValue;
  return params.x_scales != nullptr ? launch_skinny_linear_fp8(params, stream)
                                    : launch_skinny_linear(params, stream);
}

cudaError_t launch_any_portable(const PortableParams& params, cudaStream_t stream) {
  return params.scales != nullptr ? launch_portable_packed(params, stream)
                                  : launch_portable(params, stream);
}

#define FIELD(name) field(#name, &P::name)

void bind_rows(Module& module) {
  {
    using P = RmsNormParams;
    module.function("rms_norm", &launch_rms_norm, FIELD(x), FIELD(weight), FIELD(out), FIELD(dtype),
                    FIELD(num_rows), FIELD(num_columns), FIELD(eps));
  }
  {
    using P = RotaryTablesParams;
    module.function("rotary_tables", &launch_rotary_tables, FIELD(positions),
                    FIELD(inverse_frequencies), FIELD(cos), FIELD(sin), FIELD(dtype),
                    FIELD(num_rows), FIELD(rotary_dim));
  }
  {
    using P = RotaryParams;
    module.function("apply_rotary", &launch_rotary, FIELD(q), FIELD(k), FIELD(cos), FIELD(sin),
                    FIELD(cos_stride), FIELD(sin_stride), FIELD(dtype), FIELD(table_dtype),
                    FIELD(num_tokens), FIELD(head_dim), FIELD(rotary_dim), FIELD(kept), FIELD(fp8));
    module.function("norm_rotary", &launch_norm_rotary, FIELD(q), FIELD(k), FIELD(q_weight),
                    FIELD(k_weight), FIELD(eps), FIELD(cos), FIELD(sin), FIELD(cos_stride),
                    FIELD(sin_stride), FIELD(dtype), FIELD(table_dtype), FIELD(num_tokens),
                    FIELD(head_dim), FIELD(rotary_dim), FIELD(kept), FIELD(fp8));
  }
  {
    using P = SiluMulParams;
    module.function("silu_mul", &launch_silu_mul, FIELD(gate), FIELD(up), FIELD(out), FIELD(dtype),
                    FIELD(num_rows), FIELD(num_columns));
  }
  {
    using P = StoreKeysValuesParams;
    module.function("store_keys_values", &launch_store_keys_values, FIELD(k), FIELD(v),
                    FIELD(k_cache), FIELD(v_cache), FIELD(slots), FIELD(dtype), FIELD(num_rows),
                    FIELD(num_slots), FIELD(head_dim));
  }
  {
    using P = QuantiseParams;
    module.function("quantise", &launch_quantise, FIELD(x), FIELD(weight), FIELD(eps),
                    FIELD(row_scales), FIELD(column_scales), FIELD(fixed_scale), FIELD(out),
                    FIELD(scales), FIELD(is_gated), FIELD(num_rows), FIELD(num_columns));
  }
  {
    using P = ScaleParams;
    module.function("scale", &launch_scale, FIELD(product), FIELD(row_scales), FIELD(column_scales),
                    FIELD(bias), FIELD(out), FIELD(adds), FIELD(num_rows), FIELD(num_columns));
  }
}

void bind_products(Module& module) {
  {
    using P = LinearParams;
    module.function("linear", &launch_linear, FIELD(x), FIELD(weight), FIELD(x_scales),
                    FIELD(weight_scales), FIELD(bias), FIELD(out), FIELD(x_stride),
                    FIELD(weight_stride), FIELD(out_stride), FIELD(num_rows), FIELD(num_columns),
                    FIELD(depth), FIELD(epilogue), FIELD(tiling), FIELD(early), FIELD(ahead),
                    FIELD(tail));
  }
  {
    using P = LinearParams;
    module.function("add_linear", &launch_add_linear, FIELD(x), FIELD(weight), FIELD(x_scales),
                    FIELD(weight_scales), FIELD(out), FIELD(x_stride), FIELD(weight_stride),
                    FIELD(out_stride), FIELD(num_rows), FIELD(num_columns), FIELD(depth));
    module.constant("HAS_ADD_LINEAR", has_add_linear());
  }
  {
    using P = PackedLinearParams;
    module.function("packed_linear", &launch_packed_linear, FIELD(x), FIELD(values), FIELD(scales),
                    FIELD(zeros), FIELD(table), FIELD(bias), FIELD(out), FIELD(x_stride),
                    FIELD(values_stride), FIELD(scales_stride), FIELD(out_stride), FIELD(num_rows),
                    FIELD(num_columns), FIELD(depth), FIELD(group), FIELD(epilogue), FIELD(tiling),
                    FIELD(early), FIELD(ahead));
  }
  {
    using P = PortableParams;
    module.function("portable", &launch_any_portable, FIELD(dtype), FIELD(x), FIELD(weight),
                    FIELD(x_scales), FIELD(weight_scales), FIELD(scales), FIELD(zeros),
                    FIELD(table), FIELD(bias), FIELD(out), FIELD(parts), FIELD(counts),
                    FIELD(parts_bytes), FIELD(num_counts), FIELD(x_stride), FIELD(weight_stride),
                    FIELD(scales_stride), FIELD(out_stride), FIELD(num_rows), FIELD(num_columns),
                    FIELD(depth), FIELD(group), FIELD(multiprocessors), FIELD(most_blocks),
                    FIELD(shared_bytes), FIELD(epilogue));
  }
  {
    using P = UnpackParams;
    module.function("unpack", &launch_unpack, FIELD(values), FIELD(scales), FIELD(zeros),
                    FIELD(table), FIELD(out), FIELD(values_stride), FIELD(scales_stride),
                    FIELD(num_rows), FIELD(depth), FIELD(group), FIELD(is_fp8));
  }
  {
    using P = GroupedGemmParams;
    module.function("grouped_gemm", &launch_grouped_gemm, FIELD(is_gated), FIELD(x), FIELD(weight),
                    FIELD(x_scales), FIELD(weight_scales), FIELD(ends), FIELD(slots), FIELD(scales),
                    FIELD(out), FIELD(x_stride), FIELD(weight_stride), FIELD(num_rows),
                    FIELD(num_groups), FIELD(num_columns), FIELD(depth), FIELD(num_chosen),
                    FIELD(num_blocks), FIELD(early), FIELD(is_gelu));
  }
  {
    using P = RouterParams;
    module.function("route", &launch_router, FIELD(x), FIELD(gate), FIELD(bias), FIELD(weights),
                    FIELD(slots), FIELD(ends), FIELD(x_stride), FIELD(gate_stride), FIELD(num_rows),
                    FIELD(num_experts), FIELD(num_chosen), FIELD(depth), FIELD(scoring));
  }
}

void bind_attention(Module& module) {
  using P = AttentionParams;
  module.function("attention", &launch_attention, FIELD(q), FIELD(k), FIELD(v), FIELD(out),
                  FIELD(attended), FIELD(num_keys), FIELD(num_values), FIELD(scale),
                  FIELD(num_blocks));
}

void bind_ranks(Module& module) {
  {
    using P = SumRanksParams;
    module.function("sum_ranks", &launch_sum_ranks, FIELD(meeting), FIELD(residual), FIELD(out),
                    FIELD(dtype), FIELD(count));
  }
  {
    using P = GatherRanksParams;
    module.function("gather_ranks", &launch_gather_ranks, FIELD(meeting), FIELD(out), FIELD(count));
  }
}

}  // namespace
}  // namespace fused_ops

PYBIND11_MODULE(_fused_ops, python_module) {
  using namespace fused_ops;
  Module module(python_module, "fused_ops");
  module.constant("STORE", Epilogue::kStore);
  module.constant("RESIDUAL", Epilogue::kResidual);
  module.constant("SILU_MUL", Epilogue::kSiluMul);
  module.constant("MAX_QUANTISED_COLUMNS", kMaxQuantisedColumns);
  module.constant("MAX_GROUPS", kMaxGroups);
  module.constant("MAX_ROUTER_GROUPS", kMaxRouterGroups);
  module.constant("MAX_ROUTED_ROWS", kMaxRoutedRows);
  module.constant("MAX_ROUTER_DEPTH", kMaxRouterDepth);
  module.constant("ROUTER_DEPTH_STEP", kRouterDepthStep);
  module.constant("MAX_ATTENDED_SEQUENCES", kMaxSequences);
  module.constant("ATTENTION_WIDTH", kAttentionWidth);
  module.constant("MAX_RANKS", kMaxRanks);
  module.constant("MAX_RANK_BLOCKS", kMaxRankBlocks);
  bind_rows(module);
  bind_products(module);
  bind_attention(module);
  bind_ranks(module);
}
