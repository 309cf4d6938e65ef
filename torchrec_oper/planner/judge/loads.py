"""What every rank works, sends and holds in one step, before rates of links apply."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Traffic:
    """The bytes of one phase, of each rank and in each direction; what stays isn't counted.

    Args:
        sent_intra: [W] float64, bytes sent to other ranks of the same host.
        received_intra: [W] float64, bytes received from other ranks of the same host.
        sent_inter: [W] float64, bytes sent to ranks of other hosts.
        received_inter: [W] float64, bytes received from ranks of other hosts.

    Raises:
        PlanError: an array has another shape, or a value is below 0 or not finite.
    """

    sent_intra: Floats
    received_intra: Floats
    sent_inter: Floats
    received_inter: Floats

    def __post_init__(self) -> None:
        ranks = np.shape(self.sent_intra)
        for field in fields(self):
            _freeze(self, field.name, ranks)

    @classmethod
    def none(cls, world_size: int) -> Traffic:
        """No byte at all."""
        return cls(*np.zeros((4, world_size)))

    @classmethod
    def from_owners(cls, owned_bytes: npt.ArrayLike, cluster: Cluster) -> Traffic:
        """Each owner sends as much to one rank as to every other.

        Args:
            owned_bytes: [W] bytes between an owner and one rank, itself included, which
                are not sent.
            cluster: the ranks and their hosts.
        """
        owned: Floats = np.asarray(owned_bytes, dtype=np.float64)
        hosts: Floats = np.bincount(cluster.hosts, weights=owned).astype(np.float64)
        of_host, of_all = hosts[cluster.hosts], np.full(len(owned), hosts.sum())
        return cls(
            sent_intra=(cluster.local_sizes - 1) * owned,
            received_intra=_without(of_host, owned),
            sent_inter=(cluster.world_size - cluster.local_sizes) * owned,
            received_inter=_without(of_all, of_host),
        )

    @classmethod
    def from_pairs(cls, pair_bytes: npt.ArrayLike, cluster: Cluster) -> Traffic:
        """The traffic of bytes known for every two ranks.

        Args:
            pair_bytes: [W, W] bytes from each rank to each rank; the diagonal isn't sent.
                Whole numbers below 2**53 in sum are counted exactly.
            cluster: the ranks and their hosts.
        """
        pairs = np.asarray(pair_bytes, dtype=np.float64)
        of_host = np.eye(int(cluster.hosts.max()) + 1)[cluster.hosts]  # [W, hosts] of 0 and 1
        itself = np.diagonal(pairs)
        sent, received = pairs @ of_host, (of_host.T @ pairs).T  # [W, hosts]
        sent_at_home = (sent * of_host).sum(axis=1)
        received_at_home = (received * of_host).sum(axis=1)
        return cls(
            sent_intra=_without(sent_at_home, itself),
            received_intra=_without(received_at_home, itself),
            sent_inter=_without(sent.sum(axis=1), sent_at_home),
            received_inter=_without(received.sum(axis=1), received_at_home),
        )

    def reversed(self) -> Traffic:
        """The same bytes on their way back."""
        return Traffic(self.received_intra, self.sent_intra, self.received_inter, self.sent_inter)

    def scaled(self, by: float) -> Traffic:
        """All bytes times ``by``."""
        return Traffic(*(getattr(self, field.name) * by for field in fields(self)))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_intra + other.sent_intra,
            self.received_intra + other.received_intra,
            self.sent_inter + other.sent_inter,
            self.received_inter + other.received_inter,
        )


@dataclass(frozen=True, eq=False)
class RankLoads:
    """What one table, or several, bring to every rank in one step.

    Loads of tables add up: ``a + b``, or ``RankLoads.total``.

    Args:
        memory_s: [W] float64, seconds that a rank of speed 1 reads and updates rows.
        shard_s: [W] float64, seconds for the overhead of pieces of tables.
        allreduce_s: [W] float64, seconds on links for the gradients of hot rows.
        memory_bytes: [W] float64, rows, optimizer state and receive buffers.
        ids: what tells owners which rows are wanted.
        forward: rows, or sums of them, on their way to who asked.
        backward: gradients on their way to owners.
        phases: how many phases of an exchange have to be started, one after another;
            tables share them, so a sum of loads has the most of any table.
        allreduce_phases: the same for the all-reduce of hot rows.

    Raises:
        PlanError: an array has another shape, a value is below 0 or not finite, or the
            arrays are for different numbers of ranks.
    """

    memory_s: Floats
    shard_s: Floats
    allreduce_s: Floats
    memory_bytes: Floats
    ids: Traffic
    forward: Traffic
    backward: Traffic
    phases: int
    allreduce_phases: int

    def __post_init__(self) -> None:
        ranks = np.shape(self.memory_s)
        for name in ("memory_s", "shard_s", "allreduce_s", "memory_bytes"):
            _freeze(self, name, ranks)
        for traffic in (self.ids, self.forward, self.backward):
            if traffic.sent_intra.shape != ranks:
                raise PlanError(
                    f"loads of {ranks[0]} ranks can't have traffic of {len(traffic.sent_intra)}"
                )
        if self.phases < 0 or self.allreduce_phases < 0:
            raise PlanError(
                f"phases must be 0 or more, found {self.phases} and {self.allreduce_phases}"
            )

    @classmethod
    def none(cls, world_size: int) -> RankLoads:
        """Nothing to do on any of ``world_size`` ranks."""
        zeros, traffic = np.zeros(world_size), Traffic.none(world_size)
        return cls(zeros, zeros, zeros, zeros, traffic, traffic, traffic, 0, 0)

    @classmethod
    def total(cls, loads: Iterable[RankLoads], world_size: int) -> RankLoads:
        """The sum of the loads of tables."""
        return sum(loads, cls.none(world_size))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.memory_s)

    def scaled(self, by: float) -> RankLoads:
        """All amounts times ``by``, as for the mean of steps; the phases stay."""
        return RankLoads(
            memory_s=self.memory_s * by,
            shard_s=self.shard_s * by,
            allreduce_s=self.allreduce_s * by,
            memory_bytes=self.memory_bytes * by,
            ids=self.ids.scaled(by),
            forward=self.forward.scaled(by),
            backward=self.backward.scaled(by),
            phases=self.phases,
            allreduce_phases=self.allreduce_phases,
        )

    def __add__(self, other: RankLoads) -> RankLoads:
        return RankLoads(
            memory_s=self.memory_s + other.memory_s,
            shard_s=self.shard_s + other.shard_s,
            allreduce_s=self.allreduce_s + other.allreduce_s,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            ids=self.ids + other.ids,
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            phases=max(self.phases, other.phases),
            allreduce_phases=max(self.allreduce_phases, other.allreduce_phases),
        )


def _without(total: Floats, part: Floats) -> Floats:
    """``total - part``, where rounding may have left a little less than nothing."""
    return np.maximum(total - part, 0.0)


def _freeze(value: Any, name: str, shape: tuple[int, ...]) -> None:
    """Replace an array by a copy that nobody can write to."""
    array = np.array(getattr(value, name), dtype=np.float64)
    if array.ndim != 1 or array.shape != shape:
        raise PlanError(f"{name} must hold a number for each rank, found shape {array.shape}")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise PlanError(
            f"{name} must be finite numbers of 0 or more, found {reprlib.repr(array.tolist())}"
        )
    array.flags.writeable = False
    object.__setattr__(value, name, array)
