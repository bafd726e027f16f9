// SPDX-License-Identifier: Apache-2.0
//
// x weight^T for a weight of 4-bit numbers, which is read as it is stored.
//
// The copy engine brings both operands through a ring of shared-memory stages (as in
// skinny_linear.cuh). A group of four warps computes 64 columns of the product. Its threads convert
// the weight's numbers to bf16 in registers, in the layout of the tensor cores' left operand. Rows
// of x are the right operand. Several such groups of warps hide each other's waits: each takes
// other columns or, for a narrow tile, every third stage. (One group of warps cannot keep two
// products in flight, because the compiler does not accept it.)
//
// With few rows there is time to be exact: products of a group of numbers are summed separately and
// then multiplied by the group's scale, in fp32. With more rows, the sums take all registers, and a
// number is used for many rows. So it is multiplied by its scale and rounded to bf16 first, as
// `unpack` does.
//
// A cluster of `split` blocks shares the depth. At the end each block adds up its share of the
// columns from the shared memory of all blocks, always in the same order. Rows beyond the rows of a
// block are processed by further blocks, which find the weight in the cache.
//
// `STRIP` in Python defines the order of the numbers. A thread's 16 bytes of a strip are the
// numbers that it needs of a row of the weight, with one word for every 32 of the depth. Of the
// eight numbers of a word, i and i + 4 are neighbours.

#include <algorithm>

#include "epilogue.cuh"
#include "linear.h"
#include "packed_numbers.cuh"
#include "vllm_add_llada/cuda_kernels/common/ring.cuh"

namespace fused_ops {
namespace {

constexpr int kTileColumns = 64;
constexpr int kMaxStages = 8;
// a third barrier per stage: its rows of x have arrived
constexpr int kBarrierBytes = kMaxStages * 24;

// The tile of a block: 64 columns for each of `tiles` groups of warps. With `deep` > 1, that many
// groups of warps take turns at the stages of the same columns.
template <int tiles, int deep, int rows>
struct Shape {
  static constexpr int kTiles = tiles, kDeep = deep, kRows = rows;
  static constexpr int kColumns = kTiles * kTileColumns;
  static constexpr bool kScalesWeight = kRows > 64;  // scales the weight, not the products
  static constexpr int kStageDepth = kScalesWeight ? 128 : 256;
  static constexpr int kWeightRow = kStageDepth / 2;  // bytes
  static constexpr int kWeightBytes = kColumns * kWeightRow;
  static constexpr int kStageBytes = kWeightBytes + kRows * kStageDepth * 2;
  // The two warps that feed the ring belong to a group of four if that group gives registers to the
  // others.
  static constexpr int kConsumers = kTiles * kDeep * kGroupThreads;
  static constexpr int kThreads = kConsumers + (kScalesWeight ? kGroupThreads : 64);
};

struct KernelParams {
  const float* scales;
  const uint8_t* zeros;
  Target out;
  int64_t scales_stride;
  int num_rows, num_columns, depth, row_blocks, split, num_stages;
  bool is_gated;
  LookUp table;
  Ahead ahead;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kBytesUnderWay = 40 * 1024;  // bytes of the weight in flight while a block starts

__device__ void load_words(uint32_t address, uint32_t (&words)[4]) {
  asm volatile("ld.shared::cta.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address));
}

__device__ void load_words(uint32_t address, uint32_t (&words)[2]) {
  asm volatile("ld.shared::cta.v2.u32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(address));
}

__device__ float4 load_quad(uint32_t address) {
  float4 value;
  asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

template <int kThreads>
__device__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// Moves registers; called by all threads of a group of four warps. The producing group gives
// registers back, the other groups take them.
template <typename S, bool kIsProducer>
__device__ void share_registers() {
  if constexpr (S::kScalesWeight) {
    constexpr bool kArePairs = S::kTiles == 2;
    if constexpr (kIsProducer) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kArePairs ? 24 : 32));
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kArePairs ? 240 : 160));
    }
  }
}

// The rows of the weight for a block's columns: two runs, which are gate and up or follow each
// other.
struct Columns {
  int first, stride, half;

