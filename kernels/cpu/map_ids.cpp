#include "../map_ids.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <limits>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace oper {
namespace {

constexpr int64_t kIdsPerTask = 4096;
// Far above any table, far below where sums of positions overflow.
constexpr int64_t kMostRows = int64_t{1} << 60;

// `tensor` is a contiguous vector of int64 on the CPU.
void check_index_vector(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 1, "map_ids: ", name,
                  " must have 1 dimension, found ", tensor.dim());
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long, "map_ids: ", name,
                  " must be int64");
  STD_TORCH_CHECK(tensor.is_contiguous(), "map_ids: ", name,
                  " must be contiguous");
  STD_TORCH_CHECK(tensor.is_cpu(), "map_ids: ", name, " must be on the CPU");
}

// How many entries the arrays have that spans point into.
struct ArraySizes {
  int64_t listed;
  int64_t buckets;
  int64_t ranges;
};

void check_spans(const RowMapSpan* spans, int64_t count,
                 const ArraySizes& sizes, const int64_t* range_starts,
                 int64_t most_rows) {
  for (int64_t s = 0; s < count; ++s) {
    const RowMapSpan& span = spans[s];
    STD_TORCH_CHECK(0 <= span.rows && span.rows <= most_rows,
                    "map_ids: tables[", s, "] has ", span.rows,
                    " rows, outside 0 to ", most_rows,
                    " that the type of ids can number");
    STD_TORCH_CHECK(0 <= span.listed_begin &&
                        span.listed_begin <= span.listed_end &&
                        span.listed_end <= sizes.listed &&
                        span.listed_end - span.listed_begin <= span.rows,
                    "map_ids: tables[", s, "] lists rows ", span.listed_begin,
                    " to ", span.listed_end, " of ", sizes.listed,
                    " for a table of ", span.rows, " rows");
    STD_TORCH_CHECK(0 <= span.range_begin &&
                        span.range_begin <= span.range_end &&
                        span.range_end <= sizes.ranges,
                    "map_ids: tables[", s, "] has ranges ", span.range_begin,
                    " to ", span.range_end, " of ", sizes.ranges);
    if (span.lists_all()) continue;
    STD_TORCH_CHECK(
        0 <= span.bucket_shift && span.bucket_shift < 63 &&
            0 <= span.bucket_begin && span.bucket_count() <= sizes.buckets &&
            span.bucket_begin <= sizes.buckets - span.bucket_count(),
        "map_ids: tables[", s, "] has buckets of 2^", span.bucket_shift,
        " ids from ", span.bucket_begin, " of ", sizes.buckets);
    STD_TORCH_CHECK(span.range_begin < span.range_end &&
                        range_starts[span.range_begin] == 0,
                    "map_ids: tables[", s,
                    "] has no range that starts at 0 for the ids that it "
                    "doesn't list");
  }
}

void check_offsets(const int64_t* offsets, int64_t segments, int64_t ids) {
  STD_TORCH_CHECK(offsets[0] == 0, "map_ids: offsets[0] must be 0, found ",
                  offsets[0]);
  for (int64_t s = 0; s < segments; ++s) {
    STD_TORCH_CHECK(offsets[s] <= offsets[s + 1],
                    "map_ids: offsets must not fall, found ", offsets[s],
                    " before ", offsets[s + 1], " at ", s);
  }
  STD_TORCH_CHECK(offsets[segments] == ids,
                  "map_ids: the last of offsets must be the number of ids, ",
                  ids, ", found ", offsets[segments]);
}

// Maps ids[begin, end); returns the first position whose id is outside its
// table, or `end`. Exceptions don't cross parallel_for, so it doesn't throw.
template <typename Id>
int64_t map_slice(const Id* ids, int64_t begin, int64_t end,
                  const int64_t* offsets, int64_t segments,
                  const RowMapSpan* spans, const RowMapArrays& arrays,
                  Id* out) {
  int64_t segment =
      std::upper_bound(offsets, offsets + segments + 1, begin) - offsets - 1;
  for (int64_t i = begin; i < end; ++segment) {
    const int64_t stop = std::min(end, offsets[segment + 1]);
    const RowMapSpan& span = spans[segment];
    for (; i < stop; ++i) {
      const int64_t id = static_cast<int64_t>(ids[i]);
      if (id < 0 || id >= span.rows) return i;
      out[i] = static_cast<Id>(map_id(id, span, arrays));
    }
  }
  return end;
}

