// SPDX-License-Identifier: Apache-2.0
//
// Attention of many short sequences, or of long ones, to keys that may be stored in pages. It is
// meant for enough tiles of queries to fill the card.
//
// The query heads that share a KV head are neighbouring rows, so keys are read once for all of
// them. One block per multiprocessor walks over tiles of 128 such rows. Two groups of four warps
// multiply 64 rows each. A third group copies keys and values through a ring of shared-memory
// stages, and gathers the queries of the next tile. As in FlashAttention-3 (Shah et al. 2024,
// arXiv:2407.08608) the scores of a step are multiplied while the values of the previous step are,
// so that the tensor cores work during a softmax.

#include "attention.h"
#include "epilogue.cuh"
#include "vllm_add_llada/cuda_kernels/common/ring.cuh"

namespace fused_ops {
namespace {

constexpr int kPage = kAttentionPage;
constexpr int kWidth = kAttentionWidth;
constexpr int kGroups = 2;  // groups of four warps that multiply; a third group copies
constexpr int kRows = kGroups * kGroupRows;  // rows per tile
constexpr int kKeys = 2 * kPage;             // keys per step
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
// bytes of half the width of a step's keys, or of a tile
constexpr int kHalfBytes = kKeys * kRowBytes;
static_assert(kWidth == 2 * kDepth && kRows == kKeys);

// A stage holds the keys or the values of a step: the first half of their width, then the second
// half.
struct Sizes {
  static constexpr int stage_bytes = 2 * kHalfBytes;
  static constexpr int num_stages = 4;
  static constexpr int shared_bytes = (num_stages + 2) * stage_bytes + kAlignment;
};

struct KernelParams {
  const __nv_bfloat16* q;
  __nv_bfloat16* out;
  int64_t q_row, q_head;  // strides
  Attended attended;
  int num_kv_heads, group;  // `group` is the number of query heads per KV head
  float scale;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kWarps = kGroups * kGroupThreads / 32;
// Registers of a thread that multiplies, and of one that copies. Together they use the registers of
// a multiprocessor.
constexpr int kMultiplyRegisters = 232;
constexpr int kCopyRegisters = 40;
constexpr int kGatherThreads = 64;    // threads that gather queries
constexpr int kVectors = kWidth / 8;  // 16-byte vectors per row
constexpr int kPageBytes = kPage * kRowBytes;
constexpr float kNone = -__builtin_huge_valf();

// A tile of rows, and the keys that they read.
struct Tile {
  int first_row;     // row of the sequence's first query
  int num_queries;   // queries of the sequence; 0: no more tiles
  int first_packed;  // first row of the tile, counted from the sequence's first row
  int kv_head;
  int first_key;
  int num_keys;      // keys of the sequence
  int end;           // end of the keys that any row of the tile reads
  int read_by_all;   // end of the keys that all rows of the tile read
  int block_length;  // keys per block; all keys of the sequence if every query reads all of them
  int first;         // position of the first query among the keys

  __device__ int keys_read_by(int query) const {
    const int64_t block = (first + query) / block_length;
    return static_cast<int>(min((block + 1) * block_length, int64_t{num_keys}));
  }
  __device__ int num_steps() const { return (end + kKeys - 1) / kKeys; }
};

struct Shared {
  unsigned long long barriers[Sizes::num_stages][2];
  unsigned long long query_barriers[2][2];  // full and empty barriers of the two query buffers
  Tile tiles[2];                            // tiles whose queries are in the buffers
  int tiles_before[kMaxSequences + 1];      // tiles before each sequence
};

// Counts the tiles of one KV head before each sequence; called by one warp.
__device__ void count_tiles(const Attended& attended, int group, int* tiles_before) {
  const int lane = threadIdx.x;
  int before = 0;
  for (int first = 0; first < attended.num_sequences; first += 32) {
    const int sequence = first + lane;
    int count = 0;
    if (sequence < attended.num_sequences) {
      const int rows = attended.query_ends[sequence + 1] - attended.query_ends[sequence];
      count = (rows * group + kRows - 1) / kRows;
    }
    int sum = count;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (sequence < attended.num_sequences) tiles_before[sequence + 1] = before + sum;
    before += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) tiles_before[0] = 0;
}

// Iterates over the tiles of this block.
struct Walk {
  const KernelParams& params;
  const int* tiles_before;
  int number = blockIdx.x;  // tiles are numbered by sequence, then rows, then heads

