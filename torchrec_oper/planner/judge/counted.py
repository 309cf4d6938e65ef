"""The loads of one table in one step whose lookups were counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.judge.counts import StepCounts
from torchrec_oper.planner.judge.loads import RankLoads, Traffic
from torchrec_oper.planner.judge.placed import PlacedTable
from torchrec_oper.planner.judge.work import ID_BYTES, TableWork

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def counted_loads(placed: PlacedTable, counts: StepCounts, work: TableWork) -> RankLoads:
    """What one step brings to every rank; bytes of ids and rows are exact.

    Args:
        placed: the table's placement.
        counts: what the step's batches ask of it.
        work: the table on the cluster that the batches ran on.
    """
    loads = RankLoads.none(work.cluster.world_size)
    if placed.part_rows.any():
        loads += _cold_loads(placed, counts, work)
    if placed.hot_rows:
        loads += _hot_loads(placed, counts, work)
    return loads


def served(placed: PlacedTable, of_parts: Ints, of_ranks: Ints) -> Ints:
    """[W] what the owners of parts, and ranks with their replicas, do in numbers.

    Args:
        placed: the table's placement.
        of_parts: [parts] what is asked of each part.
        of_ranks: [W] what each rank asks of its own replicas.
    """
    return np.asarray(_to_owners(placed, of_parts, len(of_ranks)) + of_ranks)


def _to_owners(placed: PlacedTable, of_parts: npt.NDArray[Any], ranks: int) -> npt.NDArray[Any]:
    """[W] each owner gets its part's value, in every column slice."""
    values = np.zeros(ranks, dtype=of_parts.dtype)
    values[placed.owners] = of_parts
    return values


def _cold_loads(placed: PlacedTable, counts: StepCounts, work: TableWork) -> RankLoads:
    cluster, row_bytes = work.cluster, placed.slice_bytes
    by_row, pooled = placed.exchange == "rows", placed.table.pooling != "none"
    # What is read at the owners, what travels to who asked, what comes back as gradients.
    reads = counts.rows if by_row else counts.lookups
    answers = {"rows": counts.rows, "direct": counts.lookups}.get(placed.exchange, counts.bags)
    gradients = counts.rows if by_row else counts.bags if pooled else counts.lookups
    gradients = gradients * work.train
    asks = reads * (work.train or placed.exchange != "direct")
    memory_s = work.read_s((reads + gradients).sum(axis=0), row_bytes)
    memory_s = memory_s + work.update_s(counts.updated_rows, row_bytes)

    def to_owners(of_parts: npt.NDArray[Any]) -> Floats:
        return np.asarray(_to_owners(placed, of_parts, cluster.world_size), dtype=np.float64)

    def pairs(amounts: Ints, unit_bytes: float) -> Traffic:
        """From ranks to the owners of parts; amounts: [W, parts]."""
        sent = np.zeros((cluster.world_size, cluster.world_size))
        for owners in placed.owners:
            sent[:, owners] = amounts * unit_bytes
        return Traffic.from_pairs(sent, cluster)

    own_work_s = work.read_s(counts.lookups.sum(axis=1) * by_row, placed.table.row_bytes)
    received_bytes = answers.sum(axis=1) * row_bytes * len(placed.owners)
    return RankLoads(
        memory_s=to_owners(memory_s) + own_work_s,
        shard_s=to_owners(work.shard_s * (placed.part_rows > 0)),
        allreduce_s=np.zeros(cluster.world_size),
        memory_bytes=to_owners(work.stored_bytes(placed.part_rows, row_bytes)) + received_bytes,
        ids=pairs(asks, ID_BYTES),
        forward=pairs(answers, row_bytes).reversed(),
        backward=pairs(gradients, row_bytes),
        phases=work.phases,
        allreduce_phases=0,
    )


def _hot_loads(placed: PlacedTable, counts: StepCounts, work: TableWork) -> RankLoads:
    """Replicas; the all-reduce waits for the rank that read the most distinct rows."""
    ranks, row_bytes = work.cluster.world_size, placed.table.row_bytes
    updated = counts.hot_updated_rows
    allreduce_s = work.allreduce_s(placed.hot_rows, float(counts.hot_rows.max()), updated)
    none = Traffic.none(ranks)
    return RankLoads(
        memory_s=work.read_s(counts.hot_lookups, row_bytes) + work.update_s(updated, row_bytes),
        shard_s=np.full(ranks, work.shard_s),
        allreduce_s=np.full(ranks, allreduce_s),
        memory_bytes=np.full(ranks, float(work.stored_bytes(placed.hot_rows, row_bytes))),
        ids=none,
        forward=none,
        backward=none,
        phases=0,
        allreduce_phases=2 if work.train else 0,
    )
