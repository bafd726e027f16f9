// SPDX-License-Identifier: Apache-2.0
//
// x weight^T for as many rows as keep the tensor cores busy, in tiles that fill the card evenly.
//
// A block computes a tile of up to 256 x 192: that many sums are all that registers hold, and the
// fewer times an operand is read, the less the second-level cache has to give. Where there are too
// few tiles for all multiprocessors, two blocks of a cluster share the depth (`split`), and each
// adds up half of the rows out of the shared memory of both, in the order of the blocks: results
// are deterministic.
//
// One thread copies the weight and one copies x, through a ring of shared-memory stages that goes
// on from tile to tile, and two groups of four warps multiply. As in skinny_linear.cu an `early`
// launch reads its first weights while the kernel before it ends.
//
// Copies that several blocks of a cluster share (multicast) were tried: they take a third longer.

#include <algorithm>

#include "epilogue.cuh"
#include "hopper.cuh"
#include "linear.h"

namespace gather_gemm {
namespace {

constexpr int kBand = 8;            // tiles of rows whose products run side by side
constexpr int kBarrierBytes = 256;  // of all stages
constexpr int kGroups = 2;          // of four warps that multiply; a third one copies
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
// Registers of a thread that multiplies, and of one that copies; together those of the card.
constexpr int kMultiplyRegisters = 232;
constexpr int kCopyRegisters = 40;

// What a block computes.
template <int kTall_, int kColumns_, int kSplit_, Epilogue kEpilogue_>
struct Plan {
  static constexpr int kTall = kTall_;        // blocks of 64 rows of each group
  static constexpr int kColumns = kColumns_;  // rows of the weight
  static constexpr int kSplit = kSplit_;
  static constexpr Epilogue kEpilogue = kEpilogue_;
  static constexpr bool kTwoParts = kEpilogue == Epilogue::kSiluMul;
  static constexpr int kRows = kGroups * kTall * kGroupRows;
  static constexpr int kOutColumns = kTwoParts ? kColumns / 2 : kColumns;
  static constexpr int kStageBytes = (kRows + kColumns) * kRowBytes;
  static constexpr int kStages = (kSharedBytes - kAlignment - kBarrierBytes) / kStageBytes;
  static constexpr int kSharedTotal = kAlignment + kStages * kStageBytes + kBarrierBytes;

  static_assert(!kTwoParts || kSplit == 1, "gate and up meet in one thread");
  static_assert(kStages * 16 <= kBarrierBytes, "room for the barriers");
};

struct WideParams {
  const __nv_bfloat16* bias;
  __nv_bfloat16* out;
  int64_t out_stride;
  int num_rows;
  int width;         // columns of out
  int num_steps;     // stages of a tile
  int row_tiles;     // tiles of rows
  int column_tiles;  // tiles of columns
  uint64_t weight_hint;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tile of a block: its first row, and its first column of the result.
struct Tile {
  int row, column;
};

// Tiles that run at one time are a band of rows by as many columns: both stay in the cache.
template <typename P>
__device__ Tile locate(const WideParams& params, int tile) {
  const int band = tile / (kBand * params.column_tiles);
  const int in_band = tile - band * kBand * params.column_tiles;
  const int rows = min(kBand, params.row_tiles - band * kBand);
  const int row_tile = band * kBand + in_band % rows;
  return {row_tile * P::kRows, in_band / rows * P::kOutColumns};
}

// The ring: in each stage a tile of the weight and then one of x, and two barriers.
template <typename P>
struct Ring {
  uint32_t stages;

  __device__ uint32_t weight(int stage) const { return stages + stage * P::kStageBytes; }
  __device__ uint32_t x(int stage) const { return weight(stage) + P::kColumns * kRowBytes; }
  __device__ uint32_t full(int stage) const {
    return stages + P::kStages * P::kStageBytes + stage * 16;
  }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
};

template <typename P>
struct Position {
  int stage = 0, phase = 0;

