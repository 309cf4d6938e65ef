"""Which candidate each table takes, who owns its pieces, and what every rank bears for it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.candidates import (
    BACKWARD,
    BYTES,
    FIXED,
    FORWARD,
    IDS,
    WORK,
    Candidates,
)
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Floats

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

Phases = tuple[tuple[int, int], ...]
ALL_PHASES: Phases = ((IDS, 1), (FORWARD, 1), (BACKWARD, 1))

OVER_MEMORY = 1e6
PRESSURE = 0.05


class Ranks:
    """What loads cost the ranks of a cluster.

    A load is [6, ..., W] in the order of ``torchrec_oper.planner.candidates``; what all
    ranks bear alike is [6, ...].
    """

    def __init__(self, cluster: Cluster) -> None:
        self.size = cluster.world_size
        self.caps, self.speeds = cluster.memory_bytes, cluster.speeds
        self.intra = 1 / cluster.rates.intra_host.bytes_per_s
        self.inter = 1 / cluster.rates.inter_host.bytes_per_s
        self.others = cluster.local_sizes - 1.0
        self.strangers = cluster.world_size - cluster.local_sizes.astype(np.float64)
        self.hosts = int(cluster.hosts.max()) + 1
        self.by_host = np.argsort(cluster.hosts, kind="stable")
        _, self.starts, self.host_of = np.unique(
            cluster.hosts[self.by_host], return_index=True, return_inverse=True
        )
        self.in_order = bool((self.by_host == np.arange(self.size)).all())
        self.many_hosts = len(self.starts) > 1

    @cached_property
    def owned_byte_s(self) -> float:
        """About how many seconds of its links an owner spends on a byte for each requester."""
        return float((self.others * self.intra + self.strangers * self.inter).mean())

    def link_s(self, volumes: Floats) -> Floats:
        """[..., W] seconds on the links for owned volumes [..., W] of one phase."""
        if not self.many_hosts:
            total = volumes.sum(axis=-1, keepdims=True)
            alone: Floats = np.maximum(self.others * volumes, total - volumes)
            alone *= self.intra
            return alone
        by_host = volumes if self.in_order else volumes[..., self.by_host]
        sums = np.add.reduceat(by_host, self.starts, axis=-1)
        total = sums.sum(axis=-1, keepdims=True)
        near = sums[..., self.host_of]
        if not self.in_order:
            near = near[..., np.argsort(self.by_host)]
        seconds: Floats = np.maximum(self.others * volumes, near - volumes)
        seconds *= self.intra
        between = np.maximum(self.strangers * volumes, total - near)
        between *= self.inter
        seconds += between
        return seconds

    def cost_s(self, loads: Floats, common: Floats, phases: Phases = ALL_PHASES) -> Floats:
        """[..., W] seconds of every rank, latency aside.

        Args:
            loads: [6, ..., W].
            common: [6, ...].
            phases: those that have volumes, and how often each counts.
        """
        seconds: Floats = (loads[WORK] + common[WORK][..., None]) / self.speeds + loads[FIXED]
        seconds += common[FIXED][..., None]
        for phase, times in phases:
            link_s = self.link_s(loads[phase])
            if times > 1:
                link_s *= times
            seconds += link_s
        return seconds

    def memory(self, loads: Floats, common: Floats) -> Floats:
        """[..., W] share of every rank's memory that is used."""
        share: Floats = (loads[BYTES] + common[BYTES][..., None]) / self.caps
        return share


@dataclass(frozen=True)
class Aim:
    """What the search makes small: a mean over ranks that the slowest ones dominate.

    Args:
        power: of each rank's cost; the higher, the more the slowest rank counts.
        scale_s: the cost that counts as 1; where that is 0, a second does.
        memory_s: price of the mean share of memory that is used.
    """

    power: float
    scale_s: float
    memory_s: float

    def __post_init__(self) -> None:
        if not self.scale_s > 0:
            object.__setattr__(self, "scale_s", 1.0)

    def of(self, seconds: Floats, memory: Floats) -> Floats:
        """[...] the value for costs [..., W] and memory shares [..., W]; less is better."""
        with np.errstate(over="ignore"):  # infinite is as bad as need be
            slow = ((seconds / self.scale_s) ** self.power).mean(axis=-1)
        full = PRESSURE * (memory**16).mean(axis=-1)
        price = self.power * self.memory_s / self.scale_s * memory.mean(axis=-1)
        over = OVER_MEMORY * np.maximum(memory.max(axis=-1) - 1, 0)
        value: Floats = slow + full + price + over
        return value


