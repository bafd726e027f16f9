// SPDX-License-Identifier: Apache-2.0
//
// Names only: Python has checked the tensors and passes addresses, sizes and the stream.

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "linear.h"
#include "router.h"
#include "weighted_gemm.h"

namespace py = pybind11;

namespace gather_gemm {
namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("gather_gemm: ") + cudaGetErrorName(error) + ": " +
                           cudaGetErrorString(error));
}

void linear(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t out, int64_t x_stride,
            int64_t weight_stride, int64_t out_stride, int num_rows, int num_columns, int depth,
            Epilogue epilogue, int rows, int columns, int split, bool early, int device,
            uintptr_t stream) {
  LinearParams params{};
  params.x = reinterpret_cast<const void*>(x);
  params.weight = reinterpret_cast<const void*>(weight);
  params.bias = reinterpret_cast<const void*>(bias);
  params.out = reinterpret_cast<void*>(out);
  params.x_stride = x_stride;
  params.weight_stride = weight_stride;
  params.out_stride = out_stride;
  params.num_rows = num_rows;
  params.num_columns = num_columns;
  params.depth = depth;
  params.epilogue = epilogue;
  params.tiling = {rows, columns, split};
  params.early = early;
  check(cudaSetDevice(device));
  const auto launch = rows == 0 ? launch_skinny_linear : launch_gated_linear;
  check(launch(params, reinterpret_cast<cudaStream_t>(stream)));
}

void weighted_gemm(uintptr_t x, uintptr_t weight, uintptr_t ends, uintptr_t slots, uintptr_t scales,
                   uintptr_t out, int64_t x_stride, int64_t weight_stride, int num_rows,
                   int num_groups, int num_columns, int depth, int num_blocks, bool early,
                   int device, uintptr_t stream) {
  WeightedGemmParams params{};
  params.x = reinterpret_cast<const void*>(x);
  params.weight = reinterpret_cast<const void*>(weight);
  params.ends = reinterpret_cast<const int*>(ends);
  params.slots = reinterpret_cast<const int*>(slots);
  params.scales = reinterpret_cast<const void*>(scales);
  params.out = reinterpret_cast<void*>(out);
  params.x_stride = x_stride;
  params.weight_stride = weight_stride;
  params.num_rows = num_rows;
  params.num_groups = num_groups;
  params.num_columns = num_columns;
  params.depth = depth;
  params.num_blocks = num_blocks;
  params.early = early;
  check(cudaSetDevice(device));
  check(launch_weighted_gemm(params, reinterpret_cast<cudaStream_t>(stream)));
}

void route(uintptr_t x, uintptr_t gate, uintptr_t bias, uintptr_t weights, uintptr_t slots,
           uintptr_t ends, int64_t x_stride, int64_t gate_stride, int num_rows, int num_chosen,
           int depth, int device, uintptr_t stream) {
  RouterParams params{};
  params.x = reinterpret_cast<const void*>(x);
  params.gate = reinterpret_cast<const void*>(gate);
  params.bias = reinterpret_cast<const float*>(bias);
  params.weights = reinterpret_cast<void*>(weights);
  params.slots = reinterpret_cast<int*>(slots);
  params.ends = reinterpret_cast<int*>(ends);
  params.x_stride = x_stride;
  params.gate_stride = gate_stride;
  params.num_rows = num_rows;
  params.num_chosen = num_chosen;
  params.depth = depth;
  check(cudaSetDevice(device));
  check(launch_router(params, reinterpret_cast<cudaStream_t>(stream)));
}

}  // namespace
}  // namespace gather_gemm

PYBIND11_MODULE(_gather_gemm, module) {
  using gather_gemm::Epilogue;
  py::enum_<Epilogue>(module, "Epilogue")
      .value("STORE", Epilogue::kStore)
      .value("RESIDUAL", Epilogue::kResidual)
      .value("SILU_MUL", Epilogue::kSiluMul);
  module.def("linear", &gather_gemm::linear, py::kw_only(), py::arg("x"), py::arg("weight"),
             py::arg("bias"), py::arg("out"), py::arg("x_stride"), py::arg("weight_stride"),
             py::arg("out_stride"), py::arg("num_rows"), py::arg("num_columns"), py::arg("depth"),
             py::arg("epilogue"), py::arg("rows"), py::arg("columns"), py::arg("split"),
             py::arg("early"), py::arg("device"), py::arg("stream"),
             py::call_guard<py::gil_scoped_release>());
  module.attr("MAX_GROUPS") = gather_gemm::kMaxGroups;
  module.def("weighted_gemm", &gather_gemm::weighted_gemm, py::kw_only(), py::arg("x"),
             py::arg("weight"), py::arg("ends"), py::arg("slots"), py::arg("scales"),
             py::arg("out"), py::arg("x_stride"), py::arg("weight_stride"), py::arg("num_rows"),
             py::arg("num_groups"), py::arg("num_columns"), py::arg("depth"), py::arg("num_blocks"),
             py::arg("early"), py::arg("device"), py::arg("stream"),
             py::call_guard<py::gil_scoped_release>());
  module.attr("ROUTED_EXPERTS") = gather_gemm::kRoutedExperts;
  module.attr("MAX_ROUTED_ROWS") = gather_gemm::kMaxRoutedRows;
  module.attr("MAX_ROUTER_DEPTH") = gather_gemm::kMaxRouterDepth;
  module.attr("ROUTER_DEPTH_STEP") = gather_gemm::kRouterDepthStep;
  module.def("route", &gather_gemm::route, py::kw_only(), py::arg("x"), py::arg("gate"),
             py::arg("bias"), py::arg("weights"), py::arg("slots"), py::arg("ends"),
             py::arg("x_stride"), py::arg("gate_stride"), py::arg("num_rows"),
             py::arg("num_chosen"), py::arg("depth"), py::arg("device"), py::arg("stream"),
             py::call_guard<py::gil_scoped_release>());
}
