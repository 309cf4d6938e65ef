"""RowMap: every id has a row of its own, and the inverse finds it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from strategies import row_maps

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import RowMap


@given(row_maps())
def test_every_id_has_a_physical_row_of_its_own(row_map: RowMap) -> None:
    physical = row_map.physical_rows(np.arange(row_map.rows))
    assert sorted(physical) == list(range(row_map.rows))


@given(row_maps())
def test_logical_ids_invert_place(row_map: RowMap) -> None:
    for rank in range(row_map.world_size):
        ids = row_map.logical_ids(rank)
        owner, slot = row_map.place(ids)
        assert len(ids) == row_map.owned_rows[rank]
        assert (owner == rank).all()
        assert slot.tolist() == list(range(len(ids)))


@given(row_maps())
def test_unlisted_ids_fill_the_owners_in_ascending_order(row_map: RowMap) -> None:
    unlisted = np.setdiff1d(np.arange(row_map.rows), row_map.listed_ids)
    owner, _ = row_map.place(unlisted)
    assert (np.diff(owner) >= 0).all()
    assert (np.diff(row_map.physical_rows(unlisted)) > 0).all()


@given(row_maps())
def test_arrays_round_trip(row_map: RowMap) -> None:
    again = RowMap.from_arrays(row_map.arrays())
    ids = np.arange(row_map.rows)
    assert (again.physical_rows(ids) == row_map.physical_rows(ids)).all()


def test_by_hand() -> None:
    # 6 rows on 2 ranks: ids 4 and 1 are listed on rank 0 and 1, the others are 0 2 | 3 5.
    row_map = RowMap.from_owners(
        listed_ids=np.array([4, 1]),
        listed_owners=np.array([0, 1]),
        unlisted_counts=np.array([2, 2]),
    )
    assert row_map.bounds.tolist() == [0, 3, 6]
    owner, slot = row_map.place([0, 1, 2, 3, 4, 5])
    assert owner.tolist() == [0, 1, 0, 1, 0, 1]
    assert slot.tolist() == [1, 0, 2, 1, 0, 2]
    assert row_map.logical_ids(0).tolist() == [4, 0, 2]


def test_a_billion_rows_cost_what_is_listed() -> None:
    rows = 10**9
    row_map = RowMap.from_owners(
        listed_ids=np.array([rows - 1, 0]),
        listed_owners=np.array([1, 0]),
        unlisted_counts=np.array([rows // 2 - 1, rows // 2 - 1]),
    )
    owner, slot = row_map.place([0, rows - 1, 1, rows - 2])
    assert owner.tolist() == [0, 1, 0, 1]
    assert slot.tolist() == [0, 0, 1, rows // 2 - 1]
    assert sum(array.nbytes for array in row_map.arrays().values()) < 100


@pytest.mark.parametrize("id_", [-1, 6, 10**12])
def test_refuses_an_id_outside_the_table(id_: int) -> None:
    row_map = RowMap(np.array([0, 6]), np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    with pytest.raises(PlanError, match=f"id {id_} is outside the table, whose ids end at 5"):
        row_map.place([0, id_])


@pytest.mark.parametrize(
    ("bounds", "ids", "rows", "message"),
    [
        ([0], [], [], "bounds must rise from 0"),
        ([1, 4], [], [], "bounds must rise from 0"),
        ([0, 4, 3], [], [], "bounds must rise from 0"),
        ([0, 0], [], [], "bounds must rise from 0"),
        ([[0, 4]], [], [], "bounds must have 1 dimension, found 2"),
        ([0, 4], [0, 1], [0], "lists 2 ids but 1 physical rows"),
        ([0, 4], [1, 0], [0, 1], "must ascend within 0 to 3"),
        ([0, 4], [1, 1], [0, 1], "must ascend within 0 to 3"),
        ([0, 4], [4], [0], "must ascend within 0 to 3"),
        ([0, 4], [1], [4], "physical rows outside 0 to 3"),
        ([0, 2, 4], [1], [1], "must fill the first slots of their owners"),
        ([0, 2, 4], [1, 2], [0, 0], "must fill the first slots of their owners"),
    ],
)
def test_refuses_what_is_not_a_map(bounds: list, ids: list, rows: list, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        RowMap(np.array(bounds), np.array(ids, dtype=np.int64), np.array(rows, dtype=np.int64))


def test_from_arrays_names_a_missing_array() -> None:
    with pytest.raises(PlanError, match="'listed_rows', which is missing"):
        RowMap.from_arrays({"bounds": np.array([0, 1]), "listed_ids": np.array([])})


def test_refuses_numbers_that_are_not_whole() -> None:
    with pytest.raises(PlanError, match="a row map's bounds must be integers, found float64"):
        RowMap(np.array([0, 5.9]), [], [])
    with pytest.raises(PlanError, match="ids must be integers, found float64"):
        RowMap([0, 5], [], []).place([1.7])


def test_refuses_ranks_that_it_does_not_have() -> None:
    with pytest.raises(PlanError, match="for 1 ranks, found rank -1"):
        RowMap([0, 5], [], []).logical_ids(-1)
    for owner in (-1, 2):
        with pytest.raises(PlanError, match=f"ranks from 0 to 1, found {owner} to {owner}"):
            RowMap.from_owners(
                listed_ids=np.array([0]),
                listed_owners=np.array([owner]),
                unlisted_counts=np.array([1, 1]),
            )


def test_is_read_only() -> None:
    row_map = RowMap(np.array([0, 6]), np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="read-only"):
        row_map.bounds[0] = 1
