"""What a placement brings to every rank as TorchRec executes it, for the judge to time.

The same amounts of memory work as in our cost model, and TorchRec's collectives:

* ``table_wise``, ``column_wise``: all-to-all of a vector for every bag, empty ones too.
* ``row_wise``: reduce-scatter of a vector for every bag from every rank, whether it has a
  row of the bag or not; all-gather of the gradients.
* ``table_row_wise`` (and ``grid_shard``, column slice by column slice): the reduce-scatter
  within the host that owns the table, then an all-to-all between the ranks of equal number
  on all hosts.
* ``data_parallel``: all-reduce of the gradients of all rows.
* tables that aren't pooled: all-to-all of a row for every lookup, repeated ids repeated.

Where there is a choice, it favours TorchRec: the ranges of a table are looked up evenly,
although the hottest row alone may be several times a rank's share; the reduce-scatter is
a ring that crosses hosts once for each of them, on all ranks' links at once, as NCCL
arranges it; lengths of bags, buffers of the collectives and dense gradients are free, and a
data-parallel table updates only the rows that were touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.baselines.stock_placement import StockPlacement, Task
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.judge import RankLoads, Traffic

ID_BYTES = 8
IDS, FORWARD, BACKWARD = range(3)


def stock_loads(task: Task, placements: Sequence[StockPlacement]) -> RankLoads:
    """The loads of all tables.

    Args:
        task: the tables and ranks.
        placements: one for each table.

    Raises:
        PlanError: a placement doesn't fit its table or the cluster.
    """
    sums = _Sums(task)
    for demand, bags, placement in zip(task.demands, task.all_bags, placements, strict=True):
        placement.check_fits(demand, task.cluster)
        if placement.sharding == "data_parallel":
            sums.add_replicated(demand)
        else:
            sums.add_sharded(demand, bags, placement)
    return sums.loads()


class _Sums:
    """Sums over tables; what the ranks bear alike is added to every element."""

    def __init__(self, task: Task) -> None:
        world = task.cluster.world_size
        self.task, self.cluster, self.rates = task, task.cluster, task.cluster.rates
        self.memory_s, self.shard_s = np.zeros(world), np.zeros(world)
        self.memory_bytes = np.zeros(world)
        self.allreduce_s = 0.0
        self.owned_bytes = np.zeros((3, world))  # between an owner and each rank, by phase
        # What else a rank sends forwards and, in training, receives backwards.
        self.sent_intra, self.sent_inter = np.zeros(world), np.zeros(world)
        self.received_inter = np.zeros(world)
        self.phases = self.allreduce_phases = 0
        self.passes = 2 if task.training else 1
        self.shard_overhead_s = self.rates.shard_overhead_s * self.passes

    def read_s(self, row_bytes: float) -> float:
        """Seconds to read a row."""
        return row_bytes / float(self.rates.read.bytes_per_s(row_bytes))

    def update_s(self, row_bytes: float) -> float:
        """Seconds to update a row."""
        return row_bytes / float(self.rates.update.bytes_per_s(row_bytes))

    def add_replicated(self, demand: TableDemand) -> None:
        """A table of which every rank has a copy."""
        row_bytes = float(demand.table.row_bytes)
        self.memory_s += demand.lookups * self.read_s(row_bytes)
        self.shard_s += self.shard_overhead_s
        self.memory_bytes += demand.table.rows * self.task.stored_row_bytes(demand)
        if self.task.training:
            touched = _distinct_rows(demand, demand.lookups * self.cluster.world_size)
            self.memory_s += touched * self.update_s(row_bytes)
            self.allreduce_s += _allreduce_s(demand.table.rows * row_bytes, self.cluster)
            self.allreduce_phases = 2

    def add_sharded(self, demand: TableDemand, bags: float, placement: StockPlacement) -> None:
        """A table cut into columns and rows, whose ranges of rows are looked up evenly."""
        world, training = self.cluster.world_size, self.task.training
        table, parts = demand.table, placement.owners.shape[1]
        pooled = table.pooling != "none"
        vectors = bags if pooled else demand.lookups / parts
        gradients = demand.bags * _hit(demand, 1 / parts) if pooled else vectors
        touched = _distinct_rows(demand, demand.lookups * world) / parts
        self.phases = 3 if training else 2
        for owners, width in zip(placement.owners, placement.widths, strict=True):
            row_bytes = table.row_bytes * width / table.dim
            work_s = world * demand.lookups / parts * self.read_s(row_bytes)
            if training:
                work_s += world * gradients * self.read_s(row_bytes)
                work_s += touched * self.update_s(row_bytes)
            self.memory_s[owners] += work_s
            self.shard_s[owners] += self.shard_overhead_s
            stored = self.task.stored_row_bytes(demand, width)
            self.memory_bytes[owners] += table.rows / parts * stored
            received = vectors * (1 if pooled else parts) * row_bytes
            self.memory_bytes += received
            self.owned_bytes[IDS, owners] += ID_BYTES * demand.lookups / parts
            if pooled and placement.sharding == "row_wise":
                self._add_ring(received)
            elif pooled and placement.sharding == "table_row_wise":
                self._add_two_levels(owners, received)
            else:
                self.owned_bytes[FORWARD:, owners] += vectors * row_bytes

    def _add_ring(self, vector_bytes: float) -> None:
        """A reduce-scatter of ``vector_bytes`` for every rank, over all ranks."""
        world, hosts = self.cluster.world_size, self.cluster.host_count
        crossings = hosts if hosts > 1 else 0
        sent = (world - 1) * vector_bytes
        self.sent_intra += sent * (world - crossings) / world
        self.sent_inter += sent * crossings / world
        self.received_inter += sent * crossings / world

    def _add_two_levels(self, owners: npt.NDArray[np.int64], vector_bytes: float) -> None:
        """A reduce-scatter within the owners' host, then an all-to-all between hosts."""
        hosts = self.cluster.host_count
        self.sent_intra[owners] += (len(owners) - 1) * hosts * vector_bytes
        self.sent_inter[owners] += (hosts - 1) * vector_bytes
        elsewhere = self.cluster.hosts != self.cluster.hosts[owners[0]]
        self.received_inter[elsewhere] += vector_bytes

    def loads(self) -> RankLoads:
        """The sums as the judge takes them."""
        world, training = self.cluster.world_size, self.task.training
        owned = [Traffic.from_owners(volume, self.cluster) for volume in self.owned_bytes]
        extra = Traffic(self.sent_intra, self.sent_intra, self.sent_inter, self.received_inter)
        return RankLoads(
            memory_s=self.memory_s,
            shard_s=self.shard_s,
            allreduce_s=np.full(world, self.allreduce_s),
            memory_bytes=self.memory_bytes,
            ids=owned[IDS].reversed(),
            forward=owned[FORWARD] + extra,
            backward=(owned[BACKWARD] + extra).reversed() if training else Traffic.none(world),
            phases=self.phases,
            allreduce_phases=self.allreduce_phases,
        )


def _allreduce_s(size_bytes: float, cluster: Cluster) -> float:
    """Seconds to sum ``size_bytes`` over all ranks in a ring in each host and one across."""
    rates, hosts = cluster.rates, cluster.host_count
    local = int(cluster.local_sizes.min())
    within = 2 * (local - 1) / local * size_bytes / rates.intra_host.bytes_per_s
    across = 2 * (hosts - 1) / hosts * size_bytes / local / rates.inter_host.bytes_per_s
    return within + across


def _hit(demand: TableDemand, chance: float) -> float:
    """The chance that a bag that isn't empty has a row out of rows of ``chance``."""
    return float((1 - (1 - chance) ** demand.bag_lengths) @ demand.bag_shares)


def _distinct_rows(demand: TableDemand, lookups: float) -> float:
    """Expected distinct rows in so many lookups."""
    chances = np.minimum(demand.block_chances, 1 - 1e-15)
    return float(demand.block_rows @ -np.expm1(lookups * np.log1p(-chances)))