  __device__ void advance() {
    if (++stage == P::kStages) stage = 0, phase ^= 1;
  }
};

// One thread keeps one operand in the ring; `copy` enqueues its part of a stage. The wait for a
// stage that nothing has been in yet is none.
template <typename P, typename Copy>
__device__ void produce(const Ring<P>& ring, const WideParams& params, int bytes, int first_tile,
                        int num_tiles, int stride, int first_depth, Copy copy) {
  Position<P> at;
  for (int number = first_tile; number < num_tiles; number += stride) {
    const Tile tile = locate<P>(params, number);
    for (int step = 0; step < params.num_steps; ++step) {
      wait(ring.empty(at.stage), at.phase ^ 1);
      expect_bytes(ring.full(at.stage), bytes);
      copy(at.stage, tile, first_depth + step * kDepth);
      at.advance();
    }
  }
}

// A group of four warps multiplies its rows with the columns of every stage of a tile.
template <typename P>
__device__ void consume(const Ring<P>& ring, Position<P>& at, int num_steps, int group,
                        float (&total)[P::kTall][P::kColumns / 2]) {
  int last = 0;
  for (int step = 0; step < num_steps; ++step) {
    wait(ring.full(at.stage), at.phase);
    const uint64_t left =
        matrix_descriptor(ring.x(at.stage) + group * P::kTall * kGroupRows * kRowBytes);
    const uint64_t right = matrix_descriptor(ring.weight(at.stage));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int tall = 0; tall < P::kTall; ++tall) {
        multiply(total[tall], left + k * 2 + tall * (kGroupRows * kRowBytes >> 4), right + k * 2,
                 step > 0 || k > 0);
      }
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (step > 0 && threadIdx.x % 32 == 0) arrive(ring.empty(last));
    last = at.stage;
    at.advance();
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (threadIdx.x % 32 == 0) arrive(ring.empty(last));
}

// Four lanes hold two columns each of four times eight; afterwards each has eight of its own.
// Done twice it changes nothing.
__device__ void transpose(uint32_t (&v)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = (lane & bit) != 0;
      const uint32_t other = __shfl_xor_sync(~0u, upper ? v[i] : v[i | bit], bit);
      v[i] = upper ? other : v[i];
      v[i | bit] = upper ? v[i | bit] : other;
    }
  }
}

// The thread's part of a tile's rows, sixteen bytes at a time: a row of `tall` and `half`, columns
// (i * 4 + lane % 4) * 8 to + 7 for every i below kQuarters.
template <typename P>
struct TileOut {
  static constexpr int kQuarters = P::kOutColumns / 32;
  static constexpr int kParts = P::kTall * 2;
  const WideParams& params;
  Tile tile;
  int first_row;
  int quad = threadIdx.x % 4;

  __device__ TileOut(const WideParams& params, Tile tile, int group)
      : params(params),
        tile(tile),
        first_row(tile.row + group * P::kTall * kGroupRows + threadIdx.x % kGroupThreads / 32 * 16 +
                  threadIdx.x % 32 / 4) {}

  // Null where the tile reaches over the edge.
  __device__ uint4* at(int part, int i) const {
    const int row = first_row + part / 2 * kGroupRows + part % 2 * 8;
    const int column = tile.column + (i * 4 + quad) * 8;
    if (row >= params.num_rows || column >= params.width) return nullptr;
    return reinterpret_cast<uint4*>(params.out + row * params.out_stride + column);
  }

  // Brings what is there near, long before it is read.
  __device__ void prefetch() const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) {
        const uint4* target = at(part, i);
        if (target != nullptr) asm volatile("prefetch.global.L2 [%0];" ::"l"(target));
      }
    }
  }

  // Volatile, so that all loads of a part are under way before the first is waited for.
  __device__ void load(int part, uint4 (&there)[kQuarters]) const {
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      const uint4* target = at(part, i);
      there[i] = make_uint4(0, 0, 0, 0);
      if (target != nullptr) {
        asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(there[i].x), "=r"(there[i].y), "=r"(there[i].z), "=r"(there[i].w)
                     : "l"(target)
                     : "memory");
      }
    }
  }
};

// Writes a tile from the registers.
template <typename P>
__device__ void store_tile(const WideParams& params, const TileOut<P>& out,
                           float (&total)[P::kTall][P::kColumns / 2]) {
  constexpr bool kAdds = P::kEpilogue == Epilogue::kResidual;
#pragma unroll
  for (int part = 0; part < out.kParts; ++part) {
    uint4 there[out.kQuarters];
    if constexpr (kAdds) out.load(part, there);
#pragma unroll
    for (int i = 0; i < out.kQuarters; ++i) {
      uint32_t added[4] = {there[i].x, there[i].y, there[i].z, there[i].w};
      if constexpr (kAdds) transpose(added);
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* sums = &total[part / 2][(i * 4 + j) * 4 + part % 2 * 2];
        float2 value = make_float2(sums[0], sums[1]);
        if constexpr (P::kTwoParts) {
          const float* up = sums + P::kColumns / 4;
          value = silu_mul(value, make_float2(up[0], up[1]));
        } else if (params.bias != nullptr) {
          const int column = out.tile.column + (i * 4 + j) * 8 + out.quad * 2;
          if (column < params.width) add_pair(value, params.bias + column);
        }
        if constexpr (kAdds) add_pair(value, as_pair(added[j]));
        packed[j] = as_bits(__float22bfloat162_rn(value));
      }
      transpose(packed);
      uint4* target = out.at(part, i);
      if (target != nullptr) *target = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
  }
}

