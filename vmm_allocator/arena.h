// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstddef>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace vmm_allocator {

// The card has no memory left for the chunks asked for. All counts are in bytes.
struct OutOfMemory : std::runtime_error {
  OutOfMemory(size_t requested, size_t mapped, size_t free);
  size_t requested_bytes;  // mapped end that was asked for
  size_t mapped_bytes;     // mapped end before and after
  size_t free_bytes;       // free memory of the card
};

// More was asked for than the address range holds.
struct ReservationExceeded : std::runtime_error {
  ReservationExceeded(size_t requested, size_t reserved);
  size_t requested_bytes;
  size_t reserved_bytes;
};

// The arena has been closed.
struct ArenaClosed : std::runtime_error {
  ArenaClosed() : std::runtime_error("Arena: closed") {}
};

struct Statistics {
  size_t reserved_bytes;
  size_t mapped_bytes;
  size_t peak_mapped_bytes;
  size_t chunk_bytes;
  size_t granularity_bytes;
  size_t num_grows;    // calls that mapped something
  size_t num_shrinks;  // calls that unmapped something
};

// One reserved range of device addresses whose front part is backed by physical chunks.
//
// Growing and shrinking move the mapped end; everything below it keeps its address and contents.
// Safe to call from several threads. Teardown order: wait for the device, unmap, release the
// chunks, free the addresses, release the primary context. Whoever holds a pointer or a captured
// graph into the range drops it before the range under it goes.
class Arena {
 public:
  // Retains the primary context of `device` and reserves addresses; `chunk_bytes` is rounded up to
  // the driver's granularity and `reserve_bytes` to whole chunks. Maps nothing.
  Arena(int device, size_t reserve_bytes, size_t chunk_bytes);
  ~Arena();  // close(); what fails is written to stderr
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Maps chunks until at least `num_bytes` are mapped, or none at all where it throws (OutOfMemory,
  // ReservationExceeded, DriverError). Never unmaps.
  void grow(size_t num_bytes);

  // Waits for all work of the device, then unmaps and releases the chunks that lie wholly beyond
  // `num_bytes`.
  void shrink(size_t num_bytes);

  // Gives everything back; later calls of grow and shrink throw ArenaClosed. May be called
  // again.
  void close() noexcept;

  CUdeviceptr base() const { return base_; }
  Statistics statistics() const;

 private:
  void require_open() const;
  void map_chunks(size_t num_chunks);
  void unmap_from(size_t first_chunk);
  void roll_back(const std::vector<CUmemGenericAllocationHandle>& created,
                 size_t num_mapped) noexcept;
  size_t mapped_bytes() const { return chunks_.size() * chunk_bytes_; }

  mutable std::mutex mutex_;
  int device_;
  CUcontext context_ = nullptr;
  CUdeviceptr base_ = 0;
  size_t reserved_bytes_ = 0;
  size_t chunk_bytes_ = 0;
  size_t granularity_bytes_ = 0;
  size_t peak_mapped_bytes_ = 0;
  size_t num_grows_ = 0;
  size_t num_shrinks_ = 0;
  std::vector<CUmemGenericAllocationHandle> chunks_;  // in the order of their addresses
};

}  // namespace vmm_allocator
