// SPDX-License-Identifier: Apache-2.0
//
// Products of groups of rows, where each group has its own matrix, and groups are so small that
// reading the weights takes most of the time.
//
// One block per multiprocessor walks over the tiles of all groups with one ring of shared-memory
// stages that never drains: while the sums of a tile are written, the weights of the next tiles are
// fetched. The weight is the left operand of the tensor cores (64 of its rows for each group of
// four warps). The group's rows are the right operand, so its width follows the number of rows. A
// weight is read once for up to kRows rows. Every sum is computed in the same order, whatever the
// other rows are.
//
// A third group of four warps fills the ring. One of its threads makes the copy engine fetch the
// weights. All its threads gather the rows, which may be anywhere, 16 bytes at a time, in the
// layout of the copy engine. They also publish which tile starts in a stage.
//
// Weights do not depend on the previous kernel: an early launch fills its ring with them while that
// kernel ends, and waits for it before it reads x.
//
// Operands are bf16, or fp8 with a scale for every row of both. For fp8 a stage is twice as deep.
// The depth need not fill the last stage: zeros follow, which the copy engine and the gathering
// threads write without reading memory.

#include "epilogue.cuh"
#include "grouped_gemm.h"
#include "vllm_add_llada/cuda_kernels/common/ring.cuh"

namespace fused_ops {
namespace {

constexpr int kGroups = 2;                       // groups of four warps that multiply
constexpr int kHalfRows = kGroups * kGroupRows;  // rows of the weight in each half of a stage
constexpr int kRows = 160;                       // rows per tile, at most
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
constexpr int kChunkRows = 32;  // rows of the result that are written at once
constexpr int kChunkBytes = kChunkRows * kRowBytes;

struct Sizes {
  static constexpr int weight_bytes = 2 * kHalfRows * kRowBytes;
  static constexpr int stage_bytes = weight_bytes + kRows * kRowBytes;
  static constexpr int num_stages =
      (kSharedBytes - kGroups * kChunkBytes - kMaxGroups * 4 - kAlignment - 1024) / stage_bytes;
  static constexpr int shared_bytes = num_stages * stage_bytes + kAlignment;
};

// Depth of a stage in elements.
template <bool kIsFp8>
constexpr int kStageDepth = kIsFp8 ? kRowBytes : kDepth;

struct KernelParams {
  const char* x;
  const float* x_scales;  // for fp8 only, like weight_scales
  const float* weight_scales;
  const int* ends;
  const int* slots;
  const __nv_bfloat16* scales;
  __nv_bfloat16* out;
  int64_t x_stride;  // bytes
  int depth_bytes;
  int num_groups, num_columns, num_steps, num_chosen;
  bool early, is_gelu;
  uint64_t weight_hint;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kWarps = kGroups * kGroupThreads / 32;
constexpr int kVectors = kRowBytes / 16;             // 16-byte vectors per row of a stage
constexpr int kPassRows = kGroupThreads / kVectors;  // rows that are gathered at once
// Registers of a thread that multiplies, and of one that copies. Together they use the registers of
// a multiprocessor.
constexpr int kMultiplyRegisters = 224;
constexpr int kCopyRegisters = 56;

struct Tile {
  int first_row, num_rows;  // 0 rows mark the end
  int first_column;
  int group;
};

struct Shared {
  alignas(kRowBytes) char chunks[kGroups][kChunkBytes];  // results on their way to global memory
  unsigned long long barriers[Sizes::num_stages][2];
  Tile tiles[Sizes::num_stages];  // tiles that start in the stages
  int ends[kMaxGroups];
};

// The halves of a stage hold gates and ups of the same columns, or two ranges of columns.
template <bool kIsGated>
constexpr int kTileColumns = kIsGated ? kHalfRows : 2 * kHalfRows;

// Iterates over a block's tiles. All tiles are ordered by group, then by columns, then by rows, so
// that blocks that run at the same time share weights and rows. The tiles of a group have nearly
// equal numbers of rows.
struct Walk {
  const int* ends;  // in shared memory
  int num_groups, tile_columns, column_tiles;
  int next_tile;                                                      // next tile of this block
  int group = -1, first_tile = 0, num_tiles = 0, start = 0, end = 0;  // state of the current group
  int row_tiles = 0;
  Tile tile{};

