"""The search: longest processing time first, under memory caps, the same every time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import access, tables_and_accesses

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import Cluster, RankSpec, RowMap
from torchrec_oper.planner.busiest_rank import busiest_rank_bound
from torchrec_oper.planner.deal import _fill, deal_rows
from torchrec_oper.profile import TableAccess
from torchrec_oper.table import TableSpec

AMPLE = 10**9


def rank_loads(
    tables: list[TableSpec], accesses: list[TableAccess], maps: list[RowMap], world_size: int
) -> np.ndarray:
    """[W] bytes read on each rank, counted row by row."""
    loads = np.zeros(world_size, dtype=np.int64)
    for table, one, row_map in zip(tables, accesses, maps, strict=True):
        for id_, count in zip(one.ids, one.counts, strict=True):
            owner, _ = row_map.place([id_])
            loads[owner[0]] += count * table.row_bytes
    return loads


@given(tables_and_accesses(), st.integers(1, 4), st.integers(0, 3))
def test_loads_are_those_of_lpt_row_by_row(problem: tuple, world_size: int, seed: int) -> None:
    tables, accesses = problem
    maps = deal_rows(tables, accesses, Cluster.uniform(world_size, memory_bytes=AMPLE), seed=seed)
    rows = sorted(
        (
            count * table.row_bytes
            for table, one in zip(*problem, strict=True)
            for count in one.counts
        ),
        reverse=True,
    )
    loads = [0] * world_size
    for row in rows:
        loads[loads.index(min(loads))] += row
    assert rank_loads(tables, accesses, maps, world_size).tolist() == loads


@given(tables_and_accesses(max_tables=3, max_rows=4), st.integers(1, 3))
def test_within_graham_and_above_the_bound(problem: tuple, world_size: int) -> None:
    tables, accesses = problem
    rows = [
        count * table.row_bytes for table, one in zip(*problem, strict=True) for count in one.counts
    ]
    assume(len(rows) <= 7)
    best = min(
        max(
            sum(row for row, owner in zip(rows, owners, strict=True) if owner == rank)
            for rank in range(world_size)
        )
        for owners in itertools.product(range(world_size), repeat=len(rows))
    )
    maps = deal_rows(tables, accesses, Cluster.uniform(world_size, memory_bytes=AMPLE))
    busiest = rank_loads(tables, accesses, maps, world_size).max()
    bound = busiest_rank_bound(tables, accesses, world_size)
    assert bound <= best <= busiest <= best * 4 / 3


def test_bound_by_hand() -> None:
    table = TableSpec(name="t", rows=4, dim=1, features=("f",))
    # Loads of 4, 4, 8 bytes: the mean of 2 ranks is 8, as is the heaviest row.
    assert busiest_rank_bound([table], [access(table, {0: 1, 1: 1, 2: 2})], 2) == 8
    assert busiest_rank_bound([table], [access(table, {0: 1, 1: 1, 2: 2})], 4) == 8
    assert busiest_rank_bound([table], [access(table, {0: 1, 1: 1, 2: 1})], 2) == 6
    assert busiest_rank_bound([table], [access(table, {})], 2) == 0


@given(tables_and_accesses(), st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_caps_hold_or_the_refusal_names_table_need_and_cap(problem: tuple, caps: list) -> None:
    tables, accesses = problem
    cluster = Cluster(tuple(RankSpec(8 + 12 * cap) for cap in caps))
    try:
        maps = deal_rows(tables, accesses, cluster)
    except PlanError as error:
        assert "bytes" in str(error)
        assert any(f"table {table.name}" in str(error) for table in tables)
        need = sum(table.rows * table.stored_row_bytes for table in tables)
        largest_row = max(table.stored_row_bytes for table in tables)
        room = sum(rank.memory_bytes for rank in cluster.ranks)
        # Whole rows can leave less than one row free on each rank, not more.
        assert need > room - largest_row * len(caps)
        return
    used = sum(
        row_map.owned_rows * table.stored_row_bytes
        for table, row_map in zip(tables, maps, strict=True)
    )
    assert (used <= [rank.memory_bytes for rank in cluster.ranks]).all()


def test_refuses_tables_larger_than_all_memory() -> None:
    small = TableSpec(name="small", rows=2, dim=1, features=("f",))
    large = TableSpec(name="large", rows=100, dim=4, features=("g",), optimizer_bytes_per_row=4)
    with pytest.raises(
        PlanError,
        match=r"need 2008 bytes with optimizer state, but the 2 ranks' caps add up to 2000 bytes;"
        r" the largest, table large, needs 2000 bytes; give the ranks more memory",
    ):
        deal_rows(
            [small, large],
            [access(small, {}), access(large, {})],
            Cluster.uniform(2, memory_bytes=1000),
        )


def test_refuses_a_row_that_no_rank_has_room_for() -> None:
    wide = TableSpec(name="wide", rows=1, dim=100, features=("f",))
    with pytest.raises(
        PlanError, match=r"table wide: 1 rows of 400 bytes need 400 bytes, .* have 600 bytes left"
    ):
        deal_rows([wide], [access(wide, {0: 1})], Cluster.uniform(2, memory_bytes=300))


@given(tables_and_accesses(), st.integers(1, 4), st.integers(0, 5))
def test_equal_input_and_seed_give_equal_maps(problem: tuple, world_size: int, seed: int) -> None:
    cluster = Cluster.uniform(world_size, memory_bytes=AMPLE)
    first, second = (deal_rows(*problem, cluster, seed=seed) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.arrays().keys() == other.arrays().keys()
        assert all((one.arrays()[k] == other.arrays()[k]).all() for k in one.arrays())


def test_the_seed_parts_neighbours_of_equal_load() -> None:
    table = TableSpec(name="t", rows=1000, dim=1, features=("f",))
    one = access(table, dict.fromkeys(range(1000), 1))
    cluster = Cluster.uniform(2, memory_bytes=AMPLE)
    owners = [deal_rows([table], [one], cluster, seed=s)[0].place(range(1000))[0] for s in (0, 1)]
    assert (owners[0] != owners[1]).any()
    changes = (np.diff(owners[0]) != 0).sum()
    assert 400 < changes < 600


def test_hot_rows_take_the_first_slots() -> None:
    table = TableSpec(name="t", rows=10, dim=1, features=("f",))
    one = access(table, {7: 9, 3: 5, 1: 1})
    (row_map,) = deal_rows([table], [one], Cluster.uniform(1, memory_bytes=AMPLE))
    assert row_map.logical_ids(0)[:3].tolist() == [7, 3, 1]


def test_rows_without_lookups_level_the_memory() -> None:
    table = TableSpec(name="t", rows=100, dim=1, features=("f",))
    cluster = Cluster((RankSpec(300), RankSpec(200)))
    (row_map,) = deal_rows([table], [access(table, {})], cluster)
    assert row_map.owned_rows.tolist() == [63, 37]  # 48 and 52 bytes stay free


@given(
    st.lists(st.integers(-20, 20), min_size=1, max_size=5),
    st.integers(1, 7),
    st.integers(0, 40),
    st.data(),
)
def test_fill_equals_one_item_at_a_time(
    levels: list, weight: int, count: int, data: st.DataObject
) -> None:
    room = [data.draw(st.integers(0, 12)) for _ in levels]
    count = min(count, sum(room))
    now, taken = list(levels), [0] * len(levels)
    for _ in range(count):
        rank = min((r for r in range(len(now)) if taken[r] < room[r]), key=lambda r: now[r])
        now[rank] += weight
        taken[rank] += 1
    assert _fill(np.array(levels), weight, count, np.array(room)).tolist() == taken