  __device__ int operator()(int column) const {
    return first + column / half * stride + column % half;
  }
};

// Quotient and remainder of a number by a divisor. Adding another quotient takes no division.
struct Quotient {
  int whole, rest;

  __device__ Quotient(int number, int divisor) : whole(number / divisor), rest(number % divisor) {}

  __device__ void add(const Quotient& other, int divisor) {
    whole += other.whole;
    rest += other.rest;
    if (rest >= divisor) rest -= divisor, ++whole;
  }
};

// The scales and zero points of a block's columns and depth, group by group.
template <int kGroup, bool kIsTable>
struct GroupScales {
  float* scales;
  uint8_t* zeros;
  int pitch;  // elements from one group to the next, so that neighbours use other banks

  __device__ GroupScales(char* shared, int num_columns, int num_groups)
      : scales(reinterpret_cast<float*>(shared)),
        zeros(reinterpret_cast<uint8_t*>(scales + num_groups * (num_columns + 1))),
        pitch(num_columns + 1) {}

  __device__ void load(const KernelParams& params, const Columns& columns, int first_group,
                       int num_groups, int num_threads) const {
    Quotient at(threadIdx.x, num_groups);
    const Quotient step(num_threads, num_groups);
#pragma unroll 8
    for (int i = threadIdx.x; i < (pitch - 1) * num_groups; i += num_threads) {
      const int column = at.whole, group = at.rest;
      at.add(step, num_groups);
      const int64_t place = columns(column) * params.scales_stride + first_group + group;
      scales[group * pitch + column] = __ldg(params.scales + place);
      if (!kIsTable) zeros[group * pitch + column] = __ldg(params.zeros + place);
    }
  }

  __device__ float scale(int group, int column) const { return scales[group * pitch + column]; }

  __device__ uint32_t zero(int group, int column) const {
    return kIsTable ? 0 : 0x43004300 + zeros[group * pitch + column] * 0x00010001;
  }
};

// The barrier for a stage's rows of x; the ring's own barrier is for the weight alone.
__device__ uint32_t rows_barrier(const Ring<>& ring, int stage) {
  return ring.barriers + kMaxStages * 16 + stage * 8;
}

// Waits until a stage that was filled before is empty.
__device__ void wait_for_room(const Ring<>& ring, const Position& at, int step) {
  if (step >= ring.sizes.num_stages) wait(ring.empty(at.stage), at.phase ^ 1);
}

// One thread copies the weight, which depends on no other kernel. Its requests are queued in front
// of the first rows and scales. So at the start it adds requests only when earlier ones have been
// served.
template <typename S>
__device__ void produce_weight(const Ring<>& ring, const CUtensorMap* values,
                               const Columns& columns, const Ahead& ahead, int first_depth,
                               int num_steps) {
  constexpr int kUnderWay = (kBytesUnderWay + S::kWeightBytes - 1) / S::kWeightBytes;
  Position at;
  for (int step = 0; step < num_steps; ++step, at.advance(ring)) {
    if (step >= kUnderWay && step < ring.sizes.num_stages) wait(ring.full(step - kUnderWay), 0);
    wait_for_room(ring, at, step);
    expect_bytes(ring.full(at.stage), S::kWeightBytes);
    for (int part = 0; part < 2; ++part) {
      copy_tile(ring.weight(at.stage) + part * columns.half * S::kWeightRow, values,
                (first_depth + step * S::kStageDepth) / 2, columns.first + part * columns.stride,
                ring.full(at.stage), kEvictNormal);
    }
  }
  fetch_share(ahead.data, ahead.bytes);
}

// Another thread copies the rows.
template <typename S>
__device__ void produce_rows(const Ring<>& ring, const CUtensorMap* x, int first_row,
                             int first_depth, int num_steps) {
  wait_for_prerequisites();
  Position at;
  for (int step = 0; step < num_steps; ++step, at.advance(ring)) {
    wait_for_room(ring, at, step);
    const uint32_t come = rows_barrier(ring, at.stage);
    expect_bytes(come, S::kStageBytes - S::kWeightBytes);
    for (int part = 0; part < S::kStageDepth / kDepth; ++part) {
      copy_tile(ring.x(at.stage) + part * S::kRows * kRowBytes, x,
                first_depth + step * S::kStageDepth + part * kDepth, first_row, come, kEvictLast);
    }
  }
}

// A group of four warps multiplies its 64 columns in every stage, or in one of `kDeep` stages.
//
// If a stage is 256 deep, rows r and r + 4 of every eight rows of the weight are neighbouring rows
// of the tensor cores. The swizzle puts their data 64 bytes apart in shared memory, so that a warp
// reads without bank conflicts. Rows of 64 bytes are contiguous and not swizzled.
template <typename S, int kGroup, bool kIsTable>
struct Consumer {
  static constexpr int kRows = S::kRows;
  // depth that is multiplied at a time
  static constexpr int kUnit = S::kScalesWeight ? 64 : kGroup;
  static constexpr int kWords = kUnit / 32;
  const Ring<>& ring;
  const KernelParams& params;
  const GroupScales<kGroup, kIsTable>& scales;
  int column;
  uint32_t k128;

