"""Small clusters and tables whose costs can be worked out on paper."""

from __future__ import annotations

import numpy as np

from torchrec_oper.planner.cluster import Cluster, Link, RankSpec, Rate, Rates
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.table import TableSpec

# A row of 16 bytes is read in 0.16 s and updated in 0.32 s; 10 bytes travel in a second
# within a host and 2 between hosts; phases start in 1 s and 2 s; a piece costs 0.5 s.
PAPER = Rates(
    read=Rate(((1, 100.0),)),
    update=Rate(((1, 50.0),)),
    intra_host=Link(1.0, 10.0),
    inter_host=Link(2.0, 2.0),
    shard_overhead_s=0.5,
    shares_memory=True,
)


def cluster(*hosts: int, speeds: tuple[float, ...] = (), memory_bytes: int = 1000) -> Cluster:
    """A rank on each of ``hosts``, with the rates above."""
    ranks = zip(hosts, speeds or (1.0,) * len(hosts), strict=True)
    return Cluster(tuple(RankSpec(memory_bytes, host, speed) for host, speed in ranks), PAPER)


def demand(
    blocks: dict[float, int],
    *,
    lookups: float = 2,
    bags: float = 2,
    lengths: dict[float, float] | None = None,
    pooling: str = "sum",
    name: str = "t",
    dim: int = 4,
) -> TableDemand:
    """A table of rows of 16 bytes and 4 of optimizer state; chance of a row: rows."""
    lengths = lengths or {1: 1}
    rows = sum(blocks.values())
    return TableDemand(
        table=TableSpec(name, rows, dim, ("f",), pooling=pooling, optimizer_bytes_per_row=4),
        lookups=lookups,
        bags=bags,
        bag_lengths=np.array(list(lengths), dtype=float),
        bag_shares=np.array(list(lengths.values()), dtype=float),
        block_rows=np.array(list(blocks.values()), dtype=float),
        block_chances=np.array(list(blocks), dtype=float),
        listed_rows=rows,
    )


def decision(exchange, owners, *, hot_rows=0, weights=None) -> Decision:
    """A decision; ``owners``: a list of lists."""
    array = np.array(owners, dtype=np.int64).reshape(len(owners), -1)
    return Decision(exchange, hot_rows, array, weights)
