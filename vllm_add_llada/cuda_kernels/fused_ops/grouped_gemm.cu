// SPDX-License-Identifier: Apache-2.0
//
// Products of groups of rows, each group with a matrix of its own, for groups so small that they
// are a stream of weights.
//
// One block for each multiprocessor walks over the tiles of all groups with one ring of
// shared-memory stages that never drains: while the sums of a tile are written, the weights of the
// next ones are fetched. Tiles differ in their rows, so a block takes the next one that nobody has
// yet whenever it gets there. The weight is the left operand of the tensor cores (64 of its rows to
// a group of four warps), and the group's rows are the right one, as many as there are: a weight is
// read once for up to kRows of them. Every sum has one order, whatever the rows beside a row.
//
// A third group of four warps fills the ring. One of its threads has the copy engine fetch the
// weights; the rows, which may lie anywhere, are gathered by all, 16 bytes at a time, as the copy
// engine would lay them out. They say to the others which tile a stage begins.
//
// Weights do not depend on the kernel before this one: an early launch fills its ring with them
// while that kernel ends, and waits for it before it reads x.

#include <atomic>

#include "epilogue.cuh"
#include "grouped_gemm.h"
#include "vllm_add_llada/cuda_kernels/common/ring.cuh"

namespace fused_ops {
namespace {

constexpr int kGroups = 2;                       // of four warps that multiply
constexpr int kHalfRows = kGroups * kGroupRows;  // of the weight, in each half of a stage
constexpr int kRows = 160;                       // of a tile, at most
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kVectors = kRowBytes / 16;             // of a row of a stage
constexpr int kPassRows = kGroupThreads / kVectors;  // gathered, or written, at once
constexpr int kChunkBytes = 2 * kPassRows * kRowBytes;
constexpr int kCounters = 4096;

// Of the tiles that are taken: one for each launch of those that can be under way at a time. All
// are 0 but while it runs.
[[maybe_unused]] __device__ unsigned int counters[kCounters];

struct Sizes {
  static constexpr int weight_bytes = 2 * kHalfRows * kRowBytes;
  static constexpr int stage_bytes = weight_bytes + kRows * kRowBytes;
  static constexpr int num_stages =
      (kSharedBytes - kGroups * kChunkBytes - kMaxGroups * 4 - kAlignment - 1024) / stage_bytes;
  static constexpr int shared_bytes = num_stages * stage_bytes + kAlignment;
};

struct KernelParams {
  const __nv_bfloat16* x;
  const int* ends;
  const int* slots;
  const __nv_bfloat16* scales;
  __nv_bfloat16* out;
  int64_t x_stride;
  int num_groups, num_columns, depth, num_chosen;
  int counter;
  bool early;
  uint64_t weight_hint;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kWarps = kGroups * kGroupThreads / 32;
// Registers of a thread that multiplies, and of one that copies; together those of the card.
constexpr int kMultiplyRegisters = 224;
constexpr int kCopyRegisters = 56;

struct Tile {
  int first_row, num_rows;  // no rows: the end
  int first_column;
};

struct Shared {
  alignas(kRowBytes) char chunks[kGroups][kChunkBytes];  // of results on their way
  unsigned long long barriers[Sizes::num_stages][2];
  Tile tiles[Sizes::num_stages];  // that begin in the stages
  int turns[2];                   // tiles of the block: this one's number and the next one's
  int ends[kMaxGroups];
};

// The halves of a stage are gates and ups of the same columns, or columns that lie apart.
template <bool kIsGated>
constexpr int kTileColumns = kIsGated ? kHalfRows : 2 * kHalfRows;

// A group of four warps waits for its own.
__device__ inline void sync_group(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory");
}

// The numbers of a block's tiles: its own, and then whichever is next. One thread of the group that
// copies counts, a tile ahead, and tells the others.
struct Turns {
  unsigned int* counter;
  int* told;  // shared memory
  // What was counted for the next tile: nothing waits for it before it is used.
  unsigned int ahead = blockIdx.x - gridDim.x;
  int count = 0;

  __device__ bool counts() const { return threadIdx.x % kGroupThreads == 0; }

  __device__ int next() {
    int* turn = told + count++ % 2;  // who is late reads the other one
    if (counts()) *turn = ahead + gridDim.x;
    sync_group(kGroups);
    if (counts()) ahead = atomicAdd(counter, 1u);
    return *turn;
  }

