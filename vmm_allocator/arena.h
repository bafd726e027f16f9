// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "chunk_store.h"

namespace vmm_allocator {

// All `_bytes` are bytes, all `num_` are counts since the arena was made.
struct Statistics {
  size_t reserved_bytes;
  size_t chunk_bytes;
  size_t granularity_bytes;
  size_t front_bytes;   // mapped without a hole from the base on
  size_t mapped_bytes;  // mapped anywhere
  size_t spare_bytes;   // chunks that are kept without an address
  size_t in_use_bytes;  // mapped chunks that views or segments refer to
  size_t num_chunks_mapped;
  size_t num_chunks_created;
  size_t num_chunks_released;
  double create_seconds;
  double map_seconds;
  double access_seconds;  // to let the device read and write what has been mapped
  double unmap_seconds;
  double release_seconds;
  double wait_seconds;  // for the device, before unmapping
};

// One reserved range of device addresses, parts of which are backed by chunks of memory.
//
// The front of the range grows and shrinks; pools take their addresses from its end. Whatever is
// not unmapped keeps its address and contents. Offsets count from the base of the range.
//
// Who keeps a pointer says so by `hold`: chunks that are held are not unmapped (InUse). Teardown
// order: views and segments end, then wait for the device, unmap, release the chunks, free the
// addresses, release the primary context. `close` only starts it: it happens at once, or when the
// last hold ends.
//
// Safe to call from several threads. In a forked child every call throws ArenaForked, and teardown
// does nothing.
class Arena {
 public:
  // Retains the primary context of `device` and reserves addresses; `chunk_bytes` is rounded up to
  // the driver's granularity and `reserve_bytes` to whole chunks. Maps nothing.
  Arena(int device, size_t reserve_bytes, size_t chunk_bytes, size_t limit_bytes);
  ~Arena();  // what fails is written to stderr
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Maps the chunks that overlap the range and are not mapped yet, spares first; or none at all
  // where it throws (OutOfMemory, LimitExceeded, ReservationExceeded, DriverError).
  void map(size_t offset, size_t num_bytes);
  // map(0, num_bytes), within the front.
  void grow(size_t num_bytes);
  // Waits for the device, then unmaps the chunks from `num_bytes` to the end of the front; they
  // become spares (`keep`) or are released. Throws InUse.
  void shrink(size_t num_bytes, bool keep);
  // Releases spares until at most `num_bytes` of them are left.
  void trim(size_t num_bytes);

  // The offset of addresses that the front will never reach.
  size_t take_addresses(size_t num_bytes);

  // Says that somebody refers to a mapped range, until release_hold of the same range.
  void hold(size_t offset, size_t num_bytes);
  void release_hold(size_t offset, size_t num_bytes) noexcept;
  // Ends the hold of whole chunks and makes them spares. False where that cannot be done now (while
  // a stream is being captured, for instance): then the hold lasts.
  bool give_back(size_t offset, size_t num_bytes) noexcept;

  // No later call but statistics and release_hold is good; may be called again.
  void close() noexcept;

  CUdeviceptr base() const { return base_; }
  int device() const { return device_; }
  int owner() const { return owner_; }
  size_t chunk_bytes() const { return chunk_bytes_; }
  Statistics statistics() const;

 private:
  struct Position {  // a place for one chunk in the address range
    Chunk chunk = 0;
    uint32_t num_holds = 0;
    bool is_mapped = false;
  };
  struct Range {  // of positions, half open
    size_t first, end;
  };

  void require_own_process() const;
  void require_usable() const;
  Range covering(size_t offset, size_t num_bytes) const;
  std::vector<Range> runs(Range range, bool mapped) const;
  void require_unheld(Range range) const;
  void wait();
  void map_range(Range range);
  void unmap_range(Range range, bool keep);
  CUresult attach(const std::vector<Range>& runs, const std::vector<Chunk>& chunks,
                  const char** call);
  CUresult give_access(const std::vector<Range>& runs);
  CUresult detach(Range run, std::vector<Chunk>& chunks);
  void note_mapped(Range range);
  void note_unmapped(Range range);
  void drop_holds(Range range) noexcept;
  void tear_down() noexcept;
  CUdeviceptr address(size_t position) const { return base_ + position * chunk_bytes_; }

  mutable std::mutex mutex_;
  int device_;
  int owner_;  // process
  bool is_closed_ = false;
  CUcontext context_ = nullptr;  // null once torn down
  CUdeviceptr base_ = 0;
  size_t granularity_bytes_ = 0;
  size_t chunk_bytes_ = 0;
  size_t reserved_bytes_ = 0;
  std::unique_ptr<ChunkStore> store_;
  std::vector<Position> positions_;
  size_t front_end_ = 0;         // positions that the front may reach
  size_t front_mapped_end_ = 0;  // no position of the front is mapped from here on
  size_t front_ = 0;             // positions mapped without a hole from the first one on
  size_t num_mapped_ = 0;
  size_t num_in_use_ = 0;  // positions with holds
  size_t num_holds_ = 0;
  Statistics counters_{};  // counts and seconds; the rest is worked out when asked for
};

// A hold for as long as the object lives; keeps the arena.
class View {
 public:
  View(std::shared_ptr<Arena> arena, size_t offset, size_t num_bytes);
  ~View();
  View(const View&) = delete;
  View& operator=(const View&) = delete;

 private:
  std::shared_ptr<Arena> arena_;
  size_t offset_;
  size_t num_bytes_;
};

}  // namespace vmm_allocator
