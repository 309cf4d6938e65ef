"""Row maps of many features, packed into the tensors that ``map_ids`` reads.

The physical rows here are those that the ranks hold, ``local_bounds`` apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from torchrec_oper.ops import RowMapTensors
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.sharder.local_rows import local_bounds

# A map that lists all ids takes one read for an id; one that doesn't takes a binary
# search. The first is used for tables of at most this many rows, and where it takes at
# most this many times the memory.
SMALL_TABLE_ROWS = 1 << 16
LISTED_SHARE = 4


def row_map_tensors(row_maps: Sequence[RowMap], segment_maps: Sequence[int]) -> RowMapTensors:
    """The packed maps of S segments of ids.

    Args:
        row_maps: the maps, one for a table.
        segment_maps: [S] for each segment, which of ``row_maps`` it goes through.
    """
    listed = [_listed(row_map) for row_map in row_maps]
    listed_ends = np.cumsum([0, *(len(ids) for ids, _ in listed)])
    range_ends = np.cumsum([0, *(row_map.world_size for row_map in row_maps)])
    spans = [
        (
            row_maps[m].rows,
            listed_ends[m],
            listed_ends[m + 1],
            range_ends[m],
            range_ends[m + 1],
        )
        for m in segment_maps
    ]
    return RowMapTensors(
        tables=torch.tensor(spans, dtype=torch.int64).reshape(len(spans), 5),
        listed_ids=_joined([ids for ids, _ in listed]),
        listed_rows=_joined([rows for _, rows in listed]),
        range_starts=_joined([row_map.range_starts for row_map in row_maps]),
        range_rows=_joined([row_map.range_rows + _shifts(row_map) for row_map in row_maps]),
    )


def _listed(row_map: RowMap) -> tuple[Ints, Ints]:
    """The listed ids and rows, or all of them where that is the better form."""
    ids = row_map.listed_ids
    if row_map.rows <= max(SMALL_TABLE_ROWS, LISTED_SHARE * len(ids)):
        ids = np.arange(row_map.rows)
    owners, slots = row_map.place(ids)
    return ids, local_bounds(row_map)[owners] + slots


def _shifts(row_map: RowMap) -> Ints:
    """[W] how far each owner's rows lie behind where they would without spare rows."""
    return local_bounds(row_map)[:-1] - row_map.bounds[:-1]


def _joined(arrays: Sequence[Ints]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