  // All blocks together ask once for every tile, and every block once more. The last to ask leaves
  // the counter as it was.
  __device__ void end(int num_tiles) const {
    if (counts() && ahead == num_tiles + gridDim.x - 1) *counter = 0;
  }
};

__device__ inline int row_tiles_of(int num_rows) { return (num_rows + kRows - 1) / kRows; }

// The tiles of all groups, ordered by group, then by columns, then by rows: blocks that run
// together share weights and rows. The tiles of a group have equally many rows, nearly.
//
// Those of the first group are dealt out among the others: it may have all rows, and while its
// tiles are multiplied the weights of other groups are fetched.
struct Walk {
  const int* ends;  // shared memory
  int num_groups, tile_columns, column_tiles;
  int total, num_dealt, period;                                      // tiles
  int group = 0, first_tile = 0, num_tiles = 0, start = 0, end = 0;  // of a group behind the first
  Tile tile{};
  int tile_group = 0;

  // By all threads of a warp.
  __device__ Walk(const int* ends, int num_groups, int num_columns, int tile_columns)
      : ends(ends),
        num_groups(num_groups),
        tile_columns(tile_columns),
        column_tiles((num_columns + tile_columns - 1) / tile_columns),
        end(ends[0]) {
    int row_tiles = 0;
    for (int i = threadIdx.x % 32; i < num_groups; i += 32) {
      row_tiles += row_tiles_of(ends[i] - (i == 0 ? 0 : ends[i - 1]));
    }
    total = __reduce_add_sync(~0u, row_tiles) * column_tiles;
    num_dealt = row_tiles_of(ends[0]) * column_tiles;
    period = total / max(num_dealt, 1);
  }

  // Goes on to the tile of this number, not one before; false past the last.
  __device__ bool go_to(int number) {
    if (number >= total) return false;
    const int round = number / period;
    if (round < num_dealt && round * period == number) {
      cut(0, 0, ends[0], round);
      return true;
    }
    const int other = number - min(num_dealt, round + 1);
    while (other >= first_tile + num_tiles) {
      first_tile += num_tiles;
      start = end;
      end = ends[++group];
      num_tiles = row_tiles_of(end - start) * column_tiles;
    }
    cut(group, start, end, other - first_tile);
    return true;
  }

  // The tile of this number of a group.
  __device__ void cut(int of, int first, int last, int number) {
    const int row_tiles = row_tiles_of(last - first);
    const int tile_rows = ((last - first + row_tiles - 1) / row_tiles + 7) / 8 * 8;
    tile_group = of;
    tile.first_column = number / row_tiles * tile_columns;
    tile.first_row = first + number % row_tiles * tile_rows;
    tile.num_rows = min(last - tile.first_row, tile_rows);
  }
};

__device__ inline void copy_vector(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target),
               "l"(__cvta_generic_to_global(source))
               : "memory");
}

// Arrives at the barrier when the vectors that this thread copies have come.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// What goes into the stages, one after the other, by four warps.
template <bool kIsGated>
struct Source {
  const CUtensorMap* weight;
  const KernelParams& params;
  Tile* tiles;  // shared memory
  Walk walk;
  Turns turns;
  int step = 0;
  const __nv_bfloat16* rows[kRows / kPassRows]{};  // of the tile, that this thread gathers

  __device__ int num_steps() const { return params.depth / kDepth; }

  __device__ bool next_tile() {
    step = 0;
    return walk.go_to(turns.next());
  }

  __device__ void copy_weight(const Ring<Sizes>& ring, int stage) const {
    if (threadIdx.x % kGroupThreads != 0) return;
    if (step == 0) tiles[stage] = walk.tile;
    expect_bytes(ring.full(stage), Sizes::weight_bytes);
    const int gap = kIsGated ? params.num_columns : kHalfRows;
    const int row =
        walk.tile_group * params.num_columns * (kIsGated ? 2 : 1) + walk.tile.first_column;
    // Tiles of the first group are read again much later.
    const uint64_t hint = walk.tile_group == 0 ? kEvictNormal : params.weight_hint;
    for (int half = 0; half < 2; ++half) {
      copy_tile(ring.weight(stage) + half * kHalfRows * kRowBytes, weight, step * kDepth,
                row + half * gap, ring.full(stage), hint);
    }
  }

