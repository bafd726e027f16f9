// SPDX-License-Identifier: Apache-2.0
//
// Names only: Python has checked the tensors and passes addresses, sizes and the stream. No C++
// type is registered, so the module may be imported under both of its names.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>

#include "fused_ops.h"

namespace py = pybind11;

namespace fused_ops {
namespace {

using RowsTuple = std::array<int64_t, 4>;  // the members of Rows

Rows to_rows(const RowsTuple& rows) {
  return {reinterpret_cast<void*>(rows[0]), rows[1], rows[2], rows[3]};
}

DataType to_data_type(int dtype) {
  return static_cast<DataType>(dtype);
}  // dispatch refuses others

template <typename Params>
void launch(const char* name, cudaError_t (*function)(const Params&, cudaStream_t),
            const Params& params, int device, uintptr_t stream) {
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = function(params, reinterpret_cast<cudaStream_t>(stream));
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

void apply_rotary(RowsTuple q, RowsTuple k, uintptr_t cos, uintptr_t sin, int64_t cos_stride,
                  int64_t sin_stride, int dtype, int table_dtype, int64_t num_tokens,
                  int rotary_dim, int device, uintptr_t stream) {
  const RotaryParams params{
      to_rows(q), to_rows(k), reinterpret_cast<void*>(cos), reinterpret_cast<void*>(sin),
      cos_stride, sin_stride, to_data_type(dtype),          to_data_type(table_dtype),
      num_tokens, rotary_dim};
  launch("apply_rotary", &launch_rotary, params, device, stream);
}

void silu_mul(RowsTuple gate, RowsTuple up, RowsTuple out, int dtype, int64_t num_rows,
              int num_columns, int device, uintptr_t stream) {
  const SiluMulParams params{to_rows(gate),       to_rows(up), to_rows(out),
                             to_data_type(dtype), num_rows,    num_columns};
  launch("silu_mul", &launch_silu_mul, params, device, stream);
}

}  // namespace
}  // namespace fused_ops

PYBIND11_MODULE(_fused_ops, module) {
  using py::arg;
  const auto release = py::call_guard<py::gil_scoped_release>();
  module.attr("FLOAT32") = static_cast<int>(fused_ops::DataType::kFloat32);
  module.attr("FLOAT16") = static_cast<int>(fused_ops::DataType::kFloat16);
  module.attr("BFLOAT16") = static_cast<int>(fused_ops::DataType::kBFloat16);
  module.def("rms_norm", &fused_ops::rms_norm, py::kw_only(), arg("x"), arg("weight"), arg("out"),
             arg("dtype"), arg("num_rows"), arg("num_columns"), arg("eps"), arg("device"),
             arg("stream"), release);
  module.def("add_rms_norm", &fused_ops::add_rms_norm, py::kw_only(), arg("x"), arg("residual"),
             arg("weight"), arg("out"), arg("dtype"), arg("num_rows"), arg("num_columns"),
             arg("eps"), arg("device"), arg("stream"), release);
  module.def("apply_rotary", &fused_ops::apply_rotary, py::kw_only(), arg("q"), arg("k"),
             arg("cos"), arg("sin"), arg("cos_stride"), arg("sin_stride"), arg("dtype"),
             arg("table_dtype"), arg("num_tokens"), arg("rotary_dim"), arg("device"), arg("stream"),
             release);
  module.def("silu_mul", &fused_ops::silu_mul, py::kw_only(), arg("gate"), arg("up"), arg("out"),
             arg("dtype"), arg("num_rows"), arg("num_columns"), arg("device"), arg("stream"),
             release);
}
