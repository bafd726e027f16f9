// SPDX-License-Identifier: Apache-2.0
//
// x weight^T for as many rows as keep the tensor cores busy, in tiles that fill the card evenly.
//
// A block computes a tile of 256 x 192 (or narrower): that many sums are all that registers hold,
// and the fewer times an operand is read, the less the second-level cache has to give. Blocks of a
// cluster that differ in their columns share the rows of x: each copies its part of a stage to all
// of them (`share`). Where there are too few tiles for all multiprocessors, the blocks of a cluster
// share the depth besides (`split`), and each adds up a part of the rows out of the shared memory
// of all, in the order of the blocks: results are deterministic.
//
// One warp copies, through a ring of shared-memory stages that goes on from tile to tile, and
// groups of four warps multiply. As in skinny_linear.cu an `early` launch reads its first weights
// while the kernel before it ends.

#include <algorithm>

#include "epilogue.cuh"
#include "hopper.cuh"
#include "linear.h"

namespace gather_gemm {
namespace {

constexpr int kBand = 8;            // tiles of rows whose products run side by side
constexpr int kBarrierBytes = 256;  // of all stages

// What a block computes, and how it is divided.
template <int kGroups_, int kTall_, int kColumns_, int kShare_, int kSplit_, Epilogue kEpilogue_>
struct Plan {
  static constexpr int kGroups = kGroups_;    // of four warps that multiply
  static constexpr int kTall = kTall_;        // blocks of 64 rows of each
  static constexpr int kColumns = kColumns_;  // rows of the weight
  static constexpr int kShare = kShare_;
  static constexpr int kSplit = kSplit_;
  static constexpr Epilogue kEpilogue = kEpilogue_;
  static constexpr bool kTwoParts = kEpilogue == Epilogue::kSiluMul;
  static constexpr int kRows = kGroups * kTall * kGroupRows;
  static constexpr int kOutColumns = kTwoParts ? kColumns / 2 : kColumns;
  static constexpr int kCluster = kShare * kSplit;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kStageBytes = (kRows + kColumns) * kRowBytes;
  static constexpr int kStages = (kSharedBytes - kAlignment - kBarrierBytes) / kStageBytes;
  static constexpr int kSharedTotal = kAlignment + kStages * kStageBytes + kBarrierBytes;
  // Registers of a thread that multiplies, and of one that copies; together those of the card.
  static constexpr int kMultiplyRegisters = kGroups == 2 ? 232 : 160;
  static constexpr int kCopyRegisters = kGroups == 2 ? 40 : 32;

