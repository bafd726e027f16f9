// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <string>

#include "driver.h"

namespace vmm_allocator {
namespace {

CUmemAllocationProp chunk_properties(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

size_t round_up(size_t value, size_t multiple) {
  if (value > std::numeric_limits<size_t>::max() - multiple) {
    throw std::invalid_argument("Arena: " + std::to_string(value) + " bytes cannot be addressed");
  }
  return (value + multiple - 1) / multiple * multiple;
}

// Makes a context current for a scope.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context) {
    check("cuCtxPushCurrent", driver().context_push(context));
  }
  ~CurrentContext() {
    CUcontext popped;
    driver().context_pop(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
};

// For teardown, which goes on after a failure. A driver that is already shutting down has freed
// everything itself.
void report(const char* call, CUresult result) noexcept {
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED) return;
  std::fprintf(stderr, "vmm_allocator: %s failed with error %d during teardown\n", call,
               static_cast<int>(result));
}

}  // namespace

OutOfMemory::OutOfMemory(size_t requested, size_t mapped, size_t free)
    : std::runtime_error("Arena.grow: cannot map " + std::to_string(requested) + " bytes: " +
                         std::to_string(mapped) + " bytes are mapped and the device has " +
                         std::to_string(free) + " bytes free"),
      requested_bytes(requested),
      mapped_bytes(mapped),
      free_bytes(free) {}

ReservationExceeded::ReservationExceeded(size_t requested, size_t reserved)
    : std::runtime_error("Arena.grow: cannot map " + std::to_string(requested) +
                         " bytes: the address range holds " + std::to_string(reserved) + " bytes"),
      requested_bytes(requested),
      reserved_bytes(reserved) {}

Arena::Arena(int device, size_t reserve_bytes, size_t chunk_bytes) : device_(device) {
  if (reserve_bytes == 0 || chunk_bytes == 0) {
    throw std::invalid_argument("Arena: reserve_bytes and chunk_bytes must be positive");
  }
  const Driver& cuda = driver();
  CUdevice handle;
  check("cuDeviceGet", cuda.device_get(&handle, device));
  const CUmemAllocationProp properties = chunk_properties(device);
  check("cuMemGetAllocationGranularity",
        cuda.granularity(&granularity_bytes_, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  chunk_bytes_ = round_up(chunk_bytes, granularity_bytes_);
  reserved_bytes_ = round_up(reserve_bytes, chunk_bytes_);
  check("cuDevicePrimaryCtxRetain", cuda.primary_context_retain(&context_, handle));
  const CUresult result = cuda.address_reserve(&base_, reserved_bytes_, 0, 0, 0);
  if (result != CUDA_SUCCESS) {
    cuda.primary_context_release(handle);
    throw DriverError(
        ("cuMemAddressReserve of " + std::to_string(reserved_bytes_) + " bytes").c_str(), result);
  }
}

Arena::~Arena() { close(); }

void Arena::require_open() const {
  if (context_ == nullptr) throw ArenaClosed();
}

void Arena::grow(size_t num_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  require_open();
  if (num_bytes > reserved_bytes_) throw ReservationExceeded(num_bytes, reserved_bytes_);
  const size_t wanted = round_up(num_bytes, chunk_bytes_) / chunk_bytes_;
  if (wanted <= chunks_.size()) return;
  map_chunks(wanted - chunks_.size());
  peak_mapped_bytes_ = std::max(peak_mapped_bytes_, mapped_bytes());
  ++num_grows_;
}

void Arena::map_chunks(size_t num_chunks) {
  const Driver& cuda = driver();
  const CurrentContext current(context_);
  const CUmemAllocationProp properties = chunk_properties(device_);
  const CUdeviceptr first = base_ + mapped_bytes();
  std::vector<CUmemGenericAllocationHandle> created;
  created.reserve(num_chunks);
  chunks_.reserve(chunks_.size() + num_chunks);  // nothing below allocates on the host
  const char* call = nullptr;
  CUresult result = CUDA_SUCCESS;
  size_t num_mapped = 0;
  while (num_mapped < num_chunks && result == CUDA_SUCCESS) {
    CUmemGenericAllocationHandle handle;
    call = "cuMemCreate";
    result = cuda.create(&handle, chunk_bytes_, &properties, 0);
    if (result != CUDA_SUCCESS) break;
    created.push_back(handle);
    call = "cuMemMap";
    result = cuda.map(first + num_mapped * chunk_bytes_, chunk_bytes_, 0, handle, 0);
    if (result == CUDA_SUCCESS) ++num_mapped;
  }
  if (result == CUDA_SUCCESS) {
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    call = "cuMemSetAccess";
    result = cuda.set_access(first, num_chunks * chunk_bytes_, &access, 1);
  }
  if (result == CUDA_SUCCESS) {
    chunks_.insert(chunks_.end(), created.begin(), created.end());
    return;
  }
  roll_back(created, num_mapped);
  if (result != CUDA_ERROR_OUT_OF_MEMORY) throw DriverError(call, result);
  size_t free_bytes = 0, total_bytes = 0;
  check("cuMemGetInfo", cuda.memory_info(&free_bytes, &total_bytes));
  throw OutOfMemory(mapped_bytes() + num_chunks * chunk_bytes_, mapped_bytes(), free_bytes);
}

void Arena::roll_back(const std::vector<CUmemGenericAllocationHandle>& created,
                      size_t num_mapped) noexcept {
  const Driver& cuda = driver();
  const CUdeviceptr first = base_ + mapped_bytes();
  if (num_mapped > 0) report("cuMemUnmap", cuda.unmap(first, num_mapped * chunk_bytes_));
  for (const auto handle : created) report("cuMemRelease", cuda.release(handle));
}

void Arena::shrink(size_t num_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  require_open();
  const size_t kept = std::min(num_bytes, reserved_bytes_);
  const size_t first_chunk = round_up(kept, chunk_bytes_) / chunk_bytes_;
  if (first_chunk >= chunks_.size()) return;
  const CurrentContext current(context_);
  check("cuCtxSynchronize", driver().context_synchronize());
  unmap_from(first_chunk);
  ++num_shrinks_;
}

void Arena::unmap_from(size_t first_chunk) {
  const Driver& cuda = driver();
  const size_t num_chunks = chunks_.size() - first_chunk;
  check("cuMemUnmap", cuda.unmap(base_ + first_chunk * chunk_bytes_, num_chunks * chunk_bytes_));
  // Unmapped: the arena no longer owns these addresses, whatever the releases say.
  CUresult failure = CUDA_SUCCESS;
  for (size_t i = first_chunk; i < chunks_.size(); ++i) {
    const CUresult result = cuda.release(chunks_[i]);
    if (result != CUDA_SUCCESS) failure = result;
  }
  chunks_.resize(first_chunk);
  check("cuMemRelease", failure);
}

void Arena::close() noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (context_ == nullptr) return;
  const Driver& cuda = driver();
  const CUresult pushed = cuda.context_push(context_);
  report("cuCtxPushCurrent", pushed);
  report("cuCtxSynchronize", cuda.context_synchronize());
  if (!chunks_.empty()) report("cuMemUnmap", cuda.unmap(base_, mapped_bytes()));
  for (const auto chunk : chunks_) report("cuMemRelease", cuda.release(chunk));
  chunks_.clear();
  report("cuMemAddressFree", cuda.address_free(base_, reserved_bytes_));
  if (pushed == CUDA_SUCCESS) {
    CUcontext popped;
    report("cuCtxPopCurrent", cuda.context_pop(&popped));
  }
  CUdevice handle;
  if (cuda.device_get(&handle, device_) == CUDA_SUCCESS) {
    report("cuDevicePrimaryCtxRelease", cuda.primary_context_release(handle));
  }
  context_ = nullptr;
}

Statistics Arena::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {reserved_bytes_,    mapped_bytes(), peak_mapped_bytes_, chunk_bytes_,
          granularity_bytes_, num_grows_,     num_shrinks_};
}

}  // namespace vmm_allocator
