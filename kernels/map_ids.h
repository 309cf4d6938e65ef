// oper::map_ids, what its CPU and CUDA kernels share: the argument checks and
// the lookup of one id. torchrec_oper/ops/map_ids.py defines the arguments.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace oper {

// One row of `tables`.
struct RowMapSpan {
  int64_t rows;
  int64_t listed_begin;
  int64_t listed_end;
  int64_t range_begin;
  int64_t range_end;
};
static_assert(sizeof(RowMapSpan) == 5 * sizeof(int64_t), "tables is [S, 5]");

// First position in [begin, end) whose value is not below `value`.
inline int64_t lower_bound(const int64_t* values, int64_t begin, int64_t end,
                           int64_t value) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (values[middle] < value) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// The physical row of an id that lies in [0, span.rows).
inline int64_t map_id(int64_t id, const RowMapSpan& span,
                      const int64_t* listed_ids, const int64_t* listed_rows,
                      const int64_t* range_starts, const int64_t* range_rows) {
  if (span.listed_end - span.listed_begin == span.rows) {
    return listed_rows[span.listed_begin + id];
  }
  const int64_t listed =
      lower_bound(listed_ids, span.listed_begin, span.listed_end, id);
  if (listed < span.listed_end && listed_ids[listed] == id) {
    return listed_rows[listed];
  }
  const int64_t unlisted = id - (listed - span.listed_begin);
  const int64_t range = lower_bound(range_starts, span.range_begin,
                                    span.range_end, unlisted + 1) -
                        1;
  return range_rows[range] + unlisted - range_starts[range];
}

inline void check_index_vector(const torch::stable::Tensor& tensor,
                               const char* name) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(tensor.dim() == 1, "map_ids: ", name,
                  " must have 1 dimension, found ", tensor.dim());
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long, "map_ids: ", name,
                  " must be int64");
  STD_TORCH_CHECK(tensor.is_contiguous(), "map_ids: ", name,
                  " must be contiguous");
}

}  // namespace oper
