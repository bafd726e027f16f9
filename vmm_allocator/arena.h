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

// All `_bytes` are in bytes. All `num_` are counts since the arena was created.
struct Statistics {
  size_t reserved_bytes;
  size_t chunk_bytes;
  size_t granularity_bytes;
  size_t front_bytes;   // bytes mapped without a hole from the base on
  size_t mapped_bytes;  // bytes mapped anywhere
  size_t spare_bytes;   // bytes of chunks that are kept without an address
  size_t in_use_bytes;  // bytes of mapped chunks that views or segments refer to
  size_t num_chunks_mapped;
  size_t num_chunks_created;
  size_t num_chunks_released;
  double create_seconds;
  double map_seconds;
  double access_seconds;  // time to give the device access to mapped memory
  double unmap_seconds;
  double release_seconds;
  double wait_seconds;  // time to wait for the device before unmapping
};

// One reserved range of device addresses, parts of which are backed by chunks of memory.
//
// The front of the range grows and shrinks; pools take their addresses from the end of the range.
// Memory keeps its address and contents until it is unmapped. Offsets count from the base of the
// range.
//
// Code that keeps a pointer calls `hold`: held chunks are not unmapped (InUse). Teardown first
// waits until all views and segments have ended. Then it waits for the device, unmaps, releases the
// chunks, frees the addresses, and releases the primary context. `close` starts teardown: it runs
// at once, or when the last hold ends.
//
// The class is safe to use from several threads. In a forked child every call throws ArenaForked,
// and teardown does nothing.
class Arena {
 public:
  // Retains the primary context of `device` and reserves addresses. `chunk_bytes` is rounded up to
  // the driver's granularity, and `reserve_bytes` to whole chunks. Maps nothing.
  Arena(int device, size_t reserve_bytes, size_t chunk_bytes, size_t limit_bytes);
  ~Arena();  // writes failures to stderr
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Maps the chunks that overlap the range and are not mapped yet, spare chunks first. If it throws
  // (OutOfMemory, LimitExceeded, ReservationExceeded, DriverError), it has mapped nothing.
  void map(size_t offset, size_t num_bytes);
  // Maps the range (0, num_bytes) of the front.
  void grow(size_t num_bytes);
  // Waits for the device, then unmaps the chunks from `num_bytes` to the end of the front. They
  // become spares (`keep`) or are released. Throws InUse.
  void shrink(size_t num_bytes, bool keep);
  // Releases spares until at most `num_bytes` of them are left.
  void trim(size_t num_bytes);

  // Reserves addresses that the front will never reach; returns their offset.
  size_t take_addresses(size_t num_bytes);

  // Marks a mapped range as in use until release_hold is called with the same range.
  void hold(size_t offset, size_t num_bytes);
  void release_hold(size_t offset, size_t num_bytes) noexcept;
  // Ends the hold of whole chunks and makes them spares. Returns false if that is impossible now
  // (for instance while a stream is being captured); then the hold stays.
  bool give_back(size_t offset, size_t num_bytes) noexcept;

  // Closes the arena. Afterwards only statistics and release_hold may be called. May be called
  // again.
  void close() noexcept;

  CUdeviceptr base() const { return base_; }
  int device() const { return device_; }
  int owner() const { return owner_; }
  size_t chunk_bytes() const { return chunk_bytes_; }
  Statistics statistics() const;

 private:
  struct Position {  // a slot for one chunk in the address range
    Chunk chunk = 0;
    uint32_t num_holds = 0;
    bool is_mapped = false;
  };
  struct Range {  // a half-open range of positions
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
  int owner_;  // process that created the arena
  bool is_closed_ = false;
  CUcontext context_ = nullptr;  // null after teardown
  CUdeviceptr base_ = 0;
  size_t granularity_bytes_ = 0;
  size_t chunk_bytes_ = 0;
  size_t reserved_bytes_ = 0;
  std::unique_ptr<ChunkStore> store_;
  std::vector<Position> positions_;
  size_t front_end_ = 0;         // number of positions that the front may reach
  size_t front_mapped_end_ = 0;  // no position of the front is mapped from here on
  size_t front_ = 0;             // number of positions mapped without a hole from the first one on
  size_t num_mapped_ = 0;
  size_t num_in_use_ = 0;  // number of positions with holds
  size_t num_holds_ = 0;
  Statistics counters_{};  // counts and seconds; statistics() computes the other members
};

// A hold that lasts as long as the object; keeps the arena alive.
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
