// SPDX-License-Identifier: Apache-2.0
//
// Selects the kernel that was compiled for values known only at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "vllm_add_llada/cuda_kernels/common/params.h"

namespace native {

// Calls `function` with a null pointer of the C++ type of `dtype`.
template <typename Function>
cudaError_t dispatch(DataType dtype, Function function) {
  switch (dtype) {
    case DataType::kFloat32:
      return function(static_cast<float*>(nullptr));
    case DataType::kFloat16:
      return function(static_cast<__half*>(nullptr));
    case DataType::kBFloat16:
      return function(static_cast<__nv_bfloat16*>(nullptr));
  }
  return cudaErrorInvalidValue;
}

// Calls `function` with `value` as a compile-time constant if it is one of kValues. Other values
// have no kernel, and give cudaErrorInvalidValue.
template <auto... kValues, typename Value, typename Function>
cudaError_t dispatch_value(Value value, Function function) {
  cudaError_t error = cudaErrorInvalidValue;
  ((value == kValues && (error = function(std::integral_constant<Value, kValues>()), true)) || ...);
  return error;
}

}  // namespace native
