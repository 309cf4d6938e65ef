"""TorchRec's placement under our exchanges: what of the difference is the placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.baselines.stock_placement import StockPlacement, Task
from torchrec_oper.planner.decision import Decision, Exchange
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.judge import Verdict, decision_loads, expected_cost, rank_seconds
from torchrec_oper.table import TableSpec

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class OurExchanges:
    """A stock placement as decisions of ours.

    Args:
        demands: [P] the tables, or column slices of tables, one for each decision.
        decisions: [P] the same owners, with an exchange of ours.
        verdict: what that costs.
    """

    demands: tuple[TableDemand, ...]
    decisions: tuple[Decision, ...]
    verdict: Verdict


def with_our_exchanges(task: Task, placements: Sequence[StockPlacement]) -> OurExchanges:
    """The same owners, with the exchanges that cost least.

    Each table gets the exchange of least mean seconds over ranks among those that its
    owners allow. Giving as many tables as possible one exchange is tried too, and the
    cheapest of these is taken.

    A table whose slices ``Decision`` can't hold together (two of one rank, unequal widths,
    or rows that aren't pooled cut both ways) becomes a table for each slice. That costs the
    same: every slice has its own ids, rows and optimizer state in any case.

    Args:
        task: the tables and ranks.
        placements: one for each table.

    Raises:
        PlanError: a placement doesn't fit its table or the cluster.
    """
    demands: list[TableDemand] = []
    options: list[Mapping[Exchange, Decision]] = []
    for number, (demand, placement) in enumerate(zip(task.demands, placements, strict=True)):
        placement.check_fits(demand, task.cluster)
        for piece, owners in _pieces(demand, placement, number):
            demands.append(piece)
            options.append(_options(piece, owners, task))
    cheapest = [
        min(exchanges, key=lambda name: _mean_seconds(task, demand, exchanges[name]))
        for demand, exchanges in zip(demands, options, strict=True)
    ]
    best: OurExchanges | None = None
    for preferred in _preferences(options):
        decisions = tuple(
            exchanges[next((name for name in preferred if name in exchanges), least)]
            for exchanges, least in zip(options, cheapest, strict=True)
        )
        verdict = expected_cost(decisions, demands, task.cluster, task.objective)
        if best is None or verdict.cost_s < best.verdict.cost_s:
            best = OurExchanges(tuple(demands), decisions, verdict)
    assert best is not None
    return best


def _preferences(options: Sequence[Mapping[Exchange, Decision]]) -> list[tuple[Exchange, ...]]:
    """Exchanges to give every table that may have them; none: each its cheapest."""
    seen = {name for exchanges in options for name in exchanges}
    wanted: list[tuple[Exchange, ...]] = [("whole", "partial"), ("rows",), ("direct",)]
    return [(), *(names for names in wanted if seen & set(names))]


def _pieces(
    demand: TableDemand, placement: StockPlacement, number: int
) -> Iterator[tuple[TableDemand, Ints]]:
    """Tables or slices with the owners, [columns, parts], that a ``Decision`` can hold.

    Parts are listed hottest first in a decision, so the owners of each table begin at
    another rank: the stock placement spreads the hottest rows no worse.
    """
    owners = placement.owners
    if placement.sharding == "data_parallel":
        yield demand, owners
        return
    parts = min(owners.shape[1], demand.table.rows)
    owners = np.roll(owners[:, :parts], -number, axis=1)
    columns = len(owners)
    unequal = len(set(placement.widths)) > 1
    shared = len(np.unique(owners)) < owners.size
    crossed = demand.table.pooling == "none" and columns > 1 and parts > 1
    if not (unequal or shared or crossed):
        yield demand, owners
        return
    for column, (row, width) in enumerate(zip(owners, placement.widths, strict=True)):
        yield replace(demand, table=_slice(demand.table, column, width)), row[None]


def _slice(table: TableSpec, column: int, width: int) -> TableSpec:
    return replace(table, name=f"{table.name}.{column}", dim=width)


def _options(demand: TableDemand, owners: Ints, task: Task) -> dict[Exchange, Decision]:
    """The decisions that these owners allow, by exchange."""
    columns, parts = owners.shape
    if not parts:
        return {"replicated": Decision("replicated", demand.table.rows, owners)}
    names: list[Exchange] = []
    if demand.table.pooling != "none":
        names.append("whole" if parts == 1 else "partial")
    if columns == 1 or parts == 1:
        names.append("rows")
    if columns == 1 and task.cluster.rates.shares_memory:
        names.append("direct")
    return {name: Decision(name, 0, owners) for name in names}


def _mean_seconds(task: Task, demand: TableDemand, decision: Decision) -> float:
    loads = decision_loads(decision, demand, task.cluster, task.objective)
    return float(rank_seconds(loads, task.cluster).total.mean())
