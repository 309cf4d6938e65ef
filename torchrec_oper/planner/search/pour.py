"""Levels the ranks with the tables whose rows may be dealt unevenly: a linear program.

Tables of equal loads are poured as one, so that the program stays small, and each of
them takes its share of the ranks in turn, which leaves most of them on one rank or two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import highspy
import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.candidates import BYTES, FIXED, PHASES, WORK
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.linear_program import Entries, linear_program, solve
from torchrec_oper.planner.search.board import Ranks

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MOST_VARIABLES = 6000
NEGLIGIBLE = 1e-9
MARGIN = 1e-6  # share of the memory caps: the solver lets rows be over by 1e-7


def pour(
    totals: dict[int, Floats],
    loads: Floats,
    common: Floats,
    ranks: Ranks,
    away: Mapping[int, Mask | None],
) -> dict[int, tuple[Ints, Floats]] | None:
    """The owners of each table and their shares, or None where it doesn't fit.

    Args:
        totals: for each table what its owners bear together, [6].
        loads: [6, W] what the ranks bear without these tables.
        common: [6] what all ranks bear.
        ranks: the cluster.
        away: for each table the ranks that may own none of it, [W], or None.
    """
    if not totals:
        return {}
    banned = {
        table: np.zeros(ranks.size, dtype=np.bool_) if mask is None else mask
        for table, mask in away.items()
    }
    kinds: dict[tuple[bytes, bytes], list[int]] = {}
    for table, total in totals.items():
        amounts = np.round(np.log(np.maximum(total, 1e-300)), 9).tobytes()
        kinds.setdefault((amounts, banned[table].tobytes()), []).append(table)

    def weight(tables: list[int]) -> float:
        total = totals[tables[0]]
        return len(tables) * float(total[WORK] + total[list(PHASES)].sum() * ranks.owned_byte_s)

    ordered = sorted(kinds.values(), key=lambda tables: -weight(tables))
    poured = ordered[: max(1, MOST_VARIABLES // ranks.size)]
    rest = [table for tables in ordered[len(poured) :] for table in tables]
    spread = {table: ~banned[table] / (~banned[table]).sum() for table in rest}
    loads = loads + sum((totals[t][:, None] * spread[t] for t in rest), np.zeros((6, 1)))
    levels = _Levels(
        np.array([totals[tables[0]] * len(tables) for tables in poured]),
        loads,
        common,
        ranks,
        np.array([banned[tables[0]] for tables in poured]),
    )
    shares = levels.solve()
    if shares is None:
        return None
    result: dict[int, tuple[Ints, Floats]] = {}
    for tables, share in zip(poured, shares, strict=True):
        result |= _dealt(tables, share)
    for table, share in spread.items():
        owners = np.flatnonzero(share)
        result[table] = (owners, share[owners])
    return result


def _dealt(tables: Sequence[int], shares: Floats) -> dict[int, tuple[Ints, Floats]]:
    """Each table's owners and their shares, out of the ranks' shares of all of them."""
    ranks = np.flatnonzero(shares > NEGLIGIBLE)
    ends = np.cumsum(shares[ranks]) / shares[ranks].sum() * len(tables)
    result = {}
    for at, table in enumerate(tables):
        begins = np.concatenate([[0.0], ends[:-1]])
        parts = np.minimum(ends, at + 1) - np.maximum(begins, at)
        mine = np.flatnonzero(parts > NEGLIGIBLE)
        result[table] = (ranks[mine], parts[mine] / parts[mine].sum())
    return result


class _Levels:
    """The program: shares of K kinds of tables on W ranks, so that the slowest rank is fast.

    Columns: shares, owned bytes of each phase and rank, bytes of each phase and host,
    seconds on the links within and between hosts, and the cost of the slowest rank.
    """

    def __init__(
        self, amounts: Floats, loads: Floats, common: Floats, ranks: Ranks, banned: Mask
    ) -> None:
        self.amounts, self.loads, self.common, self.ranks = amounts, loads, common, ranks
        self.banned = banned
        self.kinds, self.world = len(amounts), ranks.size
        volumes = loads[list(PHASES)].sum(axis=1) + amounts[:, list(PHASES)].sum(axis=0)
        self.phases = [phase for phase, total in zip(PHASES, volumes, strict=True) if total > 0]
        self.totals = {p: float(v) for p, v in zip(PHASES, volumes, strict=True)}
        mean = loads[WORK].mean() + amounts[:, WORK].sum() / self.world + common[WORK]
        mean += volumes.sum() / self.world * ranks.owned_byte_s
        self.second = 1 / max(float(mean), 1e-300)
        self.hosts = len(ranks.starts)
        host_of = np.empty(self.world, dtype=np.int64)
        host_of[ranks.by_host] = ranks.host_of
        self.host_of = host_of
        self.entries = Entries()
        self.lower: list[Floats] = []
        self.upper: list[Floats] = []
        self.rows = 0

    def solve(self) -> Floats | None:
        """[K, W] the shares, or None where the tables don't fit."""
        k, w, p = self.kinds, self.world, len(self.phases)
        owned, hosts = k * w, k * w + p * w
        near = hosts + p * self.hosts
        far = near + p * w
        slowest = far + p * w * self.ranks.many_hosts
        for at in range(p):
            self._phase(at, owned + at * w, hosts + at * self.hosts, near + at * w, far + at * w)
        self._costs(near, far, slowest)
        self._memory()
        self._sums()
        objective = np.zeros(slowest + 1)
        objective[slowest] = 1.0
        lower, upper = np.concatenate(self.lower), np.concatenate(self.upper)
        solution = solve(linear_program(self.entries, objective, lower, upper))
        if solution is None:
            return None
        shares: Floats = np.maximum(solution[0][: k * w].reshape(k, w), 0.0)
        return shares

    def _close(self, lower: npt.ArrayLike, upper: npt.ArrayLike, count: int) -> None:
        self.lower.append(np.broadcast_to(np.asarray(lower, dtype=np.float64), (count,)))
        self.upper.append(np.broadcast_to(np.asarray(upper, dtype=np.float64), (count,)))
        self.rows += count

    def _share_columns(self) -> Ints:
        return np.arange(self.kinds * self.world).reshape(self.kinds, self.world)

    def _phase(self, at: int, owned: int, hosts: int, near: int, far: int) -> None:
        """Owned bytes of ranks and hosts, and the link time they take, of one phase."""
        phase, add, ranks = self.phases[at], self.entries.add, self.ranks
        unit = self.totals[phase] / self.world
        rank, infinite = np.arange(self.world), highspy.kHighsInf
        amounts = self.amounts[:, phase, None] / unit
        add(self.rows + rank, self._share_columns(), -amounts)
        add(self.rows + rank, owned + rank, 1.0)
        fixed = self.loads[phase] / unit
        self._close(fixed, fixed, self.world)
        add(self.rows + self.host_of, owned + rank, -1.0)
        add(self.rows + np.arange(self.hosts), hosts + np.arange(self.hosts), 1.0)
        self._close(0.0, 0.0, self.hosts)
        second = unit * ranks.intra * self.second
        add(self.rows + rank, owned + rank, ranks.others * second)
        add(self.rows + rank, near + rank, -1.0)
        self._close(-infinite, 0.0, self.world)
        add(self.rows + rank, hosts + self.host_of, second)
        add(self.rows + rank, owned + rank, -second)
        add(self.rows + rank, near + rank, -1.0)
        self._close(-infinite, 0.0, self.world)
        if ranks.many_hosts:
            second = unit * ranks.inter * self.second
            add(self.rows + rank, owned + rank, ranks.strangers * second)
            add(self.rows + rank, far + rank, -1.0)
            self._close(-infinite, 0.0, self.world)
            add(self.rows + rank, hosts + self.host_of, -second)
            add(self.rows + rank, far + rank, -1.0)
            total = self.totals[phase] * ranks.inter * self.second
            self._close(-infinite, -total, self.world)

    def _costs(self, near: int, far: int, slowest: int) -> None:
        rank, ranks = np.arange(self.world), self.ranks
        work = self.amounts[:, WORK, None] / ranks.speeds * self.second
        self.entries.add(self.rows + rank, self._share_columns(), work)
        for at in range(len(self.phases)):
            self.entries.add(self.rows + rank, near + at * self.world + rank, 1.0)
            if ranks.many_hosts:
                self.entries.add(self.rows + rank, far + at * self.world + rank, 1.0)
        self.entries.add(self.rows + rank, slowest, -1.0)
        fixed = (self.loads[WORK] + self.common[WORK]) / ranks.speeds + self.loads[FIXED]
        self._close(-highspy.kHighsInf, -fixed * self.second, self.world)

    def _memory(self) -> None:
        rank = np.arange(self.world)
        amounts = self.amounts[:, BYTES, None] / self.ranks.caps
        self.entries.add(self.rows + rank, self._share_columns(), amounts)
        room = 1 - MARGIN - self.ranks.memory(self.loads, self.common)
        self._close(-highspy.kHighsInf, np.maximum(room, 0.0), self.world)

    def _sums(self) -> None:
        columns = self._share_columns()
        self.entries.add(self.rows + np.arange(self.kinds)[:, None], columns, 1.0)
        self._close(1.0, 1.0, self.kinds)
        if self.banned.any():
            kind, rank = np.nonzero(self.banned)
            self.entries.add(self.rows, columns[kind, rank], 1.0)
            self._close(0.0, 0.0, 1)
