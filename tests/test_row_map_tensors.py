"""Packed row maps: the op finds what the row map says, spare rows counted in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import row_maps

from torchrec_oper.ops import map_ids
from torchrec_oper.planner import RowMap
from torchrec_oper.sharder import row_map_tensors as module
from torchrec_oper.sharder.local_rows import local_bounds


@given(st.lists(row_maps(), min_size=1, max_size=4), st.booleans())
def test_physical_rows_are_the_row_maps_with_spare_rows_between(
    maps: list[RowMap], lists_all: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SMALL_TABLE_ROWS", 1000 if lists_all else 0)
        patch.setattr(module, "LISTED_SHARE", 1)
        tensors = module.row_map_tensors(maps, list(range(len(maps))))
    ids = torch.cat([torch.arange(row_map.rows) for row_map in maps])
    offsets = torch.tensor([0, *np.cumsum([row_map.rows for row_map in maps])])
    wanted = []
    for row_map in maps:
        owner, slot = row_map.place(np.arange(row_map.rows))
        wanted += (local_bounds(row_map)[owner] + slot).tolist()
    assert map_ids(ids, offsets, tensors).tolist() == wanted
    if lists_all:
        assert not len(tensors.buckets)


def test_a_large_table_keeps_its_short_list() -> None:
    listed = np.array([5, 10**6 - 1])
    row_map = RowMap.from_owners(
        listed_ids=listed, listed_owners=np.array([0, 1]), unlisted_counts=np.array([10**6 - 2, 0])
    )
    tensors = module.row_map_tensors([row_map], [0, 0])
    assert tensors.listed_ids.tolist() == listed.tolist()
    assert len(tensors.buckets) < 10
    assert tensors.tables.shape == (2, 7)