  // Up to 31 rows more than those of the tile, whatever lies there in shared memory, are
  // multiplied, too; nothing reads their sums.
  __device__ void copy_rows(const Ring<Sizes>& ring, int stage) const {
    const int thread = threadIdx.x % kGroupThreads;
    const int first = thread / kVectors, vector = thread % kVectors;
    const uint32_t target =
        ring.x(stage) + first * kRowBytes + (vector ^ first % kVectors) * 16;  // the swizzle
#pragma unroll
    for (int i = 0; i < kRows / kPassRows; ++i) {
      if (first + i * kPassRows >= walk.tile.num_rows) break;
      copy_vector(target + i * kPassRows * kRowBytes, rows[i] + step * kDepth);
    }
    arrive_after_copies(ring.full(stage));
  }

  __device__ void find_rows() {
    const int thread = threadIdx.x % kGroupThreads;
    const int first = thread / kVectors, vector = thread % kVectors;
#pragma unroll
    for (int i = 0; i < kRows / kPassRows; ++i) {
      const int local = first + i * kPassRows;
      if (local >= walk.tile.num_rows) break;
      int row = walk.tile.first_row + local;
      if (kIsGated) row = params.slots[row] / params.num_chosen;
      rows[i] = params.x + row * params.x_stride + vector * 8;
    }
  }
};

// Fills the ring with the first steps of the block's first tile, weights before rows. Returns how
// many.
template <bool kIsGated>
__device__ int produce_first(const Ring<Sizes>& ring, Source<kIsGated>& source) {
  const int count = min(Sizes::num_stages, source.num_steps());
  for (source.step = 0; source.step < count; ++source.step) source.copy_weight(ring, source.step);
  wait_for_prerequisites();
  source.find_rows();
  for (source.step = 0; source.step < count; ++source.step) source.copy_rows(ring, source.step);
  return count;
}

template <bool kIsGated>
__device__ void produce(const Ring<Sizes>& ring, Source<kIsGated>& source) {
  Position at;
  for (bool is_first = true; source.next_tile(); is_first = false) {
    if (is_first) {
      const int count = produce_first(ring, source);
      at = {count % Sizes::num_stages, count / Sizes::num_stages};
    } else {
      source.find_rows();
    }
    for (; source.step < source.num_steps(); ++source.step) {
      wait(ring.empty(at.stage), at.phase ^ 1);  // at once where the stage was never full
      source.copy_weight(ring, at.stage);
      source.copy_rows(ring, at.stage);
      at.advance(ring);
    }
  }
  source.turns.end(source.walk.total);
  wait(ring.empty(at.stage), at.phase ^ 1);
  if (threadIdx.x % kGroupThreads == 0) {
    source.tiles[at.stage].num_rows = 0;
    arrive(ring.full(at.stage));
  }
  arrive(ring.full(at.stage));
}

// Two matrices [8, 8] as sums lie in the threads of a warp, transposed: each of the first 16 lanes
// names where one of their columns goes, 16 bytes.
__device__ inline void store_transposed(uint32_t target, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(target),
               "r"(first), "r"(second)
               : "memory");
}

__device__ inline uint4 load_vector(uint32_t source) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(source)
               : "memory");
  return value;
}

__device__ inline uint32_t scaled(uint32_t pair, float scale) {
  const float2 values = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
  return as_bits(__floats2bfloat162_rn(values.x * scale, values.y * scale));
}

// The rows of the result of which a thread writes 16 bytes: every kPassRows-th of a tile.
template <bool kIsGated, int kWidth>
struct Target {
  static constexpr int kCount = (kWidth + kPassRows - 1) / kPassRows;
  int rows[kCount];  // -1: none
  float scales[kCount];