// Adds up the halves of a tile that the blocks of a cluster have. The stages are read by all; their
// place takes the sums, fp32.
template <typename P>
__device__ void store_sum(const WideParams& params, Tile tile, int group, int rank, uint32_t sums,
                          float (&total)[P::kTall][P::kColumns / 2]) {
  constexpr int kPitch = P::kColumns + 8;  // rows apart in the banks
  constexpr int kWriters = kGroups * kGroupThreads;
  constexpr int kQuads = P::kColumns / 4;
  static_assert(P::kRows * kPitch * 4 <= P::kStages * P::kStageBytes, "the sums fit");
  asm volatile("bar.sync 1, %0;" ::"n"(kWriters) : "memory");
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int tall = 0; tall < P::kTall; ++tall) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (group * P::kTall + tall) * kGroupRows + warp * 16 + lane / 4 + half * 8;
#pragma unroll
      for (int i = 0; i < P::kColumns / 8; ++i) {
        const uint32_t address = sums + (row * kPitch + i * 8 + lane % 4 * 2) * 4;
        asm volatile("st.shared::cta.v2.f32 [%0], {%1, %2};" ::"r"(address),
                     "f"(total[tall][i * 4 + half * 2]), "f"(total[tall][i * 4 + half * 2 + 1])
                     : "memory");
      }
    }
  }
  cluster_sync();
  constexpr int kPart = P::kRows / P::kSplit;
#pragma unroll 4
  for (int i = threadIdx.x; i < kPart * kQuads; i += kWriters) {
    const int row = rank * kPart + i / kQuads, column = i % kQuads * 4;
    const bool is_there = tile.row + row < params.num_rows && tile.column + column < params.width;
    if (!is_there) continue;
    auto* target = reinterpret_cast<uint2*>(params.out + (tile.row + row) * params.out_stride +
                                            tile.column + column);
    uint2 there = make_uint2(0, 0);
    if constexpr (P::kEpilogue == Epilogue::kResidual) there = *target;
    const float4 first = load_of_block(sums + (row * kPitch + column) * 4, 0);
    const float4 second = load_of_block(sums + (row * kPitch + column) * 4, 1);
    float2 low = make_float2(first.x + second.x, first.y + second.y);
    float2 high = make_float2(first.z + second.z, first.w + second.w);
    if (params.bias != nullptr) {
      add_pair(low, params.bias + tile.column + column);
      add_pair(high, params.bias + tile.column + column + 2);
    }
    if constexpr (P::kEpilogue == Epilogue::kResidual) {
      add_pair(low, as_pair(there.x));
      add_pair(high, as_pair(there.y));
    }
    *target = make_uint2(as_bits(__float22bfloat162_rn(low)), as_bits(__float22bfloat162_rn(high)));
  }
}

template <typename P>
__global__ void __launch_bounds__(kThreads, 1)
    wide_linear_kernel(const __grid_constant__ CUtensorMap x,
                       const __grid_constant__ CUtensorMap weight,
                       const __grid_constant__ WideParams params) {
  extern __shared__ char shared[];
  const Ring<P> ring{(shared_address(shared) + kAlignment - 1) / kAlignment * kAlignment};
  if (threadIdx.x == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&weight) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
    for (int stage = 0; stage < P::kStages; ++stage) {
      init_barrier(ring.full(stage), 2);
      init_barrier(ring.empty(stage), kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  const int rank = P::kSplit == 1 ? 0 : block_of_cluster();
  const int first_tile = blockIdx.x / P::kSplit;
  const int stride = gridDim.x / P::kSplit;
  const int num_tiles = params.row_tiles * params.column_tiles;
  const int group = threadIdx.x / kGroupThreads;

  if (group == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCopyRegisters));
    const int thread = threadIdx.x % kGroupThreads;
    const int first_depth = rank * params.num_steps * kDepth;
    if (thread == 0) {
      const auto copy = [&](int stage, Tile tile, int depth) {
        copy_tile(ring.weight(stage), &weight, depth, tile.column, ring.full(stage),
                  params.weight_hint);
        if constexpr (P::kTwoParts) {
          copy_tile(ring.weight(stage) + P::kOutColumns * kRowBytes, &weight, depth,
                    params.width + tile.column, ring.full(stage), params.weight_hint);
        }
      };
      produce(ring, params, P::kColumns * kRowBytes, first_tile, num_tiles, stride, first_depth,
              copy);
    } else if (thread == 32) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      const auto copy = [&](int stage, Tile tile, int depth) {
        copy_tile(ring.x(stage), &x, depth, tile.row, ring.full(stage), kEvictLast);
      };
      produce(ring, params, P::kRows * kRowBytes, first_tile, num_tiles, stride, first_depth, copy);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplyRegisters));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    Position<P> at;
    for (int number = first_tile; number < num_tiles; number += stride) {
      const Tile tile = locate<P>(params, number);
      const TileOut<P> out{params, tile, group};
      if constexpr (P::kEpilogue == Epilogue::kResidual) out.prefetch();
      float total[P::kTall][P::kColumns / 2];
      consume<P>(ring, at, params.num_steps, group, total);
      if constexpr (P::kSplit == 1) {
        store_tile<P>(params, out, total);
      } else {
        store_sum<P>(params, tile, group, rank, ring.stages, total);
        cluster_sync();  // no block ends while the other reads its shared memory
      }
    }
  }
}

