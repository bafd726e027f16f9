// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstddef>
#include <vector>

namespace vmm_allocator {

using Chunk = CUmemGenericAllocationHandle;

// Physical memory of one device in chunks of one size, at most `limit_bytes` in total. Chunks that
// are put back may be kept as spares. `take` uses spares before it creates chunks.
//
// The caller locks, and makes the device's context current.
class ChunkStore {
 public:
  ChunkStore(int device, size_t chunk_bytes, size_t limit_bytes)
      : device_(device), chunk_bytes_(chunk_bytes), limit_bytes_(limit_bytes) {}

  // Returns `count` chunks. If it throws (OutOfMemory, LimitExceeded, DriverError), it has taken
  // none.
  std::vector<Chunk> take(size_t count);

  // Takes chunks back, as spares or to release them. Throws DriverError if a release fails, but
  // takes all chunks back even then.
  void put(const std::vector<Chunk>& chunks, bool keep);

  // Releases spares until at most `num_bytes` of them are left.
  void trim(size_t num_bytes);

  size_t chunk_bytes() const { return chunk_bytes_; }
  size_t held_bytes() const { return num_held_ * chunk_bytes_; }  // mapped and spare chunks
  size_t spare_bytes() const { return spares_.size() * chunk_bytes_; }
  size_t num_created() const { return num_created_; }
  size_t num_released() const { return num_released_; }
  double create_seconds() const { return create_seconds_; }
  double release_seconds() const { return release_seconds_; }

 private:
  std::vector<Chunk> create(size_t count);
  CUresult release(const Chunk* chunks, size_t count);

  int device_;
  size_t chunk_bytes_;
  size_t limit_bytes_;
  std::vector<Chunk> spares_;
  size_t num_held_ = 0;
  size_t num_created_ = 0;
  size_t num_released_ = 0;
  double create_seconds_ = 0;
  double release_seconds_ = 0;
};

// The properties with which chunks of a device are created, and the device that may access them.
CUmemAllocationProp chunk_properties(int device);

}  // namespace vmm_allocator
