// SPDX-License-Identifier: Apache-2.0
//
// Names only: Python has checked the tensors and passes addresses, sizes and the stream. No C++
// type is registered, so the module may be imported under both of its names.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fused_ops.h"
#include "grouped_gemm.h"
#include "linear.h"
#include "quantise.h"
#include "ranks.h"
#include "router.h"

namespace py = pybind11;

namespace fused_ops {
namespace {

using RowsTuple = std::array<int64_t, 4>;  // the members of Rows

Rows to_rows(const RowsTuple& rows) {
  return {reinterpret_cast<void*>(rows[0]), rows[1], rows[2], rows[3]};
}

using IntegersTuple = std::pair<uintptr_t, bool>;  // the members of Integers

Integers to_integers(const IntegersTuple& integers) {
  return {reinterpret_cast<void*>(integers.first), integers.second};
}

using AheadTuple = std::pair<uintptr_t, int64_t>;  // the members of Ahead

Ahead to_ahead(const AheadTuple& ahead) {
  return {reinterpret_cast<void*>(ahead.first), ahead.second};
}

DataType to_data_type(int dtype) {
  return static_cast<DataType>(dtype);
}  // dispatch refuses others

// Launches on `device` and leaves the caller's current device as it was.
template <typename Params>
void launch(const char* name, cudaError_t (*function)(const Params&, cudaStream_t),
            const Params& params, int device, uintptr_t stream) {
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) error = function(params, reinterpret_cast<cudaStream_t>(stream));
  if (current != device) cudaSetDevice(current);
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("fused_ops.") + name + ": " + cudaGetErrorName(error) +
                           ": " + cudaGetErrorString(error));
}

void rms_norm(RowsTuple x, uintptr_t weight, RowsTuple out, int dtype, int64_t num_rows,
              int num_columns, float eps, int device, uintptr_t stream) {
  const RmsNormParams params{to_rows(x),   reinterpret_cast<void*>(weight),
                             to_rows(out), to_data_type(dtype),
                             num_rows,     num_columns,
                             eps};
  launch("rms_norm", &launch_rms_norm, params, device, stream);
}

void rotary_tables(IntegersTuple positions, uintptr_t inverse_frequencies, RowsTuple cos,
                   RowsTuple sin, int dtype, int64_t num_rows, int rotary_dim, int device,
                   uintptr_t stream) {
  const RotaryTablesParams params{to_integers(positions),
                                  reinterpret_cast<float*>(inverse_frequencies),
                                  to_rows(cos),
                                  to_rows(sin),
                                  to_data_type(dtype),
                                  num_rows,
                                  rotary_dim};
  launch("rotary_tables", &launch_rotary_tables, params, device, stream);
}

RotaryParams to_rotary(const RowsTuple& q, const RowsTuple& k, uintptr_t cos, uintptr_t sin,
                       int64_t cos_stride, int64_t sin_stride, int dtype, int table_dtype,
                       int64_t num_tokens, int rotary_dim) {
  RotaryParams params{};
  params.q = to_rows(q);
  params.k = to_rows(k);
  params.cos = reinterpret_cast<void*>(cos);
  params.sin = reinterpret_cast<void*>(sin);
  params.cos_stride = cos_stride;
  params.sin_stride = sin_stride;
  params.dtype = to_data_type(dtype);
  params.table_dtype = to_data_type(table_dtype);
  params.num_tokens = num_tokens;
  params.rotary_dim = rotary_dim;
  return params;
}

void apply_rotary(RowsTuple q, RowsTuple k, uintptr_t cos, uintptr_t sin, int64_t cos_stride,
                  int64_t sin_stride, int dtype, int table_dtype, int64_t num_tokens,
                  int rotary_dim, int device, uintptr_t stream) {
  const RotaryParams params =
      to_rotary(q, k, cos, sin, cos_stride, sin_stride, dtype, table_dtype, num_tokens, rotary_dim);
  launch("apply_rotary", &launch_rotary, params, device, stream);
}

