"""What each choice of one table puts at least on a rank, whatever the other tables do.

A rank sends and receives at the same time, and the longer of the two over all tables
counts. So what two tables put on a rank may be added only if both count what is sent, or
both what is received. Hence two views of each choice, each of them a bound by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.judge.choices import ChoiceLoads

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class View:
    """Least seconds by one direction of the links; C choices.

    Args:
        busiest_s: [C] for some rank of the choice, its busiest owner.
        least_s: [C] for every rank.
        share_s: [C] where every rank has a piece, and those may be uneven: what an owner
            of all rows takes more than one of none, which takes ``least_s``; else 0.
    """

    busiest_s: Floats
    least_s: Floats
    share_s: Floats

    def least_below(self, most_s: float, ranks: int) -> Floats:
        """[C] ``least_s`` of plans in which each choice puts ``most_s`` on a rank at most.

        That limits every owner's share, so the others leave some to each.
        """
        room = np.clip(most_s - self.least_s, 0, self.share_s)
        most = np.divide(room, self.share_s, out=np.ones_like(room), where=self.share_s > 0)
        return np.asarray(self.least_s + self.share_s * np.maximum(1 - (ranks - 1) * most, 0))


@dataclass(frozen=True, eq=False)
class TableCosts:
    """The choices of one table, C of them, with P kinds of pieces in all.

    Args:
        hot: [C] whether some rows are on every rank.
        common: [C, 3] see ``ChoiceLoads``.
        uneven: [C] see there.
        shard_s: [C] see there.
        choice_of: [P] the choice of each kind of piece.
        times: [P] how many such pieces the choice has.
        memory_s: [P] memory seconds of the owner of one.
        volumes: [3, P] bytes between that owner and each rank.
        held_bytes: [P] bytes that the owner holds.
        sent: the view that counts what is sent.
        received: the view that counts what is received.
    """

    hot: Bools
    common: Floats
    uneven: Bools
    shard_s: Floats
    choice_of: Ints
    times: Floats
    memory_s: Floats
    volumes: Floats
    held_bytes: Floats
    sent: View
    received: View

    @property
    def busiest_bytes(self) -> Floats:
        """[C] what the owner of the largest piece holds at least."""
        largest = np.zeros(len(self.hot))
        np.maximum.at(largest, self.choice_of, self.held_bytes)
        return np.asarray(self.common[:, 2] + largest)

    def sums(self, of_pieces: Floats) -> Floats:
        """[C] the sum over all pieces of each choice."""
        totals = np.bincount(self.choice_of, self.times * of_pieces, minlength=len(self.hot))
        return totals.astype(np.float64)


def table_costs(loads: list[ChoiceLoads], cluster: Cluster) -> TableCosts:
    """The costs of the choices of one table on the cluster's ranks."""
    views = [(_sent(choice, cluster), _received(choice, cluster)) for choice in loads]
    sent, received = np.array(views).transpose(1, 2, 0)
    kinds = [len(choice.times) for choice in loads]
    return TableCosts(
        hot=np.array([choice.choice.hot_rows > 0 for choice in loads]),
        common=np.stack([choice.common for choice in loads]),
        uneven=np.array([choice.uneven for choice in loads]),
        shard_s=np.array([choice.shard_s for choice in loads]),
        choice_of=np.repeat(np.arange(len(loads)), kinds),
        times=np.concatenate([choice.times for choice in loads]),
        memory_s=np.concatenate([choice.memory_s for choice in loads]),
        volumes=np.concatenate([choice.volumes for choice in loads], axis=1),
        held_bytes=np.concatenate([choice.held_bytes for choice in loads]),
        sent=View(*sent),
        received=View(*received),
    )


def _common_s(loads: ChoiceLoads, cluster: Cluster) -> float:
    return float(loads.common[0] / cluster.speeds.max() + loads.common[1])