  // The thread's two rows of a unit in the layout of the tensor cores, at some depth in the stage.
  struct Unit {
    uint32_t words[2][kWords], zeros[2];
    float scales[2];
  };

  __device__ Unit load(int stage, int step, int depth) const {
    Unit unit;
    int chunk = depth / kStrip * 4 + threadIdx.x % 4;
    if constexpr (S::kWeightRow == kRowBytes) chunk ^= column & 7;
    const uint32_t place =
        ring.weight(stage) + column * S::kWeightRow + chunk * 16 + depth % kStrip / 32 * 4;
    load_words(place, unit.words[0]);
    load_words(place + 8 * S::kWeightRow, unit.words[1]);
    const int group = (step * S::kStageDepth + depth) / kGroup;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unit.scales[half] = scales.scale(group, column + half * 8);
      unit.zeros[half] = scales.zero(group, column + half * 8);
    }
    return unit;
  }

  // Enqueues the products of a unit, whose numbers are converted into `left`. The products are
  // added to `sums` if `accumulate`, else they replace `sums`.
  __device__ void begin(const Unit& unit, int stage, int depth, uint32_t (&left)[kUnit / 16][4],
                        float (&sums)[kRows / 2], bool accumulate) const {
    const uint64_t rows = matrix_descriptor(ring.x(stage) + depth / kDepth * kRows * kRowBytes);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[4];
        if constexpr (kIsTable) {
          look_up(params.table, unit.words[half][i], pairs);
        } else {
          subtract(k128, unit.zeros[half], unit.words[half][i], pairs);
        }
        if constexpr (S::kScalesWeight) {
          const TwoPartScale scale(unit.scales[half]);
#pragma unroll
          for (uint32_t& pair : pairs) pair = scale(pair);
        }
        left[i * 2][half] = pairs[0];
        left[i * 2][half + 2] = pairs[1];
        left[i * 2 + 1][half] = pairs[2];
        left[i * 2 + 1][half + 2] = pairs[3];
      }
    }
    begin_products();
