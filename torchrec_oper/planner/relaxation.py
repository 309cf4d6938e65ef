"""The planning problem with everything averaged over alike ranks: a linear program.

A plan's cost is that of its slowest rank, so it is no less than the mean over any class
of ranks. Sums of seconds and bytes are linear in the choices, ``max(sent, received)`` is
convex, so the mean over a class is no less than the cost of the mean loads. What each
table's candidates add to those means, and the memory they take, is a linear program over
(table, candidate, class of the owners), with a fraction between 0 and 1 for each. Its
optimum is a lower bound for every plan.

Owner cuts make it tighter: the slowest rank costs no less than the busiest owner of any
one table, plus the least that every other table puts on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.candidates import BYTES, FIXED, PHASES, WORK, Candidates
from torchrec_oper.planner.certificate import Multipliers
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.rank_classes import RankClasses

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

LINKS = 4  # sent within the host, received within it, sent between hosts, received between them


@dataclass(frozen=True, eq=False)
class Summary:
    """What the relaxation needs to know of a table's candidates, [C] each.

    Args:
        common: [3, C] work, fixed seconds and bytes of every rank.
        owned: [6, C] what all owners bear together.
        busiest_s: seconds of the busiest owner, if it had this table alone.
        least_s: seconds that the table costs the rank that it costs least.
        busiest_bytes: bytes of the owner that needs most.
    """

    common: Floats
    owned: Floats
    busiest_s: Floats
    least_s: Floats
    busiest_bytes: Floats

    def features(self, cluster: Cluster, classes: RankClasses) -> Floats:
        """[F, C] numbers of which less is never worse."""
        cuts = [self.busiest_s - self.least_s, self.least_s]
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
    rates, world = cluster.rates, float(cluster.world_size)
    intra, inter = rates.intra_host.bytes_per_s, rates.inter_host.bytes_per_s
    per_byte = ((classes.local - 1) / intra + (world - classes.local) / inter).min()
    speed, phases = classes.speed.max(), list(PHASES)

    def owner_s(vectors: Floats) -> Floats:
        fixed_s: Floats = vectors[WORK] / speed + vectors[FIXED]
        link_s: Floats = vectors[phases].sum(axis=0) * per_byte
        return fixed_s + link_s

    owners = candidates.columns * candidates.parts
    owned = candidates.totals()
    common_s = candidates.common[WORK] / speed + candidates.common[FIXED]
    busiest, lightest = owner_s(candidates.piece), owner_s(candidates.piece)
    most_bytes = candidates.piece[BYTES].copy()
    for number, heavy in candidates.heavy.items():
        seconds = owner_s(heavy)
        busiest[number] = max(busiest[number], seconds.max())
        lightest[number] = min(lightest[number], seconds.min())
        most_bytes[number] = max(most_bytes[number], heavy[BYTES].max())
    received = owned[phases].sum(axis=0) * _least_per_byte(candidates, cluster, classes)
    stranger = (owners < world) | candidates.linear
    least = np.where(stranger, np.minimum(lightest, received), lightest)
    exists = owners > 0
    return Summary(
        common=candidates.common[[WORK, FIXED, BYTES]],
        owned=owned,
        busiest_s=common_s + np.where(exists, busiest, 0.0),
        least_s=common_s + np.where(exists, least, 0.0),
        busiest_bytes=candidates.common[BYTES] + np.where(exists, most_bytes, 0.0),
    )


def _least_per_byte(candidates: Candidates, cluster: Cluster, classes: RankClasses) -> Floats:
    """[C] the least seconds of a rank for each byte that it needs and might not own.

    A rank that owns nothing receives it all, as much as can be from its own host. The
    owner of a share s of uneven parts receives 1 - s and sends (W - 1) s of it, which
    is least for s = 1 / W.
    """
    intra = cluster.rates.intra_host.bytes_per_s
    inter = cluster.rates.inter_host.bytes_per_s
    world, local = float(cluster.world_size), classes.local.max()
    if world == local:
        whole, uneven = 1 / intra, (world - 1) / world / intra
        return np.where(candidates.linear, uneven, whole)
    owners = np.maximum(candidates.columns * candidates.parts, 1)
    nearby = np.minimum(1.0, local / owners) if intra >= inter else np.zeros(len(owners))
    uneven = (world - 1) / world / max(intra, inter)
    return np.where(candidates.linear, uneven, nearby / intra + (1 - nearby) / inter)


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


def link_weights(cluster: Cluster, classes: RankClasses) -> Floats:
    """[4, G, G] seconds on each link of class g for a byte owned by each rank of class g'."""
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
        seconds = common_s @ summary.common[:, mask]
        seconds = seconds + (owned_s.T @ summary.owned[:, mask]).min(axis=0)
        least = summary.least_s[mask]
        seconds += multipliers.owners.sum() * least + cut * (summary.busiest_s[mask] - least)
        total += float(seconds.min())
    return total - float(memory @ classes.memory_bytes)


