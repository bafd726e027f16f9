// SPDX-License-Identifier: Apache-2.0
#include "driver.h"

#include <dlfcn.h>

#include <cstdio>

namespace vmm_allocator {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw DriverUnavailable(std::string("libcuda.so.1 has no ") + name + ": the driver is too old");
  }
}

Driver open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw DriverUnavailable(std::string("no CUDA driver: ") + dlerror());
  Driver driver;
  find(library, "cuInit", driver.init);
  find(library, "cuGetErrorName", driver.get_error_name);
  find(library, "cuDeviceGet", driver.device_get);
  find(library, "cuDeviceGetAttribute", driver.device_attribute);
  find(library, "cuDevicePrimaryCtxRetain", driver.primary_context_retain);
  find(library, "cuDevicePrimaryCtxRelease_v2", driver.primary_context_release);
  find(library, "cuCtxPushCurrent_v2", driver.context_push);
  find(library, "cuCtxPopCurrent_v2", driver.context_pop);
  find(library, "cuCtxSynchronize", driver.context_synchronize);
  find(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
  find(library, "cuMemGetInfo_v2", driver.memory_info);
  find(library, "cuMemGetAllocationGranularity", driver.granularity);
  find(library, "cuMemAddressReserve", driver.address_reserve);
  find(library, "cuMemAddressFree", driver.address_free);
  find(library, "cuMemCreate", driver.create);
  find(library, "cuMemRelease", driver.release);
  find(library, "cuMemMap", driver.map);
  find(library, "cuMemUnmap", driver.unmap);
  find(library, "cuMemSetAccess", driver.set_access);
  const CUresult result = driver.init(0);
  if (result != CUDA_SUCCESS) {
    const char* name = nullptr;
    driver.get_error_name(result, &name);
    throw DriverUnavailable(std::string("cuInit: ") + (name == nullptr ? "unknown error" : name));
  }
  return driver;
}

std::string describe(const char* call, CUresult result) {
  const char* name = nullptr;
  driver().get_error_name(result, &name);
  return std::string(call) + ": " + (name == nullptr ? "unknown error" : name) + " (" +
         std::to_string(static_cast<int>(result)) + ")";
}

}  // namespace

const Driver& driver() {
  static const Driver opened = open_driver();  // stays unset if open_driver throws
  return opened;
}

DriverError::DriverError(const char* call, CUresult result)
    : std::runtime_error(describe(call, result)), result(result) {}

void check(const char* call, CUresult result) {
  if (result != CUDA_SUCCESS) throw DriverError(call, result);
}

void report(const char* call, CUresult result) noexcept {
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED) return;
  std::fprintf(stderr, "vmm_allocator: %s failed with error %d during teardown\n", call,
               static_cast<int>(result));
}

CurrentContext::CurrentContext(CUcontext context) {
  check("cuCtxPushCurrent", driver().context_push(context));
  driver().exchange_capture_mode(&capture_mode_);
}

CurrentContext::~CurrentContext() {
  driver().exchange_capture_mode(&capture_mode_);
  CUcontext popped;
  driver().context_pop(&popped);
}

}  // namespace vmm_allocator
