// SPDX-License-Identifier: Apache-2.0
//
// Wrappers of Hopper's instructions (PTX ISA, sections on mbarrier, cp.async.bulk.tensor, wgmma and
// clusters), for kernels that feed the tensor cores through a ring of shared-memory stages.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdint>

#include "vllm_add_llada/cuda_kernels/common/ampere.cuh"
#include "vllm_add_llada/cuda_kernels/common/barriers.cuh"
#include "vllm_add_llada/cuda_kernels/common/launch.cuh"

namespace native {

constexpr int kDepth = 64;  // bf16 elements of a stage's depth: 128 bytes, the width of the swizzle
constexpr int kRowBytes = kDepth * 2;
constexpr int kGroupRows = 64;  // rows that a group of four warps multiplies at once
constexpr int kGroupThreads = 128;
constexpr int kSharedBytes = 227 * 1024;
constexpr int kAlignment = 1024;  // bytes; a stage starts at a multiple of the swizzle's pattern

constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // cache hints of the copy engine
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Makes initialised barriers visible to the cluster and to the copy engine.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void wait(uint32_t barrier, int phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ inline void copy_tile(uint32_t target, const CUtensorMap* map, int column, int row,
                                 uint32_t barrier, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(hint)
      : "memory");
}

// Copies 16 bytes, or writes zeros if there is no source; one thread performs the copy.
__device__ inline void copy_vector(uint32_t target, const void* source, bool is_there = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "r"(is_there ? 16 : 0)
               : "memory");
}

// Arrives at the barrier when all vectors that this thread copies have arrived.
__device__ inline void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Copies a multiple of 16 bytes; both addresses are multiples of 16.
__device__ inline void copy_bytes(uint32_t target, const void* source, int bytes,
                                  uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
      : "memory");
}

// Prefetches this block's share of some bytes into the second-level cache.
__device__ inline void fetch_share(const void* data, int64_t bytes) {
  constexpr int64_t kPiece = 4096;
  const int64_t pieces = bytes / kPiece;
  const int64_t first = blockIdx.x * pieces / gridDim.x,
                last = (blockIdx.x + 1) * pieces / gridDim.x;
  for (int64_t piece = first; piece < last; ++piece) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                     __cvta_generic_to_global(static_cast<const char*>(data) + piece * kPiece)),
                 "r"(static_cast<int>(kPiece))
                 : "memory");
  }
}

// Describes rows of 128 bytes under the 128-byte swizzle; eight rows (1,024 bytes) form an atom.
__device__ inline uint64_t matrix_descriptor(uint32_t address) {
  return (uint64_t{(address & 0x3FFFF) >> 4}) | (uint64_t{1} << 16) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{1} << 62);
}

// d [64, N] (+)= a [64, 16] b [N, 16]^T, computed by a group of four warps. fp8 operands are 32
// deep, in the same number of bytes. Both operands are in shared memory. A thread holds N / 2 of
// the sums.
// clang-format off
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_12 NAMES_8 ", %8, %9, %10, %11"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39" \
                          ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55" \
                          ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_80 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71" \
                          ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_96 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87" \
                          ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103" \
                          ", %104, %105, %106, %107, %108, %109, %110, %111" \
                          ", %112, %113, %114, %115, %116, %117, %118, %119" \
                          ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_12(i) SUMS_8(i), SUMS_4(i + 8)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_24(i) SUMS_16(i), SUMS_8(i + 16)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_48(i) SUMS_32(i), SUMS_16(i + 32)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define SUMS_80(i) SUMS_64(i), SUMS_16(i + 64)
