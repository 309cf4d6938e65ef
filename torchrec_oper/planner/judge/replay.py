"""Replays batches through a finished plan and counts what every rank really does.

It reads the placement as the run-time does, row by row, and shares nothing with the
search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Objective
from torchrec_oper.planner.judge.counted import counted_loads, served
from torchrec_oper.planner.judge.counts import StepCounts, count_step
from torchrec_oper.planner.judge.loads import RankLoads
from torchrec_oper.planner.judge.placed import PlacedTable, placed_table
from torchrec_oper.planner.judge.seconds import Verdict, rank_seconds, ranks_over_memory, verdict
from torchrec_oper.planner.judge.work import TableWork
from torchrec_oper.planner.plan import Plan
from torchrec_oper.table import TableSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TableReplay:
    """What one table really brought to every rank, summed over all steps.

    Args:
        table: the table.
        lookups: [W] int64, lookups that each rank serves: of the pieces it owns, for all
            ranks and every repeat; of hot rows, its own.
        rows: [W] int64, the same without the repeats within one rank's batch.
        updated_rows: [W] int64, the same without the repeats within one step: the rows
            that a rank updates in training.
        loads: the sum over steps; bytes of ids, rows and gradients are exact.
    """

    table: TableSpec
    lookups: Ints
    rows: Ints
    updated_rows: Ints
    loads: RankLoads

    def __add__(self, other: TableReplay) -> TableReplay:
        return TableReplay(
            self.table,
            self.lookups + other.lookups,
            self.rows + other.rows,
            self.updated_rows + other.updated_rows,
            self.loads + other.loads,
        )


@dataclass(frozen=True, eq=False)
class Replay:
    """Batches that were run through a placement.

    Args:
        tables: what was counted for each table.
        step_seconds: [steps, W] float64, seconds of each rank in each step.
        mean: the verdict on the mean loads of a step, to compare with ``expected_cost``.
        peak_memory_bytes: [W] float64, the most that each rank held in any step.
        over_memory: the ranks that in some step held more than they have room for.
    """

    tables: tuple[TableReplay, ...]
    step_seconds: Floats
    mean: Verdict
    peak_memory_bytes: Floats
    over_memory: tuple[int, ...]

    @property
    def cost_s(self) -> float:
        """The replay's verdict: the mean over steps of the busiest rank's seconds.

        Every step waits for its busiest rank, so this is at least ``mean.cost_s``, the
        busiest rank's mean.
        """
        return float(self.step_seconds.max(axis=1).mean())


def replay_steps(
    tables: Sequence[PlacedTable],
    steps: Iterable[Sequence[Any]],
    cluster: Cluster,
    objective: Objective,
) -> Replay:
    """Run the batches of some steps through a placement, lookup by lookup.

    Args:
        tables: the placement; ``placed_table`` makes one from a plan's.
        steps: for each step the batches [W] of all ranks; each a mapping from a feature to
            its (ids [N], bag lengths [B]), or a KeyedJaggedTensor, or an object that
            carries one as ``sparse_features``.
        cluster: the ranks.
        objective: ``train`` counts gradients, updates and optimizer state, ``infer`` not.

    Raises:
        PlanError: there is no step, a step hasn't a batch for each rank, a batch can't be
            read, or a placement doesn't fit the cluster.
    """
    for placed in tables:
        _check_fits(placed, cluster)
    totals: list[TableReplay] | None = None
    seconds: list[Floats] = []
    peak: Floats = np.zeros(cluster.world_size)
    for number, batches in enumerate(steps):
        if len(batches) != cluster.world_size:
            raise PlanError(
                f"step {number} has {len(batches)} batches, wanted one for each of"
                f" {cluster.world_size} ranks"
            )
        found = [_table_step(placed, batches, cluster, objective) for placed in tables]
        loads = RankLoads.total((table.loads for table in found), cluster.world_size)
        seconds.append(rank_seconds(loads, cluster).total)
        peak = np.asarray(np.maximum(peak, loads.memory_bytes))
        totals = found if totals is None else [a + b for a, b in zip(totals, found, strict=True)]
    if totals is None:
        raise PlanError("a replay needs at least one step, found none")
    loads = RankLoads.total((table.loads for table in totals), cluster.world_size)
    return Replay(
        tables=tuple(totals),
        step_seconds=np.array(seconds),
        mean=verdict(loads.scaled(1 / len(seconds)), cluster),
        peak_memory_bytes=peak,
        over_memory=ranks_over_memory(peak, cluster),
    )


def _check_fits(placed: PlacedTable, cluster: Cluster) -> None:
    name, highest = placed.table.name, placed.owners.max(initial=0)
    if highest >= cluster.world_size:
        raise PlanError(
            f"table {name}: a piece is of rank {highest}, but the cluster's ranks end at"
            f" {cluster.world_size - 1}"
        )
    if placed.exchange == "direct" and not cluster.rates.shares_memory:
        raise PlanError(f"table {name}: direct needs ranks that share memory")


def _table_step(
    placed: PlacedTable, batches: Sequence[Any], cluster: Cluster, objective: Objective
) -> TableReplay:
    counts: StepCounts = count_step(placed, batches)
    updated_replicas = np.full(cluster.world_size, counts.hot_updated_rows)
    return TableReplay(
        table=placed.table,
        lookups=served(placed, counts.lookups.sum(axis=0), counts.hot_lookups),
        rows=served(placed, counts.rows.sum(axis=0), counts.hot_rows),
        updated_rows=served(placed, counts.updated_rows, updated_replicas),
        loads=counted_loads(placed, counts, TableWork(placed.table, cluster, objective)),
    )


def served_lookups(plan: Plan, batches: Iterable[Any]) -> Ints:
    """[tables, W] lookups that each rank serves as an owner, for each table of the plan.

    An owner of a column slice serves all lookups of its rows. Those of replicas aren't
    counted: the ranks that look rows up serve themselves.

    Args:
        plan: the plan; rows of the result follow ``plan.placements``.
        batches: batches of all ranks, in any order; see ``replay_steps``.

    Raises:
        PlanError: a batch lacks a feature of the plan's tables, or an id is outside
            its table.
    """
    tables = [placed_table(placement) for placement in plan.placements]
    found = np.zeros((len(tables), plan.world_size), dtype=np.int64)
    for batch in batches:
        for placed, row in zip(tables, found, strict=True):
            counts = count_step(placed, [batch])
            row[placed.owners] += counts.lookups[0]
    return found
