"""What a table's candidates put on the ranks, whoever owns their pieces.

A rank sends and receives at the same time, and the longer of the two over all tables
counts. So what two tables put on a rank may be added only where both count what is sent,
or both what is received: hence two views of each candidate, each of them a bound alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.candidates import BYTES, FIXED, PHASES, WORK, Candidates
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.rank_classes import RankClasses

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class View:
    """Seconds by one direction of the links, [C].

    Args:
        busiest_s: of the busiest owner, if it had this table alone, at least.
        least_s: that the table puts on any rank at least.
    """

    busiest_s: Floats
    least_s: Floats


@dataclass(frozen=True, eq=False)
class Summary:
    """What the relaxation needs to know of a table's candidates, C of them.

    Args:
        common: [3, C] work, fixed seconds and bytes of every rank.
        owned: [6, C] what all owners bear together.
        kinds: [6, P] what may be of another class of ranks than the rest: pieces that are
            alike, all of them together.
        kind_of: [P] the candidate of each kind, ascending.
        sent, received: the views.
        busiest_bytes: [C] bytes of the owner that needs most.
    """

    common: Floats
    owned: Floats
    kinds: Floats
    kind_of: Ints
    sent: View
    received: View
    busiest_bytes: Floats

    @property
    def busiest_s(self) -> Floats:
        """[C] seconds of the busiest owner by what it sends."""
        return self.sent.busiest_s

    @property
    def least_s(self) -> Floats:
        """[C] seconds that the table puts on every rank by what it sends."""
        return self.sent.least_s

    def features(self, cluster: Cluster, classes: RankClasses) -> Floats:
        """[F, C] numbers of which less is never worse, where all ranks are alike."""
        cuts = [
            seconds
            for view in (self.sent, self.received)
            for seconds in (view.busiest_s - view.least_s, view.least_s)
        ]
        if len(classes) > 1:
            return np.vstack([self.common, self.owned, *cuts])
        # Only the means over the ranks count where all are alike.
        work, fixed, memory = self.common
        size, volumes = classes.sizes[0], self.owned[list(PHASES)].sum(axis=0)
        mean = (work + self.owned[WORK] / size) / classes.speed[0]
        mean = mean + fixed + self.owned[FIXED] / size
        mean = mean + volumes / size * link_weights(cluster, classes)[[0, 2], 0, 0].sum()
        return np.vstack([mean, memory + self.owned[BYTES] / size, *cuts])


def summarise(candidates: Candidates, cluster: Cluster, classes: RankClasses) -> Summary:
    """The summary of one table's candidates."""
    owners = candidates.columns * candidates.parts
    pieces = _Pieces.of(candidates)
    owned, speed = candidates.totals(), classes.speed.max()
    common_s = candidates.common[WORK] / speed + candidates.common[FIXED]
    facts = _Facts(cluster, classes, pieces, owned, owners, candidates.linear)
    sent, received = _sent(facts), _received(facts)
    kinds = owned
    kind_of: Ints = np.arange(len(candidates))
    if len(classes) > 1:
        kinds, kind_of = _kinds(pieces, candidates.linear)
    return Summary(
        common=candidates.common[[WORK, FIXED, BYTES]],
        owned=owned,
        kinds=kinds,
        kind_of=kind_of,
        sent=View(common_s + sent.busiest_s, common_s + sent.least_s),
        received=View(common_s + received.busiest_s, common_s + received.least_s),
        busiest_bytes=candidates.common[BYTES] + pieces.most(pieces.vectors[BYTES], len(owners)),
    )


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The kinds of pieces of all candidates, K of them, by candidate, the largest first.

    Args:
        candidate: [K] whose they are.
        times: [K] how many such pieces it has.
        vectors: [6, K] what one of them asks of its owner.
    """

    candidate: Ints
    times: Floats
    vectors: Floats

    @classmethod
    def of(cls, candidates: Candidates) -> _Pieces:
        heavy = candidates.heavy
        alone = np.zeros(len(candidates), dtype=np.int64)
        numbers = np.array(list(heavy), dtype=np.int64)
        alone[numbers] = [vectors.shape[1] for vectors in heavy.values()]
        candidate = np.concatenate([np.arange(len(candidates)), np.repeat(numbers, alone[numbers])])
        times = candidates.columns[candidate].astype(np.float64)
        times[: len(candidates)] *= candidates.parts - alone
        vectors = np.concatenate([candidates.piece, *heavy.values()], axis=1)
        volumes = vectors[list(PHASES)].sum(axis=0)
        order = np.lexsort((-volumes, candidate))
        there = order[times[order] > 0]
        return cls(candidate[there], times[there], vectors[:, there])

    def most(self, values: Floats, count: int) -> Floats:
        """[C] the largest value, [K], of each candidate's pieces; 0 where it has none."""
        found = np.zeros(count)
        np.maximum.at(found, self.candidate, values)
        return found

    def least(self, values: Floats, count: int) -> Floats:
        """[C] the least value, [K], of each candidate's pieces; 0 where it has none."""
        found = np.full(count, np.inf)
        np.minimum.at(found, self.candidate, values)
        return np.where(np.isfinite(found), found, 0.0)


