// SPDX-License-Identifier: Apache-2.0
//
// Names only: Python has checked the tensors and passes addresses, sizes and the stream.

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "fused_ops.h"

namespace py = pybind11;

namespace fused_ops {
namespace {

// Runs one launch on a device and a stream.
template <typename Params>
auto bound(const char* name, cudaError_t (*launch)(const Params&, cudaStream_t)) {
  return [name, launch](const Params& params, int device, uintptr_t stream) {
    cudaError_t error = cudaSetDevice(device);
    if (error == cudaSuccess) error = launch(params, reinterpret_cast<cudaStream_t>(stream));
    if (error == cudaSuccess) return;
    throw std::runtime_error(std::string("fused_ops.") + name + ": " + cudaGetErrorName(error) +
                             ": " + cudaGetErrorString(error));
  };
}

Rows make_rows(uintptr_t data, int64_t inner, int64_t outer_stride, int64_t inner_stride) {
  return {reinterpret_cast<void*>(data), inner, outer_stride, inner_stride};
}

RmsNormParams make_rms_norm(Rows x, Rows residual, uintptr_t weight, Rows out, DataType dtype,
                            int64_t num_rows, int num_columns, float eps) {
  return {x, residual, reinterpret_cast<void*>(weight), out, dtype, num_rows, num_columns, eps};
}

RotaryParams make_rotary(Rows q, Rows k, uintptr_t cos, uintptr_t sin, int64_t cos_stride,
                         int64_t sin_stride, DataType dtype, DataType table_dtype,
                         int64_t num_tokens, int rotary_dim) {
  return {q,
          k,
          reinterpret_cast<void*>(cos),
          reinterpret_cast<void*>(sin),
          cos_stride,
          sin_stride,
          dtype,
          table_dtype,
          num_tokens,
          rotary_dim};
}

SiluMulParams make_silu_mul(Rows gate, Rows up, Rows out, DataType dtype, int64_t num_rows,
                            int num_columns) {
  return {gate, up, out, dtype, num_rows, num_columns};
}

}  // namespace
}  // namespace fused_ops

PYBIND11_MODULE(_fused_ops, module) {
  using namespace fused_ops;
  py::enum_<DataType>(module, "DataType")
      .value("FLOAT32", DataType::kFloat32)
      .value("FLOAT16", DataType::kFloat16)
      .value("BFLOAT16", DataType::kBFloat16);
  py::class_<Rows>(module, "Rows")
      .def(py::init(&make_rows), py::arg("data"), py::arg("inner"), py::arg("outer_stride"),
           py::arg("inner_stride"));
  py::class_<RmsNormParams>(module, "RmsNormParams")
      .def(py::init(&make_rms_norm), py::kw_only(), py::arg("x"), py::arg("residual"),
           py::arg("weight"), py::arg("out"), py::arg("dtype"), py::arg("num_rows"),
           py::arg("num_columns"), py::arg("eps"));
  py::class_<RotaryParams>(module, "RotaryParams")
      .def(py::init(&make_rotary), py::kw_only(), py::arg("q"), py::arg("k"), py::arg("cos"),
           py::arg("sin"), py::arg("cos_stride"), py::arg("sin_stride"), py::arg("dtype"),
           py::arg("table_dtype"), py::arg("num_tokens"), py::arg("rotary_dim"));
  py::class_<SiluMulParams>(module, "SiluMulParams")
      .def(py::init(&make_silu_mul), py::kw_only(), py::arg("gate"), py::arg("up"), py::arg("out"),
           py::arg("dtype"), py::arg("num_rows"), py::arg("num_columns"));
  const auto release = py::call_guard<py::gil_scoped_release>();
  const auto params = py::arg("params"), device = py::arg("device"), stream = py::arg("stream");
  module.def("rms_norm", bound("rms_norm", &launch_rms_norm), params, device, stream, release);
  module.def("add_rms_norm", bound("add_rms_norm", &launch_add_rms_norm), params, device, stream,
             release);
  module.def("apply_rotary", bound("apply_rotary", &launch_rotary), params, device, stream,
             release);
  module.def("silu_mul", bound("silu_mul", &launch_silu_mul), params, device, stream, release);
}
