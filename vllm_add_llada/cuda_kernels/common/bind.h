// SPDX-License-Identifier: Apache-2.0
//
// Binds the functions of a compiled module. The bindings do not check anything: Python has checked
// the tensors, and passes addresses, sizes and the stream, with a keyword for each member of a
// launch's parameters.
#pragma once

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "vllm_add_llada/cuda_kernels/common/params.h"

namespace native {

namespace py = pybind11;

// The form in which Python passes a member: a pointer as an address, an enumerator as its number,
// anything else unchanged.
template <typename T, typename = void>
struct Given {
  using Type = T;
  static const T& of(const T& value) { return value; }
};

template <typename T>
struct Given<T*> {
  using Type = uintptr_t;
  static T* of(uintptr_t address) { return reinterpret_cast<T*>(address); }
};

template <typename T>
struct Given<T, std::enable_if_t<std::is_enum_v<T>>> {
  using Type = int;
  static T of(int number) { return static_cast<T>(number); }
};

// A struct that Python passes as a tuple of its members, in their order.
template <typename T, typename... Members>
struct GivenMembers {
  using Type = std::tuple<typename Given<Members>::Type...>;
  static T of(const Type& given) {
    return std::apply([](const auto&... members) { return T{Given<Members>::of(members)...}; },
                      given);
  }
};

template <>
struct Given<Rows> : GivenMembers<Rows, void*, int64_t, int64_t, int64_t> {};
template <>
struct Given<Integers> : GivenMembers<Integers, const void*, bool> {};

// A member and its keyword argument.
template <typename Params, typename Member>
struct Field {
  const char* name;
  Member Params::* member;
};

template <typename Params, typename Member>
Field<Params, Member> field(const char* name, Member Params::* member) {
  return {name, member};
}

template <typename Params>
using Launcher = cudaError_t (*)(const Params&, cudaStream_t);

// Launches on `device` and restores the caller's current device.
template <typename Params>
void launch(const std::string& name, Launcher<Params> launcher, const Params& params, int device,
            uintptr_t stream) {
  int current = device;
  cudaError_t error = cudaGetDevice(&current);
  if (error == cudaSuccess && current != device) error = cudaSetDevice(device);
  if (error == cudaSuccess) error = launcher(params, reinterpret_cast<cudaStream_t>(stream));
  if (current != device) cudaSetDevice(current);
  if (error == cudaSuccess) return;
  throw std::runtime_error(name + ": " + cudaGetErrorName(error) + ": " +
                           cudaGetErrorString(error));
}

// A module and its name in error messages.
class Module {
 public:
  Module(py::module_& module, std::string name) : module_(module), name_(std::move(name)) {
    constant("FLOAT32", DataType::kFloat32);
    constant("FLOAT16", DataType::kFloat16);
    constant("BFLOAT16", DataType::kBFloat16);
    module_.attr("BUILD_STAMP") = int64_t{BUILD_STAMP};  // defined by setup.py
  }

  template <typename T>
  void constant(const char* name, T value) {
    module_.attr(name) = static_cast<int>(value);
  }

  // Defines a function with the arguments `fields`, `device` and `stream`. All other members are
  // zero.
  template <typename Params, typename... Members>
  void function(const char* name, Launcher<Params> launcher, Field<Params, Members>... fields) {
    module_.def(
        name,
        [=, full_name = name_ + "." + name](typename Given<Members>::Type... given, int device,
                                            uintptr_t stream) {
          Params params{};
          ((params.*fields.member = Given<Members>::of(given)), ...);
          launch(full_name, launcher, params, device, stream);
        },
        py::kw_only(), py::arg(fields.name)..., py::arg("device"), py::arg("stream"),
        py::call_guard<py::gil_scoped_release>());
  }

 private:
  py::module_& module_;
  const std::string name_;
};

}  // namespace native
