// SPDX-License-Identifier: Apache-2.0
#include "arena.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <string>

#include "driver.h"
#include "errors.h"
#include "stopwatch.h"

namespace vmm_allocator {
namespace {

size_t round_up(size_t value, size_t multiple) {
  if (value > std::numeric_limits<size_t>::max() - multiple) {
    throw std::invalid_argument("Arena: " + std::to_string(value) + " bytes cannot be addressed");
  }
  return (value + multiple - 1) / multiple * multiple;
}

void require_virtual_memory(CUdevice device) {
  int supported = 0;
  check("cuDeviceGetAttribute",
        driver().device_attribute(&supported,
                                  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device));
  if (!supported) throw DriverUnavailable("the device has no virtual memory management");
}

}  // namespace

Arena::Arena(int device, size_t reserve_bytes, size_t chunk_bytes, size_t limit_bytes)
    : device_(device), owner_(getpid()) {
  if (reserve_bytes == 0 || chunk_bytes == 0) {
    throw std::invalid_argument("Arena: reserve_bytes and chunk_bytes must be positive");
  }
  const Driver& cuda = driver();
  CUdevice handle;
  check("cuDeviceGet", cuda.device_get(&handle, device));
  require_virtual_memory(handle);
  const CUmemAllocationProp properties = chunk_properties(device);
  check("cuMemGetAllocationGranularity",
        cuda.granularity(&granularity_bytes_, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  chunk_bytes_ = round_up(chunk_bytes, granularity_bytes_);
  reserved_bytes_ = round_up(reserve_bytes, chunk_bytes_);
  store_ = std::make_unique<ChunkStore>(device, chunk_bytes_, limit_bytes);
  positions_.resize(reserved_bytes_ / chunk_bytes_);
  front_end_ = positions_.size();
  check("cuDevicePrimaryCtxRetain", cuda.primary_context_retain(&context_, handle));
  const CUresult result = cuda.address_reserve(&base_, reserved_bytes_, 0, 0, 0);
  if (result != CUDA_SUCCESS) {
    cuda.primary_context_release(handle);
    throw DriverError(
        ("cuMemAddressReserve of " + std::to_string(reserved_bytes_) + " bytes").c_str(), result);
  }
}

Arena::~Arena() {
  if (owner_ == getpid()) tear_down();
}

void Arena::require_own_process() const {
  // Check before locking: the thread that holds the lock may not exist in this process.
  if (owner_ != getpid()) throw ArenaForked(owner_);
}

void Arena::require_usable() const {
  if (is_closed_) throw ArenaClosed();
}

Arena::Range Arena::covering(size_t offset, size_t num_bytes) const {
  if (offset > reserved_bytes_ || num_bytes > reserved_bytes_ - offset) {
    throw ReservationExceeded(offset + num_bytes, reserved_bytes_);
  }
  return {offset / chunk_bytes_, round_up(offset + num_bytes, chunk_bytes_) / chunk_bytes_};
}

// The longest runs of positions in the range that are all mapped, or all unmapped.
std::vector<Arena::Range> Arena::runs(Range range, bool mapped) const {
  std::vector<Range> found;
  for (size_t i = range.first; i < range.end; ++i) {
    if (positions_[i].is_mapped != mapped) continue;
    if (!found.empty() && found.back().end == i) {
      ++found.back().end;
    } else {
      found.push_back({i, i + 1});
    }
  }
  return found;
}

void Arena::require_unheld(Range range) const {
  const auto is_held = [](const Position& position) { return position.num_holds > 0; };
  const auto first = positions_.begin() + range.first, end = positions_.begin() + range.end;
  const auto held = std::find_if(first, end, is_held);
  if (held == end) return;
  const auto last =
      std::find_if(std::make_reverse_iterator(end), std::make_reverse_iterator(held), is_held);
  throw InUse((held - positions_.begin()) * chunk_bytes_,
              (last.base() - positions_.begin()) * chunk_bytes_);
}

void Arena::wait() {
  const Stopwatch stopwatch(counters_.wait_seconds);
  check("cuCtxSynchronize", driver().context_synchronize());
}

void Arena::map(size_t offset, size_t num_bytes) {
  require_own_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  require_usable();
  if (num_bytes > 0) map_range(covering(offset, num_bytes));
}

void Arena::grow(size_t num_bytes) {
  require_own_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  require_usable();
  const size_t front_limit = front_end_ * chunk_bytes_;
  if (num_bytes > front_limit) throw ReservationExceeded(num_bytes, front_limit);
  // Everything below the front is mapped already.
  map_range({front_, std::max(front_, covering(0, num_bytes).end)});
}

void Arena::map_range(Range range) {
  const std::vector<Range> missing = runs(range, false);
  if (missing.empty()) return;
  size_t count = 0;
  for (const Range run : missing) count += run.end - run.first;
  const CurrentContext current(context_);
  const std::vector<Chunk> chunks = store_->take(count);
  const char* call = nullptr;
  const CUresult result = attach(missing, chunks, &call);
  if (result != CUDA_SUCCESS) {
    store_->put(chunks, true);
    throw DriverError(call, result);
  }
  for (const Range run : missing) note_mapped(run);
}

// Maps chunks at runs of positions, in order, and gives the device access run by run. If a call
// fails, nothing stays mapped.
CUresult Arena::attach(const std::vector<Range>& runs, const std::vector<Chunk>& chunks,
                       const char** call) {
  const Driver& cuda = driver();
  CUresult result = CUDA_SUCCESS;
  size_t num_attached = 0;
  std::vector<Range> attached;
  attached.reserve(runs.size());
  for (const Range run : runs) {
    attached.push_back({run.first, run.first});
    const Stopwatch stopwatch(counters_.map_seconds);
    *call = "cuMemMap";
    for (size_t& end = attached.back().end; end < run.end; ++end) {
      const Chunk chunk = chunks[num_attached++];
      result = cuda.map(address(end), chunk_bytes_, 0, chunk, 0);
      if (result != CUDA_SUCCESS) break;
      positions_[end].chunk = chunk;
    }
    if (result != CUDA_SUCCESS) break;
  }
  if (result == CUDA_SUCCESS) {
    *call = "cuMemSetAccess";
    result = give_access(attached);
  }
  if (result == CUDA_SUCCESS) return result;
  for (const Range run : attached) {
    const size_t num_bytes = (run.end - run.first) * chunk_bytes_;
    if (num_bytes > 0) report("cuMemUnmap", cuda.unmap(address(run.first), num_bytes));
  }
  return result;
}

CUresult Arena::give_access(const std::vector<Range>& runs) {
  const Stopwatch stopwatch(counters_.access_seconds);
  CUmemAccessDesc access{};
  access.location = chunk_properties(device_).location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUresult result = CUDA_SUCCESS;
  for (size_t i = 0; i < runs.size() && result == CUDA_SUCCESS; ++i) {
    const size_t num_bytes = (runs[i].end - runs[i].first) * chunk_bytes_;
    result = driver().set_access(address(runs[i].first), num_bytes, &access, 1);
  }
  return result;
}

void Arena::shrink(size_t num_bytes, bool keep) {
  require_own_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  require_usable();
  const size_t first = covering(0, std::min(num_bytes, reserved_bytes_)).end;
  if (first < front_mapped_end_) unmap_range({first, front_mapped_end_}, keep);
}

void Arena::unmap_range(Range range, bool keep) {
  const std::vector<Range> mapped = runs(range, true);
  if (mapped.empty()) return;
  require_unheld(range);
  const CurrentContext current(context_);
  wait();
  std::vector<Chunk> chunks;
  CUresult result = CUDA_SUCCESS;
  for (size_t i = 0; i < mapped.size() && result == CUDA_SUCCESS; ++i) {
    result = detach(mapped[i], chunks);
    if (result == CUDA_SUCCESS) note_unmapped(mapped[i]);
  }
  store_->put(chunks, keep);
  check("cuMemUnmap", result);
}

// Unmaps one run of mapped positions and appends its chunks to `chunks`.
CUresult Arena::detach(Range run, std::vector<Chunk>& chunks) {
  const size_t count = run.end - run.first;
  chunks.reserve(chunks.size() + count);
  const Stopwatch stopwatch(counters_.unmap_seconds);
  const CUresult result = driver().unmap(address(run.first), count * chunk_bytes_);
  if (result != CUDA_SUCCESS) return result;
  for (size_t i = run.first; i < run.end; ++i) chunks.push_back(positions_[i].chunk);
  return result;
}

void Arena::note_mapped(Range range) {
  for (size_t i = range.first; i < range.end; ++i) positions_[i].is_mapped = true;
  const size_t count = range.end - range.first;
  num_mapped_ += count;
  counters_.num_chunks_mapped += count;
  if (range.first < front_end_) front_mapped_end_ = std::max(front_mapped_end_, range.end);
  while (front_ < positions_.size() && positions_[front_].is_mapped) ++front_;
}

void Arena::note_unmapped(Range range) {
  for (size_t i = range.first; i < range.end; ++i) positions_[i].is_mapped = false;
  num_mapped_ -= range.end - range.first;
  front_ = std::min(front_, range.first);
  while (front_mapped_end_ > 0 && !positions_[front_mapped_end_ - 1].is_mapped) {
    --front_mapped_end_;
  }
}

void Arena::trim(size_t num_bytes) {
  require_own_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  require_usable();
  const CurrentContext current(context_);
  store_->trim(num_bytes);
}

size_t Arena::take_addresses(size_t num_bytes) {
  require_own_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  require_usable();
  const size_t count = round_up(num_bytes, chunk_bytes_) / chunk_bytes_;
  if (count > front_end_ - front_mapped_end_) {
    throw ReservationExceeded(num_bytes, (front_end_ - front_mapped_end_) * chunk_bytes_);
  }
  front_end_ -= count;
  return front_end_ * chunk_bytes_;
}

void Arena::hold(size_t offset, size_t num_bytes) {
  require_own_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  require_usable();
  const Range range = covering(offset, num_bytes);
  if (!runs(range, false).empty()) {
    throw std::invalid_argument("Arena: bytes " + std::to_string(offset) + " to " +
                                std::to_string(offset + num_bytes) + " must be mapped, got " +
                                std::to_string(front_ * chunk_bytes_) +
                                " mapped bytes at the front");
  }
  for (size_t i = range.first; i < range.end; ++i) {
    if (positions_[i].num_holds++ == 0) ++num_in_use_;
  }
  ++num_holds_;
}

void Arena::drop_holds(Range range) noexcept {
  for (size_t i = range.first; i < range.end; ++i) {
    if (--positions_[i].num_holds == 0) --num_in_use_;
  }
  --num_holds_;
}

void Arena::release_hold(size_t offset, size_t num_bytes) noexcept {
  if (owner_ != getpid()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_holds({offset / chunk_bytes_, (offset + num_bytes + chunk_bytes_ - 1) / chunk_bytes_});
  if (num_holds_ == 0 && is_closed_) tear_down();
}

bool Arena::give_back(size_t offset, size_t num_bytes) noexcept {
  if (owner_ != getpid()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  const Range range{offset / chunk_bytes_, (offset + num_bytes) / chunk_bytes_};
  drop_holds(range);
  if (is_closed_) {
    if (num_holds_ == 0) tear_down();
    return true;
  }
  try {
    unmap_range(range, true);
    return true;
  } catch (const std::exception&) {
    for (size_t i = range.first; i < range.end; ++i) {
      if (positions_[i].num_holds++ == 0) ++num_in_use_;
    }
    ++num_holds_;
    return false;
  }
}

void Arena::close() noexcept {
  if (owner_ != getpid()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  if (num_holds_ == 0) tear_down();
}

void Arena::tear_down() noexcept {
  if (context_ == nullptr) return;
  const Driver& cuda = driver();
  const CUresult pushed = cuda.context_push(context_);
  report("cuCtxPushCurrent", pushed);
  report("cuCtxSynchronize", cuda.context_synchronize());
  try {
    std::vector<Chunk> chunks;
    for (const Range run : runs({0, positions_.size()}, true)) {
      report("cuMemUnmap", detach(run, chunks));
      note_unmapped(run);
    }
    store_->put(chunks, true);
    store_->trim(0);
  } catch (const DriverError& error) {
    report("cuMemRelease", error.result);
  } catch (const std::bad_alloc&) {  // the end of the process frees the remaining memory
  }
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
  require_own_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  Statistics all = counters_;
  all.reserved_bytes = reserved_bytes_;
  all.chunk_bytes = chunk_bytes_;
  all.granularity_bytes = granularity_bytes_;
  all.front_bytes = front_ * chunk_bytes_;
  all.mapped_bytes = num_mapped_ * chunk_bytes_;
  all.spare_bytes = store_->spare_bytes();
  all.in_use_bytes = num_in_use_ * chunk_bytes_;
  all.num_chunks_created = store_->num_created();
  all.num_chunks_released = store_->num_released();
  all.create_seconds = store_->create_seconds();
  all.release_seconds = store_->release_seconds();
  return all;
}

View::View(std::shared_ptr<Arena> arena, size_t offset, size_t num_bytes)
    : arena_(std::move(arena)), offset_(offset), num_bytes_(num_bytes) {
  arena_->hold(offset, num_bytes);
}

View::~View() { arena_->release_hold(offset_, num_bytes_); }

}  // namespace vmm_allocator