  __device__ bool next(Tile& tile) {
    const Attended& attended = params.attended;
    const int of_head = number / params.num_kv_heads;
    tile.kv_head = number % params.num_kv_heads;
    number += gridDim.x;
    if (of_head >= tiles_before[attended.num_sequences]) return false;
    // Search the first sequence whose tiles end behind `of_head`.
    int low = 0, high = attended.num_sequences - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (tiles_before[middle + 1] > of_head) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    tile.first_row = attended.query_ends[low];
    tile.num_queries = attended.query_ends[low + 1] - tile.first_row;
    tile.first_packed = (of_head - tiles_before[low]) * kRows;
    tile.first_key = attended.key_starts[low];
    tile.num_keys = tile.end = tile.read_by_all = attended.key_counts[low];
    tile.block_length = max(tile.num_keys, 1), tile.first = 0;
    if (attended.block_lengths != nullptr && attended.block_lengths[low] > 0) {
      tile.block_length = attended.block_lengths[low];
      tile.first = attended.firsts[low];
      const int last = (tile.first_packed + kRows - 1) / params.group;
      tile.end = tile.keys_read_by(min(last, tile.num_queries - 1));
      tile.read_by_all = tile.keys_read_by(tile.first_packed / params.group);
    }
    return true;
  }
};

// Finds the rows where the keys of a sequence are stored. A warp looks up 32 pages at once.
struct Places {
  const int* page_rows;
  int first_key, num_pages;
  int known = -32, mine = 0;  // the page of the first lane, and the row of this lane's page