  // Reads where the rows go to, long before there are sums.
  __device__ Target(const Tile& tile, const KernelParams& params) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int local = threadIdx.x % kGroupThreads / kVectors + i * kPassRows;
      const int row = tile.first_row + local;
      rows[i] = local >= tile.num_rows ? -1 : kIsGated ? row : params.slots[row];
      scales[i] = 1.0f;
      if (!kIsGated && rows[i] >= 0 && params.scales != nullptr) {
        scales[i] = __bfloat162float(params.scales[rows[i]]);
      }
    }
  }

  // Row i of them, from `source` in shared memory.
  __device__ void write(int i, uint32_t source, int column, const KernelParams& params) const {
    if (rows[i] < 0 || column >= params.num_columns) return;
    uint4 vector = load_vector(source);
    if (!kIsGated) {
      for (uint32_t* pair : {&vector.x, &vector.y, &vector.z, &vector.w}) {
        *pair = scaled(*pair, scales[i]);
      }
    }
    __nv_bfloat16* out = params.out + int64_t{rows[i]} * params.num_columns + column;
    *reinterpret_cast<uint4*>(out) = vector;
  }
};

// Writes the sums of a group of four warps: kWidth rows of 64 columns, or twice that many. They go
// through `chunk` in shared memory, kPassRows rows at a time, so that whole lines are written; its
// two halves take turns, so that the next rows are converted while those before are on their way.
//
// Of the 64 columns a thread has number lane / 4 of its warp's 16 and the one 8 further, and of
// every eight rows lane % 4 * 2 and the next.
template <bool kIsGated, int kWidth>
__device__ void store(const Target<kIsGated, kWidth>& target, const Tile& tile,
                      const KernelParams& params, int group, uint32_t chunk,
                      const float (&total)[2][kWidth / 2]) {
  constexpr int kHalves = kIsGated ? 1 : 2;
  constexpr int kPasses = Target<kIsGated, kWidth>::kCount;
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  const uint32_t into =
      chunk + lane % 8 * kRowBytes + ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16;
  const int vector = thread % kVectors, first = thread / kVectors;
  const uint32_t from = chunk + first * kRowBytes + (vector ^ first % 8) * 16;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const int column = tile.first_column + half * kHalfRows + group * kGroupRows + vector * 8;
#pragma unroll
    for (int row = 0; row < kWidth; row += 8) {
      const int pass = row / kPassRows, side = (half * kPasses + pass) % 2 * kPassRows;
      const float* sums = &total[half][row / 2];
      uint32_t pairs[2];
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        float2 values = make_float2(sums[eight * 2], sums[eight * 2 + 1]);
        if constexpr (kIsGated) {
          const float* ups = &total[1][row / 2 + eight * 2];
          values = silu_mul(values, make_float2(ups[0], ups[1]));
        }
        pairs[eight] = as_bits(__float22bfloat162_rn(values));
      }
      store_transposed(into + (side + row % kPassRows) * kRowBytes, pairs[0], pairs[1]);
      if ((row + 8) % kPassRows != 0 && row + 8 != kWidth) continue;
      // All have written this side, and so have read what was on the other.
      sync_group(group);
      target.write(pass, from + side * kRowBytes, column, params);
    }
  }
  if constexpr (kHalves * kPasses % 2 != 0) sync_group(group);  // the next tile has the same side
}

// A group of four warps multiplies its 64 rows of each half of the weight with kWidth rows.
template <bool kIsGated, int kWidth>
__device__ void multiply_tile(const Ring<Sizes>& ring, const Tile& tile, const KernelParams& params,
                              int group, uint32_t chunk, Position& at) {
  const Target<kIsGated, kWidth> target(tile, params);
  // Zeros, or the registers of every width would be kept from tile to tile.
  float total[2][kWidth / 2] = {};
  const int last = consume(ring, at, params.depth / kDepth, [&](int stage, bool) {
    const uint64_t left = matrix_descriptor(ring.weight(stage) + group * kGroupRows * kRowBytes);
    const uint64_t right = matrix_descriptor(ring.x(stage));
    see_copies();
    begin_products();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        multiply(total[half], left + half * (kHalfRows * kRowBytes >> 4) + k * 2, right + k * 2,
                 true);
      }
    }
  });
  settle(total[0]);
  settle(total[1]);
  if (threadIdx.x % 32 == 0) arrive(ring.empty(last));
  store(target, tile, params, group, chunk, total);
}

