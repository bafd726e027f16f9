// SPDX-License-Identifier: Apache-2.0
#include "segment_pool.h"

#include <unistd.h>

#include <exception>

namespace vmm_allocator {

SegmentPool::SegmentPool(std::shared_ptr<Arena> arena, size_t reserve_bytes)
    : arena_(std::move(arena)) {
  const size_t chunk_bytes = arena_->chunk_bytes();
  reserved_bytes_ = (reserve_bytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes;
  offset_ = arena_->take_addresses(reserved_bytes_);
}

void* SegmentPool::allocate(size_t num_bytes, int device) noexcept {
  if (arena_->owner() != getpid()) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (is_closed_ || device != arena_->device()) return nullptr;
    flush();
    const size_t chunk_bytes = arena_->chunk_bytes();
    return place((num_bytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes);
  } catch (const std::exception&) {
    return nullptr;
  }
}

void* SegmentPool::place(size_t num_bytes) {
  size_t start = offset_;
  for (const auto& [offset, segment] : segments_) {
    if (offset - start >= num_bytes) break;
    start = offset + segment.num_bytes;
  }
  if (num_bytes > offset_ + reserved_bytes_ - start) return nullptr;
  arena_->map(start, num_bytes);
  arena_->hold(start, num_bytes);
  segments_[start] = {num_bytes};
  in_use_bytes_ += num_bytes;
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
      in_use_bytes_ -= num_bytes;
      segments_.erase(segment);
    }
    segment = next;
  }
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
  return in_use_bytes_;
}

}  // namespace vmm_allocator