  __device__ int row(int key) {
    if (page_rows == nullptr) return first_key + key;
    const int page = key / kPage;
    if (page >= known + 32) {
      known = page;
      const int lane = threadIdx.x % 32;
      if (page + lane < num_pages) mine = page_rows[first_key / kPage + page + lane];
    }
    return __shfl_sync(~0u, mine, page - known);
  }
};

// One warp copies keys and values to the ring: the keys of step 0, then the keys of each further
// step before the values of the step before it.
__device__ void copy_keys(const Ring<Sizes>& ring, Walk walk, const CUtensorMap* k,
                          const CUtensorMap* v) {
  Position at;
  Tile tile;
  while (walk.next(tile)) {
    const int num_steps = tile.num_steps();
    Places places{walk.params.attended.page_rows, tile.first_key, (tile.end + kPage - 1) / kPage};
    int before[2] = {}, rows[2] = {};
    const auto copy = [&](const CUtensorMap* map, int step, const int (&from)[2]) {
      wait(ring.empty(at.stage), at.phase ^ 1);
      const int pages = min((tile.end - step * kKeys + kPage - 1) / kPage, 2);
      if (threadIdx.x % 32 == 0) {
        expect_bytes(ring.full(at.stage), pages * 2 * kPageBytes);
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int half = part % 2, page = part / 2;
          if (page == pages) break;
          copy_tile(ring.weight(at.stage) + half * kHalfBytes + page * kPageBytes, map,
                    tile.kv_head * kWidth + half * kDepth, from[page], ring.full(at.stage),
                    kEvictNormal);
        }
      }
      at.advance(ring);
    };
    for (int step = 0; step <= num_steps; ++step) {
      if (step < num_steps) {
#pragma unroll
        for (int page = 0; page < 2; ++page) {
          const int key = step * kKeys + page * kPage;
          if (key < tile.end) rows[page] = places.row(key);
        }
        copy(k, step, rows);
      }
      if (step > 0) copy(v, step - 1, before);
      before[0] = rows[0], before[1] = rows[1];
    }
  }
}

// Two warps gather the queries of every tile, in the layout of the copy engine. Rows behind the
// last one keep arbitrary data; nothing reads their results.
__device__ void gather_queries(uint32_t buffers, uint32_t barriers, Tile* tiles, Walk walk) {
  const KernelParams& params = walk.params;
  const int thread = threadIdx.x % kGroupThreads - 32;
  const int vector = thread % kVectors, first = thread / kVectors;
  constexpr int kPass = kGatherThreads / kVectors;  // rows per pass
  int count = 0;
  while (true) {
    const int buffer = count % 2, phase = count / 2 % 2;
    const uint32_t full = barriers + buffer * 16, empty = full + 8;
    wait(empty, phase ^ 1);
    Tile tile;
    const bool is_more = walk.next(tile);
    if (!is_more) tile.num_queries = 0;
    if (thread == 0) tiles[buffer] = tile;
    const uint32_t half = buffers + buffer * Sizes::stage_bytes + vector / 8 * kHalfBytes;
    for (int row = first; is_more && row < kRows; row += kPass) {
      const int packed = tile.first_packed + row, query = packed / params.group;
      if (query >= tile.num_queries) break;
      const int head = tile.kv_head * params.group + packed % params.group;
      const __nv_bfloat16* source =
          params.q + (tile.first_row + query) * params.q_row + head * params.q_head + vector * 8;
      copy_vector(half + row * kRowBytes + (vector ^ row) % 8 * 16, source);
    }
    arrive_after_copies(full);
    arrive(full);  // publishes the entry in `tiles`
    if (!is_more) return;
    ++count;
  }
}

// Waits until at most kPending groups of committed products are still running.
template <int kPending, int kCount>
__device__ inline void await(float (&sums)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

__device__ inline void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

__device__ inline float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// The numbers that a thread holds of 64 rows. It has two rows, lane / 4 of its warp's 16 rows and
// the row 8 further. Of every eight columns it has column lane % 4 * 2 and the next one.
constexpr int kOfThread = kWidth / 2;

struct Softmax {
  float scale;
  float highest[2] = {kNone, kNone};  // largest score of each row
  float total[2] = {};                // sum of the weights in this thread's columns
  float fade[2];                      // factor of the sums before the latest step

  // Replaces scores by weights, and updates the statistics of the rows.
  __device__ void weigh(float (&scores)[kOfThread]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float most = highest[row];
#pragma unroll
      for (int i = row * 2; i < kOfThread; i += 4)
        most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float base = most == kNone ? 0.0f : most * scale;
      fade[row] = power_of_two(highest[row] * scale - base);
      highest[row] = most;
      float sum = 0.0f;
#pragma unroll
      for (int i = row * 2; i < kOfThread; i += 4) {
        scores[i] = power_of_two(scores[i] * scale - base);
        scores[i + 1] = power_of_two(scores[i + 1] * scale - base);
        sum += scores[i] + scores[i + 1];
      }
      total[row] = total[row] * fade[row] + sum;
    }
  }

  __device__ void fade_out(float (&mixed)[kOfThread]) const {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) mixed[i] *= fade[i / 2 % 2];
  }

  __device__ void divide(float (&mixed)[kOfThread]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      total[row] += __shfl_xor_sync(~0u, total[row], 1);
      total[row] += __shfl_xor_sync(~0u, total[row], 2);
      fade[row] = total[row] == 0.0f ? 0.0f : 1.0f / total[row];
    }
    fade_out(mixed);
  }
};

__device__ inline void round_weights(const float (&scores)[kOfThread],
                                     uint32_t (&weights)[kOfThread / 8][4]) {
#pragma unroll
  for (int i = 0; i < kOfThread / 2; ++i) {
    weights[i / 4][i % 4] = as_bits(__floats2bfloat162_rn(scores[i * 2], scores[i * 2 + 1]));
  }
}

// A group of four warps and its state.
struct Attending {
  const Ring<Sizes>& ring;
  const KernelParams& params;
  int group;
  Position at{};

  __device__ void multiply_keys(uint32_t queries, float (&scores)[kOfThread]) {
    wait(ring.full(at.stage), at.phase);
    const uint64_t left = matrix_descriptor(queries + group * kGroupRows * kRowBytes);
    const uint64_t right = matrix_descriptor(ring.weight(at.stage));
    begin_products();
#pragma unroll
    for (int k = 0; k < kWidth / 16; ++k) {
      const int step = k / 4 * (kHalfBytes >> 4) + k % 4 * 2;
      multiply(scores, left + step, right + step, k > 0);
    }
    commit();
  }

