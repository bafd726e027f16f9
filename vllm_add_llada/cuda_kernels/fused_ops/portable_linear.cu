// SPDX-License-Identifier: Apache-2.0
//
// Portable products with weights of bf16, fp16 or fp8.

#include "portable_few.cuh"

namespace fused_ops {
namespace {

template <Operands kOperands>
struct Kind;
template <>
struct Kind<Operands::kBFloat16> {
  using Number = __nv_bfloat16;
  static constexpr int kBytes = 2;
};
template <>
struct Kind<Operands::kFloat16> {
  using Number = __half;
  static constexpr int kBytes = 2;
};
template <>
struct Kind<Operands::kFp8> {
  using Number = __nv_bfloat16;  // dtype of the result
  static constexpr int kBytes = 1;
};

// A thread multiplies 16 bytes of a row of the weight by the same bytes of a row of x, in memory
// order: its part of the depth of two instructions.
template <Operands kOperands, int kRows>
struct PlainFew {
  // If fp8 is multiplied as fp16, the registers suffice only for half the threads.
  using S = Shape<4, (kOperands == Operands::kFp8 && kRows > 32 ? 2 : 4), kRows>;
  using Scales = NoScales<S>;
  using Number = typename Kind<kOperands>::Number;
  static constexpr int kRowElementBytes = Kind<kOperands>::kBytes;
  static constexpr int kStrideBytes = kRowElementBytes;
  static constexpr int kStepBytes = S::kRowWarps * kLineBytes;  // bytes of a row per step
  static constexpr int kDepth = kStepBytes / kRowElementBytes;
  static constexpr int kLines = 1;
  static constexpr int kBlocks = 1;
  static constexpr int kStages = kRows > 32 ? 2 : 3;

  const char* from;  // address of the next load
  int eight, next;   // bytes from `from` to the other rows
  int left;          // bytes of the depth from `from` on; 0 or less if there is no next step
  uint4 numbers[2][S::kMatrices * 2] = {};

  static __device__ uint32_t place(int lane) { return line(lane / 4, lane % 4); }

  __device__ void begin(const PortableParams& params, const Columns& columns, int step) {
    const ThreadRows rows(columns, S::column());
    const int64_t stride = params.weight_stride * kRowElementBytes;
    const int byte = step * kStepBytes + threadIdx.x / (32 * S::kColumnWarps) * kLineBytes +
                     threadIdx.x % 4 * 16;
    from = static_cast<const char*>(params.weight) + rows.first * stride + byte;
    eight = static_cast<int>(rows.eight * stride), next = static_cast<int>(rows.next * stride);
    left = params.depth * kRowElementBytes - byte;
  }

  __device__ void advance() { from += kStepBytes, left -= kStepBytes; }
  __device__ void end() { left = 0; }

  __device__ void load(const PortableParams& params, int half) {
    const char* first =
        left > half * 64 ? from + half * 64 : static_cast<const char*>(params.weight);
#pragma unroll
    for (int i = 0; i < S::kMatrices * 2; ++i) {
      numbers[half][i] = load_once(first + i % 2 * eight + i / 2 * next);
    }
  }

  __device__ void load(const PortableParams& params) {
    load(params, 0);
    load(params, 1);
  }