#define SUMS_96(i) SUMS_64(i), SUMS_32(i + 64)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)
#define DEFINE_MULTIPLY_OF(name, kind, tail, count, columns, a_name, b_name, flag_name)         \
  __device__ inline void name(float (&d)[count], uint64_t a, uint64_t b, int accumulate) {     \
    asm volatile(                                                                             \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " flag_name ", 0;\n"                               \
        "wgmma.mma_async.sync.aligned.m64n" columns kind " {" NAMES_##count "}, "              \
        a_name ", " b_name ", p, 1, 1" tail ";\n}\n"                                          \
        : SUMS_##count(0)                                                                     \
        : "l"(a), "l"(b), "r"(accumulate));                                                   \
  }
#define DEFINE_MULTIPLY(...)                                                                   \
  DEFINE_MULTIPLY_OF(multiply, "k16.f32.bf16.bf16", ", 0, 0", __VA_ARGS__)                      \
  DEFINE_MULTIPLY_OF(multiply_fp8, "k32.f32.e4m3.e4m3", "", __VA_ARGS__)
DEFINE_MULTIPLY(4, "8", "%4", "%5", "%6")
DEFINE_MULTIPLY(8, "16", "%8", "%9", "%10")
DEFINE_MULTIPLY(12, "24", "%12", "%13", "%14")
DEFINE_MULTIPLY(16, "32", "%16", "%17", "%18")
DEFINE_MULTIPLY(24, "48", "%24", "%25", "%26")
DEFINE_MULTIPLY(32, "64", "%32", "%33", "%34")
DEFINE_MULTIPLY(48, "96", "%48", "%49", "%50")
DEFINE_MULTIPLY(64, "128", "%64", "%65", "%66")
DEFINE_MULTIPLY(80, "160", "%80", "%81", "%82")
DEFINE_MULTIPLY(96, "192", "%96", "%97", "%98")
#undef DEFINE_MULTIPLY_OF
#undef DEFINE_MULTIPLY

// The same with `a` in registers. Of a warp's 16 rows, a thread holds row lane / 4 and the row 8
// further: pairs at depth lane % 4 * 2 of both rows, and the same again 8 deeper. For the
// transposed form b is [16, N]: 64 of its columns form a row of a swizzled atom, and the descriptor
// gives the distance to the next 64 columns.
#define DEFINE_MULTIPLY(name, count, columns, tail, a0, a1, a2, a3, b_name, flag_name)         \
  __device__ inline void name(float (&d)[count], const uint32_t (&a)[4], uint64_t b,           \
                              int accumulate) {                                               \
    asm volatile(                                                                             \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " flag_name ", 0;\n"                               \
        "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" NAMES_##count "}, " \
        "{" a0 ", " a1 ", " a2 ", " a3 "}, " b_name ", p, 1, 1, " tail ";\n}\n"               \
        : SUMS_##count(0)                                                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));               \
  }
DEFINE_MULTIPLY(multiply, 16, "32", "0", "%16", "%17", "%18", "%19", "%20", "%21")
DEFINE_MULTIPLY(multiply, 32, "64", "0", "%32", "%33", "%34", "%35", "%36", "%37")
DEFINE_MULTIPLY(multiply, 64, "128", "0", "%64", "%65", "%66", "%67", "%68", "%69")
DEFINE_MULTIPLY(multiply, 128, "256", "0", "%128", "%129", "%130", "%131", "%132", "%133")
DEFINE_MULTIPLY(multiply_transposed, 64, "128", "1", "%64", "%65", "%66", "%67", "%68", "%69")
#undef DEFINE_MULTIPLY
// clang-format on

// Must precede the products of a stage that threads wrote by their own copies.
__device__ inline void see_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Must precede the first product of a stage, so that the registers written by the warps are
// complete.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Must follow the last product of a stage; waits for the products of all earlier stages.
__device__ inline void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// A barrier of the first `count` threads of a block; `count` is a multiple of the warp size.
__device__ inline void sync_first(int count) {
  asm volatile("barrier.cta.sync 1, %0;" ::"r"(count) : "memory");
}

// A barrier of the threads of one group of four warps.
__device__ inline void sync_group(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kGroupThreads) : "memory");
}

// Waits for all running products, and prevents the compiler from reading the sums earlier.
template <int kCount>
__device__ inline void settle(float (&sums)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
}

// Prevents the compiler from reusing registers that running products still read.
template <int kCount>
__device__ inline void keep(const uint32_t (&values)[kCount]) {
#pragma unroll
  for (uint32_t value : values) asm volatile("" ::"r"(value) : "memory");
}

// After cluster_wait(), the writes of all threads before their arrival are visible in the cluster.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

// Orders no memory accesses. For a thread that has completed its reads of other blocks' memory, and
// has written nothing for them.
__device__ inline void cluster_arrive_after_reads() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}

__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

__device__ inline float4 load_of_block(uint32_t address, int rank) {
  float4 value;
  asm volatile(
      "{\n.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}\n"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(address), "r"(rank)
      : "memory");
  return value;
}

// Writes two numbers to the shared memory of a block of the cluster. The address is that of the
// same variable in this block.
__device__ inline void store_of_block(uint32_t address, int rank, float first, float second) {
  asm volatile(
      "{\n.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v2.f32 [remote], {%2, %3};\n}\n" ::"r"(address),
      "r"(rank), "f"(first), "f"(second)
      : "memory");
}

__device__ inline int block_of_cluster() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

#endif

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Looks up the function at run time, because the module does not link the driver library.
inline EncodeTiled find_encode_tiled() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* entry = library == nullptr ? nullptr : dlsym(library, "cuTensorMapEncodeTiled");
  return reinterpret_cast<EncodeTiled>(entry);
}

// Describes tiles [tile_rows, kRowBytes] of a matrix of bf16 or of bytes; elements outside the
// matrix read as 0. With `in_pairs` the cache may fetch two lines of 128 bytes at a time. If
// `tile_bytes` is smaller than kRowBytes, the rows of a tile are contiguous and not swizzled.
inline cudaError_t describe(CUtensorMap* map, const void* matrix, int num_rows, int depth,
                            int64_t stride, int tile_rows, int element_bytes = 2,
                            bool in_pairs = true, int tile_bytes = kRowBytes) {
  static const EncodeTiled encode = find_encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(depth), static_cast<cuuint64_t>(num_rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride * element_bytes)};
  const cuuint32_t tile[] = {static_cast<cuuint32_t>(tile_bytes / element_bytes),
                             static_cast<cuuint32_t>(tile_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result = encode(
      map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
      const_cast<void*>(matrix), sizes, strides, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      tile_bytes == kRowBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      in_pairs ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace native