  // Multiplies weights and values. Values are stored as rows and multiplied as columns: 16 keys
  // deep, 64 columns of each half.
  __device__ void multiply_values(const uint32_t (&weights)[kOfThread / 8][4],
                                  float (&mixed)[kOfThread], int stage) {
    const uint64_t right = (matrix_descriptor(ring.weight(stage)) & ~(uint64_t{0x3FFF} << 16)) |
                           (uint64_t{kHalfBytes >> 4} << 16);
    begin_products();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      multiply_transposed(mixed, weights[k], right + k * (16 * kRowBytes >> 4), true);
    }
    commit();
  }

  // Waits for the values of a step and returns their stage. Values that no row reads may be
  // arbitrary numbers, so they are set to zero.
  __device__ int await_values(int num_read) {
    const int stage = at.stage;
    wait(ring.full(stage), at.phase);
    at.advance(ring);
    if (num_read >= kKeys) return stage;
    const int thread = threadIdx.x % kGroupThreads;
    for (int i = num_read * 8 + thread; i < kKeys * 8; i += kGroupThreads) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(ring.weight(stage) +
                                                                      half * kHalfBytes + i * 16),
                     "r"(0)
                     : "memory");
      }
    }
    see_copies();
    sync_group(group);
    return stage;
  }

  __device__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) arrive(ring.empty(stage));
  }

  // Masks the keys from `limits` on, which these two rows do not read. The first of `scores`
  // belongs to key `first`.
  __device__ static void mask(float (&scores)[kOfThread], int first, const int (&limits)[2]) {
    first += threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (first + i / 4 * 8 + i % 2 >= limits[i / 2 % 2]) scores[i] = kNone;
    }
  }

  __device__ void attend(const Tile& tile, uint32_t queries, float (&mixed)[kOfThread]) {
    Softmax softmax{params.scale};
    int limits[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int packed = tile.first_packed + row_of_thread() + row * 8;
      limits[row] = tile.keys_read_by(min(packed / params.group, tile.num_queries - 1));
    }
    float scores[kOfThread];
    uint32_t weights[kOfThread / 8][4];
    const int num_steps = tile.num_steps();
    if (num_steps == 0) return;
    const auto weigh = [&](int step) {
      const int first = step * kKeys;
      if (first + kKeys > tile.read_by_all) mask(scores, first, limits);
      softmax.weigh(scores);
    };
    multiply_keys(queries, scores);
    await<0>(scores);
    release(at.stage);
    at.advance(ring);
    weigh(0);
    round_weights(scores, weights);
    for (int step = 1; step < num_steps; ++step) {
      const int key_stage = at.stage;
      multiply_keys(queries, scores);
      at.advance(ring);
      const int value_stage = await_values(kKeys);
      multiply_values(weights, mixed, value_stage);
      await<1>(scores);
      release(key_stage);
      weigh(step);
      await<0>(mixed);
      release(value_stage);
      softmax.fade_out(mixed);
      round_weights(scores, weights);
    }
    const int value_stage = await_values(tile.end - (num_steps - 1) * kKeys);
    multiply_values(weights, mixed, value_stage);
    await<0>(mixed);
    release(value_stage);
    softmax.divide(mixed);
  }

  // Skips the keys and values of a tile whose rows all belong to the other group.
  __device__ void skip(const Tile& tile) {
    for (int part = 0; part < 2 * tile.num_steps(); ++part) {
      wait(ring.full(at.stage), at.phase);
      release(at.stage);
      at.advance(ring);
    }
  }

  __device__ int row_of_thread() const {
    return group * kGroupRows + threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 32 / 4;
  }

  // Writes whole rows, through the shared memory that held the queries.
  __device__ void store(const Tile& tile, uint32_t queries, const float (&mixed)[kOfThread]) {
    const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
    const uint32_t own = queries + group * kGroupRows * kRowBytes;
    const int row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < kOfThread; i += 8) {
      const int vector = i / 4 + lane / 16;
      const uint32_t target =
          own + vector / 8 * kHalfBytes + row * kRowBytes + (vector ^ row) % 8 * 16;
      uint32_t pairs[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        pairs[k] = as_bits(__floats2bfloat162_rn(mixed[i + k * 2], mixed[i + k * 2 + 1]));
      }
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(target),
                   "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                   : "memory");
    }
    sync_group(group);
    const int vector = thread % kVectors;
    const uint32_t half = own + vector / 8 * kHalfBytes;
