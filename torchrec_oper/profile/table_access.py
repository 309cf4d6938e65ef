"""How the input uses one table: an exact head, a binned tail, and the lengths of bags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import ceil

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile import chances
from torchrec_oper.table import COUNT_LIMIT, TableSpec, whole_number

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

ARRAYS = ("ids", "counts", "tail_rows", "tail_counts", "bag_rows", "bag_counts")


def _none() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class TableAccess:
    """How one table is used.

    The hottest rows are listed by id. The colder ones are known as blocks of rows of
    about equal counts, and rows that no lookup named are in no block. Arrays are copied,
    and read-only here.

    Args:
        name: the table's name.
        rows: the table's rows; ids run from 0 to ``rows - 1``.
        features: the input features that look the table up.
        ids: int64 [U], the distinct ids of the hottest rows, hottest first; of ids with
            equal counts the smaller comes first.
        counts: int64 [U], lookups of each of ``ids``.
        bags: bags of all features, empty ones included.
        empty_bags: bags without an id.
        tail_rows: int64 [T], rows of each block of colder rows, hottest first.
        tail_counts: int64 [T], lookups of all rows of each block together, so that a row
            has ``tail_counts / tail_rows`` on average: no more than a listed row or a row
            of the block before. Blocks of ``bins.bin_of``: rows of one count where that is
            below 64, else of counts within 3.2 %.
        bag_rows: int64 [K], distinct rows in the bags of each bin (repeats within a bag
            don't count), the shortest bags first; bins of ``bins.bin_of`` again. Empty
            where it wasn't counted (a profile of format 1).
        bag_counts: int64 [K], bags in each bin; they sum to the bags that aren't empty.
        sketched: the table had too many rows to count each: see ``RowCounter`` for what
            is estimated, and how well.

    Raises:
        ProfileError: for a value outside what is said above.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    ids: Ints
    counts: Ints
    bags: int
    empty_bags: int
    tail_rows: Ints = field(default_factory=_none)
    tail_counts: Ints = field(default_factory=_none)
    bag_rows: Ints = field(default_factory=_none)
    bag_counts: Ints = field(default_factory=_none)
    sketched: bool = False

    def __post_init__(self) -> None:
        # The rules for names, rows and features are TableSpec's; dim has no say here.
        spec = TableSpec(name=self.name, rows=self.rows, dim=1, features=self.features)
        object.__setattr__(self, "rows", spec.rows)
        for name in ARRAYS:
            array = self._copied(name)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if not isinstance(self.sketched, bool):
            raise self._wrong(f"sketched must be true or false, found {self.sketched!r}")
        self._check_head()
        self._check_tail()
        self._check_bags()
        self._check_bag_rows()

    @cached_property
    def lookups(self) -> int:
        """Lookups of all rows together, those of the tail included."""
        return int(self.counts.sum()) + int(self.tail_counts.sum())

    @cached_property
    def seen_rows(self) -> int:
        """Distinct rows that were looked up; an estimate if the counts are ``sketched``."""
        return self.ids.size + int(self.tail_rows.sum())

    @property
    def bag_lengths(self) -> Floats:
        """Distinct rows of a bag in each bin, float64 [K], the mean of the bin's bags.

        Where bags weren't counted so: the whole numbers next to the mean lookups of a
        bag that isn't empty, so that the mean is kept.
        """
        return self._bag_bins[0]

    @property
    def bag_shares(self) -> Floats:
        """The share of the bags that aren't empty in each bin of ``bag_lengths``, [K]."""
        return self._bag_bins[1]

    def share_of_hottest(self, fraction: float) -> float:
        """The share of the lookups, 0 to 1, that the hottest ``fraction`` of all rows gets.

        Rows of one block of the tail have equal parts of its lookups.
        """
        wanted = min(ceil(self.rows * fraction), self.rows)
        hottest = float(self.counts[:wanted].sum())
        before = np.cumsum(self.tail_rows) - self.tail_rows + self.ids.size
        taken = np.clip(wanted - before, 0, self.tail_rows)
        if taken.any():
            hottest += float(self.tail_counts @ (taken / self.tail_rows))
        return hottest / self.lookups if self.lookups else 0.0

    def blocks(self) -> tuple[Floats, Floats]:
        """The rows by their chance of the next lookup, hottest first.

        Listed rows of equal counts are one block, then come the tail's blocks, then the
        rows never seen. ``chances.row_chances`` has the formula (Good-Turing).

        Returns:
            Rows of each block, float64 [N], which sum to the table's rows. The chance of
            each single row of the block, float64 [N], not rising; ``rows @ chance`` is 1.
        """
        rows, chance = self._blocks
        return rows.copy(), chance.copy()

    def distinct_rows(self, lookups: float, hot_rows: int = 0) -> float:
        """Distinct rows expected in so many lookups, those of the hottest rows left out.

        ``sum(1 - (1 - p) ** lookups)`` over all rows but the ``hot_rows`` hottest, where
        ``p`` is a row's chance in ``blocks``.

        Raises:
            ProfileError: ``lookups`` is negative or not a number, or ``hot_rows`` is not
                0 or more.
        """
        if not lookups >= 0:
            raise self._wrong(f"lookups must be 0 or more, found {lookups}")
        cold, chance = self._cold(hot_rows)
        return float(chances.distinct(cold, chance, np.array([lookups]))[0])

    def cold_rows_per_bag(self, hot_rows: int) -> float:
        """Distinct rows expected in a bag that isn't empty, those of the hottest left out.

        A bag of ``d`` distinct rows has ``d * C(d) / A(d)`` cold ones, where ``A`` and
        ``C`` are ``distinct_rows`` of ``d`` lookups with 0 and ``hot_rows`` hot rows:
        exact for ``d = 1`` and for no hot row, and else what independent lookups would
        give, scaled to the distinct rows that were counted. The result is the mean over
        the bins of ``bag_lengths``; 0 where no bag holds an id.

        Raises:
            ProfileError: ``hot_rows`` is not an integer of 0 or more.
        """
        lengths, shares = self._bag_bins
        cold = chances.distinct(*self._cold(hot_rows), lengths)
        total = chances.distinct(*self._blocks, lengths)
        return float((shares * lengths) @ (cold / total)) if lengths.size else 0.0

    @cached_property
    def _blocks(self) -> tuple[Floats, Floats]:
        starts = np.flatnonzero(np.diff(self.counts, prepend=0))
        runs = np.diff(starts, append=self.counts.size)
        return chances.row_chances(
            np.concatenate([runs, self.tail_rows]),
            np.concatenate([runs * self.counts[starts], self.tail_counts]),
            table_rows=self.rows,
        )

    @cached_property
    def _bag_bins(self) -> tuple[Floats, Floats]:
        filled = self.bags - self.empty_bags
        if self.bag_counts.size:
            return self.bag_rows / self.bag_counts, self.bag_counts / filled
        if not filled:
            return np.empty(0), np.empty(0)
        short, longer = divmod(self.lookups, filled)
        lengths, shares = np.array([short, short + 1.0]), np.array([filled - longer, longer])
        known = shares > 0
        return lengths[known], shares[known] / filled

    def _cold(self, hot_rows: int) -> tuple[Floats, Floats]:
        """Rows and chances of ``blocks`` without the hottest rows."""
        hot = whole_number(hot_rows, f"profile of table {self.name}: hot_rows")
        rows, chance = self._blocks
        before = np.cumsum(rows) - rows
        return rows - np.clip(hot - before, 0, rows), chance

    def _copied(self, name: str) -> Ints:
        array = np.asarray(getattr(self, name))
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise self._wrong(
                f"{name} must be a one-dimensional array of integers,"
                f" found {array.dtype} of shape {array.shape}"
            )
        return array.astype(np.int64)

    def _check_head(self) -> None:
        ids, counts = self.ids, self.counts
        if ids.size != counts.size:
            raise self._wrong(f"{ids.size} ids, but {counts.size} counts")
        if counts.sum(dtype=np.float64) + self.tail_counts.sum(dtype=np.float64) >= COUNT_LIMIT:
            raise self._wrong("its counts add up to 2**63 lookups or more")
        if not ids.size:
            return
        if ids.min() < 0 or ids.max() >= self.rows:
            wrong = ids[(ids < 0) | (ids >= self.rows)][0]
            raise self._wrong(f"id {wrong} is outside 0 to {self.rows - 1}")
        repeated = _repeated(ids)
        if repeated.size:
            raise self._wrong(f"id {repeated[0]} is listed twice")
        if counts.min() < 1:
            raise self._wrong(f"counts must be 1 or more, found {counts.min()}")
        at = _out_of_order(ids, counts)
        if at is not None:
            raise self._wrong(
                f"ids must come hottest first, smaller id first among equals;"
                f" id {ids[at]} at place {at} doesn't"
            )

    def _check_tail(self) -> None:
        rows, counts = self.tail_rows, self.tail_counts
        self._check_bins("tail_rows", "tail_counts")
        # Python's integers: products of two counts don't fit into 64 bits.
        blocks = list(zip(rows.tolist(), counts.tolist(), strict=True))
        listed = [(1, int(self.counts[-1]))] if self.counts.size else []
        if not _falls(listed + blocks):
            raise self._wrong("tail_counts / tail_rows must not rise, nor be above a listed row's")
        if self.ids.size + sum(rows.tolist()) > self.rows:
            raise self._wrong(f"more rows in ids and tail_rows than the table's {self.rows}")

    def _check_bags(self) -> None:
        for name in ("bags", "empty_bags"):
            count = whole_number(getattr(self, name), f"profile of table {self.name}: {name}")
            object.__setattr__(self, name, count)
        filled = self.bags - self.empty_bags
        if not (0 < filled <= self.lookups or filled == self.lookups == 0):
            raise self._wrong(
                f"{self.lookups} lookups can't come from {self.bags} bags"
                f" of which {self.empty_bags} are empty"
            )

    def _check_bag_rows(self) -> None:
        rows, counts = self.bag_rows, self.bag_counts
        self._check_bins("bag_counts", "bag_rows")
        if not rows.size:
            return
        filled, distinct = sum(counts.tolist()), sum(rows.tolist())
        if filled != self.bags - self.empty_bags:
            raise self._wrong(
                f"bag_counts sum to {filled}, but {self.bags - self.empty_bags} bags hold ids"
            )
        if distinct > self.lookups:
            raise self._wrong(f"{distinct} rows in bag_rows, more than the {self.lookups} lookups")
        bins = list(zip(counts.tolist(), rows.tolist(), strict=True))
        if not _falls(bins[::-1]):
            raise self._wrong("bag_rows / bag_counts must not fall: the shortest bags come first")

    def _check_bins(self, members: str, totals: str) -> None:
        """Each bin has a member, and each member one or more of the total."""
        least, most = getattr(self, members), getattr(self, totals)
        if least.size != most.size:
            raise self._wrong(f"{least.size} {members}, but {most.size} {totals}")
        if (least < 1).any():
            raise self._wrong(f"{members} must be 1 or more, found {least.min()}")
        if (most < least).any():
            raise self._wrong(f"{totals} must be at least {members}")

    def _wrong(self, what: str) -> ProfileError:
        return ProfileError(f"profile of table {self.name}: {what}")


def _repeated(ids: Ints) -> Ints:
    ascending = np.sort(ids)
    return np.asarray(ascending[1:][ascending[1:] == ascending[:-1]])


def _out_of_order(ids: Ints, counts: Ints) -> int | None:
    """The first place that doesn't come hottest first, smaller id first among equals."""
    in_order = (counts[:-1] > counts[1:]) | ((counts[:-1] == counts[1:]) & (ids[:-1] < ids[1:]))
    return None if in_order.all() else int(np.argmin(in_order)) + 1


def _falls(bins: Sequence[tuple[int, int]]) -> bool:
    """Whether total / members of (members, total) never rises."""
    return all(
        after_total * members <= total * after_members
        for (members, total), (after_members, after_total) in pairwise(bins)
    )
