"""The planning problem with everything averaged over alike ranks: a linear program.

A plan's cost is that of its slowest rank, so it is no less than the mean over any class
of ranks. Sums of seconds and bytes are linear in the choices, ``max(sent, received)`` is
convex, so the mean over a class is no less than the cost of the mean loads. What each
table's candidates add to those means, and the memory they take, is a linear program over
(table, candidate, class of the owners), with a fraction between 0 and 1 for each.

Owner cuts make it tighter: the slowest rank costs no less than the busiest owner of any
one table, plus the least that every other table puts on every rank, if both count only
what ranks send.

The program finds good multipliers; ``proven_s`` says what they prove. Where ranks are
alike that is the program's optimum. Where they aren't it may be less: the pieces of one
table may differ, and then their owners' classes may, too, which the program leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.candidates import BYTES, FIXED, PHASES, WORK
from torchrec_oper.planner.certificate import Multipliers
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.linear_program import Entries, linear_program, solve
from torchrec_oper.planner.rank_classes import RankClasses
from torchrec_oper.planner.summary import Mask, Summary, link_weights

Ints = npt.NDArray[np.int64]

LINKS = 4  # sent within the host, received within it, sent between hosts, received between them
# What a memory cap costs that is lent twice over, in costs of a plan with memory to spare.
LENT_MEMORY = 1e3


@dataclass(frozen=True, eq=False)
class Relaxed:
    """An optimum of the relaxation.

    Args:
        value_s: its cost.
        shares: for each table the fraction of each of its candidates, [C].
        multipliers: the duals.
    """

    value_s: float
    shares: tuple[Floats, ...]
    multipliers: Multipliers


def proven_s(
    summaries: Sequence[Summary],
    allowed: Sequence[Mask],
    cluster: Cluster,
    classes: RankClasses,
    multipliers: Multipliers,
) -> float:
    """The bound that ``multipliers`` prove: each table takes what is cheapest at their prices."""
    weight, memory, sizes = multipliers.cost, multipliers.memory, classes.sizes
    links = link_weights(cluster, classes).reshape(2, 2, len(classes), len(classes))
    sent = multipliers.sent_share[:, :, :, None] * links[:, 0, None]
    received = (1 - multipliers.sent_share[:, :, :, None]) * links[:, 1, None]
    byte_s = np.einsum("r,lprg->pg", weight, sent + received) / sizes
    common_s = np.array([(weight / classes.speed).sum(), weight.sum(), memory.sum()])
    owned_s = np.zeros((6, len(classes)))
    owned_s[WORK] = weight / classes.speed / sizes
    owned_s[FIXED], owned_s[BYTES] = weight / sizes, memory / sizes
    owned_s[list(PHASES)] = byte_s
    total = 0.0
    for summary, mask, cut in zip(summaries, allowed, multipliers.owners, strict=True):
        kinds_s = (owned_s.T @ summary.kinds).min(axis=0)
        seconds = common_s @ summary.common
        seconds = seconds + np.bincount(summary.kind_of, kinds_s, minlength=len(mask))
        least_s = summary.least_s
        seconds += multipliers.owners.sum() * least_s + cut * (summary.busiest_s - least_s)
        total += float(seconds[mask].min())
    return total - float(memory @ classes.memory_bytes)


def relax(
    summaries: Sequence[Summary],
    allowed: Sequence[Mask],
    cluster: Cluster,
    classes: RankClasses,
    *,
    memory_share: float = 1.0,
    lend: bool = False,
) -> Relaxed | None:
    """Solve the relaxation over the allowed candidates; None where nothing is feasible.

    Args:
        summaries: of every table.
        allowed: [C] for each table, which of its candidates may be used.
        cluster, classes: the ranks.
        memory_share: how much of the memory caps may be used.
        lend: whether memory may be had above the caps, for a high price.
    """
    if not all(mask.any() for mask in allowed):
        return None
    model = _Model(summaries, allowed, cluster, classes, memory_share)
    solution = solve(model.program(lend=lend))
    return None if solution is None else model.read(*solution)


class _Model:
    """Tables of equal candidates are one table that counts as many times: a kind.

    Columns: (kind, candidate, class) fractions, then these, each [their shape].

    * ``z`` the cost, ``base`` the least that all tables put on a rank;
    * ``volumes`` [3, G] bytes that a rank of each class owns, in each phase;
    * ``seconds`` [2, 3, G] on links within and between hosts;
    * ``lent`` memory, where it is lent.

    Rows: ``cost`` [G] and the kinds' owner cuts ``cut`` [K] below z; ``memory`` [G]
    within the caps; ``least`` sums up base; ``one`` [K] fractions sum to the number of
    tables; ``volume`` [3, G] and ``link`` [4, 3, G] sum up volumes and seconds.
    """

    def __init__(
        self,
        summaries: Sequence[Summary],
        allowed: Sequence[Mask],
        cluster: Cluster,
        classes: RankClasses,
        memory_share: float,
    ) -> None:
        kinds: dict[tuple[int, bytes], list[int]] = {}
        for table, (summary, mask) in enumerate(zip(summaries, allowed, strict=True)):
            kinds.setdefault((id(summary), mask.tobytes()), []).append(table)
        self.members = list(kinds.values())
        self.times = np.array([float(len(members)) for members in self.members])
        self.classes, self.tables = classes, len(summaries)
        self.caps = classes.memory_bytes * memory_share
        first = [members[0] for members in self.members]
        self.sizes = [allowed[table].size for table in first]
        picked = [np.flatnonzero(allowed[table]) for table in first]
        self.kind = np.repeat(np.arange(len(first)), [len(numbers) for numbers in picked])
        self.number = np.concatenate(picked)

        def gather(field: str) -> Floats:
            values = [getattr(summaries[table], field) for table in first]
            return np.concatenate(
                [value[..., n] for value, n in zip(values, picked, strict=True)], axis=-1
            )

        self.common, self.owned = gather("common"), gather("owned")
        self.busiest, self.least = gather("busiest_s"), gather("least_s")
        self.weights = link_weights(cluster, classes)
        # Scaled so that what the solver sees is near 1.
        mean = self.common[0] + self.common[1]
        mean = mean + (self.owned[WORK] + self.owned[FIXED]) / classes.sizes.sum()
        edges = np.searchsorted(self.kind, np.arange(len(first)))
        self.second = 1 / max(float(self.times @ np.minimum.reduceat(mean, edges)), 1e-30)
        volumes = self.owned[list(PHASES)].sum(axis=1) / len(self.kind) * self.tables
        self.volume = 1 / np.maximum(volumes / classes.sizes.sum(), 1e-30)
        self._number_rows_and_columns()

    def _number_rows_and_columns(self) -> None:
        g, k, phases = len(self.classes), len(self.members), len(PHASES)
        row, column = _Counter(), _Counter(len(self.kind) * g)
        self.row_cost, self.row_memory = row.take(g), row.take(g)
        self.row_least, self.row_cut, self.row_one = row.take(1), row.take(k), row.take(k)
        self.row_volume = row.take(phases * g).reshape(phases, g)
        self.row_link = row.take(LINKS * phases * g).reshape(LINKS, phases, g)
        self.z, self.base = column.take(1), column.take(1)
        self.volumes = column.take(phases * g).reshape(phases, g)
        self.seconds = column.take(2 * phases * g).reshape(2, phases, g)
        self.rows, self.columns = row.taken, column.taken

    def program(self, *, lend: bool) -> highspy.HighsLp:
        """The linear program, with or without lent memory."""
        entries = Entries()
        for owner in range(len(self.classes)):
            self._add_fractions(entries, owner)
        entries.add(self.row_cost, self.z, -1.0)
        entries.add(self.row_cut, self.z, -1.0)
        entries.add(self.row_least, self.base, -1.0)
        entries.add(self.row_cut, self.base, 1.0)
        self._add_links(entries)
        objective = np.zeros(self.columns + lend)
        objective[self.z] = 1.0
        if lend:
            entries.add(self.row_memory, self.columns, -1.0)
            objective[self.columns] = LENT_MEMORY
        lower, upper = np.full(self.rows, -highspy.kHighsInf), np.zeros(self.rows)
        upper[self.row_memory] = 1.0
        lower[self.row_one] = upper[self.row_one] = self.times
        lower[self.row_volume] = 0.0
        return linear_program(entries, objective, lower, upper)

    def _add_fractions(self, entries: Entries, owner: int) -> None:
        """The fractions of candidates whose pieces lie with class ``owner``."""
        g, size = len(self.classes), self.classes.sizes[owner]
        at = np.arange(len(self.kind)) * g + owner
        for row in range(g):
            mine = (row == owner) / size
            work = (self.common[0] + self.owned[WORK] * mine) / self.classes.speed[row]
            seconds = work + self.common[1] + self.owned[FIXED] * mine
            entries.add(self.row_cost[row], at, seconds * self.second)
            held = self.common[2] + self.owned[BYTES] * mine
            entries.add(self.row_memory[row], at, held / self.caps[row])
        entries.add(self.row_least, at, self.least * self.second)
        # The mean of the cuts of equal tables: as tight, since they can take turns.
        above = (self.busiest - self.least) / self.times[self.kind]
        entries.add(self.row_cut[self.kind], at, above * self.second)
        entries.add(self.row_one[self.kind], at, 1.0)
        for p, phase in enumerate(PHASES):
            volume = self.owned[phase] / size * self.volume[p]
            entries.add(self.row_volume[p, owner], at, volume)

    def _add_links(self, entries: Entries) -> None:
        """The sums of the volumes, and what they take on the links."""
        entries.add(self.row_volume, self.volumes, -1.0)
        for p in range(len(PHASES)):
            # [4, G, 1] rows of links by [1, G] columns of owners' volumes
            seconds = self.weights / self.volume[p] * self.second
            entries.add(self.row_link[:, p, :, None], self.volumes[p], seconds)
            for kind in range(LINKS):
                entries.add(self.row_link[kind, p], self.seconds[kind // 2, p], -1.0)
            entries.add(self.row_cost, self.seconds[:, p], 1.0)

    def read(self, values: Floats, duals: Floats) -> Relaxed:
        """The optimum that the solver found, and the multipliers from its duals."""
        g = len(self.classes)
        fractions = values[: len(self.kind) * g].reshape(-1, g).sum(axis=1)
        shares = self._shares(np.maximum(fractions, 0.0))
        prices = np.maximum(-duals, 0.0)
        links = prices[self.row_link].reshape(2, 2, len(PHASES), g)
        sums = links.sum(axis=1)
        cost, owners = prices[self.row_cost], np.empty(self.tables)
        for members, price in zip(self.members, prices[self.row_cut], strict=True):
            owners[members] = price / len(members)
        # The solver's weights sum to 1 but for rounding, or to 0 where nothing costs anything.
        total = float(cost.sum() + owners.sum())
        if not total:
            cost, total = self.classes.sizes, float(self.classes.sizes.sum())
        multipliers = Multipliers(
            cost=cost / total,
            sent_share=np.where(sums > 0, links[:, 0] / np.where(sums > 0, sums, 1), 1.0),
            memory=prices[self.row_memory] / self.second / self.caps / total,
            owners=owners / total,
        )
        return Relaxed(float(values[self.z[0]]) / self.second, shares, multipliers)

    def _shares(self, fractions: Floats) -> tuple[Floats, ...]:
        """For each table the fraction of each of its candidates, [C].

        Equal tables take their kind's candidates in turn, so that most take one whole.
        """
        shares: list[Floats] = [np.empty(0)] * self.tables
        edges = np.searchsorted(self.kind, np.arange(len(self.members) + 1))
        for kind, members in enumerate(self.members):
            mine = slice(edges[kind], edges[kind + 1])
            ends = np.cumsum(fractions[mine])
            ends *= len(members) / ends[-1]
            begins = np.concatenate([[0.0], ends[:-1]])
            for turn, table in enumerate(members):
                shares[table] = np.zeros(self.sizes[kind])
                taken = np.minimum(ends, turn + 1) - np.maximum(begins, turn)
                shares[table][self.number[mine]] = np.maximum(taken, 0.0)
        return tuple(shares)


class _Counter:
    """Hands out numbers in order."""

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken

    def take(self, count: int) -> Ints:
        """The next ``count`` numbers."""
        self.taken += count
        return np.arange(self.taken - count, self.taken)