  // Moves to the next tile; returns false behind the last one.
  __device__ bool next() {
    while (next_tile >= first_tile + num_tiles) {
      if (++group == num_groups) return false;
      tile.group = group;
      first_tile += num_tiles;
      start = end;
      end = ends[group];
      row_tiles = (end - start + kRows - 1) / kRows;
      num_tiles = row_tiles * column_tiles;
    }
    const int local = next_tile - first_tile;
    const int tile_rows = ((end - start + row_tiles - 1) / row_tiles + 7) / 8 * 8;
    tile.first_column = local / row_tiles * tile_columns;
    tile.first_row = start + local % row_tiles * tile_rows;
    tile.num_rows = min(end - tile.first_row, tile_rows);
    next_tile += gridDim.x;
    return true;
  }
};

// The data that four warps copy to the stages, one stage after the other.
template <bool kIsFp8, bool kIsGated>
struct Source {
  const CUtensorMap* weight;
  const KernelParams& params;
  Tile* tiles;  // in shared memory
  Walk walk;
  int step = params.num_steps - 1;
  const char* rows[kRows / kPassRows]{};  // rows of the tile that this thread gathers

  __device__ bool next() {
    if (++step < params.num_steps) return true;
    step = 0;
    return walk.next();
  }

  __device__ void copy_weight(const Ring<Sizes>& ring, int stage) const {
    if (threadIdx.x % kGroupThreads != 0) return;
    if (step == 0) tiles[stage] = walk.tile;
    expect_bytes(ring.full(stage), Sizes::weight_bytes);
    const int gap = kIsGated ? params.num_columns : kHalfRows;
    const int row = walk.group * params.num_columns * (kIsGated ? 2 : 1) + walk.tile.first_column;
    for (int half = 0; half < 2; ++half) {
      copy_tile(ring.weight(stage) + half * kHalfRows * kRowBytes, weight,
                step * kStageDepth<kIsFp8>, row + half * gap, ring.full(stage), params.weight_hint);
    }
  }

  // Up to 31 rows behind the tile's rows are multiplied too, with arbitrary data from shared
  // memory. Nothing reads their sums.
  __device__ void copy_rows(const Ring<Sizes>& ring, int stage) {
    const int thread = threadIdx.x % kGroupThreads;
    const int first = thread / kVectors, vector = thread % kVectors;
    if (step == 0) find_rows(first, vector);
    const uint32_t target =
        // XOR with the vector is the swizzle
        ring.x(stage) + first * kRowBytes + (vector ^ first % kVectors) * 16;
    const bool is_in_row = step * kRowBytes + vector * 16 < params.depth_bytes;
#pragma unroll
    for (int i = 0; i < kRows / kPassRows; ++i) {
      if (first + i * kPassRows >= walk.tile.num_rows) break;
      copy_vector(target + i * kPassRows * kRowBytes, rows[i] + step * kRowBytes, is_in_row);
    }
    arrive_after_copies(ring.full(stage));
  }

  __device__ void find_rows(int first, int vector) {
#pragma unroll
    for (int i = 0; i < kRows / kPassRows; ++i) {
      const int local = first + i * kPassRows;
      if (local >= walk.tile.num_rows) break;
      int row = walk.tile.first_row + local;
      if (kIsGated) row = params.slots[row] / params.num_chosen;
      rows[i] = params.x + row * params.x_stride + vector * 16;
    }
  }
};

template <typename Source>
__device__ void produce(const Ring<Sizes>& ring, Source source) {
  Source late = source;  // The rows are copied later than the weights of an early launch.
  int num_filled = 0;
  bool is_more = true;
  while (num_filled < Sizes::num_stages && (is_more = source.next())) {
    source.copy_weight(ring, num_filled++);
  }
  wait_for_prerequisites();
  for (int stage = 0; stage < num_filled; ++stage) {
    late.next();
    late.copy_rows(ring, stage);
  }
#pragma unroll
  for (int i = 0; i < kRows / kPassRows; ++i) source.rows[i] = late.rows[i];
  Position at{num_filled % Sizes::num_stages, 0};
  while (is_more && source.next()) {
    wait(ring.empty(at.stage), at.phase);
    source.copy_weight(ring, at.stage);
    source.copy_rows(ring, at.stage);
    at.advance(ring);
  }
  if (num_filled == Sizes::num_stages) wait(ring.empty(at.stage), at.phase);
  if (threadIdx.x % kGroupThreads == 0) {
    source.tiles[at.stage].num_rows = 0;
    arrive(ring.full(at.stage));
  }
  arrive(ring.full(at.stage));
}

// Stores two matrices [8, 8], transposed, from the registers in which a warp holds sums. Each of
// the first 16 lanes passes the address of one column, 16 bytes.
__device__ inline void store_transposed(uint32_t target, uint32_t first, uint32_t second) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(target),
               "r"(first), "r"(second)
               : "memory");
}

__device__ inline uint32_t scaled(uint32_t pair, float scale) {
  const float2 values = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
  return as_bits(__floats2bfloat162_rn(values.x * scale, values.y * scale));
}

// The rows of the result of which a thread writes 16 bytes each: every kPassRows-th row of a tile.
template <bool kIsGated, int kWidth>
struct Target {
  static constexpr int kCount = (kWidth + kPassRows - 1) / kPassRows;
  int rows[kCount];  // -1: no row
  float scales[kCount];

