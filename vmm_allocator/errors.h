// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace vmm_allocator {

// The card has no memory left for the requested chunks. All counts are in bytes.
struct OutOfMemory : std::runtime_error {
  OutOfMemory(size_t requested, size_t held, size_t free)
      : std::runtime_error("Arena: cannot create " + std::to_string(requested) +
                           " bytes of chunks: the arena holds " + std::to_string(held) +
                           " bytes and the device has " + std::to_string(free) + " bytes free"),
        requested_bytes(requested),
        held_bytes(held),
        free_bytes(free) {}
  size_t requested_bytes;  // bytes of chunks that had to be created
  size_t held_bytes;       // bytes of the arena's chunks before and after, mapped and spare
  size_t free_bytes;       // free memory of the card in bytes
};

// The arena's own limit does not allow the requested chunks.
struct LimitExceeded : std::runtime_error {
  LimitExceeded(size_t requested, size_t held, size_t limit)
      : std::runtime_error("Arena: cannot create " + std::to_string(requested) +
                           " bytes of chunks: the arena holds " + std::to_string(held) +
                           " bytes of at most " + std::to_string(limit) + " bytes"),
        requested_bytes(requested),
        held_bytes(held),
        limit_bytes(limit) {}
  size_t requested_bytes;
  size_t held_bytes;
  size_t limit_bytes;
};

// The request exceeds the address range.
struct ReservationExceeded : std::runtime_error {
  ReservationExceeded(size_t requested, size_t reserved)
      : std::runtime_error("Arena: " + std::to_string(requested) +
                           " bytes of addresses were asked for, got " + std::to_string(reserved) +
                           " reserved"),
        requested_bytes(requested),
        reserved_bytes(reserved) {}
  size_t requested_bytes;
  size_t reserved_bytes;
};

// A tensor or a segment is in the range to be unmapped.
struct InUse : std::runtime_error {
  InUse(size_t first, size_t end)
      : std::runtime_error("Arena: bytes " + std::to_string(first) + " to " + std::to_string(end) +
                           " hold memory that tensors or graphs still refer to"),
        first_bytes(first),
        end_bytes(end) {}
  size_t first_bytes;  // start of the first chunk in use within the range
  size_t end_bytes;    // end of the last chunk in use
};

// The arena has been closed.
struct ArenaClosed : std::runtime_error {
  ArenaClosed() : std::runtime_error("Arena: closed") {}
};

// The arena belongs to the parent of this process.
struct ArenaForked : std::runtime_error {
  explicit ArenaForked(int owner)
      : std::runtime_error("Arena: made by process " + std::to_string(owner) +
                           "; CUDA memory does not survive a fork, start workers by spawn") {}
};

// All pairs of hooks that can be given to PyTorch are in use.
struct HooksExhausted : std::runtime_error {
  explicit HooksExhausted(int count)
      : std::runtime_error("TorchPool: all " + std::to_string(count) +
                           " pools of the process are open or hold memory") {}
};

}  // namespace vmm_allocator