void norm_rotary(RowsTuple q, RowsTuple k, uintptr_t q_weight, uintptr_t k_weight, float eps,
                 uintptr_t cos, uintptr_t sin, int64_t cos_stride, int64_t sin_stride, int dtype,
                 int table_dtype, int64_t num_tokens, int head_dim, int rotary_dim, int device,
                 uintptr_t stream) {
  RotaryParams params =
      to_rotary(q, k, cos, sin, cos_stride, sin_stride, dtype, table_dtype, num_tokens, rotary_dim);
  params.q_weight = reinterpret_cast<void*>(q_weight);
  params.k_weight = reinterpret_cast<void*>(k_weight);
  params.head_dim = head_dim;
  params.eps = eps;
  launch("norm_rotary", &launch_norm_rotary, params, device, stream);
}

void silu_mul(RowsTuple gate, RowsTuple up, RowsTuple out, int dtype, int64_t num_rows,
              int num_columns, int device, uintptr_t stream) {
  const SiluMulParams params{to_rows(gate),       to_rows(up), to_rows(out),
                             to_data_type(dtype), num_rows,    num_columns};
  launch("silu_mul", &launch_silu_mul, params, device, stream);
}

void store_keys_values(RowsTuple k, RowsTuple v, RowsTuple k_cache, RowsTuple v_cache,
                       IntegersTuple slots, int dtype, int64_t num_rows, int64_t num_slots,
                       int head_dim, int device, uintptr_t stream) {
  const StoreKeysValuesParams params{to_rows(k),       to_rows(v),         to_rows(k_cache),
                                     to_rows(v_cache), to_integers(slots), to_data_type(dtype),
                                     num_rows,         num_slots,          head_dim};
  launch("store_keys_values", &launch_store_keys_values, params, device, stream);
}

void linear(uintptr_t x, uintptr_t weight, uintptr_t x_scales, uintptr_t weight_scales,
            uintptr_t bias, uintptr_t out, int64_t x_stride, int64_t weight_stride,
            int64_t out_stride, int num_rows, int num_columns, int depth, int epilogue, int rows,
            int columns, int split, bool early, AheadTuple ahead, int device, uintptr_t stream) {
  LinearParams params{};
  params.x = reinterpret_cast<void*>(x);
  params.weight = reinterpret_cast<void*>(weight);
  params.x_scales = reinterpret_cast<float*>(x_scales);
  params.weight_scales = reinterpret_cast<float*>(weight_scales);
  params.bias = reinterpret_cast<void*>(bias);
  params.out = reinterpret_cast<void*>(out);
  params.x_stride = x_stride;
  params.weight_stride = weight_stride;
  params.out_stride = out_stride;
  params.num_rows = num_rows;
  params.num_columns = num_columns;
  params.depth = depth;
  params.epilogue = static_cast<Epilogue>(epilogue);
  params.tiling = {rows, columns, split};
  params.early = early;
  params.ahead = to_ahead(ahead);
  auto function = rows == 0 ? &launch_skinny_linear : &launch_gated_linear;
  if (x_scales != 0) function = &launch_skinny_linear_fp8;
  launch("linear", function, params, device, stream);
}

void packed_linear(uintptr_t x, uintptr_t values, uintptr_t scales, uintptr_t zeros,
                   std::array<uint32_t, 8> table, uintptr_t bias, uintptr_t out,
                   std::array<int64_t, 4> strides, int num_rows, int num_columns, int depth,
                   int group, int epilogue, int columns, int split, bool early, AheadTuple ahead,
                   int device, uintptr_t stream) {
  PackedLinearParams params{};
  params.x = reinterpret_cast<void*>(x);
  params.values = reinterpret_cast<void*>(values);
  params.scales = reinterpret_cast<float*>(scales);
  params.zeros = reinterpret_cast<uint8_t*>(zeros);
  params.table = {
      {table[0], table[1]}, {table[2], table[3]}, {table[4], table[5]}, {table[6], table[7]}};
  params.bias = reinterpret_cast<void*>(bias);
  params.out = reinterpret_cast<void*>(out);
  params.x_stride = strides[0];
  params.values_stride = strides[1];
  params.scales_stride = strides[2];
  params.out_stride = strides[3];
  params.num_rows = num_rows;
  params.num_columns = num_columns;
  params.depth = depth;
  params.group = group;
  params.epilogue = static_cast<Epilogue>(epilogue);
  params.tiling = {0, columns, split};
  params.early = early;
  params.ahead = to_ahead(ahead);
  launch("packed_linear", &launch_packed_linear, params, device, stream);
}

