// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <stdexcept>
#include <string>

namespace vmm_allocator {

// There is no CUDA driver on this machine, or it is too old.
struct DriverUnavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A call of the driver failed.
struct DriverError : std::runtime_error {
  DriverError(const char* call, CUresult result);
  CUresult result;
};

// The functions of libcuda that an arena uses. The library is opened at the first use and never
// linked, because build machines have no driver.
struct Driver {
  decltype(&::cuInit) init;
  decltype(&::cuGetErrorName) get_error_name;
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDeviceGetAttribute) device_attribute;
  decltype(&::cuDevicePrimaryCtxRetain) primary_context_retain;
  decltype(&::cuDevicePrimaryCtxRelease) primary_context_release;
  decltype(&::cuCtxPushCurrent) context_push;
  decltype(&::cuCtxPopCurrent) context_pop;
  CUresult (*context_synchronize)();
  decltype(&::cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  decltype(&::cuMemGetInfo) memory_info;
  decltype(&::cuMemGetAllocationGranularity) granularity;
  decltype(&::cuMemAddressReserve) address_reserve;
  decltype(&::cuMemAddressFree) address_free;
  decltype(&::cuMemCreate) create;
  decltype(&::cuMemRelease) release;
  decltype(&::cuMemMap) map;
  decltype(&::cuMemUnmap) unmap;
  decltype(&::cuMemSetAccess) set_access;
};

// Opens and initialises the driver once. Throws DriverUnavailable; a later call tries again.
const Driver& driver();

// Throws DriverError unless the call succeeded.
void check(const char* call, CUresult result);

// Writes a failure to stderr, for teardown, which continues after a failure. A driver that is
// already shutting down has freed everything itself, so that is not a failure.
void report(const char* call, CUresult result) noexcept;

// Makes a context current for a scope, and allows the thread to map memory while one of its streams
// is being captured. Mapping is not an operation of a stream, so a graph does not record it.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  CUstreamCaptureMode capture_mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace vmm_allocator
