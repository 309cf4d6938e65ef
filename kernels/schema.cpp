// The schema of every op, in one place. An op's kernels register themselves in
// cpu/<op>.cpp and cuda/<op>.cu under the same name.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(oper, library) {
  library.def(
      "map_ids(Tensor ids, Tensor offsets, Tensor tables, Tensor listed_ids, "
      "Tensor listed_rows, Tensor buckets, Tensor range_starts, "
      "Tensor range_rows) -> Tensor");
}
