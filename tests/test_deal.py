"""Dealing rows one by one: every part gets its share, and hot rows are kept apart."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import access

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import Decision
from torchrec_oper.planner.deal import _filled, apportioned, deal
from torchrec_oper.profile import TableAccess
from torchrec_oper.table import TableSpec

TOLERANCE = 1e-6


def decision(
    parts: int, *, exchange: str = "partial", hot_rows: int = 0, weights: Any = None
) -> Decision:
    return Decision(exchange, hot_rows, np.arange(parts)[None], weights)


def table(rows: int) -> TableSpec:
    return TableSpec(name="t", rows=rows, dim=4, features=("f",))


@st.composite
def accesses(draw: st.DrawFn, most: int = 30, tail: bool = True) -> TableAccess:
    """Counts of some rows by id, of others together, and rows that were never seen."""
    values = draw(st.lists(st.integers(1, draw(st.sampled_from([1, 3, 60]))), max_size=most))
    ids = draw(st.permutations(range(len(values))))
    tail_rows = draw(st.integers(0, 40)) if tail else 0
    # A row of the tail has at most the count of the coldest listed one.
    tail_counts = draw(st.integers(tail_rows, tail_rows * min(values, default=5)))
    unseen = draw(st.integers(0, 40)) if tail else 0
    rows = len(values) + tail_rows + unseen
    return access(
        table(max(rows, 1)),
        dict(zip(ids, values, strict=True)),
        tail=(tail_rows, tail_counts) if tail_rows else None,
    )


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, np.ndarray | None]:
    """Parts, and their weights or none."""
    parts = draw(st.integers(1, 5))
    if draw(st.booleans()):
        return parts, None
    counts = draw(st.lists(st.integers(0, 9), min_size=parts, max_size=parts).filter(any))
    return parts, np.array(counts) / sum(counts)


def listed_loads(one: TableAccess, owners: np.ndarray, parts: int) -> np.ndarray:
    """[parts] lookups of listed rows, counted row by row."""
    loads = np.zeros(parts)
    for owner, count in zip(owners, one.counts, strict=True):
        loads[owner] += count
    return loads


def heavy_rows(counts: list[int], parts: int) -> int:
    """How many of the hottest rows have more lookups than the others could balance."""
    rest = sum(counts)
    for number, count in enumerate(counts):
        if parts - number < 2 or count * (parts - number) <= rest:
            return number
        rest -= count
    return len(counts)


@given(accesses(tail=False), st.integers(1, 5), st.integers(0, 3))
def test_heavy_rows_are_alone_and_the_rest_within_a_row_of_even(
    one: TableAccess, parts: int, seed: int
) -> None:
    row_map = deal(one, decision(parts), seed=seed)
    owners, _ = row_map.place(one.ids)
    loads = listed_loads(one, owners, parts)
    heavy = heavy_rows(one.counts.tolist(), parts)
    # Part i has the i-th hottest row, and only that.
    assert loads[:heavy].tolist() == one.counts[:heavy].tolist()
    assert np.bincount(owners, minlength=parts)[:heavy].tolist() == [1] * heavy
    rest = one.counts[heavy:]
    even = rest.sum() / (parts - heavy) if parts > heavy else 0
    assert (np.abs(loads[heavy:] - even) <= rest.max(initial=0) + TOLERANCE).all()


@given(accesses(), shares(), st.integers(0, 3))
def test_no_part_is_more_than_its_hottest_row_over_its_share(
    one: TableAccess, wanted: tuple, seed: int
) -> None:
    parts, weights = wanted
    row_map = deal(one, decision(parts, weights=weights), seed=seed)
    owners, _ = row_map.place(one.ids)
    loads = listed_loads(one, owners, parts)
    share = np.full(parts, 1 / parts) if weights is None else weights
    most = one.counts.max(initial=0)
    assert (loads <= share * one.lookups + most + TOLERANCE).all()
    assert not loads[share == 0].any()
    assert row_map.rows == one.rows


@given(accesses(), shares())
def test_unlisted_rows_fill_the_parts_up_to_their_share_of_lookups(
    one: TableAccess, wanted: tuple
) -> None:
    parts, weights = wanted
    row_map = deal(one, decision(parts, weights=weights))
    owners, _ = row_map.place(one.ids)
    unlisted = row_map.owned_rows - np.bincount(owners, minlength=parts)
    share = np.full(parts, 1 / parts) if weights is None else weights
    tail = one.lookups - int(one.counts.sum())
    if not tail:
        # Nothing to balance but memory.
        dealt = np.bincount(owners, minlength=parts)
        missing = np.maximum(share * one.rows - dealt, 0)
    else:
        loads = listed_loads(one, owners, parts)
        missing = np.maximum(share * one.lookups - loads, 0)
    if missing.sum():
        exact = unlisted.sum() * missing / missing.sum()
        assert (np.abs(unlisted - exact) < 1 + TOLERANCE).all()


@given(accesses(), shares(), st.integers(0, 3))
def test_for_exchange_rows_every_stretch_of_hotness_is_shared_out(
    one: TableAccess, wanted: tuple, seed: int
) -> None:
    parts, weights = wanted
    row_map = deal(one, decision(parts, exchange="rows", weights=weights), seed=seed)
    owners, _ = row_map.place(one.ids)
    share = np.full(parts, 1 / parts) if weights is None else weights
    # As many rows as a part's share, but for the fraction of one at either end.
    for count in {*one.counts.tolist(), 0}:
        hotter = np.bincount(owners[one.counts > count], minlength=parts)
        assert (np.abs(hotter - share * hotter.sum()) < 2).all()
    assert (np.abs(row_map.owned_rows - share * one.rows) < 2).all()


@given(accesses(), st.integers(1, 4), st.sampled_from(["rows", "partial"]), st.data())
def test_hot_rows_are_the_hottest_in_a_part_of_their_own(
    one: TableAccess, parts: int, exchange: str, data: st.DataObject
) -> None:
    hot = data.draw(st.integers(0, len(one.ids)))
    row_map = deal(one, decision(parts, exchange=exchange, hot_rows=hot))
    assert row_map.world_size == parts + (hot > 0)
    owners, slots = row_map.place(one.ids)
    if hot:
        assert row_map.owned_rows[-1] == hot
        assert owners[:hot].tolist() == [parts] * hot
        assert slots[:hot].tolist() == list(range(hot))
    assert (owners[hot:] < parts).all()
    # The others go as they would without the hot rows.
    cold = access(
        table(one.rows - hot) if one.rows > hot else table(1),
        {number: int(count) for number, count in enumerate(one.counts[hot:])},
        tail=(int(one.tail_rows.sum()), int(one.tail_counts.sum())) if len(one.tail_rows) else None,
    )
    if one.rows > hot:
        alone = deal(cold, decision(parts, exchange=exchange))
        assert alone.owned_rows.tolist() == row_map.owned_rows[:parts].tolist()


def test_hot_rows_that_nobody_listed_are_refused() -> None:
    one = access(table(9), {3: 2})
    with pytest.raises(
        PlanError, match="table t: 2 hot rows can't be told, the profile lists 1; profile with more"
    ):
        deal(one, decision(2, hot_rows=2))


def test_a_replicated_table_is_one_part() -> None:
    everything = Decision("replicated", 9, np.empty((1, 0)))
    row_map = deal(access(table(9), {3: 2}), everything)
    assert row_map.owned_rows.tolist() == [9]


@given(accesses(), shares(), st.integers(0, 5))
def test_equal_input_and_seed_give_equal_maps(one: TableAccess, wanted: tuple, seed: int) -> None:
    parts, weights = wanted
    first, second = (deal(one, decision(parts, weights=weights), seed=seed) for _ in range(2))
    assert all((first.arrays()[k] == second.arrays()[k]).all() for k in first.arrays())


def test_the_seed_parts_neighbours_of_equal_load() -> None:
    one = access(table(1000), dict.fromkeys(range(1000), 1))
    owners = [deal(one, decision(2), seed=seed).place(range(1000))[0] for seed in (0, 1)]
    assert (owners[0] != owners[1]).any()
    changes = (np.diff(owners[0]) != 0).sum()
    assert 400 < changes < 600


def test_hotter_rows_take_the_first_slots() -> None:
    row_map = deal(access(table(10), {7: 9, 3: 5, 1: 1}), decision(1))
    assert row_map.logical_ids(0)[:3].tolist() == [7, 3, 1]


def test_rows_that_nobody_looked_up_level_the_memory() -> None:
    row_map = deal(access(table(100), {0: 50}), decision(4))
    assert row_map.owned_rows.tolist() == [25, 25, 25, 25]
    weights = np.array([0.1, 0.9])
    assert deal(access(table(100), {}), decision(2, weights=weights)).owned_rows.tolist() == [
        10,
        90,
    ]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), min_size=1, max_size=5).filter(
        lambda pairs: any(share for _, share in pairs)
    ),
    st.integers(1, 200),
)
def test_filled_raises_the_lowest_to_one_level(pairs: list, amount: int) -> None:
    levels, share = (np.array(one, dtype=np.float64) for one in zip(*pairs, strict=True))
    filled = _filled(levels, share, amount)
    assert filled.sum() == pytest.approx(amount)
    assert (filled >= 0).all()
    assert not filled[share == 0].any()
    some = share > 0
    heights = (levels + filled)[some] / share[some]
    raised = filled[some] > TOLERANCE
    assert np.ptp(heights[raised]) < TOLERANCE
    assert (heights[~raised] >= heights[raised].max() - TOLERANCE).all()


@given(st.integers(0, 10**12), shares())
def test_apportioned_adds_up_and_is_within_one(total: int, wanted: tuple) -> None:
    parts, weights = wanted
    share = np.full(parts, 1 / parts) if weights is None else weights
    found = apportioned(total, share)
    assert found.sum() == total
    assert (np.abs(found - total * share) <= 1 + 1e-3).all()
    assert all(b >= 0 for b in itertools.chain(found.tolist()))