void unpack(uintptr_t values, uintptr_t scales, uintptr_t zeros, uintptr_t table, uintptr_t out,
            int64_t values_stride, int64_t scales_stride, int num_rows, int depth, int group,
            bool is_fp8, int device, uintptr_t stream) {
  const UnpackParams params{reinterpret_cast<void*>(values),
                            reinterpret_cast<float*>(scales),
                            reinterpret_cast<uint8_t*>(zeros),
                            reinterpret_cast<float*>(table),
                            reinterpret_cast<void*>(out),
                            values_stride,
                            scales_stride,
                            num_rows,
                            depth,
                            group,
                            is_fp8};
  launch("unpack", &launch_unpack, params, device, stream);
}

// A norm where there is a weight of one, silu(gate) * up where x has them; else the rows as they
// are.
void quantise(RowsTuple x, uintptr_t weight, float eps, uintptr_t row_scales,
              uintptr_t column_scales, uintptr_t fixed_scale, uintptr_t out, uintptr_t scales,
              bool is_gated, int64_t num_rows, int num_columns, int device, uintptr_t stream) {
  QuantiseParams params{};
  params.x = to_rows(x);
  params.weight = reinterpret_cast<void*>(weight);
  params.eps = eps;
  params.row_scales = reinterpret_cast<float*>(row_scales);
  params.column_scales = reinterpret_cast<float*>(column_scales);
  params.fixed_scale = reinterpret_cast<float*>(fixed_scale);
  params.out = reinterpret_cast<uint8_t*>(out);
  params.scales = reinterpret_cast<float*>(scales);
  params.num_rows = num_rows;
  params.num_columns = num_columns;
  auto function = weight == 0 ? &launch_quantise : &launch_norm_quantise;
  if (is_gated) function = &launch_gated_quantise;
  launch("quantise", function, params, device, stream);
}

void scale(RowsTuple product, uintptr_t row_scales, uintptr_t column_scales, uintptr_t bias,
           RowsTuple out, bool adds, int64_t num_rows, int num_columns, int device,
           uintptr_t stream) {
  ScaleParams params{};
  params.product = to_rows(product);
  params.row_scales = reinterpret_cast<float*>(row_scales);
  params.column_scales = reinterpret_cast<float*>(column_scales);
  params.bias = reinterpret_cast<void*>(bias);
  params.out = to_rows(out);
  params.adds = adds;
  params.num_rows = num_rows;
  params.num_columns = num_columns;
  launch("scale", &launch_scale, params, device, stream);
}

void grouped_gemm(bool is_gated, uintptr_t x, uintptr_t weight, uintptr_t ends, uintptr_t slots,
                  uintptr_t scales, uintptr_t out, int64_t x_stride, int64_t weight_stride,
                  int num_rows, int num_groups, int num_columns, int depth, int num_chosen,
                  int num_blocks, bool early, int device, uintptr_t stream) {
  GroupedGemmParams params{};
  params.x = reinterpret_cast<void*>(x);
  params.weight = reinterpret_cast<void*>(weight);
  params.ends = reinterpret_cast<int*>(ends);
  params.slots = reinterpret_cast<int*>(slots);
  params.scales = reinterpret_cast<void*>(scales);
  params.out = reinterpret_cast<void*>(out);
  params.x_stride = x_stride;
  params.weight_stride = weight_stride;
  params.num_rows = num_rows;
  params.num_groups = num_groups;
  params.num_columns = num_columns;
  params.depth = depth;
  params.num_chosen = num_chosen;
  params.num_blocks = num_blocks;
  params.early = early;
  launch("grouped_gemm", is_gated ? &launch_gated_gemm : &launch_weighted_gemm, params, device,
         stream);
}

void route(uintptr_t x, uintptr_t gate, uintptr_t bias, uintptr_t weights, uintptr_t slots,
           uintptr_t ends, int64_t x_stride, int64_t gate_stride, int num_rows, int num_experts,
           int num_chosen, int depth, bool is_sigmoid, int num_groups, int num_kept_groups,
           bool is_normalised, float scale, bool in_fp32, int device, uintptr_t stream) {
  RouterParams params{};
  params.x = reinterpret_cast<void*>(x);
  params.gate = reinterpret_cast<void*>(gate);
  params.bias = reinterpret_cast<float*>(bias);
  params.weights = reinterpret_cast<void*>(weights);
  params.slots = reinterpret_cast<int*>(slots);
  params.ends = reinterpret_cast<int*>(ends);
  params.x_stride = x_stride;
  params.gate_stride = gate_stride;
  params.num_rows = num_rows;
  params.num_experts = num_experts;
  params.num_chosen = num_chosen;
  params.depth = depth;
  params.scoring = {is_sigmoid, num_groups, num_kept_groups, is_normalised, scale, in_fp32};
  launch("route", &launch_router, params, device, stream);
}