@dataclass(frozen=True, eq=False)
class Choices:
    """The candidates of one table that the search tries, [C] of them, most promising first.

    Args:
        numbers: [C] their numbers among the table's candidates.
        owners: [C] ranks that own a piece.
        piece: [6, C] an even piece.
        common: [6, C] what every rank bears.
        uneven: for a place in ``numbers`` all pieces, heaviest first, where they differ.
        unsorted: for such a place the number of each of those pieces among the candidate's.
        banned: [W] ranks that may not own a piece, or None.
    """

    numbers: Ints
    owners: Ints
    piece: Floats
    common: Floats
    uneven: dict[int, Floats]
    unsorted: dict[int, Ints]
    banned: Mask | None = None

    @classmethod
    def of(
        cls, candidates: Candidates, numbers: Ints, ranks: Ranks, banned: Mask | None = None
    ) -> Choices:
        """The choices that are those ``numbers`` of a table's candidates."""
        piece = candidates.piece[:, numbers].copy()
        owners = (candidates.columns * candidates.parts)[numbers]
        # Uneven parts will be poured onto few ranks; here they stand for an even spread.
        spread = candidates.linear[numbers]
        piece[FIXED, spread] /= owners[spread]
        uneven, unsorted = {}, {}
        for place, number in enumerate(numbers.tolist()):
            if number in candidates.heavy:
                pieces = candidates.pieces(number)
                seconds = pieces[WORK] + pieces[IDS : BACKWARD + 1].sum(0) * ranks.owned_byte_s
                unsorted[place] = np.argsort(-seconds, kind="stable")
                uneven[place] = pieces[:, unsorted[place]]
        common = candidates.common[:, numbers]
        return cls(numbers, owners, piece, common, uneven, unsorted, banned)

    def pieces(self, place: int) -> Floats:
        """[6, owners] the pieces of a choice, heaviest first."""
        if place in self.uneven:
            return self.uneven[place]
        return np.repeat(self.piece[:, place, None], int(self.owners[place]), axis=1)

    def total(self, place: int) -> Floats:
        """[6] what the owners of a choice bear together."""
        if place in self.uneven:
            return np.asarray(self.uneven[place].sum(axis=1))
        total: Floats = self.piece[:, place] * self.owners[place]
        return total


