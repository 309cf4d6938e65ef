"""Where TorchRec's sharding types put a table, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Objective, TableDemand

Sharding = Literal["table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel"]
"""How the values travel. TorchRec's ``table_column_wise`` is executed as ``column_wise``, and
its ``grid_shard`` as ``table_row_wise`` of each column slice."""


@dataclass(frozen=True, eq=False)
class Task:
    """What every baseline is given.

    Args:
        demands: the tables and how a rank's batch looks them up.
        cluster: the ranks.
        objective: what a step is: training or inference.
        batch_size: samples of a rank's batch.

    Raises:
        PlanError: there is no table, or a batch has more bags than samples allow.
    """

    demands: Sequence[TableDemand]
    cluster: Cluster
    objective: Objective
    batch_size: int

    def __post_init__(self) -> None:
        if not self.demands:
            raise PlanError("a task needs at least one table, found none")
        for demand, bags in zip(self.demands, self.all_bags, strict=True):
            if demand.bags > bags * (1 + 1e-9):
                raise PlanError(
                    f"demand of table {demand.table.name}: {demand.bags} bags aren't empty, but"
                    f" {self.batch_size} samples of {len(demand.table.features)} features have"
                    f" {bags:.0f}"
                )

    @property
    def training(self) -> bool:
        """Whether a step updates the tables."""
        return self.objective == "train"

    @property
    def all_bags(self) -> list[float]:
        """Bags of a rank in a step for each table, empty ones too."""
        return [float(self.batch_size * len(demand.table.features)) for demand in self.demands]

    def stored_row_bytes(self, demand: TableDemand, width: int | None = None) -> float:
        """Bytes that a row takes in memory, optimizer state only in training.

        Args:
            demand: the table.
            width: elements of a column slice; by default of the whole row.
        """
        table = demand.table
        state = table.optimizer_bytes_per_row if self.training else 0
        return table.row_bytes * (width or table.dim) / table.dim + state


@dataclass(frozen=True, eq=False)
class StockPlacement:
    """One table under one of TorchRec's sharding types.

    Args:
        sharding: the type.
        owners: [C, K] int64 the rank of each shard: the columns are cut into C slices, the
            rows of each into K ranges. A rank may own several slices. ``data_parallel``
            has K = 0.
        widths: [C] elements of a row of each slice.

    Raises:
        PlanError: for a value outside what is said above.
    """

    sharding: Sharding
    owners: npt.NDArray[np.int64]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        owners = np.array(self.owners, dtype=np.int64)
        if self.sharding not in get_args(Sharding):
            raise PlanError(f"sharding must be one of {get_args(Sharding)}, found {self.sharding}")
        if owners.ndim != 2 or (owners.size and owners.min() < 0):
            raise PlanError(f"owners must be ranks, [slices, ranges], found shape {owners.shape}")
        wanted = {
            "table_wise": (1, 1),
            "column_wise": (len(owners), 1),
            "row_wise": (1, max(owners.shape[1], 1)),
            "data_parallel": (1, 0),
        }.get(self.sharding, (len(owners), max(owners.shape[1], 1)))
        if owners.shape != wanted or len(self.widths) != len(owners):
            raise PlanError(
                f"{self.sharding} can't have owners of shape {owners.shape} with"
                f" {len(self.widths)} widths"
            )
        owners.flags.writeable = False
        object.__setattr__(self, "owners", owners)

    @classmethod
    def whole(cls, demand: TableDemand, rank: int) -> StockPlacement:
        """The whole table on one rank."""
        return cls("table_wise", np.array([[rank]]), (demand.table.dim,))

    def check_fits(self, demand: TableDemand, cluster: Cluster) -> None:
        """Raise ``PlanError`` unless TorchRec could place the table so on the cluster."""
        name, ranks = demand.table.name, cluster.world_size
        if sum(self.widths) != demand.table.dim:
            raise PlanError(
                f"table {name}: the slices have {sum(self.widths)} elements, the table"
                f" {demand.table.dim}"
            )
        if self.owners.size and self.owners.max() >= ranks:
            raise PlanError(
                f"table {name}: placed on rank {self.owners.max()}, but there are {ranks} ranks"
            )
        if self.sharding == "row_wise" and sorted(self.owners[0]) != list(range(ranks)):
            raise PlanError(f"table {name}: row_wise takes each of the {ranks} ranks once")
        if self.sharding == "table_row_wise":
            for owners in self.owners:
                host = np.flatnonzero(cluster.hosts == cluster.hosts[owners[0]])
                if sorted(owners) != host.tolist():
                    raise PlanError(
                        f"table {name}: table_row_wise takes each rank of one host once, found"
                        f" {owners.tolist()} where the host has {host.tolist()}"
                    )
