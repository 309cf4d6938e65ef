"""What moves between two plans, against moving every element of every row by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import row_maps

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.moves import shared_rows, table_moves
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.row_map import RowMap
from torchrec_oper.table import TableSpec

STATE = 3


@st.composite
def placements(draw: st.DrawFn, table: TableSpec) -> TablePlacement:
    """Any placement of the table on up to 6 ranks."""
    world = draw(st.integers(1, 6))
    hot = draw(st.one_of(st.just(0), st.just(table.rows), st.integers(0, table.rows)))
    columns = draw(st.sampled_from([c for c in (1, 2, 3, 6) if c <= world]))
    if hot == table.rows:
        columns, parts = 1, 0
    else:
        parts = draw(st.integers(1, world // columns))
    owners = np.array(draw(st.permutations(range(world)))[: columns * parts], dtype=np.int64)
    names = st.sampled_from(["rows", "partial"]) if parts else st.just("replicated")
    decision = Decision(draw(names), hot, owners.reshape(columns, parts))
    order = np.array(draw(st.permutations(range(table.rows))), dtype=np.int64)
    listed = draw(st.integers(hot, table.rows))
    part = st.integers(0, max(parts - 1, 0))
    cold = draw(st.lists(part, min_size=listed - hot, max_size=listed - hot))
    rest = draw(st.lists(part, min_size=table.rows - listed, max_size=table.rows - listed))
    row_map = RowMap.from_owners(
        listed_ids=order[:listed],
        listed_owners=np.array([parts] * hot + cold, dtype=np.int64),
        unlisted_counts=np.bincount(np.array(rest, dtype=np.int64), minlength=parts + (hot > 0)),
    )
    return TablePlacement("m", table, decision, row_map, np.zeros(world, dtype=np.int64))


def holders(placement: TablePlacement) -> list[list[set[int]]]:
    """The ranks that have each element of each row."""
    decision, dim = placement.decision, placement.table.dim
    part_of, _ = placement.row_map.place(np.arange(placement.table.rows))
    everyone = set(range(placement.world_size))
    return [
        [
            everyone
            if part == decision.parts
            else {int(placement.owners[column * decision.columns // dim, part])}
            for column in range(dim)
        ]
        for part in part_of.tolist()
    ]


def by_hand(before: TablePlacement, after: TablePlacement) -> tuple[Counter, Counter]:
    """Rows and bytes of each pair of ranks, element by element."""
    rows: Counter = Counter()
    sizes: Counter = Counter()
    width = after.table.dim // after.decision.columns
    for old, new in zip(holders(before), holders(after), strict=True):
        ways = set()
        for column, (has, needs) in enumerate(zip(old, new, strict=True)):
            for to in needs - has:
                source = to % before.world_size if len(has) == before.world_size else min(has)
                ways.add((source, to))
                sizes[source, to] += 4 + STATE * (column % width == 0)
        rows.update(ways)
    return rows, sizes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_moves_are_those_of_every_element(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 12))
    table = TableSpec("t", rows, 6, ("f",), optimizer_bytes_per_row=STATE)
    before, after = data.draw(placements(table)), data.draw(placements(table))
    found = table_moves(before, after, optimizer=True)
    pairs = list(zip(found.from_ranks.tolist(), found.to_ranks.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    wanted_rows, wanted_bytes = by_hand(before, after)
    assert dict(zip(pairs, found.rows.tolist(), strict=True)) == dict(wanted_rows)
    assert dict(zip(pairs, found.bytes.tolist(), strict=True)) == dict(wanted_bytes)
    assert found.total_bytes == sum(wanted_bytes.values())
    values = table_moves(before, after, optimizer=False)
    assert values.total_bytes <= found.total_bytes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_shared_rows_are_those_of_every_id(data: st.DataObject) -> None:
    a = data.draw(row_maps(max_rows=12))
    order = np.array(data.draw(st.permutations(range(a.rows))), dtype=np.int64)
    owners = np.array(data.draw(st.lists(st.integers(0, 2), max_size=a.rows)), dtype=np.int64)
    left = a.rows - len(owners)
    rest = data.draw(st.lists(st.integers(0, 3), min_size=left, max_size=left))
    b = RowMap.from_owners(
        listed_ids=order[: len(owners)],
        listed_owners=owners,
        unlisted_counts=np.bincount(np.array(rest, dtype=np.int64), minlength=4),
    )
    counted = np.zeros((a.world_size, b.world_size), dtype=np.int64)
    ids = np.arange(a.rows)
    np.add.at(counted, (a.place(ids)[0], b.place(ids)[0]), 1)
    assert np.array_equal(shared_rows(a, b), counted)


def test_a_table_of_any_size_is_compared_at_once() -> None:
    rows = 2**61
    none = np.empty(0, dtype=np.int64)
    halves = RowMap(np.array([0, rows // 2, rows]), none, none)
    thirds = RowMap(np.array([0, rows // 4, rows // 4, rows]), np.array([9]), np.array([0]))
    shared = shared_rows(halves, thirds)
    assert shared.tolist() == [[rows // 4, 0, rows // 4], [0, 0, rows // 2]]


def test_a_table_of_another_shape_is_refused() -> None:
    placed = []
    for dim in (2, 4):
        table = TableSpec("t", 3, dim, ("f",))
        row_map = RowMap(np.array([0, 3]), np.empty(0, np.int64), np.empty(0, np.int64))
        decision = Decision("whole", 0, np.zeros((1, 1), np.int64))
        placed.append(TablePlacement("m", table, decision, row_map, np.zeros(1, np.int64)))
    with pytest.raises(PlanError, match="m.t has 3 rows of 2 float32 in one plan and 3 of 4"):
        table_moves(*placed, optimizer=True)