class Board:
    """A state of the search.

    Args:
        choices: of every table.
        ranks: the cluster.
    """

    def __init__(self, choices: Sequence[Choices], ranks: Ranks) -> None:
        self.choices, self.ranks = choices, ranks
        self.places = [0] * len(choices)
        self.owners: list[Ints] = [np.empty(0, dtype=np.int64)] * len(choices)
        self.owned = np.zeros((len(choices), ranks.size), dtype=np.bool_)
        self.loads: Floats = np.zeros((6, ranks.size))
        self.common: Floats = np.zeros(6)
        self.phases = _phases([choice.piece for choice in choices])

    def copy(self) -> Board:
        """An equal state that changes on its own."""
        other = copy.copy(self)
        other.take(self)
        return other

    def take(self, other: Board) -> None:
        """Become equal to another state of the same tables."""
        self.places, self.owners = list(other.places), list(other.owners)
        self.owned = other.owned.copy()
        self.loads, self.common = other.loads.copy(), other.common.copy()

    def cost_s(self) -> Floats:
        """[W] seconds of every rank, latency aside."""
        return self.ranks.cost_s(self.loads, self.common, self.phases)

    def memory(self) -> Floats:
        """[W] share of every rank's memory that is used."""
        return self.ranks.memory(self.loads, self.common)

    def fits(self) -> bool:
        """Whether no rank's memory is over its cap."""
        return bool(self.memory().max() <= 1 + 1e-12)

    def value(self, aim: Aim) -> float:
        """How far the state is from the aim."""
        return float(aim.of(self.cost_s(), self.memory()))

    def load_of(self, table: int) -> Floats:
        """[6, W] what the owners of a table's pieces bear."""
        return self.spread(table, self.places[table], self.owners[table])

    def spread(self, table: int, place: int, owners: Ints) -> Floats:
        """[6, W] the loads of a choice's pieces on their owners."""
        load = np.zeros((6, self.ranks.size))
        load[:, owners] = self.choices[table].pieces(place)
        return load

    def common_of(self, table: int) -> Floats:
        """[6] what every rank bears for a table."""
        return self.choices[table].common[:, self.places[table]]

    def without(self, tables: Sequence[int]) -> tuple[Floats, Floats]:
        """The loads and the common part if those tables weren't there."""
        loads, common = self.loads.copy(), self.common.copy()
        for table in tables:
            loads -= self.load_of(table)
            common -= self.common_of(table)
        return np.maximum(loads, 0.0), common

    def recount(self) -> None:
        """Add the loads up again, which moves change by differences."""
        self.loads = np.sum([self.load_of(t) for t in range(len(self.choices))], axis=0)
        self.common = np.sum([self.common_of(t) for t in range(len(self.choices))], axis=0)

    def put(self, table: int, place: int, owners: Ints, loads: Floats, common: Floats) -> None:
        """Give a table a choice and owners, on top of the loads without it."""
        self.places[table], self.owners[table] = place, owners
        self.owned[table] = False
        self.owned[table, owners] = True
        self.loads = loads + self.spread(table, place, owners)
        self.common = common + self.common_of(table)

    def best(self, table: int, loads: Floats, common: Floats, aim: Aim) -> tuple[float, int, Ints]:
        """The best choice and owners for a table on top of loads without it.

        A choice's pieces go to the first ranks in one of several orders: by cost, work,
        bytes to send, or memory, the least first.
        """
        choices, ranks = self.choices[table], self.ranks
        orders = self._orders(loads, common, aim, choices.banned)
        position = np.argsort(orders, axis=1)
        taken = position < choices.owners[:, None, None]
        tried = choices.piece[:, :, None, None] * taken
        for place, pieces in choices.uneven.items():
            padded = np.zeros((6, ranks.size))
            padded[:, : pieces.shape[1]] = pieces
            tried[:, place] = padded[:, position]
        tried += loads[:, None, None, :]
        everywhere = np.broadcast_to(
            (common[:, None] + choices.common)[:, :, None], tried.shape[:-1]
        )
        seconds = ranks.cost_s(tried, everywhere, self.phases)
        values = aim.of(seconds, ranks.memory(tried, everywhere))
        at = int(values.argmin())
        place, order = divmod(at, len(orders))
        return float(values.flat[at]), place, orders[order, : choices.owners[place]]

    def _orders(self, loads: Floats, common: Floats, aim: Aim, banned: Mask | None) -> Ints:
        memory = self.ranks.memory(loads, common)
        pressure = PRESSURE * memory**8
        keys = [self.ranks.cost_s(loads, common, self.phases) / aim.scale_s + pressure]
        for amount in (loads[WORK], loads[FORWARD]):
            keys.append(amount / max(float(amount.mean()), 1e-300) + pressure)
        if memory.max() > 0.5:
            keys.append(memory)
        if banned is not None:
            keys = [np.where(banned, np.inf, key) for key in keys]
        return np.argsort(np.array(keys), axis=1, kind="stable")


def _phases(pieces: Sequence[Floats]) -> Phases:
    """The phases that cost anything; gradients that go back as the values came count twice."""
    there = [phase for phase, _ in ALL_PHASES if any(piece[phase].any() for piece in pieces)]
    if BACKWARD in there and all((p[FORWARD] == p[BACKWARD]).all() for p in pieces):
        return tuple((phase, 1 + (phase == FORWARD)) for phase in there if phase != BACKWARD)
    return tuple((phase, 1) for phase in there)
