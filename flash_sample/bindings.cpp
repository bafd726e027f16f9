// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <vector>

#include "params.h"
#include "vllm_add_llada/cuda_kernels/common/bind.h"

namespace native {

using namespace flash_sample;

template <typename T>
struct Given<PerRow<T>> : GivenMembers<PerRow<T>, const T*, T> {};

template <>
struct Given<Columns> {
  using Type = std::vector<int64_t>;
  static Columns of(const Type& given) {
    Columns columns{};
    columns.count = static_cast<int>(std::min<size_t>(given.size(), kMaxColumns));
    std::copy_n(given.begin(), columns.count, columns.ids);
    return columns;
  }
};

template <>
struct Given<RowParams>
    : GivenMembers<RowParams, PerRow<double>, PerRow<int64_t>, PerRow<int64_t>, PerRow<int64_t>,
                   uint32_t, bool, PerRow<float>, Columns, PerRow<int32_t>, PerRow<int32_t>> {};

}  // namespace native

namespace flash_sample {
namespace {

#define FIELD(name) field(#name, &P::name)

void bind(Module& module) {
  {
    using P = LogitsParams;
    module.function("candidates", &launch_candidates, FIELD(rows), FIELD(logits), FIELD(dtype),
                    FIELD(row_stride), FIELD(num_rows), FIELD(num_columns), FIELD(first_column),
                    FIELD(score), FIELD(has_noise), FIELD(whole), FIELD(share), FIELD(record),
                    FIELD(token), FIELD(value), FIELD(greedy));
  }
  {
    using P = FilteredParams;
    module.function("filtered", &launch_filtered, FIELD(rows), FIELD(logits), FIELD(dtype),
                    FIELD(row_stride), FIELD(num_rows), FIELD(num_columns), FIELD(min_p),
                    FIELD(top_k), FIELD(top_p), FIELD(is_top_p_first), FIELD(keeps_equal),
                    FIELD(has_noise), FIELD(are_scored), FIELD(score), FIELD(token), FIELD(value),
                    FIELD(greedy));
  }
  {
    using P = MergeParams;
    module.function("merge", &launch_merge, FIELD(rows), FIELD(records), FIELD(num_slices),
                    FIELD(num_rows), FIELD(score), FIELD(record), FIELD(token), FIELD(value),
                    FIELD(greedy));
  }
  {
    using P = UniformParams;
    module.function("uniform", &launch_uniform, FIELD(rows), FIELD(num_rows), FIELD(first_column),
                    FIELD(num_columns), FIELD(numbers));
  }
}

}  // namespace
}  // namespace flash_sample

PYBIND11_MODULE(_flash_sample, python_module) {
  using namespace flash_sample;
  Module module(python_module, "flash_sample");
  module.constant("MAX_COLUMNS", kMaxColumns);
  module.constant("RECORD_FIELDS", kRecordFields);
  module.constant("CONFIDENCE", Score::kConfidence);
  module.constant("ENTROPY", Score::kEntropy);
  module.constant("MARGIN", Score::kMargin);
  bind(module);
}
