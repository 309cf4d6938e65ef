"""Deals the rows of all tables to the ranks: by measured load, under the memory caps.

The load of a row is the bytes that its lookups read. Rows are dealt heaviest first,
each to the least loaded rank that has room for it (longest processing time first,
Graham 1969, within 4/3 of the best for alike ranks). Rows of one load and size are
dealt together, which gives what dealing them one by one would give, so the work
grows with the number of distinct loads and not with the number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.profile import TableAccess
from torchrec_oper.table import TableSpec

MOST_BYTES = 1 << 60  # where sums in int64 stay far from overflow


def deal_rows(
    tables: Sequence[TableSpec],
    accesses: Sequence[TableAccess],
    cluster: Cluster,
    *,
    seed: int = 0,
) -> list[RowMap]:
    """A row map for each table.

    Rows without a lookup carry no load: they go, a range of ids to each rank, to where
    most memory is free.

    Args:
        tables: the tables.
        accesses: how each of them is used, in the same order.
        cluster: the ranks and their memory caps.
        seed: shuffles rows of equal load, so that neighbours in id space part.

    Raises:
        PlanError: the tables don't fit into the ranks' memory.
    """
    free = _usable(tables, [rank.memory_bytes for rank in cluster.ranks])
    table_of, ids, owners = _deal_looked_up(tables, accesses, free, seed)
    by_size = sorted(range(len(tables)), key=lambda t: -tables[t].stored_row_bytes)
    # One stable sort by table keeps each table's rows in order of load.
    by_table = np.argsort(table_of, kind="stable")
    ends = np.searchsorted(table_of[by_table], np.arange(len(tables) + 1))
    maps: dict[int, RowMap] = {}
    for t in by_size:
        mine = by_table[ends[t] : ends[t + 1]]
        rest = tables[t].rows - len(mine)
        size = tables[t].stored_row_bytes
        counts = _fill(-free, size, rest, _room(tables[t], rest, free))
        free -= counts * size
        maps[t] = RowMap.from_owners(
            listed_ids=ids[mine], listed_owners=owners[mine], unlisted_counts=counts
        )
    return [maps[t] for t in range(len(tables))]


def _deal_looked_up(
    tables: Sequence[TableSpec], accesses: Sequence[TableAccess], free: Ints, seed: int
) -> tuple[Ints, Ints, Ints]:
    """Table, id and owner of every row that was looked up, heaviest first; lowers ``free``."""
    table_of, ids, loads, sizes = _loads(tables, accesses, seed)
    owners = np.empty(len(ids), dtype=np.int64)
    rank_loads = np.zeros(len(free), dtype=np.int64)
    for begin, end in _runs(loads, sizes):
        load, size, table = int(loads[begin]), int(sizes[begin]), tables[table_of[begin]]
        counts = _fill(rank_loads, load, end - begin, _room(table, end - begin, free))
        owners[begin:end] = np.repeat(np.arange(len(free)), counts)
        rank_loads += counts * load
        free -= counts * size
    return table_of, ids, owners


def _loads(
    tables: Sequence[TableSpec], accesses: Sequence[TableAccess], seed: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Table, id, load and stored bytes of every row that was looked up, heaviest first."""
    none = np.empty(0, dtype=np.int64)
    table_of = np.concatenate([none, *(np.full(len(a.ids), t) for t, a in enumerate(accesses))])
    ids = np.concatenate([none, *(access.ids for access in accesses)])
    loads = np.concatenate(
        [none, *(a.counts * table.row_bytes for table, a in zip(tables, accesses, strict=True))]
    )
    sizes = np.array([table.stored_row_bytes for table in tables], dtype=np.int64)[table_of]
    shuffled = np.random.default_rng(seed).permutation(len(ids))
    order = shuffled[np.lexsort((-sizes[shuffled], -loads[shuffled]))]
    return table_of[order], ids[order], loads[order], sizes[order]


def _runs(loads: Ints, sizes: Ints) -> Iterator[tuple[int, int]]:
    """The spans of rows of one load and one size."""
    if not len(loads):
        return
    changes = np.flatnonzero((np.diff(loads) != 0) | (np.diff(sizes) != 0)) + 1
    edges = [0, *changes.tolist(), len(loads)]
    yield from itertools.pairwise(edges)


def _fill(levels: Ints, weight: int, count: int, room: Ints) -> Ints:
    """How many of ``count`` equal items each rank gets when the lowest goes first.

    The same as giving the items one by one to the rank of the lowest level that has
    room, the first such rank on a tie; each item raises its rank's level by ``weight``.
    """
    low, high = int(levels.min()) - 1, int(levels.max()) + weight * count
    while high - low > 1:
        middle = (low + high) // 2
        if _taken(levels, weight, room, middle).sum() >= count:
            high = middle
        else:
            low = middle
    # Items that start below `high` are all given; of those that start at it, the first.
    given = _taken(levels, weight, room, high - 1)
    at_level = np.flatnonzero(_taken(levels, weight, room, high) > given)
    given[at_level[: count - int(given.sum())]] += 1
    return given


def _taken(levels: Ints, weight: int, room: Ints, level: int) -> Ints:
    """How many items each rank takes while its level is at most ``level``."""
    return np.clip((level - levels) // weight + 1, 0, room)


def _room(table: TableSpec, rows: int, free: Ints) -> Ints:
    """[W] how many rows of ``table`` fit into each rank.

    Raises:
        PlanError: ``rows`` of them don't fit.
    """
    room: Ints = free // table.stored_row_bytes
    if sum(room.tolist()) < rows:
        raise PlanError(
            f"table {table.name}: {rows} rows of {table.stored_row_bytes} bytes need"
            f" {rows * table.stored_row_bytes} bytes, but the ranks have {sum(free.tolist())} bytes"
            f" left, room for {sum(room.tolist())} of them; give the ranks more memory, use more"
            " ranks, or shrink the table"
        )
    return room


def _usable(tables: Sequence[TableSpec], caps: Sequence[int]) -> Ints:
    """[W] bytes of each rank that the tables could use at most.

    Raises:
        PlanError: the tables need more than all ranks have.
    """
    need = sum(table.rows * table.stored_row_bytes for table in tables)
    largest = max(tables, key=lambda table: table.rows * table.stored_row_bytes)
    if need > min(sum(caps), MOST_BYTES):
        raise PlanError(
            f"the tables need {need} bytes with optimizer state, but the {len(caps)} ranks' caps"
            f" add up to {sum(caps)} bytes; the largest, table {largest.name}, needs"
            f" {largest.rows * largest.stored_row_bytes} bytes; give the ranks more memory, use"
            " more ranks, or shrink the table"
        )
    # A cap above the need means no cap, and sums of such caps would overflow.
    return np.array([min(cap, need) for cap in caps], dtype=np.int64)