  static_assert(kGroups == 2 || kGroups == 3, "the registers are divided for these");
  static_assert(!kTwoParts || kSplit == 1, "gate and up meet in one thread");
  static_assert(kRows % (kShare * 8) == 0 && kRows % kSplit == 0, "equal parts");
  static_assert(kStages * 16 <= kBarrierBytes, "room for the barriers");
};

struct WideParams {
  const __nv_bfloat16* bias;
  __nv_bfloat16* out;
  int64_t out_stride;
  int num_rows;
  int width;          // columns of out
  int num_steps;      // stages of a tile
  int row_tiles;      // tiles of rows
  int column_groups;  // tiles of columns, a cluster's at a time
  uint64_t weight_hint;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tile of a block: its first row, and its first column of the result.
struct Tile {
  int row, column;
};

// Tiles that run at one time are a band of rows by as many columns: both stay in the cache.
template <typename P>
__device__ Tile locate(const WideParams& params, int tile, int share) {
  const int band = tile / (kBand * params.column_groups);
  const int in_band = tile - band * kBand * params.column_groups;
  const int rows = min(kBand, params.row_tiles - band * kBand);
  const int row_tile = band * kBand + in_band % rows;
  const int column_tile = in_band / rows * P::kShare + share;
  return {row_tile * P::kRows, column_tile * P::kOutColumns};
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

// Where a block stands in its cluster: blocks of one `part` of the depth share rows of x.
struct Place {
  int share, part;
};

// One thread keeps the ring full.
template <typename P>
struct Producer {
  const Ring<P>& ring;
  const CUtensorMap *x, *weight;
  const WideParams& params;
  Place place;

  __device__ void copy_weight(int stage, Tile tile, int depth) const {
    expect_bytes(ring.full(stage), P::kStageBytes);
    copy_tile(ring.weight(stage), weight, depth, tile.column, ring.full(stage), params.weight_hint);
    if constexpr (P::kTwoParts) {
      copy_tile(ring.weight(stage) + P::kOutColumns * kRowBytes, weight, depth,
                params.width + tile.column, ring.full(stage), params.weight_hint);
    }
  }

  __device__ void copy_rows(int stage, Tile tile, int depth) const {
    constexpr int kPart = P::kRows / P::kShare;
    const uint32_t target = ring.x(stage) + place.share * kPart * kRowBytes;
    const int row = tile.row + place.share * kPart;
    if constexpr (P::kShare == 1) {
      copy_tile(target, x, depth, row, ring.full(stage), kEvictLast);
    } else {
      const auto blocks = ((1 << P::kShare) - 1) << (place.part * P::kShare);
      copy_to_blocks(target, x, depth, row, ring.full(stage), static_cast<uint16_t>(blocks),
                     kEvictLast);
    }
  }

  __device__ void run(int first_tile, int num_tiles, int stride) const {
    const int first_depth = place.part * params.num_steps * kDepth;
    const int ahead = min(params.num_steps, P::kStages);
    Tile tile = locate<P>(params, first_tile, place.share);
    for (int step = 0; step < ahead; ++step) {
      copy_weight(step, tile, first_depth + step * kDepth);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int step = 0; step < ahead; ++step) copy_rows(step, tile, first_depth + step * kDepth);
    Position<P> at;
    at.stage = ahead % P::kStages;
    at.phase = ahead == P::kStages;
    int step = ahead;
    for (int number = first_tile; number < num_tiles; number += stride) {
      tile = locate<P>(params, number, place.share);
      for (; step < params.num_steps; ++step) {
        wait(ring.empty(at.stage), at.phase ^ 1);
        copy_weight(at.stage, tile, first_depth + step * kDepth);
        copy_rows(at.stage, tile, first_depth + step * kDepth);
        at.advance();
      }
      step = 0;
    }
  }
};

// A group of four warps multiplies its rows with the columns of every stage of a tile.
template <typename P>
__device__ void consume(const Ring<P>& ring, Position<P>& at, int num_steps, int group, Place place,
                        float (&total)[P::kTall][P::kColumns / 2]) {
  const auto release = [&](int stage) {
    const int lane = threadIdx.x % 32;
    if constexpr (P::kShare == 1) {
      if (lane == 0) arrive(ring.empty(stage));
    } else {
      if (lane < P::kShare) {
        arrive_at_block(ring.empty(stage), place.part * P::kShare + lane);
      }
    }
  };
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
    if (step > 0) release(last);
    last = at.stage;
    at.advance();
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  release(last);
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

// Writes a tile from the registers, sixteen bytes at a time.
template <typename P>
__device__ void store_tile(const WideParams& params, Tile tile, int group,
                           float (&total)[P::kTall][P::kColumns / 2]) {
  constexpr int kQuarters = P::kOutColumns / 32;
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int tall = 0; tall < P::kTall; ++tall) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row =
          tile.row + (group * P::kTall + tall) * kGroupRows + warp * 16 + lane / 4 + half * 8;
      __nv_bfloat16* out = params.out + row * params.out_stride;
      uint4 there[kQuarters];
      if constexpr (P::kEpilogue == Epilogue::kResidual) {
#pragma unroll
        for (int i = 0; i < kQuarters; ++i) {
          const int column = tile.column + (i * 4 + quad) * 8;
          there[i] = make_uint4(0, 0, 0, 0);
          if (row < params.num_rows && column < params.width) {
            there[i] = *reinterpret_cast<const uint4*>(out + column);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kQuarters; ++i) {
        uint32_t added[4];
        if constexpr (P::kEpilogue == Epilogue::kResidual) {
          added[0] = there[i].x, added[1] = there[i].y, added[2] = there[i].z;
          added[3] = there[i].w;
          transpose(added);
        }
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = (i * 4 + j) * 4 + half * 2;
          float first = total[tall][at], second = total[tall][at + 1];
          if constexpr (P::kTwoParts) {
            first = silu_mul(first, total[tall][at + P::kColumns / 4]);
            second = silu_mul(second, total[tall][at + P::kColumns / 4 + 1]);
          } else if (params.bias != nullptr) {
            const int column = tile.column + (i * 4 + j) * 8 + quad * 2;
            if (column < params.width) {
              first += __bfloat162float(params.bias[column]);
              second += __bfloat162float(params.bias[column + 1]);
            }
          }
          if constexpr (P::kEpilogue == Epilogue::kResidual) {
            const __nv_bfloat162 pair = as_pair(added[j]);
            first += __low2float(pair);
            second += __high2float(pair);
          }
          packed[j] = as_bits(__floats2bfloat162_rn(first, second));
        }
        transpose(packed);
        const int column = tile.column + (i * 4 + quad) * 8;
        if (row < params.num_rows && column < params.width) {
          *reinterpret_cast<uint4*>(out + column) =
              make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
      }
    }
  }
}

// Adds up the parts of a tile that the blocks of a cluster have. The stages are read by all; their
// place takes the sums, fp32.
template <typename P>
__device__ void store_sum(const WideParams& params, Tile tile, int group, Place place,
                          uint32_t sums, float (&total)[P::kTall][P::kColumns / 2]) {
  constexpr int kPitch = P::kColumns + 8;  // rows apart in the banks
  constexpr int kWriters = P::kGroups * kGroupThreads;
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
#pragma unroll 2
  for (int i = threadIdx.x; i < kPart * kQuads; i += kWriters) {
    const int row = place.part * kPart + i / kQuads, column = i % kQuads * 4;
    float4 values[P::kSplit];
#pragma unroll
    for (int part = 0; part < P::kSplit; ++part) {
      values[part] =
          load_of_block(sums + (row * kPitch + column) * 4, part * P::kShare + place.share);
    }
    float4 sum = values[0];
#pragma unroll
    for (int part = 1; part < P::kSplit; ++part) {
      sum.x += values[part].x, sum.y += values[part].y;
      sum.z += values[part].z, sum.w += values[part].w;
    }
    if (tile.row + row < params.num_rows && tile.column + column < params.width) {
      const int64_t first = (tile.row + row) * params.out_stride + tile.column + column;
      auto* target = reinterpret_cast<uint2*>(params.out + first);
      if (params.bias != nullptr) {
        const __nv_bfloat16* bias = params.bias + tile.column + column;
        sum.x += __bfloat162float(bias[0]), sum.y += __bfloat162float(bias[1]);
        sum.z += __bfloat162float(bias[2]), sum.w += __bfloat162float(bias[3]);
      }
      if constexpr (P::kEpilogue == Epilogue::kResidual) {
        const uint2 there = *target;
        const __nv_bfloat162 low = as_pair(there.x), high = as_pair(there.y);
        sum.x += __low2float(low), sum.y += __high2float(low);
        sum.z += __low2float(high), sum.w += __high2float(high);
      }
      *target = make_uint2(as_bits(__floats2bfloat162_rn(sum.x, sum.y)),
                           as_bits(__floats2bfloat162_rn(sum.z, sum.w)));
    }
  }
}

template <typename P>
__global__ void __launch_bounds__(P::kThreads, 1)
    wide_linear_kernel(const __grid_constant__ CUtensorMap x,
                       const __grid_constant__ CUtensorMap weight,
                       const __grid_constant__ WideParams params) {
  extern __shared__ char shared[];
  const Ring<P> ring{(shared_address(shared) + kAlignment - 1) / kAlignment * kAlignment};
  if (threadIdx.x == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&weight) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&x) : "memory");
    for (int stage = 0; stage < P::kStages; ++stage) {
      init_barrier(ring.full(stage), 1);
      init_barrier(ring.empty(stage), P::kShare * P::kGroups * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if constexpr (P::kCluster > 1) {
    cluster_sync();  // no block copies to another whose barriers are not there
  } else {
    __syncthreads();
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  const int rank = P::kCluster == 1 ? 0 : block_of_cluster();
  const Place place{rank % P::kShare, rank / P::kShare};
  const int first_tile = blockIdx.x / P::kCluster;
  const int stride = gridDim.x / P::kCluster;
  const int num_tiles = params.row_tiles * params.column_groups;
  const int group = threadIdx.x / kGroupThreads;

  if (group == P::kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(P::kCopyRegisters));
    if (threadIdx.x == P::kGroups * kGroupThreads) {
      Producer<P>{ring, &x, &weight, params, place}.run(first_tile, num_tiles, stride);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(P::kMultiplyRegisters));
    Position<P> at;
    for (int number = first_tile; number < num_tiles; number += stride) {
      const Tile tile = locate<P>(params, number, place.share);
      float total[P::kTall][P::kColumns / 2];
      consume<P>(ring, at, params.num_steps, group, place, total);
      // Every thread that writes waits itself, those beside the copying one too.
      asm volatile("griddepcontrol.wait;" ::: "memory");
      if constexpr (P::kSplit == 1) {
        store_tile<P>(params, tile, group, total);
      } else {
        store_sum<P>(params, tile, group, place, ring.stages, total);
      }
    }
    if constexpr (P::kCluster > 1) cluster_sync();  // others reach into a block until they end
  }
}

#else

template <typename P>
__global__ void wide_linear_kernel(const __grid_constant__ CUtensorMap,
                                   const __grid_constant__ CUtensorMap,
                                   const __grid_constant__ WideParams) {}

#endif

// Clusters that the current device holds at a time; the first call for it prepares the kernel.
template <typename P>
cudaError_t find_clusters(cudaLaunchConfig_t config, int* clusters) {
  thread_local int known_device = -1;
  thread_local int known = 0;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device != known_device) {
    const auto kernel = wide_linear_kernel<P>;
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kSharedTotal);
    if (error != cudaSuccess) return error;
    config.gridDim = dim3(P::kCluster);
    error = cudaOccupancyMaxActiveClusters(&known, kernel, &config);
    if (error == cudaSuccess) known_device = device;
  }
  *clusters = known;
  return error == cudaSuccess && known == 0 ? cudaErrorNotSupported : error;
}

template <typename P>
cudaError_t launch(const LinearParams& params, cudaStream_t stream) {
  const int width = P::kTwoParts ? params.num_columns / 2 : params.num_columns;
  if (params.depth % (P::kSplit * kDepth) != 0 || width % 8 != 0) return cudaErrorInvalidValue;
  CUtensorMap x, weight;
  cudaError_t error =
      describe(&x, params.x, params.num_rows, params.depth, params.x_stride, P::kRows / P::kShare);
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
  constexpr int kGroupColumns = P::kOutColumns * P::kShare;
  wide.column_groups = (width + kGroupColumns - 1) / kGroupColumns;
  wide.weight_hint = wide.row_tiles == 1 ? kEvictFirst : kEvictNormal;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {P::kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = params.early ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(P::kThreads);
  config.dynamicSmemBytes = P::kSharedTotal;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  int clusters = 0;
  error = find_clusters<P>(config, &clusters);
  if (error != cudaSuccess) return error;
  // A cluster that shares the depth computes one tile, as its sums take the place of the stages.
  const int num_tiles = wide.row_tiles * wide.column_groups;
  config.gridDim = dim3((P::kSplit == 1 ? std::min(num_tiles, clusters) : num_tiles) * P::kCluster);
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, wide_linear_kernel<P>, x, weight, wide);
}

template <int kGroups, int kTall, int kColumns, int kShare, int kSplit>
cudaError_t launch_sum(const LinearParams& params, cudaStream_t stream) {
  return params.epilogue == Epilogue::kResidual
             ? launch<Plan<kGroups, kTall, kColumns, kShare, kSplit, Epilogue::kResidual>>(params,
                                                                                           stream)
             : launch<Plan<kGroups, kTall, kColumns, kShare, kSplit, Epilogue::kStore>>(params,
                                                                                        stream);
}

template <int kGroups, int kTall, int kColumns, int kShare>
cudaError_t launch_gated(const LinearParams& params, cudaStream_t stream) {
  return launch<Plan<kGroups, kTall, kColumns, kShare, 1, Epilogue::kSiluMul>>(params, stream);
}

}  // namespace

cudaError_t launch_wide_linear(const LinearParams& params, cudaStream_t stream) {
  const Tiling tiling = params.tiling;
  if (params.num_rows < 1) return cudaErrorInvalidValue;
  const int key = ((tiling.rows * 1000 + tiling.columns) * 10 + tiling.share) * 10 + tiling.split;
  if (params.epilogue == Epilogue::kSiluMul) {
    switch (key) {
      case 25619211:
        return launch_gated<2, 2, 192, 1>(params, stream);
      case 25619221:
        return launch_gated<2, 2, 192, 2>(params, stream);
      case 25619241:
        return launch_gated<2, 2, 192, 4>(params, stream);
      case 19219241:
        return launch_gated<3, 1, 192, 4>(params, stream);
      default:
        return cudaErrorInvalidValue;
    }
  }
  switch (key) {
    case 25619221:
      return launch_sum<2, 2, 192, 2, 1>(params, stream);
    case 25619241:
      return launch_sum<2, 2, 192, 4, 1>(params, stream);
    case 25619222:
      return launch_sum<2, 2, 192, 2, 2>(params, stream);
    case 25609641:
      return launch_sum<2, 2, 96, 4, 1>(params, stream);
    case 25612814:
      return launch_sum<2, 2, 128, 1, 4>(params, stream);
    case 25612824:
      return launch_sum<2, 2, 128, 2, 4>(params, stream);
    case 25612822:
      return launch_sum<2, 2, 128, 2, 2>(params, stream);
    case 25612821:
      return launch_sum<2, 2, 128, 2, 1>(params, stream);
    case 25612841:
      return launch_sum<2, 2, 128, 4, 1>(params, stream);
    case 19219241:
      return launch_sum<3, 1, 192, 4, 1>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace gather_gemm