#pragma unroll
    for (int local = thread / kVectors; local < kGroupRows; local += kGroupThreads / kVectors) {
      const int packed = tile.first_packed + group * kGroupRows + local;
      const int query = packed / params.group;
      if (query >= tile.num_queries) break;
      const int head = tile.kv_head * params.group + packed % params.group;
      const uint4 value = load_vector(half + local * kRowBytes + (vector ^ local) % 8 * 16);
      const int64_t place = int64_t{tile.first_row + query} * params.num_kv_heads * params.group;
      *reinterpret_cast<uint4*>(params.out + (place + head) * kWidth + vector * 8) = value;
    }
  }
};

__device__ void attend_tiles(const Ring<Sizes>& ring, const KernelParams& params, int group,
                             uint32_t buffers, uint32_t barriers, const Tile* tiles) {
  Attending attending{ring, params, group};
  for (int count = 0;; ++count) {
    const int buffer = count % 2, phase = count / 2 % 2;
    const uint32_t full = barriers + buffer * 16, queries = buffers + buffer * Sizes::stage_bytes;
    wait(full, phase);
    const Tile tile = tiles[buffer];
    if (tile.num_queries == 0) return;
    if (tile.first_packed + group * kGroupRows < tile.num_queries * params.group) {
      see_copies();
      float mixed[kOfThread] = {};
      attending.attend(tile, queries, mixed);
      attending.store(tile, queries, mixed);
    } else {
      attending.skip(tile);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(full + 8);
  }
}

#endif

__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v,
                     const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char stages[];
  __shared__ Shared shared;
  const Ring<Sizes> ring{first_stage(stages), shared_address(shared.barriers)};
  const uint32_t buffers = ring.stages + Sizes::num_stages * Sizes::stage_bytes;
  const uint32_t query_barriers = shared_address(shared.query_barriers);
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) {
      init_barrier(query_barriers + buffer * 16, 2 * kGatherThreads);
      init_barrier(query_barriers + buffer * 16 + 8, kWarps);
    }
    ring.open(&k, &v, 1, kWarps);
  }
  wait_for_prerequisites();
  launch_dependents();
  if (threadIdx.x < 32) count_tiles(params.attended, params.group, shared.tiles_before);
  __syncthreads();

  const int group = threadIdx.x / kGroupThreads;
  if (group == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
    const Walk walk{params, shared.tiles_before};
    const int warp = threadIdx.x % kGroupThreads / 32;
    if (warp == 0) {
      copy_keys(ring, walk, &k, &v);
    } else if (warp <= kGatherThreads / 32) {
      gather_queries(buffers, query_barriers, shared.tiles, walk);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
    attend_tiles(ring, params, group, buffers, query_barriers, shared.tiles);
  }
#endif
}

}  // namespace

cudaError_t launch_attention(const AttentionParams& params, cudaStream_t stream) {
  const int num_kv_heads = static_cast<int>(params.k.inner);
  const int depth = num_kv_heads * kWidth;
  if (params.attended.num_sequences > kMaxSequences || params.q.inner % num_kv_heads != 0) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap k, v;
  cudaError_t error =
      describe(&k, params.k.data, params.num_keys, depth, params.k.outer_stride, kPage);
  if (error == cudaSuccess) {
    error = describe(&v, params.v.data, params.num_values, depth, params.v.outer_stride, kPage);
  }
  if (error != cudaSuccess) return error;
  const KernelParams kernel_params{static_cast<const __nv_bfloat16*>(params.q.data),
                                   static_cast<__nv_bfloat16*>(params.out),
                                   params.q.outer_stride,
                                   params.q.inner_stride,
                                   params.attended,
                                   num_kv_heads,
                                   static_cast<int>(params.q.inner) / num_kv_heads,
                                   params.scale};
  const Launch launch{params.num_blocks, kThreads, stream, /*overlaps=*/true, Sizes::shared_bytes};
  return launch_kernel(attention_kernel, launch, k, v, kernel_params);
}

}  // namespace fused_ops
