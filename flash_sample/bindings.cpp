// SPDX-License-Identifier: Apache-2.0
//
// Names only: Python has checked the tensors and passes addresses, sizes and the stream.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "low_confidence.h"

namespace py = pybind11;

namespace flash_sample {
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("flash_sample.low_confidence: ") + cudaGetErrorName(error) +
                           ": " + cudaGetErrorString(error));
}

void low_confidence(uintptr_t logits, DataType dtype, int64_t row_stride, int64_t num_rows,
                    int num_columns, const std::vector<int>& excluded, uintptr_t workspace,
                    uintptr_t column, uintptr_t confidence, uintptr_t maximum, uintptr_t sum_exp,
                    int device, uintptr_t stream) {
  if (num_columns < 1) throw std::invalid_argument("low_confidence: num_columns must be positive");
  if (excluded.size() > static_cast<size_t>(kMaxExcluded)) {
    throw std::invalid_argument("low_confidence: too many excluded columns");
  }
  LowConfidenceParams params{};
  params.logits = reinterpret_cast<const void*>(logits);
  params.dtype = dtype;
  params.row_stride = row_stride;
  params.num_rows = num_rows;
  params.num_columns = num_columns;
  params.num_excluded = static_cast<int>(excluded.size());
  std::copy(excluded.begin(), excluded.end(), params.excluded);
  const int64_t num_segments = (num_columns - 1) / kSegmentColumns + 1;
  params.segment_max = reinterpret_cast<float*>(workspace);
  params.segment_sum = params.segment_max + num_rows * num_segments;
  params.segment_column = reinterpret_cast<int*>(params.segment_sum + num_rows * num_segments);
  params.column = reinterpret_cast<int64_t*>(column);
  params.confidence = reinterpret_cast<float*>(confidence);
  params.maximum = reinterpret_cast<float*>(maximum);
  params.sum_exp = reinterpret_cast<float*>(sum_exp);
  check(cudaSetDevice(device));
  check(launch_low_confidence(params, reinterpret_cast<cudaStream_t>(stream)));
}

}  // namespace
}  // namespace flash_sample

PYBIND11_MODULE(_flash_sample, module) {
  using flash_sample::DataType;
  module.attr("SEGMENT_COLUMNS") = flash_sample::kSegmentColumns;
  module.attr("MAX_EXCLUDED") = flash_sample::kMaxExcluded;
  py::enum_<DataType>(module, "DataType")
      .value("FLOAT32", DataType::kFloat32)
      .value("FLOAT16", DataType::kFloat16)
      .value("BFLOAT16", DataType::kBFloat16);
  module.def("low_confidence", &flash_sample::low_confidence, py::kw_only(), py::arg("logits"),
             py::arg("dtype"), py::arg("row_stride"), py::arg("num_rows"), py::arg("num_columns"),
             py::arg("excluded"), py::arg("workspace"), py::arg("column"), py::arg("confidence"),
             py::arg("maximum"), py::arg("sum_exp"), py::arg("device"), py::arg("stream"),
             py::call_guard<py::gil_scoped_release>());
}
