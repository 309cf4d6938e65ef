"""All ways to place one table that a search space has, and what each would cost alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.decision import Exchange
from torchrec_oper.planner.demand import Objective, TableDemand
from torchrec_oper.planner.judge.pieces import piece_loads, pooling_s
from torchrec_oper.planner.judge.rows import RowSplit, table_rows
from torchrec_oper.planner.judge.work import TableWork
from torchrec_oper.planner.space import SearchSpace

Floats = npt.NDArray[np.float64]

LEAST_ROWS = 8  # of a part, on average, where there are several


@dataclass(frozen=True, order=True)
class Choice:
    """A way to place a table, but for who owns which piece."""

    hot_rows: int
    exchange: Exchange
    columns: int
    parts: int

    @property
    def owners(self) -> int:
        """How many ranks own a piece."""
        return self.columns * self.parts


@dataclass(frozen=True, eq=False)
class ChoiceLoads:
    """What one choice brings to ranks, wherever its pieces lie. K kinds of pieces.

    Args:
        choice: the choice.
        common: [3] memory seconds at speed 1, other seconds (the all-reduce, overhead of
            hot rows), and bytes held, of every rank.
        times: [K] how many pieces of each kind there are.
        memory_s: [K] memory seconds at speed 1 of the owner of a piece.
        volumes: [3, K] bytes between that owner and each rank: ids, forward, backward.
        held_bytes: [K] bytes that the owner holds.
        shard_s: other seconds of each owner.
        uneven: whether the pieces may have any shares of all but ``shard_s``.
    """

    choice: Choice
    common: Floats
    times: Floats
    memory_s: Floats
    volumes: Floats
    held_bytes: Floats
    shard_s: float
    uneven: bool


def choices_of(demand: TableDemand, space: SearchSpace, cluster: Cluster) -> list[Choice]:
    """Every choice of the space for one table, each once."""
    rows, ranks = demand.table.rows, cluster.world_size
    found = set()
    if "replicated" in space.exchanges:
        found.add(Choice(rows, "replicated", 1, 0))
    for hot_rows in _hot_cuts(demand, space):
        grids = set(_grids(demand, space, ranks, hot_rows))
        for exchange in _cold_exchanges(demand, space, cluster):
            choices = (Choice(hot_rows, exchange, *grid) for grid in grids)
            found.update(choice for choice in choices if _allowed(choice, ranks))
    return sorted(found)


def _hot_cuts(demand: TableDemand, space: SearchSpace) -> set[int]:
    """No row, and for each step the first end of a block at or above it.

    Steps are the powers of ``hot_step``, and above 2**20 those of its fourth root.
    """
    if not space.hot_rows:
        return {0}
    ends = np.cumsum(demand.block_rows)
    steps = itertools.takewhile(
        lambda step: step <= demand.table.rows,
        (space.hot_step ** (quarter / 4) for quarter in itertools.count()),
    )
    wanted = [step for at, step in enumerate(steps) if at % 4 == 0 or step > 2**20]
    cuts = {int(ends[np.searchsorted(ends, step)]) for step in wanted}
    return {0} | {cut for cut in cuts if cut < demand.table.rows and cut <= demand.listed_rows}


def _cold_exchanges(demand: TableDemand, space: SearchSpace, cluster: Cluster) -> list[Exchange]:
    summed: tuple[Exchange, ...] = ("partial", "whole")
    refused = set(summed) if demand.table.pooling == "none" else set()
    if not cluster.rates.shares_memory:
        refused.add("direct")
    return [name for name in space.exchanges if name not in refused and name != "replicated"]


def _grids(
    demand: TableDemand, space: SearchSpace, ranks: int, hot_rows: int
) -> Iterator[tuple[int, int]]:
    """The columns and parts that any exchange may take behind a hot cut."""
    dim, cold_rows = demand.table.dim, demand.table.rows - hot_rows
    for columns in _powers_of_2(ranks):
        if columns > 1 and (dim % columns or dim // columns < space.min_slice_width):
            continue
        most = ranks // columns
        few = {1, most} if hot_rows else {1, most, *_powers_of_2(most)}
        if space.fine_parts and not hot_rows:
            few |= {3 * power for power in _powers_of_2(most // 3)}
        yield from (
            (columns, parts) for parts in few if parts == 1 or cold_rows >= LEAST_ROWS * parts
        )


def _allowed(choice: Choice, ranks: int) -> bool:
    """Whether the exchange takes its grid."""
    columns, parts = choice.columns, choice.parts
    if choice.exchange == "whole":
        return parts == 1
    if choice.exchange == "partial":
        return parts > 1
    if choice.hot_rows:  # rows and direct, behind a hot cut
        return columns == 1 and parts == ranks
    return columns == 1 or (choice.exchange == "rows" and parts == 1)


def _powers_of_2(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def choice_loads(
    demand: TableDemand, choices: list[Choice], cluster: Cluster, objective: Objective
) -> list[ChoiceLoads]:
    """The loads of each choice for one table, in the same order."""
    work = TableWork(demand.table, cluster, objective)
    rows = table_rows(demand, cluster.world_size)
    splits = {cut: rows.split_at(cut) for cut in {choice.hot_rows for choice in choices}}
    return [_loads(work, demand, choice, splits[choice.hot_rows]) for choice in choices]


def _loads(work: TableWork, demand: TableDemand, choice: Choice, split: RowSplit) -> ChoiceLoads:
    common = _hot(work, demand, split) if choice.hot_rows else np.zeros(3)
    if not choice.parts:
        return ChoiceLoads(
            choice, common, np.zeros(0), np.zeros(0), np.zeros((3, 0)), np.zeros(0), 0.0, False
        )
    slice_bytes = work.table.row_bytes / choice.columns
    sets, alike = split.parts(choice.exchange, choice.parts)
    pieces = piece_loads(work, demand, choice.exchange, sets, slice_bytes)
    times = (alike * choice.columns).astype(np.float64)
    every_rank_s = pooling_s(work, demand, choice.exchange, float(split.cold[1]))
    return ChoiceLoads(
        choice=choice,
        common=common + np.array([every_rank_s, 0.0, times @ pieces.forward]),
        times=times,
        memory_s=pieces.memory_s,
        volumes=np.stack([pieces.ids, pieces.forward, pieces.backward]),
        held_bytes=work.stored_bytes(sets.rows, slice_bytes),
        shard_s=work.shard_s,
        uneven=_may_be_uneven(work, demand, choice, has_heavy=len(times) > 1),
    )


def _hot(work: TableWork, demand: TableDemand, split: RowSplit) -> Floats:
    """[3] what replicas bring to every rank, as in ``ChoiceLoads.common``."""
    hot, row_bytes = split.hot, work.table.row_bytes
    memory_s = work.read_s(demand.lookups * hot.chance, row_bytes)
    memory_s = memory_s + work.update_s(hot.distinct_of_all, row_bytes)
    allreduce_s = work.allreduce_s(
        float(hot.rows[0]), float(hot.distinct[0]), float(hot.distinct_of_all[0])
    )
    held_bytes = work.stored_bytes(hot.rows, row_bytes)
    return np.array([memory_s[0], allreduce_s + work.shard_s, held_bytes[0]])


def _may_be_uneven(
    work: TableWork, demand: TableDemand, choice: Choice, *, has_heavy: bool
) -> bool:
    """Whether parts may have any share of the rows: where what they ask is in proportion."""
    if choice.columns > 1 or choice.parts == 1 or has_heavy:
        return False
    one_id_bags = bool((demand.bag_lengths[demand.bag_shares > 0] == 1).all())
    # A bag's gradient goes once to each owner that it hits, so bags of several ids don't scale.
    by_lookup = demand.table.pooling == "none" or not work.train
    return choice.exchange == "rows" or one_id_bags or (choice.exchange == "direct" and by_lookup)
