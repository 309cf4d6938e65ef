"""What decisions cost on average, straight from the definition of the cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Objective, TableDemand
from torchrec_oper.planner.judge.loads import RankLoads, Traffic
from torchrec_oper.planner.judge.pieces import piece_loads, pooling_s
from torchrec_oper.planner.judge.rows import RowSets, split_rows
from torchrec_oper.planner.judge.seconds import Verdict, verdict
from torchrec_oper.planner.judge.work import TableWork

Floats = npt.NDArray[np.float64]


def expected_cost(
    decisions: Sequence[Decision],
    demands: Sequence[TableDemand],
    cluster: Cluster,
    objective: Objective,
) -> Verdict:
    """What a step costs where each table is placed by its decision.

    Args:
        decisions: one for each table.
        demands: how each table is looked up, in the same order.
        cluster: the ranks.
        objective: ``train`` counts gradients, updates and optimizer state, ``infer`` not.

    Raises:
        PlanError: a decision doesn't fit its table or the cluster, or their numbers differ.
    """
    return verdict(expected_loads(decisions, demands, cluster, objective), cluster)


def expected_loads(
    decisions: Sequence[Decision],
    demands: Sequence[TableDemand],
    cluster: Cluster,
    objective: Objective,
) -> RankLoads:
    """What a step brings to every rank; arguments and errors of ``expected_cost``."""
    if len(decisions) != len(demands):
        raise PlanError(
            f"found {len(decisions)} decisions for {len(demands)} tables, wanted one each"
        )
    tables = zip(decisions, demands, strict=True)
    loads = (decision_loads(made, demand, cluster, objective) for made, demand in tables)
    return RankLoads.total(loads, cluster.world_size)


def decision_loads(
    decision: Decision, demand: TableDemand, cluster: Cluster, objective: Objective
) -> RankLoads:
    """What one table brings to every rank in a step; errors of ``expected_cost``."""
    check_decision(decision, demand, cluster)
    work = TableWork(demand.table, cluster, objective)
    hot, parts = split_rows(demand, decision, cluster.world_size)
    loads = RankLoads.none(cluster.world_size)
    if decision.parts:
        loads += _cold_loads(work, demand, decision, parts)
    if decision.hot_rows:
        loads += _hot_loads(work, demand, hot)
    return loads


def check_decision(decision: Decision, demand: TableDemand, cluster: Cluster) -> None:
    """Raise ``PlanError`` unless the table can be placed so on the cluster."""
    table, exchange = demand.table, decision.exchange
    hot, columns, owners = decision.hot_rows, decision.columns, decision.owners
    one_id_bags = bool((demand.bag_lengths[demand.bag_shares > 0] == 1).all())
    uneven = decision.weights is not None
    refused = {
        f"hot_rows must be 0 to its {table.rows} rows, found {hot}": not 0 <= hot <= table.rows,
        f"replicated means all {table.rows} rows are hot, found {exchange} with {hot}": (
            (hot == table.rows) != (exchange == "replicated")
        ),
        f"owners must be ranks below {cluster.world_size}, found {owners.max(initial=0)}": (
            owners.max(initial=0) >= cluster.world_size
        ),
        f"{table.dim} elements can't be cut into {columns} slices of equal width": (
            columns < 1 or table.dim % columns != 0
        ),
        f"direct doesn't cut columns, found {columns} slices": (
            exchange == "direct" and columns > 1
        ),
        "direct needs ranks that share memory (Rates.shares_memory)": (
            exchange == "direct" and not cluster.rates.shares_memory
        ),
        f"{exchange} sums the rows of a bag, but its pooling is 'none'": (
            exchange in ("partial", "whole") and table.pooling == "none"
        ),
        f"{exchange} can't have weights where bags have several ids; leave them out": (
            uneven and exchange == "partial" and not one_id_bags
        ),
    }
    for what, wrong in refused.items():
        if wrong:
            raise PlanError(f"decision for table {table.name}: {what}")


def _cold_loads(
    work: TableWork, demand: TableDemand, decision: Decision, parts: RowSets
) -> RankLoads:
    """The loads of pieces: the cold rows of every part and column slice."""
    slice_bytes = work.table.row_bytes / decision.columns
    pieces = piece_loads(work, demand, decision.exchange, parts, slice_bytes)
    every_rank_s = pooling_s(work, demand, decision.exchange, float(parts.chance.sum()))
    held_bytes = work.stored_bytes(parts.rows, slice_bytes)

    def of_owners(values: Floats) -> Floats:
        """[W] each owner gets its part's value: no rank owns two pieces."""
        ranks = np.zeros(work.cluster.world_size)
        ranks[decision.owners] = values
        return ranks

    # A requester keeps what it gets of every piece until the batch is done.
    receive_buffer_bytes = pieces.forward.sum() * decision.columns
    return RankLoads(
        memory_s=of_owners(pieces.memory_s) + every_rank_s,
        shard_s=of_owners(np.full(decision.parts, work.shard_s)),
        allreduce_s=np.zeros(work.cluster.world_size),
        memory_bytes=of_owners(held_bytes) + receive_buffer_bytes,
        ids=Traffic.from_owners(of_owners(pieces.ids), work.cluster).reversed(),
        forward=Traffic.from_owners(of_owners(pieces.forward), work.cluster),
        backward=Traffic.from_owners(of_owners(pieces.backward), work.cluster).reversed(),
        phases=work.phases,
        allreduce_phases=0,
    )


def _hot_loads(work: TableWork, demand: TableDemand, hot: RowSets) -> RankLoads:
    """The loads of replicas: every rank reads its own, and updates what any rank read."""
    world_size, row_bytes = work.cluster.world_size, work.table.row_bytes
    memory_s = work.read_s(demand.lookups * hot.chance, row_bytes)
    memory_s = memory_s + work.update_s(hot.distinct_of_all, row_bytes)
    hot_rows, distinct = float(hot.rows[0]), float(hot.distinct[0])
    allreduce_s = work.allreduce_s(hot_rows, distinct, float(hot.distinct_of_all[0]))
    none = Traffic.none(world_size)
    return RankLoads(
        memory_s=np.full(world_size, memory_s[0]),
        shard_s=np.full(world_size, work.shard_s),
        allreduce_s=np.full(world_size, allreduce_s),
        memory_bytes=np.full(world_size, work.stored_bytes(hot.rows, row_bytes)[0]),
        ids=none,
        forward=none,
        backward=none,
        phases=0,
        allreduce_phases=2 if work.train else 0,
    )
