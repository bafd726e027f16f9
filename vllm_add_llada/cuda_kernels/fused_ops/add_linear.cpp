// SPDX-License-Identifier: Apache-2.0
//
// out += x weight^T of many fp8 rows, by cuBLASLt: one scale for each row of x and of the weight
// ("outer vector" in its documentation of cublasLtMatmul). The addition to `out` is part of the
// product. PyTorch calls the same function without the addition, which then takes a pass over
// memory.
//
// The library is the one that PyTorch has loaded. The module does not link it and is compiled
// without its header, so this file declares the part of it that is used here.

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "linear.h"

namespace fused_ops {
namespace {

using Status = int;  // 0 means success
using Opaque = void*;

// The enumerators have the library's values.
enum Type { kFloat32 = 0, kBFloat16 = 14, kFp8 = 28 };  // kFp8 is e4m3
enum ProductAttribute {
  kTransposesA = 3,
  kScalesOfA = 17,
  kScalesOfB = 18,
  kAddsFast = 25,  // the tensor cores' sums are not moved to wider registers, as in PyTorch's call
  kModeOfA = 31,
  kModeOfB = 32,
};
enum PreferenceAttribute { kAlignmentOfA = 5, kAlignmentOfB, kAlignmentOfC, kAlignmentOfD };
constexpr int kComputesFloat32 = 68;
constexpr int32_t kScaleOfEach = 3;  // a scale for each row or column
constexpr int32_t kTransposed = 1;
constexpr size_t kFirstVersion = 120900;  // the first version that has such scales on Hopper
constexpr int kMaxDevices = 64;

struct Choice {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  Status status;
  float waves;
  int reserved[4];
};

struct Library {
  size_t (*version)();
  Status (*open)(Opaque*);
  Status (*make_product)(Opaque*, int compute_type, int scale_type);
  Status (*end_product)(Opaque);
  Status (*set_product)(Opaque, int attribute, const void*, size_t bytes);
  Status (*make_layout)(Opaque*, int type, uint64_t rows, uint64_t columns, int64_t stride);
  Status (*end_layout)(Opaque);
  Status (*make_preference)(Opaque*);
  Status (*end_preference)(Opaque);
  Status (*set_preference)(Opaque, int attribute, const void*, size_t bytes);
  Status (*choose)(Opaque, Opaque product, Opaque a, Opaque b, Opaque c, Opaque d,
                   Opaque preference, int wanted, Choice*, int* found);
  Status (*multiply)(Opaque, Opaque product, const void* alpha, const void* a, Opaque of_a,
                     const void* b, Opaque of_b, const void* beta, const void* c, Opaque of_c,
                     void* d, Opaque of_d, const uint64_t* algorithm, void* workspace,
                     size_t workspace_bytes, cudaStream_t);
};

template <typename Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

bool find_all(void* library, Library& found) {
  return find(library, "cublasLtGetVersion", found.version) &&
         find(library, "cublasLtCreate", found.open) &&
         find(library, "cublasLtMatmulDescCreate", found.make_product) &&
         find(library, "cublasLtMatmulDescDestroy", found.end_product) &&
         find(library, "cublasLtMatmulDescSetAttribute", found.set_product) &&
         find(library, "cublasLtMatrixLayoutCreate", found.make_layout) &&
         find(library, "cublasLtMatrixLayoutDestroy", found.end_layout) &&
         find(library, "cublasLtMatmulPreferenceCreate", found.make_preference) &&
         find(library, "cublasLtMatmulPreferenceDestroy", found.end_preference) &&
         find(library, "cublasLtMatmulPreferenceSetAttribute", found.set_preference) &&
         find(library, "cublasLtMatmulAlgoGetHeuristic", found.choose) &&
         find(library, "cublasLtMatmul", found.multiply);
}

// Returns null if the library is not loaded or too old.
const Library* find_library() {
  static Library found{};
  static const bool is_there = [] {
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
      if (library != nullptr && find_all(library, found)) return found.version() >= kFirstVersion;
    }
    return false;
  }();
  return is_there ? &found : nullptr;
}

// The library's handle for the current device, created once; null if its creation fails.
Opaque open_device(const Library& library) {
  static std::mutex mutex;
  static Opaque opened[kMaxDevices]{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return nullptr;
  const std::lock_guard lock(mutex);
  if (opened[device] == nullptr && library.open(&opened[device]) != 0) opened[device] = nullptr;
  return opened[device];
}

// Owns an object of the library.
class Held {
 public:
  explicit Held(Status (*end)(Opaque)) : end_(end) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (object_ != nullptr) end_(object_);
  }
  Opaque* target() { return &object_; }
  operator Opaque() const { return object_; }

 private:
  Status (*end_)(Opaque);
  Opaque object_ = nullptr;
};

// The largest power of two up to 256 that an address is a multiple of.
uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 256;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

}  // namespace

bool has_add_linear() { return find_library() != nullptr; }

cudaError_t launch_add_linear(const LinearParams& params, cudaStream_t stream) {
  const Library* library = find_library();
  const Opaque device = library == nullptr ? nullptr : open_device(*library);
  if (device == nullptr) return cudaErrorNotSupported;
  // Matrices of the library are stored column by column, so it computes the transpose of ours:
  // out^T += weight x^T.
  Held product(library->end_product), preference(library->end_preference);
  Held weight(library->end_layout), x(library->end_layout), out(library->end_layout);
  const auto set = [&](ProductAttribute attribute, const auto& value) {
    return library->set_product(product, attribute, &value, sizeof(value)) == 0;
  };
  const auto align = [&](PreferenceAttribute attribute, const void* address) {
    const uint32_t bytes = alignment_of(address);
    return library->set_preference(preference, attribute, &bytes, sizeof(bytes)) == 0;
  };
  const auto lay = [&](Held& layout, int type, int rows, int columns, int64_t stride) {
    return library->make_layout(layout.target(), type, rows, columns, stride) == 0;
  };
  const int8_t adds_fast = 1;
  const bool is_described =
      library->make_product(product.target(), kComputesFloat32, kFloat32) == 0 &&
      set(kTransposesA, kTransposed) && set(kAddsFast, adds_fast) && set(kModeOfA, kScaleOfEach) &&
      set(kModeOfB, kScaleOfEach) && set(kScalesOfA, params.weight_scales) &&
      set(kScalesOfB, params.x_scales) &&
      lay(weight, kFp8, params.depth, params.num_columns, params.weight_stride) &&
      lay(x, kFp8, params.depth, params.num_rows, params.x_stride) &&
      lay(out, kBFloat16, params.num_columns, params.num_rows, params.out_stride) &&
      library->make_preference(preference.target()) == 0 && align(kAlignmentOfA, params.weight) &&
      align(kAlignmentOfB, params.x) && align(kAlignmentOfC, params.out) &&
      align(kAlignmentOfD, params.out);
  if (!is_described) return cudaErrorInvalidValue;
  Choice choice{};
  int found = 0;
  const Status status = library->choose(device, product, weight, x, out, out, preference, 1,
                                        // among the algorithms without a workspace
                                        &choice, &found);
  if (status != 0 || found == 0 || choice.status != 0) return cudaErrorNotSupported;
  const float one = 1.0f;
  const Status launched =
      library->multiply(device, product, &one, params.weight, weight, params.x, x, &one, params.out,
                        out, params.out, out, choice.algorithm, nullptr, 0, stream);
  return launched == 0 ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace fused_ops