  // The registers of an instruction's operand must be consecutive, but a load fills registers of
  // one row. The compiler would repeat plain moves in front of every instruction, because it lacks
  // registers. It keeps the result of an operation, here an XOR with a zero whose value it cannot
  // infer. With the sums of 64 rows there are too few registers to keep the result, and the moves
  // cost less.
  __device__ void multiply(const PortableParams& params, uint32_t x, const char*,
                           WarpSums<S>& all) {
    const uint32_t zero = kRows > 32 ? 0 : params.num_rows >> 31;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t left[2][S::kMatrices][4];
#pragma unroll
      for (int m = 0; m < S::kMatrices; ++m) {
        const uint4 &upper = numbers[half][m * 2], &lower = numbers[half][m * 2 + 1];
        left[0][m][0] = upper.x ^ zero, left[0][m][1] = lower.x ^ zero;
        left[0][m][2] = upper.y ^ zero, left[0][m][3] = lower.y ^ zero;
        left[1][m][0] = upper.z ^ zero, left[1][m][1] = lower.z ^ zero;
        left[1][m][2] = upper.w ^ zero, left[1][m][3] = lower.w ^ zero;
      }
#pragma unroll
      for (int i = 0; i < kRows / 8; ++i) {
        const uint4 right = load_vector((x ^ half * 64) + i * 8 * kLineBytes);
#pragma unroll
        for (int m = 0; m < S::kMatrices; ++m) {
          multiply_add<kOperands>(all[m][i], left[0][m], right.x, right.y);
        }
#pragma unroll
        for (int m = 0; m < S::kMatrices; ++m) {
          multiply_add<kOperands>(all[m][i], left[1][m], right.z, right.w);
        }
      }
      load(params, half);
    }
  }
};

// Products of more rows. A warp multiplies 64 of the columns by a quarter of the rows, so that the
// tensor cores take longer than shared memory. It loads the next operands while it multiplies, and
// the first operands of a stage before the last product of the previous stage.
constexpr int kShortBytes = 64;  // bytes of a row of x and of the weight per stage

__device__ inline uint32_t short_line(int row, int chunk) {
  return row * kShortBytes + ((chunk ^ row >> 1) & 3) * 16;
}

template <Operands kOperands, int kRows>
struct PlainMany {
  using S = Shape<2, 4, kRows>;
  static constexpr int kElementBytes = Kind<kOperands>::kBytes;
  static constexpr int kDepth = kShortBytes / kElementBytes;
  static constexpr int kWeightBytes = kTileColumns * kShortBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kShortBytes;
  static constexpr int kStages = kRows > 128 ? 4 : 6;
  static constexpr int kApart = S::kThreads / 4;
};

template <typename S>
struct Fragments {
  uint32_t left[S::kMatrices][4], right[S::kEights / 2][4];
};

template <Operands kOperands, int kRows>
__global__ void __launch_bounds__(PlainMany<kOperands, kRows>::S::kThreads)
    portable_many(const PortableParams params, const Work work) {
  using W = PlainMany<kOperands, kRows>;
  using S = typename W::S;
  constexpr int kWeightLines = kTileColumns / W::kApart, kRowLines = kRows / W::kApart;
  extern __shared__ __align__(1024) char shared[];
  __shared__ int arrived;
  const uint32_t ring = shared_place(shared);
  const int begin = work.begin(blockIdx.x), count = work.begin(blockIdx.x + 1) - begin;
  int tile = begin / work.num_steps, step = begin - tile * work.num_steps;

  const int local = threadIdx.x / 4;
  const int chunk_byte = threadIdx.x % 4 * 16, depth_bytes = params.depth * W::kElementBytes;
  const uint32_t target = short_line(local, threadIdx.x % 4);
  WeightLines<W::kApart, kWeightLines> weight;
  RowLines<W::kApart, kRowLines> rows;
  auto begin_weight = [&](int of) {
    weight.begin(params, columns_of(params, work, of), local,
                 params.weight_stride * W::kElementBytes);
  };
  auto begin_rows = [&](int of) {
    rows.begin(params, of % work.row_tiles * kRows + local, params.x_stride * W::kElementBytes);
  };
  begin_weight(tile);
  begin_rows(tile);
  struct Place {
    int tile, byte;
  };
  const int end_byte = work.num_steps * kShortBytes;
  auto goes_on = [&](Place& place) {  // returns whether the next place is in another tile
    place.byte += kShortBytes;
    if (place.byte < end_byte) return false;
    place = {place.tile + 1, chunk_byte};
    return true;
  };
  // The copies have no branch, so that they run between products. They write zeros when there is
  // nothing left to copy.
  auto copy_weight = [&](int stage, const Place& place, bool is_more) {
    is_more = is_more && place.byte < depth_bytes;
#pragma unroll
    for (int i = 0; i < kWeightLines; ++i) {
      copy_later<16>(ring + stage * W::kStageBytes + target + i * W::kApart * kShortBytes,
                     weight.line(i) + place.byte, weight.is_there(i) && is_more);
    }
  };
  auto copy_rows = [&](int stage, const Place& place, bool is_more) {
    is_more = is_more && place.byte < depth_bytes;
    const uint32_t to = ring + stage * W::kStageBytes + W::kWeightBytes + target;
#pragma unroll
    for (int i = 0; i < kRowLines; ++i) {
      copy_later<16>(to + i * W::kApart * kShortBytes, rows.first + i * rows.next + place.byte,
                     rows.is_there(i) && is_more);
    }
  };

  const int lane = threadIdx.x % 32;
  const uint32_t left_place = short_line(S::column() + lane % 16, lane / 16);
  const uint32_t right_place =
      W::kWeightBytes + short_line(S::row() + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  auto load = [&](int stage, int k, Fragments<S>& fragments) {
    const uint32_t base = ring + stage * W::kStageBytes;
#pragma unroll
    for (int i = 0; i < S::kMatrices; ++i) {
      load_matrices(base + (left_place ^ k * 32) + i * 16 * kShortBytes, fragments.left[i]);
    }
#pragma unroll
    for (int i = 0; i < S::kEights / 2; ++i) {
      load_matrices(base + (right_place ^ k * 32) + i * 16 * kShortBytes, fragments.right[i]);
    }
  };
  typename S::Sums sums;
  clear(sums);
  auto multiply = [&](const Fragments<S>& fragments) {
#pragma unroll
    for (int pair = 0; pair < S::kEights / 2; ++pair) {
      const uint32_t (&right)[4] = fragments.right[pair];
#pragma unroll
      for (int i = 0; i < S::kMatrices; ++i) {
        multiply_add<kOperands>(sums[i][pair * 2], fragments.left[i], right[0], right[1]);
        multiply_add<kOperands>(sums[i][pair * 2 + 1], fragments.left[i], right[2], right[3]);
      }
    }
  };

  Place place{tile, step * kShortBytes + chunk_byte}, row_place = place;
  for (int i = 0; i < W::kStages - 1; ++i) {
    copy_weight(i, place, i < count);
    if (goes_on(place)) begin_weight(place.tile);
  }
  launch_dependents();
  for (int i = 0; i < W::kStages - 1; ++i) {
    copy_rows(i, row_place, i < count);
    if (goes_on(row_place)) begin_rows(row_place.tile);
    end_copies();
  }
  Fragments<S> first, second;
  wait_for_copies<W::kStages - 2>();
  __syncthreads();
  load(0, 0, first);
  int stage = 0, filled = W::kStages - 1;
  for (int i = 0; i < count; ++i) {
    const bool is_more = i + W::kStages - 1 < count;
    load(stage, 1, second);
    copy_weight(filled, place, is_more);
    copy_rows(filled, place, is_more);
    end_copies();
    multiply(first);
    if (++stage == W::kStages) stage = 0;
    if (++filled == W::kStages) filled = 0;
    wait_for_copies<W::kStages - 2>();
    __syncthreads();
    const bool is_whole = ++step == work.num_steps || i + 1 == count;
    if (!is_whole) load(stage, 0, first);
    multiply(second);
    if (goes_on(place)) {
      begin_weight(place.tile);
      begin_rows(place.tile);
    }
    if (is_whole) {
      finish<typename Kind<kOperands>::Number, S>(params, work, tile, sums, &arrived);
      step = 0;
      ++tile;
      load(stage, 0, first);
    }
  }
}

template <Operands kOperands, int kRows>
cudaError_t launch_many(const PortableParams& params, cudaStream_t stream) {
  using W = PlainMany<kOperands, kRows>;
  constexpr int kShared = W::kStages * W::kStageBytes;
  static_assert(kShared <= kMostShared);
  return launch_portable_kernel<typename W::S, portable_many<kOperands, kRows>>(params, W::kDepth,
                                                                                kShared, stream);
}

template <Operands kOperands>
cudaError_t launch_any(const PortableParams& params, cudaStream_t stream) {
  if (params.num_rows <= 32) return launch_few<PlainFew<kOperands, 32>>(params, stream);
  if (params.num_rows <= 64) return launch_few<PlainFew<kOperands, 64>>(params, stream);
  if (params.num_rows <= 128 || takes_short_tiles(params)) {
    return launch_many<kOperands, 128>(params, stream);
  }
  return launch_many<kOperands, 256>(params, stream);
}

// Finds whether the code that the current device runs has fp8 products.
cudaError_t find_fp8(bool* has) {
  thread_local int known_device = -1;
  thread_local bool known = false;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device != known_device) {
    cudaFuncAttributes attributes{};
    error = cudaFuncGetAttributes(&attributes, portable_few<PlainFew<Operands::kFp8, 32>>);
    if (error == cudaSuccess) known = attributes.ptxVersion >= 89, known_device = device;
  }
  *has = known;
  return error;
}

}  // namespace

cudaError_t launch_portable(const PortableParams& params, cudaStream_t stream) {
  const bool is_fp8 = params.x_scales != nullptr;
  if (params.num_columns % 16 != 0 || params.depth % (is_fp8 ? 16 : 8) != 0) {
    return cudaErrorInvalidValue;
  }
  if (is_fp8) {
    bool has = false;
    const cudaError_t error = find_fp8(&has);
    if (error != cudaSuccess) return error;
    if (!has) return cudaErrorNotSupported;
    if (params.dtype != DataType::kBFloat16) return cudaErrorInvalidValue;
    return launch_any<Operands::kFp8>(params, stream);
  }
  return params.dtype == DataType::kFloat16 ? launch_any<Operands::kFloat16>(params, stream)
                                            : launch_any<Operands::kBFloat16>(params, stream);
}

}  // namespace fused_ops
