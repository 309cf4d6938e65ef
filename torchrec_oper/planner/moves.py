"""Which rows move between ranks where one plan takes another's place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.row_map import Ints, RowMap


@dataclass(frozen=True, eq=False)
class TableMoves:
    """What ranks have to send each other of one table; entries of M pairs of ranks.

    Args:
        key: the table's path in the model.
        from_ranks: [M] int64, who has rows.
        to_ranks: [M] int64, who needs them, and hasn't got them.
        rows: [M] int64, how many; a row of which only some columns move counts as one.
        bytes: [M] int64, of these columns, and of the optimizer state where that is kept.
    """

    key: str
    from_ranks: Ints
    to_ranks: Ints
    rows: Ints
    bytes: Ints

    @cached_property
    def total_rows(self) -> int:
        """Rows that move, counted for each rank that needs them."""
        return sum(self.rows.tolist())

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that move."""
        return sum(self.bytes.tolist())


def moves(before: Plan, after: Plan) -> tuple[TableMoves, ...]:
    """What moves where ``after`` takes the place of ``before``, for each table of both.

    A rank that has a replica has the row. A row that every rank is to have comes from its
    owner; a new rank gets what all ranks have from rank ``its number modulo the old ranks``.
    Optimizer state moves if both plans are for training: each column slice keeps its own,
    which comes with the slice's first column.

    Raises:
        PlanError: a table has another shape in the other plan.
    """
    old = {placement.key: placement for placement in before.placements}
    pairs = [(old[new.key], new) for new in after.placements if new.key in old]
    state = before.workload.objective == after.workload.objective == "train"
    return tuple(table_moves(a, b, optimizer=state) for a, b in pairs)


def table_moves(before: TablePlacement, after: TablePlacement, *, optimizer: bool) -> TableMoves:
    """What moves of one table; see ``moves``.

    Args:
        before, after: its placements.
        optimizer: whether optimizer state moves too.
    """
    a, b = before.table, after.table
    if (a.rows, a.dim, a.dtype) != (b.rows, b.dim, b.dtype):
        raise PlanError(
            f"table {before.key} has {a.rows} rows of {a.dim} {a.dtype} in one plan and {b.rows}"
            f" of {b.dim} {b.dtype} in the other: its rows can't be moved"
        )
    shared = shared_rows(before.row_map, after.row_map)
    columns = math.lcm(before.decision.columns, after.decision.columns)
    state_bytes = min(a.optimizer_bytes_per_row, b.optimizer_bytes_per_row) if optimizer else 0
    pairs, rows, sizes = [], [], []
    world = max(before.world_size, after.world_size)
    for column in range(columns):
        from_ranks, to_ranks, count = _ways(before, after, shared, column / columns)
        begins = column % (columns // after.decision.columns) == 0
        ways, way_of = np.unique(from_ranks * world + to_ranks, return_inverse=True)
        row_count = np.zeros(len(ways), dtype=np.int64)
        np.add.at(row_count, way_of, count)
        pairs.append(ways)
        rows.append(row_count)
        sizes.append(row_count * (a.row_bytes // columns + state_bytes * begins))
    all_ways, way_of = np.unique(np.concatenate(pairs), return_inverse=True)
    most, size = np.zeros((2, len(all_ways)), dtype=np.int64)
    # No rank owns two pieces, so what goes one way is a stretch of columns, and the one
    # where most rows go has them all.
    np.maximum.at(most, way_of, np.concatenate(rows))
    np.add.at(size, way_of, np.concatenate(sizes))
    return TableMoves(after.key, all_ways // world, all_ways % world, most, size)


def _ways(
    before: TablePlacement, after: TablePlacement, shared: Ints, at: float
) -> tuple[Ints, Ints, Ints]:
    """For one column, ``at`` of the row's width: from which rank, to which, how many rows."""
    source: Ints = before.owners[int(at * before.decision.columns)]
    target: Ints = after.owners[int(at * after.decision.columns)]
    hot_before, hot_after = len(source), len(target)
    part, to_part = np.nonzero(shared[:, :hot_after])
    to_ranks, count = target[to_part], shared[part, to_part]
    if shared.shape[1] > hot_after:
        given = np.flatnonzero(shared[:, hot_after])
        part = np.concatenate([part, np.repeat(given, after.world_size)])
        to_ranks = np.concatenate([to_ranks, np.tile(np.arange(after.world_size), len(given))])
        count = np.concatenate([count, np.repeat(shared[given, hot_after], after.world_size)])
    # Old ranks have what is hot; a new one asks one of them.
    from_ranks = to_ranks % before.world_size
    cold = part < hot_before
    from_ranks[cold] = source[part[cold]]
    moved = from_ranks != to_ranks
    return from_ranks[moved], to_ranks[moved], count[moved]


def shared_rows(a: RowMap, b: RowMap) -> Ints:
    """[parts of a, parts of b] int64, rows that both maps have in these parts.

    Exact, in time that grows with the listed ids and parts only: between the first ids of
    parts, rows that neither map lists are in one part of each.

    Raises:
        PlanError: the maps are of different numbers of rows.
    """
    if a.rows != b.rows:
        raise PlanError(f"row maps of {a.rows} and {b.rows} rows have none to compare")
    listed = np.union1d(a.listed_ids, b.listed_ids)
    starts = _first_ids(a), _first_ids(b)
    edges = np.unique(np.concatenate([[0, a.rows], *starts]))
    inside = np.diff(np.searchsorted(listed, edges))
    unlisted = np.diff(edges) - inside
    shared = np.zeros((a.world_size, b.world_size), dtype=np.int64)
    parts = [np.searchsorted(ids, edges[:-1], side="right") - 1 for ids in starts]
    np.add.at(shared, (parts[0], parts[1]), unlisted)
    np.add.at(shared, (a.place(listed)[0], b.place(listed)[0]), 1)
    return shared


def _first_ids(row_map: RowMap) -> Ints:
    """[parts] the first id that isn't listed of each part, or where it would be."""
    # The n-th unlisted id is n plus the listed ids that come before it.
    gaps = row_map.listed_ids - np.arange(len(row_map.listed_ids))
    starts = row_map.range_starts
    ids: Ints = starts + np.searchsorted(gaps, starts, side="right")
    return np.where(starts == 0, 0, ids)
