// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "arena.h"

namespace vmm_allocator {

// Segments of memory for PyTorch's caching allocator, at the end of an arena's addresses: first
// fit, each in chunks of its own.
//
// A freed segment's chunks become spares of the arena. They cannot be unmapped while a stream is
// being captured; then they stay mapped, and count, until a later call.
class SegmentPool {
 public:
  // Takes `reserve_bytes` of addresses for as long as the arena lives.
  SegmentPool(std::shared_ptr<Arena> arena, size_t reserve_bytes);

  // Null where the addresses or the memory do not allow it.
  void* allocate(size_t num_bytes, int device) noexcept;
  void free(void* pointer) noexcept;

  // Refuses all later allocations; segments in use live on.
  void close() noexcept;
  bool is_done() const;         // closed, and every segment is free
  size_t in_use_bytes() const;  // of segments handed out, in whole chunks

 private:
  struct Segment {
    size_t num_bytes;
    bool is_freed = false;  // but not unmapped yet
  };
  using Segments = std::map<size_t, Segment>;  // by offset in the arena

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
// pluggable allocator calls; the pair is taken again once the pool is done. Returns n. Throws
// HooksExhausted.
int attach_hooks(const std::shared_ptr<SegmentPool>& pool);

}  // namespace vmm_allocator
