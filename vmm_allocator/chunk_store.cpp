// SPDX-License-Identifier: Apache-2.0
#include "chunk_store.h"

#include <algorithm>

#include "driver.h"
#include "errors.h"
#include "stopwatch.h"

namespace vmm_allocator {

CUmemAllocationProp chunk_properties(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

std::vector<Chunk> ChunkStore::take(size_t count) {
  const size_t reused = std::min(count, spares_.size());
  std::vector<Chunk> chunks = create(count - reused);  // This comes first, because it may throw.
  chunks.insert(chunks.end(), spares_.end() - reused, spares_.end());
  spares_.resize(spares_.size() - reused);
  return chunks;
}

std::vector<Chunk> ChunkStore::create(size_t count) {
  std::vector<Chunk> chunks;
  if (count == 0) return chunks;
  const size_t num_bytes = count * chunk_bytes_;
  if (held_bytes() > limit_bytes_ || num_bytes > limit_bytes_ - held_bytes()) {
    throw LimitExceeded(num_bytes, held_bytes(), limit_bytes_);
  }
  chunks.reserve(count);
  const Driver& cuda = driver();
  const CUmemAllocationProp properties = chunk_properties(device_);
  CUresult result = CUDA_SUCCESS;
  {
    const Stopwatch stopwatch(create_seconds_);
    while (chunks.size() < count) {
      Chunk chunk;
      result = cuda.create(&chunk, chunk_bytes_, &properties, 0);
      if (result != CUDA_SUCCESS) break;
      chunks.push_back(chunk);
    }
  }
  if (result == CUDA_SUCCESS) {
    num_created_ += count;
    num_held_ += count;
    return chunks;
  }
  size_t free_bytes = 0, total_bytes = 0;
  for (const Chunk chunk : chunks) report("cuMemRelease", cuda.release(chunk));
  if (result != CUDA_ERROR_OUT_OF_MEMORY) throw DriverError("cuMemCreate", result);
  check("cuMemGetInfo", cuda.memory_info(&free_bytes, &total_bytes));
  throw OutOfMemory(num_bytes, held_bytes(), free_bytes);
}

CUresult ChunkStore::release(const Chunk* chunks, size_t count) {
  const Stopwatch stopwatch(release_seconds_);
  CUresult failure = CUDA_SUCCESS;
  for (size_t i = 0; i < count; ++i) {
    const CUresult result = driver().release(chunks[i]);
    if (result != CUDA_SUCCESS) failure = result;
  }
  num_released_ += count;
  num_held_ -= count;
  return failure;
}

void ChunkStore::put(const std::vector<Chunk>& chunks, bool keep) {
  if (keep) {
    spares_.insert(spares_.end(), chunks.begin(), chunks.end());
  } else {
    check("cuMemRelease", release(chunks.data(), chunks.size()));
  }
}

void ChunkStore::trim(size_t num_bytes) {
  const size_t kept = num_bytes / chunk_bytes_;
  if (kept >= spares_.size()) return;
  const CUresult result = release(spares_.data() + kept, spares_.size() - kept);
  spares_.resize(kept);
  check("cuMemRelease", result);
}

}  // namespace vmm_allocator