  // Reads the destinations of the rows long before there are sums.
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

  // Writes row i from `source` in shared memory.
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

// Multiplies the sums of fp8 numbers by the scales of their rows and of the weight's rows, of which
// a thread has two in each half. `row_scales` holds the scales of the tile's rows.
template <bool kIsGated, int kWidth>
__device__ void rescale(const Tile& tile, const KernelParams& params, int group,
                        const float* row_scales, float (&total)[2][kWidth / 2]) {
  const int thread = threadIdx.x % kGroupThreads;
  const int gap = kIsGated ? params.num_columns : kHalfRows;
  const float* weight_scales =
      params.weight_scales + int64_t{tile.group} * params.num_columns * (kIsGated ? 2 : 1);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scales[2];
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int in_tile = group * kGroupRows + thread / 32 * 16 + eight * 8 + thread % 32 / 4;
      const int column = tile.first_column + (kIsGated ? 0 : half * gap) + in_tile;
      // nothing is written for columns behind the last one
      const bool is_column = column < params.num_columns;
      const int place = kIsGated ? column + half * gap : column;
      scales[eight] = is_column ? weight_scales[place] : 0.0f;
    }
#pragma unroll
    for (int row = 0; row < kWidth; row += 8) {
      const auto of_rows = *reinterpret_cast<const float2*>(row_scales + row + thread % 4 * 2);
      float* sums = &total[half][row / 2];
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        sums[eight * 2] *= of_rows.x * scales[eight];
        sums[eight * 2 + 1] *= of_rows.y * scales[eight];
      }
    }
  }
}

// Writes the sums of a group of four warps: kWidth rows of 64 columns, or of 128 if not gated. They
// go through `chunk` in shared memory, kChunkRows rows at a time, so that whole lines are written.
//
// Of the 64 columns a thread has column lane / 4 of its warp's 16 columns and the column 8 further.
// Of every eight rows it has row lane % 4 * 2 and the next one.
template <bool kIsGated, int kWidth>
__device__ void store(const Target<kIsGated, kWidth>& target, const Tile& tile,
                      const KernelParams& params, int group, uint32_t chunk,
                      const float (&total)[2][kWidth / 2]) {
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  const uint32_t into =
      chunk + lane % 8 * kRowBytes + ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16;
  const int vector = thread % kVectors, first = thread / kVectors;
  const uint32_t from = chunk + first * kRowBytes + (vector ^ first % 8) * 16;
#pragma unroll
  for (int half = 0; half < (kIsGated ? 1 : 2); ++half) {
    const int column = tile.first_column + half * kHalfRows + group * kGroupRows + vector * 8;
#pragma unroll
    for (int row = 0; row < kWidth; row += 8) {
      const float* sums = &total[half][row / 2];
      uint32_t pairs[2];
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        float2 values = make_float2(sums[eight * 2], sums[eight * 2 + 1]);
        if constexpr (kIsGated) {
          const float* ups = &total[1][row / 2 + eight * 2];
          const float2 up = make_float2(ups[0], ups[1]);
          values = params.is_gelu ? gelu_mul(values, up) : silu_mul(values, up);
        }
        pairs[eight] = as_bits(__float22bfloat162_rn(values));
      }
      store_transposed(into + row % kChunkRows * kRowBytes, pairs[0], pairs[1]);
      if ((row + 8) % kChunkRows != 0 && row + 8 != kWidth) continue;
      sync_group(group);
#pragma unroll
      for (int i = row / kChunkRows * kChunkRows / kPassRows; i * kPassRows < row + 8; ++i) {
        const int pass = i % (kChunkRows / kPassRows);
        target.write(i, from + pass * kPassRows * kRowBytes, column, params);
      }
      sync_group(group);
    }
  }
}

