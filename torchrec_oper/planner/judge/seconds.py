"""Seconds from loads, and the verdict on a placement."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.judge.loads import RankLoads, Traffic

Floats = npt.NDArray[np.float64]

# Sums of many floats may land this much above a cap that is met exactly.
ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class RankSeconds:
    """Where the seconds of each rank go in one step; [W] float64 each.

    Args:
        memory: reads and updates of rows.
        shards: overhead of pieces of tables.
        ids: the links while ids travel.
        forward: the links while rows, or sums of them, travel.
        backward: the links while gradients travel.
        allreduce: the links while gradients of hot rows are summed.
        latency: the start of phases.
    """

    memory: Floats
    shards: Floats
    ids: Floats
    forward: Floats
    backward: Floats
    allreduce: Floats
    latency: Floats

    @property
    def parts(self) -> dict[str, Floats]:
        """The parts by name, in the order of a step."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> Floats:
        """[W] the seconds of each rank: its parts come one after another."""
        return np.asarray(np.sum(list(self.parts.values()), axis=0))


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a placement costs.

    Args:
        loads: what every rank works, sends and holds.
        seconds: what that takes on the cluster's ranks and links.
        over_memory: the ranks that would hold more than they have room for.
    """

    loads: RankLoads
    seconds: RankSeconds
    over_memory: tuple[int, ...]

    @property
    def cost_s(self) -> float:
        """Seconds of the busiest rank, which all others wait for."""
        return float(self.seconds.total.max())

    @property
    def busiest_rank(self) -> int:
        """The first rank that takes longest."""
        return int(self.seconds.total.argmax())

    @property
    def memory_bytes(self) -> Floats:
        """[W] bytes that each rank holds."""
        return self.loads.memory_bytes

    @property
    def feasible(self) -> bool:
        """Whether every rank has room for what it holds."""
        return not self.over_memory


def verdict(loads: RankLoads, cluster: Cluster) -> Verdict:
    """The verdict on the loads of all tables."""
    over_memory = ranks_over_memory(loads.memory_bytes, cluster)
    return Verdict(loads, rank_seconds(loads, cluster), over_memory)


def ranks_over_memory(memory_bytes: Floats, cluster: Cluster) -> tuple[int, ...]:
    """The ranks that would hold more than they have room for; memory_bytes: [W]."""
    over = memory_bytes > cluster.memory_bytes * (1 + ROUNDING)
    return tuple(np.flatnonzero(over).tolist())


def rank_seconds(loads: RankLoads, cluster: Cluster) -> RankSeconds:
    """What the loads of all tables take on the cluster's ranks and links.

    Loads of single tables can't be turned into seconds and then added: a rank sends and
    receives at the same time, and the longer of the two over all tables counts.

    Raises:
        PlanError: the loads are for another number of ranks.
    """
    if loads.world_size != cluster.world_size:
        raise PlanError(
            f"the loads are of {loads.world_size} ranks, the cluster has {cluster.world_size}"
        )
    starts = loads.phases + loads.allreduce_phases
    return RankSeconds(
        memory=loads.memory_s / cluster.speeds,
        shards=loads.shard_s,
        ids=phase_seconds(loads.ids, cluster),
        forward=phase_seconds(loads.forward, cluster),
        backward=phase_seconds(loads.backward, cluster),
        allreduce=loads.allreduce_s,
        latency=np.full(cluster.world_size, starts * phase_latency_s(cluster)),
    )


def phase_seconds(traffic: Traffic, cluster: Cluster) -> Floats:
    """[W] seconds on the links: sending and receiving overlap, the two levels don't."""
    intra = np.maximum(traffic.sent_intra, traffic.received_intra)
    inter = np.maximum(traffic.sent_inter, traffic.received_inter)
    rates = cluster.rates
    seconds = intra / rates.intra_host.bytes_per_s + inter / rates.inter_host.bytes_per_s
    return np.asarray(seconds)


def phase_latency_s(cluster: Cluster) -> float:
    """Seconds to start one phase: the latency of every level of links that there is."""
    hosts = int(cluster.hosts.max()) + 1
    within = cluster.rates.intra_host.latency_s if cluster.local_sizes.max() > 1 else 0.0
    between = cluster.rates.inter_host.latency_s if hosts > 1 else 0.0
    return within + between
