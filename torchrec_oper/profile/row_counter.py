"""Counts the lookups of one table's rows in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.profile.bag_counter import id_dtype
from torchrec_oper.profile.bins import BinnedSums
from torchrec_oper.profile.row_sketch import RowSketch, add_by_id
from torchrec_oper.profile.tail import Blocks, blocks_of, cut_head

Ids = npt.NDArray[np.int64]

PENDING_IDS = 1 << 17
EXACT_ROWS = 1 << 22
DENSE_ROWS = 1 << 20

_ROWS_FOR_DENSE = 5  # 8 bytes for each row are fewer than 40 for each distinct one then


class RowCounter:
    """Lookups of the rows of one table.

    A small table has a counter for each of its rows. In a larger one, ids wait in a
    buffer until it is full, and are then merged into the sorted distinct ids; it gets a
    counter for each row once a fifth of them was seen. The buffer is as long as the
    distinct ids, or ``pending_ids`` where those are fewer, so that a lookup's share of
    the merges stays constant.

    Memory, however many lookups pass by: 8 bytes for each row of a table of up to
    ``dense_rows``, or of which a fifth was seen. Else up to 32 bytes for each distinct
    row, of which ``exact_rows`` count, and during a merge up to 300: with ``EXACT_ROWS``,
    130 MB for a table, and 1.2 GB for the one that is merging.

    Counting is exact up to ``exact_rows`` distinct rows, and always in tables of up to
    five times as many rows. Above, a ``RowSketch`` with room for ``exact_rows // 2`` rows
    in each part takes over. Then a listed row's count is exact or up to 1/32 low, rows
    that can't be known so well aren't listed, and the tail is estimated from a sample of
    ``exact_rows / 4`` to ``exact_rows / 2`` rows: numbers of rows have a relative standard
    error of about ``1 / sqrt(their rows in the sample)``, 0.1 % of all with ``EXACT_ROWS``.

    Args:
        rows: the table's rows.
        pending_ids: the least number of ids that the buffer holds, 1 or more.
        exact_rows: how many distinct rows are counted one by one, 2 or more.
        dense_rows: the most rows of a table with a counter for each from the start.
    """

    def __init__(
        self,
        rows: int,
        *,
        pending_ids: int = PENDING_IDS,
        exact_rows: int = EXACT_ROWS,
        dense_rows: int = DENSE_ROWS,
    ) -> None:
        self.rows = rows
        self.limits = (pending_ids, exact_rows, dense_rows)
        self._dtype = id_dtype(rows)
        self._dense = np.zeros(rows, np.int64) if rows <= dense_rows else None
        self._sketch: RowSketch | None = None
        self._ids: Ids = np.empty(0, np.int64)
        self._counts: Ids = np.empty(0, np.int64)
        self._pending: npt.NDArray[Any] = self._buffer()
        self._filled = 0

    def add(self, ids: npt.NDArray[Any]) -> None:
        """Count ids, integers [N] from 0 to below the table's rows."""
        start = 0
        while self._dense is None and start < ids.size:
            part = ids[start : start + self._pending.size - self._filled]
            self._pending[self._filled : self._filled + part.size] = part
            self._filled += part.size
            start += part.size
            if self._filled == self._pending.size:
                self._flush()
        if self._dense is not None and start < ids.size:
            # Fast for one number and indices of numpy's own type only.
            np.add.at(self._dense, ids[start:].astype(np.intp, copy=False), 1)

    def merge(self, other: RowCounter) -> None:
        """Add what another counter, of the same rows and ``exact_rows``, has counted."""
        assert (self.rows, self.limits[1]) == (other.rows, other.limits[1])
        if other._sketch is None:
            self._flush()
            self._absorb(*other.counted())
            return
        other._flush()
        self._flush()
        if self._sketch is None:
            self._start_sketch()
        assert self._sketch is not None
        self._sketch.merge(other._sketch)

    def head_and_tail(self, head_rows: int) -> tuple[Ids, Ids, Blocks, bool]:
        """The hottest rows by id, and blocks of the others.

        Returns:
            Ids and counts, both int64 [U], of up to ``head_rows`` rows, hottest first, of
            equal ones the smaller id first. The other rows' blocks. Whether any of it is
            the estimate of a sketch.
        """
        self._flush()
        if self._sketch is not None:
            ids, counts, _ = cut_head(*self._sketch.hot_rows(), head_rows)
            return ids, counts, self._sketch.tail(ids, counts, table_rows=self.rows), True
        ids, counts, rest = cut_head(*self.counted(), head_rows)
        bins = BinnedSums()
        bins.add(rest)
        return ids, counts, blocks_of(bins), False

    def counted(self) -> tuple[Ids, Ids]:
        """Distinct ids, ascending, and their counts, int64 [U]; not while there is a sketch."""
        assert self._sketch is None
        self._flush()
        if self._dense is None:
            return self._ids, self._counts
        (ids,) = np.nonzero(self._dense)
        return ids, self._dense[ids]

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to another process: no buffer, and no counter of a row never seen."""
        self._flush()
        state = {**self.__dict__, "_pending": None}
        if self._dense is not None:
            ids, counts = self.counted()
            if 2 * ids.size < self.rows:
                state.update(_dense=None, _ids=ids, _counts=counts, was_dense=True)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        was_dense = state.pop("was_dense", False)
        self.__dict__.update(state)
        self._pending = self._buffer()
        if was_dense:
            self._make_dense()

    def _buffer(self) -> npt.NDArray[Any]:
        """An empty buffer of the length that is due."""
        pending_ids, exact_rows, _ = self.limits
        counted = exact_rows if self._sketch is not None else self._ids.size
        size = max(pending_ids, min(counted, exact_rows)) if self._dense is None else 0
        return np.empty(size, self._dtype)

    def _flush(self) -> None:
        if self._filled:
            ids, counts = np.unique(self._pending[: self._filled], return_counts=True)
            self._filled = 0
            self._absorb(ids.astype(np.int64), counts.astype(np.int64))

    def _absorb(self, ids: Ids, counts: Ids) -> None:
        """Add counts of distinct ids, ascending."""
        if self._dense is not None:
            self._dense[ids] += counts
            return
        if self._sketch is not None:
            self._sketch.add(ids, counts)
            return
        self._ids, (self._counts,) = add_by_id((self._ids, self._counts), (ids, counts))
        exact_rows = self.limits[1]
        if _ROWS_FOR_DENSE * min(self._ids.size, exact_rows) >= self.rows:
            self._make_dense()
        elif self._ids.size > exact_rows:
            self._start_sketch()
        elif self._ids.size > self._pending.size:
            self._pending = self._buffer()

    def _make_dense(self) -> None:
        self._dense = np.zeros(self.rows, np.int64)
        self._dense[self._ids] = self._counts
        self._drop_counts()

    def _start_sketch(self) -> None:
        self._sketch = RowSketch(self.limits[1] // 2)
        self._sketch.add(self._ids, self._counts)
        self._drop_counts()

    def _drop_counts(self) -> None:
        self._ids = self._counts = np.empty(0, np.int64)
        self._pending = self._buffer()
