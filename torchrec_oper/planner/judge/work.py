"""Seconds of memory work and of the all-reduce, and bytes held, for rows of one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Objective
from torchrec_oper.table import TableSpec

Floats = npt.NDArray[np.float64]

ID_BYTES = 8


@dataclass(frozen=True)
class TableWork:
    """What rows of one table cost on one cluster.

    Args:
        table: the table.
        cluster: the ranks.
        objective: ``train`` counts gradients, updates and optimizer state, ``infer`` not.

    Raises:
        PlanError: the objective is neither.
    """

    table: TableSpec
    cluster: Cluster
    objective: Objective

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise PlanError(
                f"objective must be one of {get_args(Objective)}, found {self.objective!r}"
            )

    @property
    def train(self) -> bool:
        """Whether gradients come back and rows are updated."""
        return self.objective == "train"

    @property
    def phases(self) -> int:
        """Phases of an exchange: ids, forward, and in training backward."""
        return 3 if self.train else 2

    @property
    def shard_s(self) -> float:
        """Seconds of overhead of a piece, in the forward pass and in training the backward."""
        return (2 if self.train else 1) * self.cluster.rates.shard_overhead_s

    def read_s(self, rows: npt.ArrayLike, row_bytes: float) -> Floats:
        """Seconds to read as many rows of ``row_bytes``."""
        bytes_read = np.asarray(rows, dtype=np.float64) * row_bytes
        return np.asarray(bytes_read / self.cluster.rates.read.bytes_per_s(row_bytes))

    def update_s(self, rows: npt.ArrayLike, row_bytes: float) -> Floats:
        """Seconds to update as many rows; none in inference."""
        bytes_updated = np.asarray(rows, dtype=np.float64) * row_bytes * self.train
        return np.asarray(bytes_updated / self.cluster.rates.update.bytes_per_s(row_bytes))

    def stored_bytes(self, rows: npt.ArrayLike, row_bytes: float) -> Floats:
        """Bytes that as many rows of a slice, each with its optimizer state, take."""
        state_bytes = self.table.optimizer_bytes_per_row if self.train else 0
        return np.asarray(np.asarray(rows, dtype=np.float64) * (row_bytes + state_bytes))

    def allreduce_s(self, hot_rows: float, distinct: float, distinct_of_all: float) -> float:
        """Seconds on the links to sum the gradients of hot rows over ranks; 0 in inference.

        The quicker of two ways:

        * dense, the gradients of all hot rows, in a ring within hosts and one between
          them: ``2 (R-1)/R D/intra + 2 (H-1)/H (D/R)/inter``, D bytes, H hosts, R ranks on
          the smallest host;
        * sparse: each rank sends the ids and gradients of the distinct rows it read to
          the ranks that sum them, which send the sums of all distinct rows to all.

        Args:
            hot_rows: rows that every rank has.
            distinct: how many of them a rank's batch names.
            distinct_of_all: how many of them the batches of all ranks name.
        """
        if not self.train:
            return 0.0
        rates, ranks = self.cluster.rates, self.cluster.world_size
        intra, inter = rates.intra_host.bytes_per_s, rates.inter_host.bytes_per_s
        local, hosts = int(self.cluster.local_sizes.min()), int(self.cluster.hosts.max()) + 1
        row_bytes = self.table.row_bytes
        all_bytes = hot_rows * row_bytes
        dense = 2 * (local - 1) / local * all_bytes / intra
        dense += 2 * (hosts - 1) / hosts * (all_bytes / local) / inter
        sent = distinct * (row_bytes + ID_BYTES) + distinct_of_all * row_bytes
        sparse = sent * ((local - 1) / ranks / intra + (ranks - local) / ranks / inter)
        return min(dense, sparse)