Meeting to_meeting(const std::vector<uintptr_t>& parts, const std::vector<uintptr_t>& flags,
                   uintptr_t calls, uintptr_t is_over, int rank, int num_blocks) {
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

void sum_ranks(const std::vector<uintptr_t>& parts, const std::vector<uintptr_t>& flags,
               uintptr_t calls, uintptr_t is_over, int rank, int num_blocks, uintptr_t residual,
               uintptr_t out, int dtype, int64_t count, int device, uintptr_t stream) {
  const SumRanksParams params{to_meeting(parts, flags, calls, is_over, rank, num_blocks),
                              reinterpret_cast<void*>(residual), reinterpret_cast<void*>(out),
                              to_data_type(dtype), count};
  launch("sum_ranks", &launch_sum_ranks, params, device, stream);
}

void gather_ranks(const std::vector<uintptr_t>& parts, const std::vector<uintptr_t>& flags,
                  uintptr_t calls, uintptr_t is_over, int rank, int num_blocks, uintptr_t out,
                  int64_t count, int device, uintptr_t stream) {
  const GatherRanksParams params{to_meeting(parts, flags, calls, is_over, rank, num_blocks),
                                 reinterpret_cast<void*>(out), count};
  launch("gather_ranks", &launch_gather_ranks, params, device, stream);
}

}  // namespace
}  // namespace fused_ops