#pragma unroll
    for (int k = 0; k < kUnit / 16; ++k) {  // one tensor-core instruction per iteration
      const uint64_t right = rows + k / 4 * (kRows * kRowBytes >> 4) + k % 4 * 2;
      multiply(sums, left[k], right, accumulate || k > 0);
    }
    commit_products();
  }

  // Adds the products of a unit to the sums.
  __device__ void multiply_unit(int stage, int step, int depth, float (&total)[kRows / 2]) const {
    const Unit unit = load(stage, step, depth);
    uint32_t left[kUnit / 16][4];
    if constexpr (S::kScalesWeight) {
      begin(unit, stage, depth, left, total, true);
      settle(total);
    } else {
      float partial[kRows / 2];
      begin(unit, stage, depth, left, partial, false);
      settle(partial);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) total[i] += unit.scales[i / 2 % 2] * partial[i];
    }
#pragma unroll
    // Keep the registers until the products are complete.
    for (auto& fragment : left) keep(fragment);
  }

  __device__ void consume(int num_steps, int part, float (&total)[kRows / 2]) const {
    Position at;
    for (int step = 0; step < num_steps; ++step, at.advance(ring)) {
      if (step % S::kDeep != part) continue;
      wait(ring.full(at.stage), at.phase);
      wait(rows_barrier(ring, at.stage), at.phase);
#pragma unroll
      for (int depth = 0; depth < S::kStageDepth; depth += kUnit) {
        multiply_unit(at.stage, step, depth, total);
      }
      if (threadIdx.x % 32 == 0) arrive(ring.empty(at.stage));
    }
  }
};

// Adds up the sums of `kDeep` parts, [num_rows, kPitch] each, in the blocks of a cluster, and
// writes the totals.
template <typename S>
__device__ void store(const KernelParams& params, const Columns& columns, uint32_t sums, int rank,
                      int first_row, int num_rows) {
  constexpr int kColumns = S::kColumns, kPitch = kColumns + 4;
  const int width = params.is_gated ? kColumns / 2 : kColumns;
  const int quads = width / params.split / 4;
  auto sum = [&](int row, int column) {
    float4 total{};
    for (int block = 0; block < params.split; ++block) {
#pragma unroll
      for (int part = 0; part < S::kDeep; ++part) {
        const uint32_t place = sums + ((part * num_rows + row) * kPitch + column) * 4;
        const float4 value = params.split == 1 ? load_quad(place) : load_of_block(place, block);
        total.x += value.x;
        total.y += value.y;
        total.z += value.z;
        total.w += value.w;
      }
    }
    return total;
  };
  Quotient at(threadIdx.x, quads);
  const Quotient step(S::kConsumers, quads);
  for (; at.whole < num_rows; at.add(step, quads)) {
    const int row = at.whole;
    const int column = (rank * quads + at.rest) * 4;
    const int place = columns(column);
    const __nv_bfloat162 there[] = {load_pair(params.out, first_row + row, place),
                                    load_pair(params.out, first_row + row, place + 2)};
    const float4 first = sum(row, column);
    float2 low = make_float2(first.x, first.y), high = make_float2(first.z, first.w);
    if (params.is_gated) {
      const float4 up = sum(row, width + column);
      low = silu_mul(low, make_float2(up.x, up.y));
      high = silu_mul(high, make_float2(up.z, up.w));
    }
    store_pair(params.out, first_row + row, place, low.x, low.y, there[0]);
    store_pair(params.out, first_row + row, place + 2, high.x, high.y, there[1]);
  }
}

#endif