#else

template <typename P>
__global__ void wide_linear_kernel(const __grid_constant__ CUtensorMap,
                                   const __grid_constant__ CUtensorMap,
                                   const __grid_constant__ WideParams) {}

#endif

// Blocks that the current device holds at a time; the first call for it prepares the kernel.
template <typename P>
cudaError_t find_blocks(int* blocks) {
  thread_local int known_device = -1;
  thread_local int known = 0;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device != known_device) {
    error = cudaDeviceGetAttribute(&known, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(wide_linear_kernel<P>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 P::kSharedTotal);
    if (error == cudaSuccess) known_device = device;
  }
  *blocks = known;
  return error;
}

template <typename P>
cudaError_t launch(const LinearParams& params, cudaStream_t stream) {
  const int width = P::kTwoParts ? params.num_columns / 2 : params.num_columns;
  if (params.depth % (P::kSplit * kDepth) != 0 || width % 8 != 0) return cudaErrorInvalidValue;
  CUtensorMap x, weight;
  cudaError_t error =
      describe(&x, params.x, params.num_rows, params.depth, params.x_stride, P::kRows);
  if (error != cudaSuccess) return error;
  error = describe(&weight, params.weight, params.num_columns, params.depth, params.weight_stride,
                   P::kOutColumns);
  if (error != cudaSuccess) return error;

  WideParams wide{};
  wide.bias = static_cast<const __nv_bfloat16*>(params.bias);
  wide.out = static_cast<__nv_bfloat16*>(params.out);
  wide.out_stride = params.out_stride;
  wide.num_rows = params.num_rows;
  wide.width = width;
  wide.num_steps = params.depth / P::kSplit / kDepth;
  wide.row_tiles = (params.num_rows + P::kRows - 1) / P::kRows;
  wide.column_tiles = (width + P::kOutColumns - 1) / P::kOutColumns;
  wide.weight_hint = wide.row_tiles == 1 ? kEvictFirst : kEvictNormal;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {P::kSplit, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = params.early ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = P::kSharedTotal;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  int blocks = 0;
  error = find_blocks<P>(&blocks);
  if (error != cudaSuccess) return error;
  // Blocks that share the depth compute one tile, as its sums take the place of the stages.
  const int num_tiles = wide.row_tiles * wide.column_tiles;
  config.gridDim = dim3(P::kSplit == 1 ? std::min(num_tiles, blocks) : num_tiles * P::kSplit);
  return cudaLaunchKernelEx(&config, wide_linear_kernel<P>, x, weight, wide);
}

template <int kTall, int kColumns, int kSplit>
cudaError_t launch_sum(const LinearParams& params, cudaStream_t stream) {
  return params.epilogue == Epilogue::kResidual
             ? launch<Plan<kTall, kColumns, kSplit, Epilogue::kResidual>>(params, stream)
             : launch<Plan<kTall, kColumns, kSplit, Epilogue::kStore>>(params, stream);
}

}  // namespace

cudaError_t launch_wide_linear(const LinearParams& params, cudaStream_t stream) {
  const Tiling tiling = params.tiling;
  if (params.num_rows < 1) return cudaErrorInvalidValue;
  const int key = (tiling.rows * 1000 + tiling.columns) * 10 + tiling.split;
  if (params.epilogue == Epilogue::kSiluMul) {
    switch (key) {
      case 2561921:
        return launch<Plan<2, 192, 1, Epilogue::kSiluMul>>(params, stream);
      case 1281921:
        return launch<Plan<1, 192, 1, Epilogue::kSiluMul>>(params, stream);
      default:
        return cudaErrorInvalidValue;
    }
  }
  switch (key) {
    case 1281281:
      return launch_sum<1, 128, 1>(params, stream);
    case 1281282:
      return launch_sum<1, 128, 2>(params, stream);
    case 1281921:
      return launch_sum<1, 192, 1>(params, stream);
    case 2560961:
      return launch_sum<2, 96, 1>(params, stream);
    case 2561281:
      return launch_sum<2, 128, 1>(params, stream);
    case 2561921:
      return launch_sum<2, 192, 1>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace gather_gemm