PYBIND11_MODULE(_fused_ops, module) {
  using py::arg;
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.attr("FLOAT32") = static_cast<int>(fused_ops::DataType::kFloat32);
  module.attr("FLOAT16") = static_cast<int>(fused_ops::DataType::kFloat16);
  module.attr("BFLOAT16") = static_cast<int>(fused_ops::DataType::kBFloat16);
  module.attr("STORE") = static_cast<int>(fused_ops::Epilogue::kStore);
  module.attr("RESIDUAL") = static_cast<int>(fused_ops::Epilogue::kResidual);
  module.attr("SILU_MUL") = static_cast<int>(fused_ops::Epilogue::kSiluMul);
  module.attr("MAX_QUANTISED_COLUMNS") = fused_ops::kMaxQuantisedColumns;
  module.attr("MAX_GROUPS") = fused_ops::kMaxGroups;
  module.attr("MAX_ROUTER_GROUPS") = fused_ops::kMaxRouterGroups;
  module.attr("MAX_ROUTED_ROWS") = fused_ops::kMaxRoutedRows;
  module.attr("MAX_ROUTER_DEPTH") = fused_ops::kMaxRouterDepth;
  module.attr("ROUTER_DEPTH_STEP") = fused_ops::kRouterDepthStep;
  module.def("rms_norm", &fused_ops::rms_norm, py::kw_only(), arg("x"), arg("weight"), arg("out"),
             arg("dtype"), arg("num_rows"), arg("num_columns"), arg("eps"), arg("device"),
             arg("stream"), release);
  module.def("rotary_tables", &fused_ops::rotary_tables, py::kw_only(), arg("positions"),
             arg("inverse_frequencies"), arg("cos"), arg("sin"), arg("dtype"), arg("num_rows"),
             arg("rotary_dim"), arg("device"), arg("stream"), release);
  module.def("apply_rotary", &fused_ops::apply_rotary, py::kw_only(), arg("q"), arg("k"),
             arg("cos"), arg("sin"), arg("cos_stride"), arg("sin_stride"), arg("dtype"),
             arg("table_dtype"), arg("num_tokens"), arg("rotary_dim"), arg("device"), arg("stream"),
             release);
  module.def("norm_rotary", &fused_ops::norm_rotary, py::kw_only(), arg("q"), arg("k"),
             arg("q_weight"), arg("k_weight"), arg("eps"), arg("cos"), arg("sin"),
             arg("cos_stride"), arg("sin_stride"), arg("dtype"), arg("table_dtype"),
             arg("num_tokens"), arg("head_dim"), arg("rotary_dim"), arg("device"), arg("stream"),
             release);
  module.def("silu_mul", &fused_ops::silu_mul, py::kw_only(), arg("gate"), arg("up"), arg("out"),
             arg("dtype"), arg("num_rows"), arg("num_columns"), arg("device"), arg("stream"),
             release);
  module.def("store_keys_values", &fused_ops::store_keys_values, py::kw_only(), arg("k"), arg("v"),
             arg("k_cache"), arg("v_cache"), arg("slots"), arg("dtype"), arg("num_rows"),
             arg("num_slots"), arg("head_dim"), arg("device"), arg("stream"), release);
  module.def("linear", &fused_ops::linear, py::kw_only(), arg("x"), arg("weight"), arg("x_scales"),
             arg("weight_scales"), arg("bias"), arg("out"), arg("x_stride"), arg("weight_stride"),
             arg("out_stride"), arg("num_rows"), arg("num_columns"), arg("depth"), arg("epilogue"),
             arg("rows"), arg("columns"), arg("split"), arg("early"), arg("ahead"), arg("device"),
             arg("stream"), release);
  module.def("packed_linear", &fused_ops::packed_linear, py::kw_only(), arg("x"), arg("values"),
             arg("scales"), arg("zeros"), arg("table"), arg("bias"), arg("out"), arg("strides"),
             arg("num_rows"), arg("num_columns"), arg("depth"), arg("group"), arg("epilogue"),
             arg("columns"), arg("split"), arg("early"), arg("ahead"), arg("device"), arg("stream"),
             release);
  module.def("unpack", &fused_ops::unpack, py::kw_only(), arg("values"), arg("scales"),
             arg("zeros"), arg("table"), arg("out"), arg("values_stride"), arg("scales_stride"),
             arg("num_rows"), arg("depth"), arg("group"), arg("is_fp8"), arg("device"),
             arg("stream"), release);
  module.def("quantise", &fused_ops::quantise, py::kw_only(), arg("x"), arg("weight"), arg("eps"),
             arg("row_scales"), arg("column_scales"), arg("fixed_scale"), arg("out"), arg("scales"),
             arg("is_gated"), arg("num_rows"), arg("num_columns"), arg("device"), arg("stream"),
             release);
  module.def("scale", &fused_ops::scale, py::kw_only(), arg("product"), arg("row_scales"),
             arg("column_scales"), arg("bias"), arg("out"), arg("adds"), arg("num_rows"),
             arg("num_columns"), arg("device"), arg("stream"), release);
  module.def("grouped_gemm", &fused_ops::grouped_gemm, py::kw_only(), arg("is_gated"), arg("x"),
             arg("weight"), arg("ends"), arg("slots"), arg("scales"), arg("out"), arg("x_stride"),
             arg("weight_stride"), arg("num_rows"), arg("num_groups"), arg("num_columns"),
             arg("depth"), arg("num_chosen"), arg("num_blocks"), arg("early"), arg("device"),
             arg("stream"), release);
  module.def("route", &fused_ops::route, py::kw_only(), arg("x"), arg("gate"), arg("bias"),
             arg("weights"), arg("slots"), arg("ends"), arg("x_stride"), arg("gate_stride"),
             arg("num_rows"), arg("num_experts"), arg("num_chosen"), arg("depth"),
             arg("is_sigmoid"), arg("num_groups"), arg("num_kept_groups"), arg("is_normalised"),
             arg("scale"), arg("in_fp32"), arg("device"), arg("stream"), release);
  module.attr("MAX_RANKS") = fused_ops::kMaxRanks;
  module.attr("MAX_RANK_BLOCKS") = fused_ops::kMaxRankBlocks;
  module.def("sum_ranks", &fused_ops::sum_ranks, py::kw_only(), arg("parts"), arg("flags"),
             arg("calls"), arg("is_over"), arg("rank"), arg("num_blocks"), arg("residual"),
             arg("out"), arg("dtype"), arg("count"), arg("device"), arg("stream"), release);
  module.def("gather_ranks", &fused_ops::gather_ranks, py::kw_only(), arg("parts"), arg("flags"),
             arg("calls"), arg("is_over"), arg("rank"), arg("num_blocks"), arg("out"), arg("count"),
             arg("device"), arg("stream"), release);
}