// Loads the scales of a tile's rows for the four warps that use them.
template <bool kIsGated>
__device__ void load_scales(const Tile& tile, const KernelParams& params, float* row_scales) {
  for (int i = threadIdx.x % kGroupThreads; i < tile.num_rows; i += kGroupThreads) {
    int row = tile.first_row + i;
    if (kIsGated) row = params.slots[row] / params.num_chosen;
    row_scales[i] = params.x_scales[row];
  }
}

// A group of four warps multiplies its 64 rows of each half of the weight by kWidth rows of x.
template <bool kIsFp8, bool kIsGated, int kWidth>
__device__ void multiply_tile(const Ring<Sizes>& ring, const Tile& tile, const KernelParams& params,
                              int group, uint32_t chunk, float* row_scales, Position& at) {
  if constexpr (kIsFp8) load_scales<kIsGated>(tile, params, row_scales);
  const Target<kIsGated, kWidth> target(tile, params);
  // Start with zeros, because otherwise the registers of every width would be kept from tile to
  // tile.
  float total[2][kWidth / 2] = {};
  const int last = consume(ring, at, params.num_steps, [&](int stage, bool) {
    const uint64_t left = matrix_descriptor(ring.weight(stage) + group * kGroupRows * kRowBytes);
    const uint64_t right = matrix_descriptor(ring.x(stage));
    see_copies();
    begin_products();
#pragma unroll
    for (int k = 0; k < kRowBytes / 32; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t rows = left + half * (kHalfRows * kRowBytes >> 4) + k * 2;
        if constexpr (kIsFp8) {
          multiply_fp8(total[half], rows, right + k * 2, true);
        } else {
          multiply(total[half], rows, right + k * 2, true);
        }
      }
    }
  });
  settle(total[0]);
  settle(total[1]);
  if (threadIdx.x % 32 == 0) arrive(ring.empty(last));
  if constexpr (kIsFp8) {
    sync_group(group);  // the scales are loaded
    rescale<kIsGated, kWidth>(tile, params, group, row_scales, total);
  }
  store(target, tile, params, group, chunk, total);
}

template <bool kIsFp8, bool kIsGated>
__device__ void multiply_tiles(const Ring<Sizes>& ring, const Tile* tiles,
                               const KernelParams& params, int group, uint32_t chunk,
                               float* row_scales) {
  Position at;
  while (true) {
    wait(ring.full(at.stage), at.phase);
    const Tile tile = tiles[at.stage];
    if (tile.num_rows == 0) {
      return;
    } else if (tile.num_rows <= 8) {
      multiply_tile<kIsFp8, kIsGated, 8>(ring, tile, params, group, chunk, row_scales, at);
    } else if (tile.num_rows <= 16) {
      multiply_tile<kIsFp8, kIsGated, 16>(ring, tile, params, group, chunk, row_scales, at);
    } else if (tile.num_rows <= 32) {
      multiply_tile<kIsFp8, kIsGated, 32>(ring, tile, params, group, chunk, row_scales, at);
    } else if (tile.num_rows <= 64) {
      multiply_tile<kIsFp8, kIsGated, 64>(ring, tile, params, group, chunk, row_scales, at);
    } else if (tile.num_rows <= 96) {
      multiply_tile<kIsFp8, kIsGated, 96>(ring, tile, params, group, chunk, row_scales, at);
    } else if (tile.num_rows <= 128) {
      multiply_tile<kIsFp8, kIsGated, 128>(ring, tile, params, group, chunk, row_scales, at);
    } else {
      multiply_tile<kIsFp8, kIsGated, kRows>(ring, tile, params, group, chunk, row_scales, at);
    }
  }
}