template <typename Id>
Tensor map_ids_of_type(const Tensor& ids, const Tensor& offsets,
                       const Tensor& tables, const RowMapArrays& arrays,
                       const ArraySizes& sizes) {
  const int64_t count = ids.numel();
  const int64_t segments = tables.size(0);
  const auto* spans =
      reinterpret_cast<const RowMapSpan*>(tables.const_data_ptr<int64_t>());
  const auto* starts = offsets.const_data_ptr<int64_t>();
  check_spans(spans, segments, sizes, arrays.range_starts,
              std::min<int64_t>(std::numeric_limits<Id>::max(), kMostRows));
  check_offsets(starts, segments, count);

  Tensor out = torch::stable::empty_like(ids);
  const Id* in = ids.const_data_ptr<Id>();
  Id* mapped = out.mutable_data_ptr<Id>();
  std::atomic<int64_t> first_bad{count};
  if (count > 0) {
    torch::stable::parallel_for(
        0, count, kIdsPerTask, [&](int64_t begin, int64_t end) {
          const int64_t stop = map_slice(in, begin, end, starts, segments,
                                         spans, arrays, mapped);
          if (stop == end) return;
          int64_t seen = first_bad.load();
          while (stop < seen && !first_bad.compare_exchange_weak(seen, stop)) {
          }
        });
  }
  const int64_t bad = first_bad.load();
  if (bad < count) {
    const int64_t segment =
        std::upper_bound(starts, starts + segments + 1, bad) - starts - 1;
    STD_TORCH_CHECK(false, "map_ids: ids[", bad,
                    "] = ", static_cast<int64_t>(in[bad]),
                    " is outside tables[", segment, "], which has ",
                    spans[segment].rows, " rows");
  }
  return out;
}

Tensor map_ids(const Tensor& ids, const Tensor& offsets, const Tensor& tables,
               const Tensor& listed_ids, const Tensor& listed_rows,
               const Tensor& buckets, const Tensor& range_starts,
               const Tensor& range_rows) {
  STD_TORCH_CHECK(ids.dim() == 1, "map_ids: ids must have 1 dimension, found ",
                  ids.dim());
  STD_TORCH_CHECK(ids.is_contiguous(), "map_ids: ids must be contiguous");
  STD_TORCH_CHECK(tables.dim() == 2 && tables.size(1) == 7 &&
                      tables.scalar_type() == ScalarType::Long &&
                      tables.is_contiguous() && tables.is_cpu(),
                  "map_ids: tables must be contiguous int64 [S, 7] on the CPU");
  check_index_vector(offsets, "offsets");
  check_index_vector(listed_ids, "listed_ids");
  check_index_vector(listed_rows, "listed_rows");
  check_index_vector(buckets, "buckets");
  check_index_vector(range_starts, "range_starts");
  check_index_vector(range_rows, "range_rows");
  STD_TORCH_CHECK(offsets.numel() == tables.size(0) + 1,
                  "map_ids: offsets must have one entry more than tables, ",
                  tables.size(0) + 1, ", found ", offsets.numel());
  STD_TORCH_CHECK(listed_ids.numel() == listed_rows.numel(),
                  "map_ids: listed_ids and listed_rows differ in length, ",
                  listed_ids.numel(), " and ", listed_rows.numel());
  STD_TORCH_CHECK(range_starts.numel() == range_rows.numel(),
                  "map_ids: range_starts and range_rows differ in length, ",
                  range_starts.numel(), " and ", range_rows.numel());
  const RowMapArrays arrays{listed_ids.const_data_ptr<int64_t>(),
                            listed_rows.const_data_ptr<int64_t>(),
                            buckets.const_data_ptr<int64_t>(),
                            range_starts.const_data_ptr<int64_t>(),
                            range_rows.const_data_ptr<int64_t>()};
  const ArraySizes sizes{listed_ids.numel(), buckets.numel(),
                         range_starts.numel()};
  switch (ids.scalar_type()) {
    case ScalarType::Int:
      return map_ids_of_type<int32_t>(ids, offsets, tables, arrays, sizes);
    case ScalarType::Long:
      return map_ids_of_type<int64_t>(ids, offsets, tables, arrays, sizes);
    default:
      STD_TORCH_CHECK(false, "map_ids: ids must be int32 or int64");
  }
}

}  // namespace
}  // namespace oper

STABLE_TORCH_LIBRARY_IMPL(oper, CPU, library) {
  library.impl("map_ids", TORCH_BOX(&oper::map_ids));
}
