// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "arena.h"

namespace vmm_allocator {

// Segments of memory for PyTorch's caching allocator, at the end of an arena's addresses. They are
// placed first fit, and each segment has its own chunks.
//
// A freed segment's chunks become spares of the arena. They cannot be unmapped while a stream is
// being captured. Then they stay mapped, and count as in use, until a later call.
class SegmentPool {
 public:
  // Takes `reserve_bytes` of addresses for the lifetime of the arena.
  SegmentPool(std::shared_ptr<Arena> arena, size_t reserve_bytes);

  // Returns null if there are not enough addresses or not enough memory.
  void* allocate(size_t num_bytes, int device) noexcept;
  void free(void* pointer) noexcept;

  // Refuses all later allocations; segments in use stay valid.
  void close() noexcept;
  bool is_done() const;         // true if the pool is closed and every segment is free
  size_t in_use_bytes() const;  // bytes of allocated segments, in whole chunks

 private:
  struct Segment {
    size_t num_bytes;
    bool is_freed = false;  // freed, but not unmapped yet
  };
  using Segments = std::map<size_t, Segment>;  // key: offset in the arena

  void* place(size_t num_bytes);
  void flush() noexcept;

  mutable std::mutex mutex_;
  std::shared_ptr<Arena> arena_;
  size_t reserved_bytes_;
  size_t offset_;
  Segments segments_;
  bool is_closed_ = false;
  size_t in_use_bytes_ = 0;
};

// Gives a pool one of the pairs of C functions `vmm_allocate_<n>`, `vmm_free_<n>` that PyTorch's
// pluggable allocator calls. The pair can be given to another pool once this pool is done. Returns
// n. Throws HooksExhausted.
int attach_hooks(const std::shared_ptr<SegmentPool>& pool);

}  // namespace vmm_allocator
