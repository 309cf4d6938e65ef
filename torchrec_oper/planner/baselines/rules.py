"""Rules of thumb: whole tables to the least loaded rank, or every table cut by rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.baselines.stock_placement import StockPlacement, Task
from torchrec_oper.planner.demand import TableDemand

GREEDY_SIZES: dict[str, Callable[[TableDemand], float]] = {
    "rows": lambda demand: float(demand.table.rows * demand.table.row_bytes),
    "dim": lambda demand: float(demand.table.dim),
    "lookups": lambda demand: demand.lookups * demand.table.row_bytes,
}
"""What a table counts for: the bytes of its rows, its dim, the bytes that are looked up.

DreamShard (Zha et al., NeurIPS 2022) compares with greedy placement by these three."""


class OverMemoryError(PlanError):
    """A rule can't place the tables within the ranks' memory."""


def greedy_table_wise(task: Task, by: str) -> list[StockPlacement]:
    """Whole tables, the largest first, each to the least loaded rank that has room for it.

    Args:
        task: the tables and ranks.
        by: what a table counts for, a key of ``GREEDY_SIZES``.

    Raises:
        OverMemoryError: no rank has room for a table; the message names the first such table.
    """
    size_of = GREEDY_SIZES[by]
    buffers = sum(
        bags * demand.table.row_bytes
        for bags, demand in zip(task.all_bags, task.demands, strict=True)
    )
    room = task.cluster.memory_bytes - buffers
    load = np.zeros(task.cluster.world_size)
    placed: dict[int, StockPlacement] = {}
    for number in sorted(range(len(task.demands)), key=lambda t: -size_of(task.demands[t])):
        demand = task.demands[number]
        need = demand.table.rows * task.stored_row_bytes(demand)
        fits = need <= room
        if not fits.any():
            raise OverMemoryError(
                f"no rank has room for table {demand.table.name}: it needs {need:.0f} bytes, and"
                f" the most that a rank has left beside its receive buffers is"
                f" {room.max():.0f} bytes"
            )
        rank = int(np.where(fits, load, np.inf).argmin())
        load[rank] += size_of(demand)
        room[rank] -= need
        placed[number] = StockPlacement.whole(demand, rank)
    return [placed[number] for number in range(len(task.demands))]


def row_wise(task: Task) -> list[StockPlacement]:
    """Every table cut by rows over all ranks."""
    everyone = np.arange(task.cluster.world_size)[None]
    return [StockPlacement("row_wise", everyone, (demand.table.dim,)) for demand in task.demands]
