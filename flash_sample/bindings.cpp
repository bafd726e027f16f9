// SPDX-License-Identifier: Apache-2.0
//
// Names only: Python has checked the tensors and passes addresses, sizes and the stream. A
// parameter of the rows is a pair (address or 0, value for all rows).

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "params.h"

namespace py = pybind11;

namespace flash_sample {
namespace {

void check(const char* name, cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("flash_sample.") + name + ": " + cudaGetErrorName(error) +
                           ": " + cudaGetErrorString(error));
}

template <typename T>
PerRow<T> per_row(const std::pair<uintptr_t, T>& given) {
  return {reinterpret_cast<const T*>(given.first), given.second};
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

RowParams make_rows(std::pair<uintptr_t, double> temperature, std::pair<uintptr_t, int64_t> seed,
                    std::pair<uintptr_t, int64_t> step, std::pair<uintptr_t, int64_t> position,
                    uint32_t purpose, bool is_tempered, std::pair<uintptr_t, float> epsilon,
                    const std::vector<int64_t>& columns, std::pair<uintptr_t, int32_t> forbidden,
                    std::pair<uintptr_t, int32_t> excluded) {
  if (columns.size() > static_cast<size_t>(kMaxColumns)) {
    throw std::invalid_argument("flash_sample: too many columns");
  }
  RowParams rows{};
  rows.temperature = per_row(temperature);
  rows.seed = per_row(seed);
  rows.step = per_row(step);
  rows.position = per_row(position);
  rows.purpose = purpose;
  rows.is_tempered = is_tempered;
  rows.epsilon = per_row(epsilon);
  std::copy(columns.begin(), columns.end(), rows.columns);
  rows.num_columns = static_cast<int>(columns.size());
  rows.forbidden = per_row(forbidden);
  rows.excluded = per_row(excluded);
  return rows;
}

void candidates(const RowParams& rows, uintptr_t logits, DataType dtype, int64_t row_stride,
                int64_t num_rows, int num_columns, int64_t first_column, Score score,
                bool has_noise, uintptr_t whole, uintptr_t share, uintptr_t record, uintptr_t token,
                uintptr_t value, uintptr_t greedy, int device, uintptr_t stream) {
  if (num_columns < 1) throw std::invalid_argument("candidates: num_columns must be positive");
  LogitsParams params{};
  params.logits = pointer<const void>(logits);
  params.dtype = dtype;
  params.row_stride = row_stride;
  params.num_rows = num_rows;
  params.num_columns = num_columns;
  params.first_column = first_column;
  params.rows = rows;
  params.score = score;
  params.has_noise = has_noise;
  params.whole = pointer<const double>(whole);
  params.share = pointer<float>(share);
  params.record = pointer<double>(record);
  params.token = pointer<int64_t>(token);
  params.value = pointer<float>(value);
  params.greedy = pointer<int64_t>(greedy);
  check("candidates", cudaSetDevice(device));
  check("candidates", launch_candidates(params, reinterpret_cast<cudaStream_t>(stream)));
}

void merge(const RowParams& rows, uintptr_t records, int num_slices, int64_t num_rows, Score score,
           uintptr_t record, uintptr_t token, uintptr_t value, uintptr_t greedy, int device,
           uintptr_t stream) {
  MergeParams params{};
  params.records = pointer<const double>(records);
  params.num_slices = num_slices;
  params.num_rows = num_rows;
  params.rows = rows;
  params.score = score;
  params.record = pointer<double>(record);
  params.token = pointer<int64_t>(token);
  params.value = pointer<float>(value);
  params.greedy = pointer<int64_t>(greedy);
  check("merge", cudaSetDevice(device));
  check("merge", launch_merge(params, reinterpret_cast<cudaStream_t>(stream)));
}

void uniform(const RowParams& rows, int64_t num_rows, int64_t first_column, int64_t num_columns,
             uintptr_t numbers, int device, uintptr_t stream) {
  const UniformParams params{rows, num_rows, first_column, num_columns, pointer<double>(numbers)};
  check("uniform", cudaSetDevice(device));
  check("uniform", launch_uniform(params, reinterpret_cast<cudaStream_t>(stream)));
}

}  // namespace
}  // namespace flash_sample

PYBIND11_MODULE(_flash_sample, module) {
  using flash_sample::DataType;
  using flash_sample::RowParams;
  using flash_sample::Score;
  module.attr("MAX_COLUMNS") = flash_sample::kMaxColumns;
  module.attr("RECORD_FIELDS") = static_cast<int>(flash_sample::kRecordFields);
  py::enum_<DataType>(module, "DataType")
      .value("FLOAT32", DataType::kFloat32)
      .value("FLOAT16", DataType::kFloat16)
      .value("BFLOAT16", DataType::kBFloat16);
  py::enum_<Score>(module, "Score")
      .value("CONFIDENCE", Score::kConfidence)
      .value("ENTROPY", Score::kEntropy)
      .value("MARGIN", Score::kMargin);
  py::class_<RowParams>(module, "RowParams")
      .def(py::init(&flash_sample::make_rows), py::kw_only(), py::arg("temperature"),
           py::arg("seed"), py::arg("step"), py::arg("position"), py::arg("purpose"),
           py::arg("is_tempered"), py::arg("epsilon"), py::arg("columns"), py::arg("forbidden"),
           py::arg("excluded"));
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("candidates", &flash_sample::candidates, py::kw_only(), py::arg("rows"),
             py::arg("logits"), py::arg("dtype"), py::arg("row_stride"), py::arg("num_rows"),
             py::arg("num_columns"), py::arg("first_column"), py::arg("score"),
             py::arg("has_noise"), py::arg("whole"), py::arg("share"), py::arg("record"),
             py::arg("token"), py::arg("value"), py::arg("greedy"), py::arg("device"),
             py::arg("stream"), no_gil);
  module.def("merge", &flash_sample::merge, py::kw_only(), py::arg("rows"), py::arg("records"),
             py::arg("num_slices"), py::arg("num_rows"), py::arg("score"), py::arg("record"),
             py::arg("token"), py::arg("value"), py::arg("greedy"), py::arg("device"),
             py::arg("stream"), no_gil);
  module.def("uniform", &flash_sample::uniform, py::kw_only(), py::arg("rows"), py::arg("num_rows"),
             py::arg("first_column"), py::arg("num_columns"), py::arg("numbers"), py::arg("device"),
             py::arg("stream"), no_gil);
}