def _sent(loads: ChoiceLoads, cluster: Cluster) -> tuple[float, float, float]:
    """The numbers of a view where only sent bytes count; who owns nothing sends nothing."""
    common_s, everywhere = _common_s(loads, cluster), loads.choice.owners == cluster.world_size
    if not loads.choice.parts:
        return common_s, common_s, 0.0
    local, rates = cluster.local_sizes, cluster.rates
    to_others = (local - 1) / rates.intra_host.bytes_per_s
    to_others = to_others + (cluster.world_size - local) / rates.inter_host.bytes_per_s
    work_s = loads.memory_s / cluster.speeds.max() + loads.volumes.sum(axis=0) * to_others.min()
    # Of uneven pieces the largest is no smaller than the mean, and others may be empty.
    busiest_s = common_s + loads.shard_s + float(work_s.max())
    if not everywhere:
        return busiest_s, common_s, 0.0
    empty_s = common_s + loads.shard_s
    if loads.uneven:
        return busiest_s, empty_s, float(work_s @ loads.times)
    return busiest_s, empty_s + float(work_s.min()), 0.0


def _received(loads: ChoiceLoads, cluster: Cluster) -> tuple[float, float, float]:
    """The numbers of a view where only received bytes count: all but the rank's own."""
    common_s, everywhere = _common_s(loads, cluster), loads.choice.owners == cluster.world_size
    if not loads.choice.parts:
        return common_s, common_s, 0.0
    if loads.uneven:
        return _received_uneven(loads, cluster)
    total = loads.volumes @ loads.times  # [3]
    memory_s = loads.memory_s / cluster.speeds.max()
    near = _largest(loads, int(cluster.local_sizes.max()) - 1)
    owner_s = (
        memory_s
        + loads.shard_s
        + sum(
            _link_seconds(total[phase] - loads.volumes[phase], near[phase], cluster)
            for phase in range(3)
        )
    )
    busiest_s, least_s = float(owner_s.max()), float(owner_s.min())
    if not everywhere:
        other_s = sum(_link_seconds(total[phase], near[phase], cluster) for phase in range(3))
        least_s = min(least_s, float(other_s))
    return common_s + busiest_s, common_s + least_s, 0.0


def _received_uneven(loads: ChoiceLoads, cluster: Cluster) -> tuple[float, float, float]:
    """An owner of share w works w of it all, and receives 1 - w."""
    common_s, everywhere = _common_s(loads, cluster), loads.choice.owners == cluster.world_size
    pieces = float(loads.times.sum())
    work_s = float(loads.memory_s @ loads.times) / cluster.speeds.max()
    links_s = float((loads.volumes @ loads.times).sum()) / _best_link(cluster)
    # The busiest has a mean share or more, and is least busy with just that, or with all.
    ends = np.array([1 / pieces, 1.0])
    busiest_s = common_s + loads.shard_s + float((ends * work_s + (1 - ends) * links_s).min())
    least_s = common_s + min(work_s, links_s) + loads.shard_s * everywhere
    return busiest_s, least_s, max(work_s - links_s, 0.0) * everywhere


def _largest(loads: ChoiceLoads, count: int) -> Floats:
    """[3] the volume of the ``count`` largest pieces, for each phase."""
    found = np.zeros(3)
    for phase, volumes in enumerate(loads.volumes):
        order = np.argsort(-volumes)
        before = np.cumsum(loads.times[order]) - loads.times[order]
        taken = np.clip(count - before, 0, loads.times[order])
        found[phase] = taken @ volumes[order]
    return found


def _link_seconds(received: npt.ArrayLike, near: float, cluster: Cluster) -> Floats:
    """The least seconds to receive as many bytes, no more than ``near`` from the own host."""
    rates, total = cluster.rates, np.maximum(received, 0.0)
    intra, inter = rates.intra_host.bytes_per_s, rates.inter_host.bytes_per_s
    if cluster.hosts.max() == 0:
        return np.asarray(total / intra)
    if intra < inter:
        return np.asarray(total / inter)
    at_home = np.minimum(total, near)
    return np.asarray(at_home / intra + (total - at_home) / inter)


def _best_link(cluster: Cluster) -> float:
    intra, inter = cluster.rates.intra_host.bytes_per_s, cluster.rates.inter_host.bytes_per_s
    return intra if cluster.hosts.max() == 0 else max(intra, inter)