def _kinds(pieces: _Pieces, linear: Mask) -> tuple[Floats, Ints]:
    """[6, P] and [P], see ``Summary``: rows of uneven parts need not be where parts are."""
    together = pieces.vectors * pieces.times
    uneven = linear[pieces.candidate]
    overhead = np.zeros((6, int(uneven.sum())))
    overhead[FIXED] = together[FIXED, uneven]
    together[FIXED, uneven] = 0.0
    kind_of = np.concatenate([pieces.candidate, pieces.candidate[uneven]])
    order = np.argsort(kind_of, kind="stable")
    return np.concatenate([together, overhead], axis=1)[:, order], kind_of[order]


@dataclass(frozen=True, eq=False)
class _Facts:
    """What both views are made from; see ``Summary`` and ``_Pieces``."""

    cluster: Cluster
    classes: RankClasses
    pieces: _Pieces
    owned: Floats
    owners: Ints
    linear: Mask

    @property
    def everywhere(self) -> Mask:
        """[C] whether every rank owns a piece."""
        return np.asarray(self.owners == self.cluster.world_size)

    @property
    def overhead_s(self) -> Floats:
        """[C] fixed seconds of an owner."""
        return self.pieces.most(self.pieces.vectors[FIXED], len(self.owners))


def _sent(facts: _Facts) -> View:
    """What owners send; other ranks send nothing."""
    rates, classes = facts.cluster.rates, facts.classes
    pieces, count = facts.pieces, len(facts.owners)
    intra, inter = rates.intra_host.bytes_per_s, rates.inter_host.bytes_per_s
    strangers = facts.cluster.world_size - classes.local
    per_byte = ((classes.local - 1) / intra + strangers / inter).min()
    seconds = pieces.vectors[WORK] / classes.speed.max()
    seconds = seconds + pieces.vectors[list(PHASES)].sum(axis=0) * per_byte
    # The largest of uneven parts is no smaller than their mean; others may be empty.
    lightest = np.where(facts.linear, 0.0, pieces.least(seconds, count))
    return View(
        busiest_s=facts.overhead_s + pieces.most(seconds, count),
        least_s=np.where(facts.everywhere, facts.overhead_s + lightest, 0.0),
    )