#endif

template <bool kIsFp8, bool kIsGated>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ CUtensorMap weight,
                        const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char stages[];
  __shared__ Shared shared;
  __shared__ alignas(8) float row_scales[kIsFp8 ? kGroups : 1][kIsFp8 ? kRows : 2];
  const Ring<Sizes> ring{first_stage(stages), shared_address(shared.barriers)};
  if (threadIdx.x == 0) ring.open(&weight, &weight, kGroupThreads + 1, kWarps);
  if (!params.early) wait_for_prerequisites();
  // Bypass L1, which may hold old contents if an earlier kernel still runs.
  for (int i = threadIdx.x; i < params.num_groups; i += kThreads) {
    shared.ends[i] = __ldcg(params.ends + i);
  }
  __syncthreads();

  const int group = threadIdx.x / kGroupThreads;
  if (group == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
    constexpr int columns = kTileColumns<kIsGated>;
    const Walk walk{shared.ends, params.num_groups, columns,
                    (params.num_columns + columns - 1) / columns, static_cast<int>(blockIdx.x)};
    produce(ring, Source<kIsFp8, kIsGated>{&weight, params, shared.tiles, walk});
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
    wait_for_prerequisites();  // Every thread that writes must wait itself.
    launch_dependents();
    multiply_tiles<kIsFp8, kIsGated>(ring, shared.tiles, params, group,
                                     shared_address(shared.chunks[group]),
                                     row_scales[kIsFp8 ? group : 0]);
  }
#endif
}

// Results of this size or more fill the cache, and are written back while the kernel runs. If
// weights were the first data to leave the cache, they would leave it before their use. So they are
// not marked that way for large results.
constexpr int64_t kMostKeptBytes = 32 << 20;

template <bool kIsFp8, bool kIsGated>
cudaError_t launch(const GroupedGemmParams& params, cudaStream_t stream) {
  constexpr int depth = kStageDepth<kIsFp8>;
  constexpr int element_bytes = kRowBytes / depth;
  const int depth_bytes = params.depth * element_bytes;
  if (depth_bytes % 16 != 0 || params.num_columns % 8 != 0 || params.num_groups > kMaxGroups) {
    return cudaErrorInvalidValue;
  }
  CUtensorMap weight;
  const int weight_rows = params.num_groups * params.num_columns * (kIsGated ? 2 : 1);
  // The gathered rows stay in the cache and evict lines that are fetched before their use, so a
  // gated product does not fetch pairs of lines.
  const cudaError_t error = describe(&weight, params.weight, weight_rows, params.depth,
                                     params.weight_stride, kHalfRows, element_bytes,
                                     /*in_pairs=*/!kIsGated);
  if (error != cudaSuccess) return error;
  const int64_t result_bytes = int64_t{params.num_rows} * params.num_columns * 2;
  const bool fills_cache = !kIsGated && result_bytes >= kMostKeptBytes;
  const KernelParams kernel_params{static_cast<const char*>(params.x),
                                   params.x_scales,
                                   params.weight_scales,
                                   params.ends,
                                   params.slots,
                                   static_cast<const __nv_bfloat16*>(params.scales),
                                   static_cast<__nv_bfloat16*>(params.out),
                                   params.x_stride * element_bytes,
                                   depth_bytes,
                                   params.num_groups,
                                   params.num_columns,
                                   (depth_bytes + kRowBytes - 1) / kRowBytes,
                                   params.num_chosen,
                                   params.early,
                                   params.is_gelu,
                                   fills_cache ? kEvictNormal : kEvictFirst};
  const Launch launch{params.num_blocks, kThreads, stream, /*overlaps=*/true, Sizes::shared_bytes};
  return launch_kernel(grouped_gemm_kernel<kIsFp8, kIsGated>, launch, weight, kernel_params);
}

}  // namespace

cudaError_t launch_grouped_gemm(const GroupedGemmParams& params, cudaStream_t stream) {
  if (params.weight_scales == nullptr) {
    return params.is_gated ? launch<false, true>(params, stream)
                           : launch<false, false>(params, stream);
  }
  return params.is_gated ? launch<true, true>(params, stream) : launch<true, false>(params, stream);
}

}  // namespace fused_ops
