"""What a piece of a table brings to the rank that owns it, by the way its values travel.

Symbols of the comments: W ranks; a rank's step has n lookups in NB bags that aren't
empty; P is the chance that a lookup is of a part; hit(P) that a bag has one of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.decision import Exchange
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.judge.rows import RowSets, bag_hits
from torchrec_oper.planner.judge.work import ID_BYTES, TableWork

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PieceLoads:
    """[parts] float64 each: what a piece of each part brings to the rank that owns it.

    ``ids``, ``forward`` and ``backward`` are bytes between the owner and one rank.
    """

    memory_s: Floats
    ids: Floats
    forward: Floats
    backward: Floats


def piece_loads(
    work: TableWork, demand: TableDemand, exchange: Exchange, parts: RowSets, row_bytes: float
) -> PieceLoads:
    """What a piece of each part brings.

    Args:
        work: the table on the cluster.
        demand: how it is looked up.
        exchange: how values travel; not ``replicated``, which has no pieces.
        parts: the parts that the rows are dealt to, or one part of each kind.
        row_bytes: of a row of one column slice.
    """
    of_exchange = {"direct": _direct, "rows": _by_row}.get(exchange, _by_bag)
    return of_exchange(work, demand, parts, row_bytes)


def pooling_s(
    work: TableWork, demand: TableDemand, exchange: Exchange, cold_chance: float
) -> float:
    """Memory seconds of every rank, owner or not: with ``rows`` it sums the rows it gets.

    Args:
        work: the table on the cluster.
        demand: how it is looked up.
        exchange: how values travel.
        cold_chance: the chance that a lookup is of any part.
    """
    if exchange != "rows":
        return 0.0
    return float(work.read_s(demand.lookups * cold_chance, work.table.row_bytes))


def _by_bag(work: TableWork, demand: TableDemand, parts: RowSets, row_bytes: float) -> PieceLoads:
    """``partial`` and ``whole``: ids go to the owners, one sum for each bag comes back."""
    ranks = work.cluster.world_size
    lookups = demand.lookups * parts.chance  # n P, of one rank
    sums = demand.bags * bag_hits(demand, parts.chance)  # NB hit(P), of one rank
    gradients = sums * work.train
    return PieceLoads(
        memory_s=work.read_s(ranks * lookups, row_bytes)
        + work.read_s(ranks * gradients, row_bytes)
        + work.update_s(parts.distinct_of_all, row_bytes),
        ids=ID_BYTES * lookups,
        forward=sums * row_bytes,
        backward=gradients * row_bytes,
    )


def _by_row(work: TableWork, demand: TableDemand, parts: RowSets, row_bytes: float) -> PieceLoads:
    """``rows``: each distinct row travels once; whoever asked makes the sums."""
    ranks = work.cluster.world_size
    gradients = parts.distinct * work.train
    return PieceLoads(
        memory_s=work.read_s(ranks * parts.distinct, row_bytes)
        + work.read_s(ranks * gradients, row_bytes)
        + work.update_s(parts.distinct_of_all, row_bytes),
        ids=ID_BYTES * parts.distinct,
        forward=parts.distinct * row_bytes,
        backward=gradients * row_bytes,
    )


def _direct(work: TableWork, demand: TableDemand, parts: RowSets, row_bytes: float) -> PieceLoads:
    """``direct``: whoever asks reads the row where it lies, as often as it is looked up."""
    ranks = work.cluster.world_size
    lookups = demand.lookups * parts.chance
    pooled = work.table.pooling != "none"
    answers = demand.bags * bag_hits(demand, parts.chance) if pooled else lookups
    gradients = answers * work.train
    return PieceLoads(
        memory_s=work.read_s(ranks * lookups, row_bytes)
        + work.read_s(ranks * gradients, row_bytes)
        + work.update_s(parts.distinct_of_all, row_bytes),
        ids=ID_BYTES * lookups * work.train,  # the owner of a row learns only who updates it
        forward=lookups * row_bytes,
        backward=gradients * row_bytes,
    )