def _received(facts: _Facts) -> View:
    """What ranks receive: everything but what they own."""
    cluster, pieces, count = facts.cluster, facts.pieces, len(facts.owners)
    near = _largest(pieces, float(facts.classes.local.max()) - 1, count)
    volumes, totals = pieces.vectors[list(PHASES)], facts.owned[list(PHASES)]
    speed = facts.classes.speed.max()
    others_s = _link_s(totals[:, pieces.candidate] - volumes, near[:, pieces.candidate], cluster)
    owner_s = pieces.vectors[WORK] / speed + pieces.vectors[FIXED] + others_s.sum(axis=0)
    busiest_s, least_s = pieces.most(owner_s, count), pieces.least(owner_s, count)
    stranger_s = _link_s(totals, near, cluster).sum(axis=0)
    least_s = np.where(facts.everywhere, least_s, np.minimum(least_s, stranger_s))
    # The owner of a share s of uneven parts works s of it all and receives 1 - s: least
    # at an end, which is 1 / parts for the owner of the largest part, or else 0.
    rates = cluster.rates
    best = rates.intra_host.bytes_per_s
    if cluster.hosts.max() > 0:
        best = max(best, rates.inter_host.bytes_per_s)
    work_s, link_s = facts.owned[WORK] / speed, totals.sum(axis=0) / best
    even = 1 / np.maximum(facts.owners, 1)
    largest_s = facts.overhead_s + np.minimum(work_s, even * work_s + (1 - even) * link_s)
    any_s = np.minimum(work_s, link_s) + facts.overhead_s * facts.everywhere
    return View(
        busiest_s=np.where(facts.linear, largest_s, busiest_s),
        least_s=np.where(facts.linear, any_s, least_s),
    )


def _largest(pieces: _Pieces, limit: float, count: int) -> Floats:
    """[3, C] the bytes of each candidate's ``limit`` largest pieces."""
    ends = np.cumsum(pieces.times)
    first = np.searchsorted(pieces.candidate, pieces.candidate)
    before = ends - pieces.times
    before = before - before[first]
    taken = np.clip(limit - before, 0, pieces.times)
    found = np.zeros((len(PHASES), count))
    for phase, volumes in zip(found, pieces.vectors[list(PHASES)], strict=True):
        np.add.at(phase, pieces.candidate, taken * volumes)
    return found


def _link_s(received: Floats, near: Floats, cluster: Cluster) -> Floats:
    """The least seconds to receive so many bytes, no more than ``near`` from the own host."""
    rates, total = cluster.rates, np.maximum(received, 0.0)
    intra, inter = rates.intra_host.bytes_per_s, rates.inter_host.bytes_per_s
    if cluster.hosts.max() == 0:
        return total / intra
    if intra < inter:
        return total / inter
    at_home = np.minimum(total, near)
    return np.asarray(at_home / intra + (total - at_home) / inter)


def link_weights(cluster: Cluster, classes: RankClasses) -> Floats:
    """[4, G, G] seconds on each link of class g for a byte owned by each rank of class g'.

    The links: sent within the host, received within it, sent between hosts, received
    between them.
    """
    world, own = float(cluster.world_size), np.eye(len(classes))
    near = classes.neighbours
    everyone = np.broadcast_to(classes.sizes, near.shape)
    intra = 1 / cluster.rates.intra_host.bytes_per_s
    inter = 1 / cluster.rates.inter_host.bytes_per_s
    return np.array(
        [
            own * (classes.local - 1)[:, None] * intra,
            (near - own) * intra,
            own * (world - classes.local)[:, None] * inter,
            (everyone - near) * inter,
        ]
    )


def undominated(features: Floats, allowed: Mask) -> Mask:
    """The allowed candidates that no other allowed one beats in every feature, [C]."""
    numbers = np.flatnonzero(allowed)
    values = features[:, numbers]
    order = np.lexsort(values[::-1])
    values = values[:, order]
    keep = np.ones(len(order), dtype=np.bool_)
    for at in range(len(order)):
        if keep[at]:
            beaten = np.asarray((values[:, at + 1 :] >= values[:, at, None]).all(axis=0))
            keep[at + 1 :] &= ~beaten
    result = np.zeros_like(allowed)
    result[numbers[order[keep]]] = True
    return result


def all_undominated(
    summaries: Sequence[Summary], allowed: Sequence[Mask], cluster: Cluster, classes: RankClasses
) -> list[Mask]:
    """``undominated`` of every table's candidates; equal tables are looked at once."""
    known: dict[tuple[int, bytes], Mask] = {}
    found = []
    for summary, mask in zip(summaries, allowed, strict=True):
        key = (id(summary), mask.tobytes())
        if key not in known:
            known[key] = undominated(summary.features(cluster, classes), mask)
        found.append(known[key])
    return found