template <typename S, int kGroup, bool kIsTable>
__global__ void __launch_bounds__(S::kThreads, 1)
    packed_linear_kernel(const __grid_constant__ CUtensorMap x,
                         const __grid_constant__ CUtensorMap values,
                         const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kTiles = S::kTiles, kRows = S::kRows, kColumns = S::kColumns;
  constexpr int kPitch = kColumns + 4;
  extern __shared__ char shared[];
  const uint32_t base = first_stage(shared);
  const RingSizes sizes{S::kStageBytes, params.num_stages, S::kWeightBytes};
  const int stages_bytes = sizes.stage_bytes * sizes.num_stages;
  const Ring<> ring{base, base + stages_bytes, sizes};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < params.num_stages; ++stage) {
      init_barrier(rows_barrier(ring, stage), 1);
    }
    ring.open(&x, &values, 1, kTiles * kGroupThreads / 32);
  }
  __syncthreads();
  launch_dependents();

  const int rank = block_of_cluster();
  const int unit = blockIdx.x / params.split;
  const int first_row = unit % params.row_blocks * kRows;
  const int tile = unit / params.row_blocks;
  const Columns columns{tile * (params.is_gated ? kColumns / 2 : kColumns),
                        params.is_gated ? params.num_columns / 2 : kColumns / 2, kColumns / 2};
  const int all_steps = params.depth / S::kStageDepth;
  const int first_step = rank * all_steps / params.split;
  const int num_steps = (rank + 1) * all_steps / params.split - first_step;
  // lets the compiler assume one value per warp
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
  const int group = warp / 4;
  // The thread's row of the tensor cores, which is a row of the weight. The thread has this row and
  // the row 8 further.
  const int pair = threadIdx.x % 32 / 4;
  const int column = group % kTiles * kTileColumns + warp % 4 * 16 +
                     (S::kWeightRow == kRowBytes ? pair >> 1 | (pair & 1) << 2 : pair);

  constexpr int kConsumerWarps = S::kConsumers / 32;
  if (warp >= kConsumerWarps) {
    share_registers<S, true>();
    const int first_depth = first_step * S::kStageDepth;
    if (threadIdx.x == S::kConsumers) {
      produce_weight<S>(ring, &values, columns, params.ahead, first_depth, num_steps);
    } else if (threadIdx.x == S::kConsumers + 32) {
      produce_rows<S>(ring, &x, first_row, first_depth, num_steps);
    }
    return;
  }
  share_registers<S, false>();
  const int first_group = first_step * S::kStageDepth / kGroup;
  const int num_groups = num_steps * S::kStageDepth / kGroup;
  char* behind = shared + (ring.barriers + kBarrierBytes - shared_address(shared));
  const GroupScales<kGroup, kIsTable> scales(behind, kColumns, num_groups);
  scales.load(params, columns, first_group, num_groups, S::kConsumers);
  sync_consumers<S::kConsumers>();
  uint32_t k128;
  asm volatile("mov.b32 %0, 0x43004300;" : "=r"(k128));
  const Consumer<S, kGroup, kIsTable> consumer{ring, params, scales, column, k128};
  float total[kRows / 2]{};
  consumer.consume(num_steps, group / kTiles, total);
  wait_for_prerequisites();  // Every thread that writes must wait itself.
  sync_consumers<S::kConsumers>();
  // All stages have been read. Their memory now takes the sums, fp32 [kDeep, rows, kPitch].
  const int num_rows = min(kRows, params.num_rows - first_row);
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const int row = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    if (row >= num_rows) continue;
    const int place = (group / kTiles * num_rows + row) * kPitch + column + i / 2 % 2 * 8;
    asm volatile("st.shared::cta.f32 [%0], %1;" ::"r"(base + place * 4), "f"(total[i]) : "memory");
  }
  if (params.split > 1) {
    cluster_sync();
  } else {
    sync_consumers<S::kConsumers>();
  }
  store<S>(params, columns, base, rank, first_row, num_rows);
  if (params.split > 1) {  // A block must not end while others read its shared memory.
    cluster_arrive_after_reads();
    cluster_wait();
  }
#endif
}

