"""Row maps of many features, packed into the tensors that ``map_ids`` reads.

The physical rows here are those that the ranks hold, ``local_bounds`` apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torchrec_oper.ops import RowMapTensors
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.sharder.local_rows import local_bounds

# A map that lists all ids takes one read for an id; one that doesn't takes a bucket and
# a search. The first is used for tables of at most this many rows, and where it takes at
# most this many times the memory.
SMALL_TABLE_ROWS = 1 << 12
LISTED_SHARE = 4


def row_map_tensors(row_maps: Sequence[RowMap], segment_maps: Sequence[int]) -> RowMapTensors:
    """The packed maps of S segments of ids.

    Args:
        row_maps: the maps, one for a table.
        segment_maps: [S] for each segment, which of ``row_maps`` it goes through.
    """
    packed = [_pack(row_map) for row_map in row_maps]
    listed = np.cumsum([0, *(len(one.listed_ids) for one in packed)])
    buckets = np.cumsum([0, *(len(one.buckets) for one in packed)])
    ranges = np.cumsum([0, *(len(one.range_starts) for one in packed)])
    spans = [
        (
            row_maps[m].rows,
            listed[m],
            listed[m + 1],
            buckets[m],
            packed[m].bucket_shift,
            ranges[m],
            ranges[m + 1],
        )
        for m in segment_maps
    ]
    return RowMapTensors(
        tables=torch.tensor(spans, dtype=torch.int64).reshape(len(spans), 7),
        listed_ids=_joined([one.listed_ids for one in packed]),
        listed_rows=_joined([one.listed_rows for one in packed]),
        buckets=_joined(
            [one.buckets + begin for one, begin in zip(packed, listed[:-1], strict=True)]
        ),
        range_starts=_joined([one.range_starts for one in packed]),
        range_rows=_joined([one.range_rows for one in packed]),
    )


class _Packed(NamedTuple):
    """The parts of one map; ``buckets`` counts from its first listed id."""

    listed_ids: Ints
    listed_rows: Ints
    buckets: Ints
    bucket_shift: int
    range_starts: Ints
    range_rows: Ints


def _pack(row_map: RowMap) -> _Packed:
    ids = row_map.listed_ids
    if row_map.rows <= max(SMALL_TABLE_ROWS, LISTED_SHARE * len(ids)):
        ids = np.arange(row_map.rows)
    bounds = local_bounds(row_map)
    owners, slots = row_map.place(ids)
    buckets, shift = _buckets(ids, row_map.rows)
    return _Packed(
        listed_ids=ids,
        listed_rows=bounds[owners] + slots,
        buckets=buckets,
        bucket_shift=shift,
        range_starts=row_map.range_starts,
        range_rows=row_map.range_rows + (bounds - row_map.bounds)[:-1],
    )


def _buckets(ids: Ints, rows: int) -> tuple[Ints, int]:
    """Where each bucket of 2^shift ids begins among the listed ``ids``, and the shift.

    There are about as many buckets as listed ids: one id in each where they are spread.
    """
    if len(ids) == rows:
        return np.empty(0, dtype=np.int64), 0
    shift = (rows // max(len(ids), 1)).bit_length()
    starts = np.arange(((rows - 1) >> shift) + 2) << shift
    buckets: Ints = np.searchsorted(ids, starts).astype(np.int64)
    return buckets, shift


def _joined(arrays: Sequence[Ints]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
