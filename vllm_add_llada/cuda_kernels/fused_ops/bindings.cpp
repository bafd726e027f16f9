// SPDX-License-Identifier: Apache-2.0
//
// Names only: Python has checked the tensors and passes addresses, sizes and the stream. No C++
// type is registered, so the module may be imported under both of its names.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include "fused_ops.h"

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
  const RmsNormParams params{to_rows(x),
                             Rows{},
                             reinterpret_cast<void*>(weight),
                             to_rows(out),
                             to_data_type(dtype),
                             num_rows,
                             num_columns,
                             eps};
  launch("rms_norm", &launch_rms_norm, params, device, stream);
}

void add_rms_norm(RowsTuple x, RowsTuple residual, uintptr_t weight, RowsTuple out, int dtype,
                  int64_t num_rows, int num_columns, float eps, int device, uintptr_t stream) {
  const RmsNormParams params{to_rows(x),
                             to_rows(residual),
                             reinterpret_cast<void*>(weight),
                             to_rows(out),
                             to_data_type(dtype),
                             num_rows,
                             num_columns,
                             eps};
  launch("add_rms_norm", &launch_add_rms_norm, params, device, stream);
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

void commit(uintptr_t tokens, uintptr_t scores, IntegersTuple rows, uintptr_t ends,
            uintptr_t canvas, uintptr_t ranges, uintptr_t quota, uintptr_t threshold,
            int64_t mask_id, uintptr_t chosen, uintptr_t num_masked, uintptr_t prefix,
            int64_t num_candidates, int64_t num_positions, int num_requests, int device,
            uintptr_t stream) {
  const CommitParams params{reinterpret_cast<int64_t*>(tokens),
                            reinterpret_cast<double*>(scores),
                            to_integers(rows),
                            reinterpret_cast<int*>(ends),
                            reinterpret_cast<int64_t*>(canvas),
                            reinterpret_cast<int*>(ranges),
                            reinterpret_cast<int*>(quota),
                            reinterpret_cast<double*>(threshold),
                            mask_id,
                            reinterpret_cast<bool*>(chosen),
                            reinterpret_cast<int*>(num_masked),
                            reinterpret_cast<int*>(prefix),
                            num_candidates,
                            num_positions,
                            num_requests};
  launch("commit", &launch_commit, params, device, stream);
}

}  // namespace
}  // namespace fused_ops

PYBIND11_MODULE(_fused_ops, module) {
  using py::arg;
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.attr("FLOAT32") = static_cast<int>(fused_ops::DataType::kFloat32);
  module.attr("FLOAT16") = static_cast<int>(fused_ops::DataType::kFloat16);
  module.attr("BFLOAT16") = static_cast<int>(fused_ops::DataType::kBFloat16);
  module.attr("AT_LEAST_THRESHOLD") = fused_ops::kAtLeastThreshold;
  module.attr("ABOVE_THRESHOLD") = fused_ops::kAboveThreshold;
  module.def("rms_norm", &fused_ops::rms_norm, py::kw_only(), arg("x"), arg("weight"), arg("out"),
             arg("dtype"), arg("num_rows"), arg("num_columns"), arg("eps"), arg("device"),
             arg("stream"), release);
  module.def("add_rms_norm", &fused_ops::add_rms_norm, py::kw_only(), arg("x"), arg("residual"),
             arg("weight"), arg("out"), arg("dtype"), arg("num_rows"), arg("num_columns"),
             arg("eps"), arg("device"), arg("stream"), release);
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
  module.def("commit", &fused_ops::commit, py::kw_only(), arg("tokens"), arg("scores"), arg("rows"),
             arg("ends"), arg("canvas"), arg("ranges"), arg("quota"), arg("threshold"),
             arg("mask_id"), arg("chosen"), arg("num_masked"), arg("prefix"), arg("num_candidates"),
             arg("num_positions"), arg("num_requests"), arg("device"), arg("stream"), release);
}