template <typename S, int kGroup, bool kIsTable>
cudaError_t launch(const PackedLinearParams& params, cudaStream_t stream) {
  constexpr int kColumns = S::kColumns, kRows = S::kRows;
  const int split = params.tiling.split;
  if (params.num_columns % kColumns != 0 || params.depth % S::kStageDepth != 0 || split < 1 ||
      params.depth / S::kStageDepth < split || kColumns / 2 % (split * 4) != 0) {
    return cudaErrorInvalidValue;
  }
  // stages per block, at most
  const int num_steps = (params.depth / S::kStageDepth + split - 1) / split;
  CUtensorMap x, values;
  cudaError_t error = describe(&x, params.x, params.num_rows, params.depth, params.x_stride, kRows);
  if (error != cudaSuccess) return error;
  error = describe(&values, params.values, params.num_columns, params.depth / 2,
                   params.values_stride, kColumns / 2, 1, !S::kScalesWeight, S::kWeightRow);
  if (error != cudaSuccess) return error;
  const int row_blocks = (params.num_rows + kRows - 1) / kRows;
  const int num_groups = num_steps * S::kStageDepth / kGroup;
  const int overhead =
      kAlignment + kBarrierBytes + num_groups * (kColumns + 1) * (kIsTable ? 4 : 5);
  int num_stages = std::min({kMaxStages, (kSharedBytes - overhead) / S::kStageBytes, num_steps});
  // A stage that is refilled must always belong to the same warps, because other warps would miss a
  // phase of its barrier.
  if (num_stages < num_steps) num_stages -= num_stages % S::kDeep;
  // The sums reuse the memory of the stages.
  const int num_rows = std::min(params.num_rows, kRows);
  const int sum_bytes = S::kDeep * num_rows * (kColumns + 4) * 4;
  const int shared_bytes = std::max(num_stages * S::kStageBytes, sum_bytes) + overhead;
  if (num_stages < 1 || shared_bytes > kSharedBytes) return cudaErrorInvalidValue;
  const KernelParams kernel_params{
      params.scales,
      params.zeros,
      {static_cast<const __nv_bfloat16*>(params.bias), static_cast<__nv_bfloat16*>(params.out),
       params.out_stride, params.epilogue == Epilogue::kResidual},
      params.scales_stride,
      params.num_rows,
      params.num_columns,
      params.depth,
      row_blocks,
      split,
      num_stages,
      params.epilogue == Epilogue::kSiluMul,
      params.table,
      params.ahead};
  const Launch launch{static_cast<unsigned>(params.num_columns / kColumns * row_blocks * split),
                      S::kThreads,
                      stream,
                      params.early,
                      shared_bytes,
                      static_cast<unsigned>(split)};
  return launch_kernel(packed_linear_kernel<S, kGroup, kIsTable>, launch, x, values, kernel_params);
}

template <typename S>
cudaError_t launch_kind(const PackedLinearParams& params, cudaStream_t stream) {
  const bool is_table = params.zeros == nullptr;
  if (params.group == 128 && !is_table) return launch<S, 128, false>(params, stream);
  if (params.group != 64) return cudaErrorInvalidValue;
  return is_table ? launch<S, 64, true>(params, stream) : launch<S, 64, false>(params, stream);
}

template <int kTiles, int kDeep>
cudaError_t launch_few(const PackedLinearParams& params, cudaStream_t stream) {
  return params.num_rows <= 32 ? launch_kind<Shape<kTiles, kDeep, 32>>(params, stream)
                               : launch_kind<Shape<kTiles, kDeep, 64>>(params, stream);
}

}  // namespace

cudaError_t launch_packed_linear(const PackedLinearParams& params, cudaStream_t stream) {
  if (params.num_rows < 1) return cudaErrorInvalidValue;
  const int columns = params.tiling.columns;
  switch (params.tiling.rows) {
    // Three groups of warps: one for every 64 columns, or all three for the columns of a narrow
    // tile.
    case 0:
      if (columns == 64) return launch_few<1, 3>(params, stream);
      if (columns == 192) return launch_few<3, 1>(params, stream);
      break;
    case 128:
      if (columns == 128) return launch_kind<Shape<2, 1, 128>>(params, stream);
      if (columns == 192) return launch_kind<Shape<3, 1, 128>>(params, stream);
      break;
    case 256:
      if (columns == 128) return launch_kind<Shape<2, 1, 256>>(params, stream);
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace fused_ops
