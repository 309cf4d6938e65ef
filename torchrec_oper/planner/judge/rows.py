"""Expected numbers about the rows of a table: which are drawn, how often, by how many bags."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.decision import Decision, Exchange
from torchrec_oper.planner.demand import TableDemand

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# A row must be hotter than the mean by more than this share of it to be a part of its own:
# whether a row as hot as the mean is one must not hang on the rounding of sums.
ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class RowSets:
    """Sets of rows of one table, hot rows or the parts of cold ones.

    Args:
        rows: [K] float64, rows of each set.
        chance: [K] float64, the chance that a lookup is of one of them.
        distinct: [K] float64, how many of them a rank's lookups of one step name.
        distinct_of_all: [K] float64, the same for the lookups of all ranks together.
    """

    rows: Floats
    chance: Floats
    distinct: Floats
    distinct_of_all: Floats

    def repeated(self, times: Ints) -> RowSets:
        """Each set as often as ``times`` [K] says."""
        sets = (self.rows, self.chance, self.distinct, self.distinct_of_all)
        return RowSets(*(np.repeat(numbers, times) for numbers in sets))


@dataclass(frozen=True, eq=False)
class RowSplit:
    """The rows of a table behind a hot cut; made by ``split_at``.

    Args:
        hot: one set, the hot rows.
        cold: [4] rows, chance, distinct and distinct_of_all of all other rows.
        hottest: [4, L] the same of each of the hottest of them, as far as they might be
            parts of their own.
    """

    hot: RowSets
    cold: Floats
    hottest: Floats

    def parts(self, exchange: Exchange, parts: int) -> tuple[RowSets, Ints]:
        """The parts that the cold rows are dealt to, and how many there are of each kind.

        The parts of ``rows`` are alike. Those of other exchanges are filled by chance: a
        row hotter than what the parts left over would have on average is a part of its
        own, the hottest first.
        """
        heavy = 0 if exchange == "rows" else self._heavy_rows(parts)
        alone = self.hottest[:, :heavy]
        rest = np.maximum(self.cold - alone.sum(axis=1), 0.0) / (parts - heavy)
        sets = RowSets(*np.concatenate([alone, rest[:, None]], axis=1))
        return sets, np.array([1] * heavy + [parts - heavy])

    def weighted_parts(self, weights: Floats) -> RowSets:
        """The parts where part i has ``weights[i]`` of everything."""
        return RowSets(*np.outer(self.cold, weights))

    def _heavy_rows(self, parts: int) -> int:
        left, heavy = float(self.cold[1]), 0
        for chance in self.hottest[1, : parts - 1].tolist():
            if chance <= left / (parts - heavy) * (1 + ROUNDING):
                break
            left -= chance
            heavy += 1
        return heavy


@dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of a table in a cluster; made by ``table_rows``.

    Args:
        blocks: [4, N] rows, chance, distinct and distinct_of_all of each block of rows.
        ranks: how many ranks look them up.
    """

    blocks: Floats
    ranks: int

    def split_at(self, hot_rows: float) -> RowSplit:
        """The rows behind a hot cut, which may go through a block."""
        before = np.cumsum(self.blocks[0]) - self.blocks[0]
        taken = np.clip(hot_rows - before, 0, self.blocks[0])
        hot = self.blocks * (taken / self.blocks[0])
        cold = (self.blocks - hot)[:, taken < self.blocks[0]]
        # No more rows than ranks can be parts of their own: only the first blocks matter.
        first = cold[:, : int(np.searchsorted(np.cumsum(cold[0]), self.ranks)) + 1]
        times = np.minimum(first[0], self.ranks).astype(np.int64)
        hottest = np.repeat(first / first[0], times, axis=1)[:, : self.ranks]
        return RowSplit(RowSets(*hot.sum(axis=1)[:, None]), cold.sum(axis=1), hottest)


def table_rows(demand: TableDemand, ranks: int) -> TableRows:
    """What ``ranks`` ranks draw of each block of rows."""
    rows, chances = demand.block_rows, demand.block_chances
    in_rank = distinct_rows(chances, demand.lookups)
    in_all = distinct_rows(chances, demand.lookups * ranks)
    return TableRows(rows * np.stack([np.ones_like(chances), chances, in_rank, in_all]), ranks)


def split_rows(demand: TableDemand, decision: Decision, ranks: int) -> tuple[RowSets, RowSets]:
    """The hot rows, one set, and the parts of the cold ones that the decision makes."""
    split = table_rows(demand, ranks).split_at(decision.hot_rows)
    if decision.parts == 0:
        return split.hot, RowSets(*np.zeros((4, 0)))
    if decision.weights is not None:
        return split.hot, split.weighted_parts(decision.weights)
    sets, times = split.parts(decision.exchange, decision.parts)
    return split.hot, sets.repeated(times)


def distinct_rows(chances: Floats, lookups: float) -> Floats:
    """The chance of each row to be among ``lookups`` lookups: ``1 - (1 - p) ** lookups``."""
    if lookups == 0:
        return np.zeros_like(chances)
    with np.errstate(divide="ignore"):  # a row of chance 1: log(0) is -inf, and 1 comes out
        missed = np.log1p(-np.minimum(chances, 1.0))
    return np.asarray(-np.expm1(lookups * missed))


def bag_hits(demand: TableDemand, chances: Floats) -> Floats:
    """[K] the chance that a bag that isn't empty has a row of a set of each chance [K].

    ``sum over lengths of share * (1 - (1 - P) ** length)``
    """
    missed = (1 - np.clip(chances, 0, 1))[:, None] ** demand.bag_lengths[None, :]
    return (1 - missed) @ demand.bag_shares
