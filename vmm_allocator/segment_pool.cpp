// SPDX-License-Identifier: Apache-2.0
#include "segment_pool.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace vmm_allocator {

SegmentPool::SegmentPool(std::shared_ptr<Arena> arena, size_t reserve_bytes, size_t limit_bytes)
    : arena_(std::move(arena)) {
  const size_t chunk_bytes = arena_->chunk_bytes();
  reserved_bytes_ = (reserve_bytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes;
  offset_ = arena_->take_addresses(reserved_bytes_);
  counters_.reserved_bytes = reserved_bytes_;
  counters_.limit_bytes = limit_bytes;
}

void* SegmentPool::allocate(size_t num_bytes, int device) noexcept {
  if (arena_->owner() != getpid()) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (is_closed_) throw std::runtime_error("TorchPool: closed");
    if (device != arena_->device()) throw std::runtime_error("TorchPool: on another device");
    flush();
    const size_t chunk_bytes = arena_->chunk_bytes();
    void* const pointer = place((num_bytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes);
    ++counters_.num_allocations;
    return pointer;
  } catch (const std::exception& error) {
    ++counters_.num_refusals;
    counters_.refused_bytes = num_bytes;
    counters_.last_refusal = error.what();
    return nullptr;
  }
}

void* SegmentPool::place(size_t num_bytes) {
  const size_t in_use = counters_.in_use_bytes, limit = counters_.limit_bytes;
  if (in_use > limit || num_bytes > limit - in_use) {
    throw std::runtime_error("TorchPool: cannot give " + std::to_string(num_bytes) +
                             " bytes: " + std::to_string(in_use) + " bytes of at most " +
                             std::to_string(limit) + " bytes are in use");
  }
  size_t start = offset_;
  for (const auto& [offset, segment] : segments_) {
    if (offset - start >= num_bytes) break;
    start = offset + segment.num_bytes;
  }
  if (num_bytes > offset_ + reserved_bytes_ - start) {
    throw std::runtime_error("TorchPool: no " + std::to_string(num_bytes) +
                             " bytes of addresses in a row are free");
  }
  arena_->map(start, num_bytes);
  arena_->hold(start, num_bytes);
  segments_[start] = {num_bytes};
  counters_.in_use_bytes += num_bytes;
  counters_.peak_in_use_bytes = std::max(counters_.peak_in_use_bytes, counters_.in_use_bytes);
  return reinterpret_cast<void*>(arena_->base() + start);
}

void SegmentPool::free(void* pointer) noexcept {
  if (pointer == nullptr || arena_->owner() != getpid()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = segments_.find(reinterpret_cast<CUdeviceptr>(pointer) - arena_->base());
  if (found == segments_.end()) return;
  found->second.is_freed = true;
  flush();
}

void SegmentPool::flush() noexcept {
  for (auto segment = segments_.begin(); segment != segments_.end();) {
    const auto next = std::next(segment);
    const size_t num_bytes = segment->second.num_bytes;
    if (segment->second.is_freed) {
      if (!arena_->give_back(segment->first, num_bytes)) return;
      counters_.in_use_bytes -= num_bytes;
      segments_.erase(segment);
    }
    segment = next;
  }
}

void SegmentPool::set_limit(size_t num_bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  counters_.limit_bytes = num_bytes;
}

void SegmentPool::reset_peak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  counters_.peak_in_use_bytes = counters_.in_use_bytes;
}

void SegmentPool::close() noexcept {
  if (arena_->owner() != getpid()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  flush();
}

bool SegmentPool::is_done() const {
  if (arena_->owner() != getpid()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_closed_ && segments_.empty();
}

size_t SegmentPool::in_use_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counters_.in_use_bytes;
}

SegmentStatistics SegmentPool::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  SegmentStatistics all = counters_;
  all.num_segments = segments_.size();
  return all;
}

}  // namespace vmm_allocator