def relax(
    summaries: Sequence[Summary],
    allowed: Sequence[Mask],
    cluster: Cluster,
    classes: RankClasses,
    *,
    memory_share: float = 1.0,
) -> Relaxed | None:
    """Solve the relaxation over the allowed candidates; None where nothing is feasible.

    Args:
        summaries: of every table.
        allowed: [C] for each table, which of its candidates may be used.
        cluster, classes: the ranks.
        memory_share: how much of the memory caps may be used.
    """
    if not all(mask.any() for mask in allowed):
        return None
    model = _Model(summaries, allowed, cluster, classes, memory_share)
    solution = solve(model.program())
    return None if solution is None else model.read(*solution)


def solve(program: highspy.HighsLp) -> tuple[Floats, Floats] | None:
    """The values of an optimum's columns and the duals of its rows, or None without one."""
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    # One thread and a fixed seed: equal programs have equal solutions.
    for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        solver.setOptionValue(option, value)
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = solver.getSolution()
    return np.array(solution.col_value), np.array(solution.row_dual)


class _Model:
    """Columns: (table, candidate, class) fractions, cost z, least g, volumes, link seconds.

    Rows: each class's cost below z; each class's memory; least sum below g; each table's
    owner cut below z; each table's fractions sum to 1; volumes; link seconds.
    """

    def __init__(
        self,
        summaries: Sequence[Summary],
        allowed: Sequence[Mask],
        cluster: Cluster,
        classes: RankClasses,
        memory_share: float,
    ) -> None:
        self.classes, self.tables = classes, len(summaries)
        self.caps = classes.memory_bytes * memory_share
        self.sizes = [mask.size for mask in allowed]
        picked = [np.flatnonzero(mask) for mask in allowed]
        self.table = np.repeat(np.arange(self.tables), [len(numbers) for numbers in picked])
        self.number = np.concatenate(picked)

        def gather(field: str) -> Floats:
            return np.concatenate(
                [getattr(s, field)[..., n] for s, n in zip(summaries, picked, strict=True)], axis=-1
            )

        self.common, self.owned = gather("common"), gather("owned")
        self.busiest, self.least = gather("busiest_s"), gather("least_s")
        self.weights = link_weights(cluster, classes)
        # Scaled so that what the solver sees is near 1.
        mean = self.common[0] + self.common[1]
        mean = mean + (self.owned[WORK] + self.owned[FIXED]) / classes.sizes.sum()
        edges = np.searchsorted(self.table, np.arange(self.tables))
        self.second = 1 / max(float(np.minimum.reduceat(mean, edges).sum()), 1e-30)
        volumes = self.owned[list(PHASES)].sum(axis=1) / len(self.table) * self.tables
        self.volume = 1 / np.maximum(volumes / classes.sizes.sum(), 1e-30)

    def program(self) -> highspy.HighsLp:
        g, t, n = len(self.classes), self.tables, len(self.table)
        phases = len(PHASES)
        cost, memory = 0, g
        least, cut, one = 2 * g, 2 * g + 1, 2 * g + 1 + t
        volume, link = one + t, one + t + phases * g
        rows = link + LINKS * phases * g
        z, base, volumes, links = n * g, n * g + 1, n * g + 2, n * g + 2 + phases * g
        columns = links + 2 * phases * g
        entries = Entries()
        for owner in range(g):
            at = np.arange(n) * g + owner
            size = self.classes.sizes[owner]
            for row in range(g):
                mine = (row == owner) / size
                speed = self.classes.speed[row]
                work = (self.common[0] + self.owned[WORK] * mine) / speed
                entries.add(
                    cost + row, at, (work + self.common[1] + self.owned[FIXED] * mine) * self.second
                )
                entries.add(
                    memory + row, at, (self.common[2] + self.owned[BYTES] * mine) / self.caps[row]
                )
            entries.add(least, at, self.least * self.second)
            entries.add(cut + self.table, at, (self.busiest - self.least) * self.second)
            entries.add(one + self.table, at, np.ones(n))
            for p, phase in enumerate(PHASES):
                entries.add(volume + p * g + owner, at, self.owned[phase] / size * self.volume[p])
        entries.add(np.r_[cost : cost + g, cut : cut + t], z, -np.ones(g + t))
        entries.add(np.r_[least, cut : cut + t], base, np.r_[-1.0, np.ones(t)])
        for p in range(phases):
            for own in range(g):
                entries.add(volume + p * g + own, volumes + p * g + own, -1.0)
                for kind in range(LINKS):
                    seconds = self.weights[kind, :, own] / self.volume[p] * self.second
                    entries.add(
                        link + (kind * phases + p) * g + np.arange(g),
                        volumes + p * g + own,
                        seconds,
                    )
            for row in range(g):
                for kind in range(LINKS):
                    seconds_at = links + ((kind // 2) * phases + p) * g + row
                    entries.add(link + (kind * phases + p) * g + row, seconds_at, -1.0)
                for level in range(2):
                    entries.add(cost + row, links + (level * phases + p) * g + row, 1.0)
        upper = np.zeros(rows)
        lower = np.full(rows, -highspy.kHighsInf)
        upper[memory : memory + g] = 1.0
        lower[one : one + t] = upper[one : one + t] = 1.0
        lower[volume:link] = 0.0
        objective = np.zeros(columns)
        objective[z] = 1.0
        return linear_program(entries, objective, lower, upper)

    def read(self, values: Floats, duals: Floats) -> Relaxed:
        g, t, phases = len(self.classes), self.tables, len(PHASES)
        fractions = values[: len(self.table) * g].reshape(-1, g).sum(axis=1)
        edges = np.searchsorted(self.table, np.arange(t + 1))
        shares = []
        for table, size in enumerate(self.sizes):
            mine = slice(edges[table], edges[table + 1])
            share = np.zeros(size)
            share[self.number[mine]] = np.clip(fractions[mine], 0, 1)
            shares.append(share)
        prices = np.maximum(-duals, 0.0)
        links = prices[-LINKS * phases * g :].reshape(2, 2, phases, g)
        sums = links.sum(axis=1)
        cost, owners = prices[:g], prices[2 * g + 1 : 2 * g + 1 + t]
        # The solver's weights sum to 1 but for rounding.
        total = float(cost.sum() + owners.sum())
        multipliers = Multipliers(
            cost=cost / total,
            sent_share=np.where(sums > 0, links[:, 0] / np.where(sums > 0, sums, 1), 1.0),
            memory=prices[g : 2 * g] / self.second / self.caps / total,
            owners=owners / total,
        )
        return Relaxed(float(values[len(self.table) * g]) / self.second, tuple(shares), multipliers)


class Entries:
    """The nonzeros of a matrix, gathered piece by piece."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []
        self.columns: list[Ints] = []
        self.values: list[Floats] = []

    def add(self, rows: npt.ArrayLike, columns: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Add entries; the arrays are broadcast against each other."""
        r, c, v = np.broadcast_arrays(rows, columns, values)
        self.rows.append(r.ravel())
        self.columns.append(c.ravel())
        self.values.append(v.ravel())


def linear_program(
    entries: Entries, objective: Floats, lower: Floats, upper: Floats
) -> highspy.HighsLp:
    """Minimise over columns of 0 or more."""
    rows, columns = np.concatenate(entries.rows), np.concatenate(entries.columns)
    values = np.concatenate(entries.values)
    there = values != 0
    order = np.lexsort((rows[there], columns[there]))
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(objective), len(upper)
    program.col_cost_ = objective
    program.col_lower_ = np.zeros(len(objective))
    program.col_upper_ = np.full(len(objective), highspy.kHighsInf)
    program.row_lower_, program.row_upper_ = lower, upper
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_ = np.searchsorted(columns[there][order], np.arange(len(objective) + 1))
    matrix.index_, matrix.value_ = rows[there][order], values[there][order]
    return program