// The same with the first of these widths that has the tile's rows.
template <bool kIsGated, int kWidth, int... kWider>
__device__ void multiply_tile_of(const Ring<Sizes>& ring, const Tile& tile,
                                 const KernelParams& params, int group, uint32_t chunk,
                                 Position& at) {
  if constexpr (sizeof...(kWider) > 0) {
    if (tile.num_rows > kWidth) {
      multiply_tile_of<kIsGated, kWider...>(ring, tile, params, group, chunk, at);
      return;
    }
  }
  multiply_tile<kIsGated, kWidth>(ring, tile, params, group, chunk, at);
}

template <bool kIsGated>
__device__ void multiply_tiles(const Ring<Sizes>& ring, const Tile* tiles,
                               const KernelParams& params, int group, uint32_t chunk) {
  Position at;
  while (true) {
    wait(ring.full(at.stage), at.phase);
    const Tile tile = tiles[at.stage];
    if (tile.num_rows == 0) return;
    multiply_tile_of<kIsGated, 8, 16, 32, 64, 96, 128, kRows>(ring, tile, params, group, chunk, at);
  }
}

#endif

template <bool kIsGated>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ CUtensorMap weight,
                        const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char stages[];
  __shared__ Shared shared;
  const Ring<Sizes> ring{first_stage(stages), shared_address(shared.barriers)};
  if (threadIdx.x == 0) ring.open(&weight, &weight, kGroupThreads + 1, kWarps);
  if (!params.early) wait_for_prerequisites();
  // Read past L1, which may hold what was there before where an earlier kernel still runs.
  for (int i = threadIdx.x; i < params.num_groups; i += kThreads) {
    shared.ends[i] = __ldcg(params.ends + i);
  }
  __syncthreads();

  const int group = threadIdx.x / kGroupThreads;
  if (group == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
    const Walk walk(shared.ends, params.num_groups, params.num_columns, kTileColumns<kIsGated>);
    const Turns turns{counters + params.counter, shared.turns};
    Source<kIsGated> source{&weight, params, shared.tiles, walk, turns};
    produce(ring, source);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
    wait_for_prerequisites();  // every thread that writes waits itself
    launch_dependents();
    multiply_tiles<kIsGated>(ring, shared.tiles, params, group,
                             shared_address(shared.chunks[group]));
  }
#endif
}

// Results that fill the cache are written back while the kernel runs. If weights are the first to
// leave the cache then, they leave before they are used; so they are not.
constexpr int64_t kMostKeptBytes = 32 << 20;

// Of a launch; those of a graph are the same whenever it runs.
int next_counter() {
  static std::atomic<unsigned> num_launches{0};
  return static_cast<int>(num_launches++ % kCounters);
}

template <bool kIsGated>
cudaError_t launch(const GroupedGemmParams& params, cudaStream_t stream) {
  if (params.depth % kDepth != 0 || params.num_columns % 8 != 0 || params.num_groups > kMaxGroups) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap weight;
  const int weight_rows = params.num_groups * params.num_columns * (kIsGated ? 2 : 1);
  // The gathered rows stay in the cache, and push out what is fetched ahead of its use.
  const cudaError_t error = describe(&weight, params.weight, weight_rows, params.depth,
                                     params.weight_stride, kHalfRows, /*element_bytes=*/2,
                                     /*in_pairs=*/!kIsGated);
  if (error != cudaSuccess) return error;
  const int64_t result_bytes = int64_t{params.num_rows} * params.num_columns * 2;
  const bool fills_cache = !kIsGated && result_bytes >= kMostKeptBytes;
  const KernelParams kernel_params{static_cast<const __nv_bfloat16*>(params.x),
                                   params.ends,
                                   params.slots,
                                   static_cast<const __nv_bfloat16*>(params.scales),
                                   static_cast<__nv_bfloat16*>(params.out),
                                   params.x_stride,
                                   params.num_groups,
                                   params.num_columns,
                                   params.depth,
                                   params.num_chosen,
                                   next_counter(),
                                   params.early,
                                   fills_cache ? kEvictNormal : kEvictFirst};
  const Launch launch{params.num_blocks, kThreads, stream, /*overlaps=*/true, Sizes::shared_bytes};
  return launch_kernel(grouped_gemm_kernel<kIsGated>, launch, weight, kernel_params);
}

}  // namespace

cudaError_t launch_grouped_gemm(const GroupedGemmParams& params, cudaStream_t stream) {
  return params.is_gated ? launch<true>(params, stream) : launch<false>(params, stream);
}

}  // namespace fused_ops
