// oper::map_ids, the lookup of one id, which is the same on every device.
// torchrec_oper/ops/map_ids.py defines the arguments.
#pragma once

#include <cstdint>

namespace oper {

// One row of `tables`.
struct RowMapSpan {
  int64_t rows;
  int64_t listed_begin;
  int64_t listed_end;
  int64_t bucket_begin;
  int64_t bucket_shift;
  int64_t range_begin;
  int64_t range_end;

  bool lists_all() const { return listed_end - listed_begin == rows; }
  // Entries in `buckets`: one for each 2^bucket_shift ids, and one for the end.
  int64_t bucket_count() const {
    return lists_all() ? 0 : ((rows - 1) >> bucket_shift) + 2;
  }
};
static_assert(sizeof(RowMapSpan) == 7 * sizeof(int64_t), "tables is [S, 7]");

// The arrays that spans point into.
struct RowMapArrays {
  const int64_t* listed_ids;
  const int64_t* listed_rows;
  const int64_t* buckets;
  const int64_t* range_starts;
  const int64_t* range_rows;
};

// First position in [begin, end) whose value is not below `value`. Written
// without branches on the values, which no processor could predict.
inline int64_t lower_bound(const int64_t* values, int64_t begin, int64_t end,
                           int64_t value) {
  int64_t length = end - begin;
  while (length > 0) {
    const int64_t half = length / 2;
    const bool below = values[begin + half] < value;
    begin += below ? half + 1 : 0;
    length = below ? length - half - 1 : half;
  }
  return begin;
}

inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// The physical row of an id that lies in [0, span.rows).
inline int64_t map_id(int64_t id, const RowMapSpan& span,
                      const RowMapArrays& arrays) {
  if (span.lists_all()) return arrays.listed_rows[span.listed_begin + id];
  // Clamped here and below, so that wrong arrays give a wrong row, not a wild
  // read.
  const int64_t* bucket =
      arrays.buckets + span.bucket_begin + (id >> span.bucket_shift);
  const int64_t begin = clamp(bucket[0], span.listed_begin, span.listed_end);
  const int64_t end = clamp(bucket[1], begin, span.listed_end);
  const int64_t listed = lower_bound(arrays.listed_ids, begin, end, id);
  if (listed < end && arrays.listed_ids[listed] == id) {
    return arrays.listed_rows[listed];
  }
  const int64_t before = listed - span.listed_begin;
  const int64_t unlisted = id < before ? 0 : id - before;
  const int64_t above = lower_bound(arrays.range_starts, span.range_begin,
                                    span.range_end, unlisted + 1);
  const int64_t range = above > span.range_begin ? above - 1 : above;
  // Unsigned, because wrong arrays may overflow.
  const auto row = static_cast<uint64_t>(arrays.range_rows[range]);
  const auto start = static_cast<uint64_t>(arrays.range_starts[range]);
  return static_cast<int64_t>(row + static_cast<uint64_t>(unlisted) - start);
}

}  // namespace oper
