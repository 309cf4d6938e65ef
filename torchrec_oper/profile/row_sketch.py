"""Counts of more rows than memory holds: the hot rows by id, the others by a sample of rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchrec_oper.profile.bins import BinnedSums
from torchrec_oper.profile.tail import Blocks, blocks_of, fit_blocks

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TRUSTED = 32  # a listed count may lack this part of itself: 3.1 %


class RowSketch:
    """Counts of rows, some of them estimated.

    Two parts, of up to ``limit_rows`` rows each. **Hot rows**: a Misra-Gries summary, fed
    and cut as in Agarwal et al., "Mergeable summaries" (PODS 2012): where more rows are
    counted than there is room for, the coldest are dropped, and ``error`` rises to the
    most that a dropped row can have had. It stays within ``lookups / limit_rows``, and a
    row that isn't counted had ``error`` lookups at most. ``missed`` is what a counted row
    can have had before it was counted, 0 for rows that were hot all along. **A sample of
    rows**: the exact counts of all rows whose hash is below a threshold, which halves
    when there are too many (distinct sampling: Gibbons, VLDB 2001; sketches whose hashes
    are shared can be merged: Cohen and Kaplan's bottom-k, PODC 2007). The threshold
    depends on nothing but which rows were seen.

    Args:
        limit_rows: rows in each part at most.
    """

    def __init__(self, limit_rows: int) -> None:
        self.limit_rows = limit_rows
        self.lookups = 0
        self.error = 0
        self.halvings = 0
        none: Ints = np.empty(0, np.int64)
        # Of the hot rows and the sample: ids ascending, and what is known of each row.
        self._hot_ids = self._hot_counts = self._hot_missed = none
        self._sample_ids = self._sample_counts = none

    def add(self, ids: Ints, counts: Ints) -> None:
        """Add lookups (int64 [N]) of distinct rows (int64 [N], ascending)."""
        self.lookups += int(counts.sum())
        self._hot_ids, (self._hot_counts, self._hot_missed) = add_by_id(
            (self._hot_ids, self._hot_counts, self._hot_missed),
            (ids, counts, np.zeros_like(counts)),
            lacking=(0, self.error),
        )
        kept = self._in_sample(ids)
        self._sample_ids, (self._sample_counts,) = add_by_id(
            (self._sample_ids, self._sample_counts), (ids[kept], counts[kept])
        )
        self._cut()

    def merge(self, other: RowSketch) -> None:
        """Add what another sketch with the same limit has seen."""
        # Rows that the other doesn't count may have had its error's lookups there.
        mine = np.isin(self._hot_ids, other._hot_ids, assume_unique=True, invert=True)
        self._hot_missed = self._hot_missed + np.where(mine, other.error, 0)
        self._hot_ids, (self._hot_counts, self._hot_missed) = add_by_id(
            (self._hot_ids, self._hot_counts, self._hot_missed),
            (other._hot_ids, other._hot_counts, other._hot_missed),
            lacking=(0, self.error),
        )
        self.lookups += other.lookups
        self.error += other.error
        self.halvings = max(self.halvings, other.halvings)
        self._sample_ids, (self._sample_counts,) = add_by_id(
            (self._sample_ids, self._sample_counts), (other._sample_ids, other._sample_counts)
        )
        self._keep_sample()
        self._cut()

    def hot_rows(self) -> tuple[Ints, Ints]:
        """The ids (ascending) and counts of rows that are surely hotter than all others.

        A count is exact, or low by 1 in ``TRUSTED`` at most.
        """
        sure = (self._hot_missed * TRUSTED <= self._hot_counts) & (self._hot_counts > self.error)
        return self._hot_ids[sure], self._hot_counts[sure]

    def tail(self, listed: Ints, counts: Ints, *, table_rows: int) -> Blocks:
        """The rows that aren't listed, as blocks of alike rows, hottest first.

        The sample's rows stand for all: their numbers are scaled so that the lookups
        are those that the listed rows leave.

        Args:
            listed: int64 [U], ids of the listed rows.
            counts: int64 [U], their counts.
            table_rows: rows of the table.
        """
        most = int(counts.min()) if counts.size else self.lookups
        unlisted = np.isin(self._sample_ids, listed, assume_unique=True, invert=True)
        bins = BinnedSums()
        bins.add(np.minimum(self._sample_counts[unlisted], most))
        return fit_blocks(
            blocks_of(bins),
            weight=1 << self.halvings,
            lookups=self.lookups - int(counts.sum()),
            room_rows=table_rows - listed.size,
            most_per_row=most,
        )

    def _cut(self) -> None:
        """Drop rows until both parts are within their limit."""
        while self._sample_ids.size > self.limit_rows:
            self.halvings += 1
            self._keep_sample()
        size = self._hot_ids.size
        if size <= self.limit_rows:
            return
        most = self._hot_counts + self._hot_missed
        self.error = int(np.partition(most, size - self.limit_rows - 1)[size - self.limit_rows - 1])
        kept = most > self.error
        self._hot_ids = self._hot_ids[kept]
        self._hot_counts, self._hot_missed = self._hot_counts[kept], self._hot_missed[kept]

    def _keep_sample(self) -> None:
        kept = self._in_sample(self._sample_ids)
        self._sample_ids, self._sample_counts = self._sample_ids[kept], self._sample_counts[kept]

    def _in_sample(self, ids: Ints) -> Bools:
        return np.asarray(mixed(ids) <= np.uint64((1 << 64) - 1 >> self.halvings))


def add_by_id(
    known: tuple[Ints, ...], more: tuple[Ints, ...], *, lacking: tuple[int, ...] = (0,)
) -> tuple[Ints, tuple[Ints, ...]]:
    """Add up what two lists know of rows.

    Args:
        known: ids, int64 [N] ascending, and values of each.
        more: the same of other rows; values are as many, all [M].
        lacking: what is added to each value of a row that only ``more`` has.

    Returns:
        Ids, ascending, and the values' sums.
    """
    (ids, *values), (new_ids, *new_values) = known, more
    at = np.searchsorted(ids, new_ids)
    found = at < ids.size
    found[found] = ids[at[found]] == new_ids[found]
    old, new = at[found], at[~found]
    sums = []
    for value, new_value, extra in zip(values, new_values, lacking, strict=True):
        value = value.copy()
        value[old] += new_value[found]
        sums.append(np.insert(value, new, new_value[~found] + extra))
    return np.insert(ids, new, new_ids[~found]), tuple(sums)


def mixed(numbers: Ints) -> npt.NDArray[np.uint64]:
    """A hash of each number: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = numbers.astype(np.int64, copy=False).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
