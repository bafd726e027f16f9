// SPDX-License-Identifier: Apache-2.0
//
// The C functions that torch.cuda.memory.CUDAPluggableAllocator looks up by name. Their arguments
// are a size, a device and a stream, but not the pool, so every pool has its own pair of functions.
#include <array>
#include <mutex>

#include "errors.h"
#include "segment_pool.h"

namespace vmm_allocator {
namespace {

constexpr int kNumHooks = 16;

struct Hooks {
  std::mutex mutex;
  std::array<std::shared_ptr<SegmentPool>, kNumHooks> pools;
};

// Never destroyed, because PyTorch may free memory at the very end of the process.
Hooks& hooks() {
  static Hooks* const all = new Hooks;
  return *all;
}

std::shared_ptr<SegmentPool> pool_of(int index) {
  const std::lock_guard<std::mutex> lock(hooks().mutex);
  return hooks().pools[index];
}

void* allocate(int index, size_t num_bytes, int device) noexcept {
  const std::shared_ptr<SegmentPool> pool = pool_of(index);
  return pool == nullptr ? nullptr : pool->allocate(num_bytes, device);
}

void free_segment(int index, void* pointer) noexcept {
  const std::shared_ptr<SegmentPool> pool = pool_of(index);
  if (pool == nullptr) return;
  pool->free(pointer);
  if (!pool->is_done()) return;
  const std::lock_guard<std::mutex> lock(hooks().mutex);
  if (hooks().pools[index] == pool) hooks().pools[index] = nullptr;
}

}  // namespace

int attach_hooks(const std::shared_ptr<SegmentPool>& pool) {
  const std::lock_guard<std::mutex> lock(hooks().mutex);
  for (int i = 0; i < kNumHooks; ++i) {
    std::shared_ptr<SegmentPool>& owner = hooks().pools[i];
    if (owner != nullptr && !owner->is_done()) continue;
    owner = pool;
    return i;
  }
  throw HooksExhausted(kNumHooks);
}

}  // namespace vmm_allocator

// The stream and the device of a free are not needed: freeing waits for the whole device.
#define VMM_HOOKS(index)                                                                         \
  extern "C" __attribute__((visibility("default"))) void* vmm_allocate_##index(                  \
      size_t num_bytes, int device, void*) {                                                     \
    return vmm_allocator::allocate(index, num_bytes, device);                                    \
  }                                                                                              \
  extern "C" __attribute__((visibility("default"))) void vmm_free_##index(void* pointer, size_t, \
                                                                          int, void*) {          \
    vmm_allocator::free_segment(index, pointer);                                                 \
  }

VMM_HOOKS(0)
VMM_HOOKS(1)
VMM_HOOKS(2)
VMM_HOOKS(3)
VMM_HOOKS(4)
VMM_HOOKS(5)
VMM_HOOKS(6)
VMM_HOOKS(7)
VMM_HOOKS(8)
VMM_HOOKS(9)
VMM_HOOKS(10)
VMM_HOOKS(11)
VMM_HOOKS(12)
VMM_HOOKS(13)
VMM_HOOKS(14)
VMM_HOOKS(15)
