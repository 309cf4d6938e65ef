"""Counts lookups per row while batches stream by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import ProfileError
from torchrec_oper.table import TableSpec, check_unique_names

Ids = npt.NDArray[np.int64]

PENDING_IDS = 1 << 17


class RowCounter:
    """Lookups of the rows of one table.

    Ids wait in a buffer until it is full, and are then merged into the sorted
    distinct ids. The buffer is as long as the distinct ids, or ``pending_ids`` where
    those are fewer: memory stays within about 40 bytes for each distinct id plus
    8 bytes for each pending one, however many lookups pass by, and a lookup's share
    of the merges stays constant.

    Args:
        pending_ids: the least number of ids that the buffer holds.
    """

    def __init__(self, *, pending_ids: int = PENDING_IDS) -> None:
        self.bags = 0
        self.empty_bags = 0
        self._ids: Ids = np.empty(0, np.int64)
        self._counts: Ids = np.empty(0, np.int64)
        self._pending: Ids = np.empty(pending_ids, np.int64)
        self._filled = 0

    def add(self, ids: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Count ``ids`` (integers, [N]) that lie in bags of ``lengths`` (integers, [B])."""
        self.bags += lengths.size
        self.empty_bags += lengths.size - int(np.count_nonzero(lengths))
        start = 0
        while start < ids.size:
            part = ids[start : start + self._pending.size - self._filled]
            self._pending[self._filled : self._filled + part.size] = part
            self._filled += part.size
            start += part.size
            if self._filled == self._pending.size:
                self._merge()

    def hottest_first(self) -> tuple[Ids, Ids]:
        """Distinct ids and their counts, both int64 [U]; equal counts by smaller id."""
        self._merge()
        order = np.argsort(-self._counts, kind="stable")
        return self._ids[order], self._counts[order]

    def _merge(self) -> None:
        ids, counts = np.unique(self._pending[: self._filled], return_counts=True)
        self._filled = 0
        at = np.searchsorted(self._ids, ids)
        known = at < self._ids.size
        known[known] = self._ids[at[known]] == ids[known]
        self._counts[at[known]] += counts[known]
        self._counts = np.insert(self._counts, at[~known], counts[~known])
        self._ids = np.insert(self._ids, at[~known], ids[~known])
        if self._ids.size > self._pending.size:
            self._pending = np.empty(self._ids.size, np.int64)


class AccessCollector:
    """Lookups of several tables, from one pass over the input.

    Args:
        tables: the tables that the input looks up.
        pending_ids: see ``RowCounter``, which states the memory that a table takes.

    Raises:
        ProfileError: for no table, or two tables of one name.
    """

    def __init__(self, tables: Sequence[TableSpec], *, pending_ids: int = PENDING_IDS) -> None:
        check_unique_names(tables)
        self.tables = tuple(tables)
        self.counters = tuple(RowCounter(pending_ids=pending_ids) for _ in self.tables)
        self.samples = 0

    def add(
        self,
        table: int,
        feature: str,
        ids: npt.NDArray[Any],
        lengths: npt.NDArray[Any],
        *,
        where: str,
    ) -> None:
        """Count the bags of one feature.

        Args:
            table: position of the table in ``tables``.
            feature: the feature's name, for messages.
            ids: integers [N], the bags' ids one after another.
            lengths: integers [B], ids in each bag.
            where: which part of the input this is, for messages.

        Raises:
            ProfileError: an id is negative or not below the table's rows.
        """
        spec = self.tables[table]
        if ids.size and (ids.min() < 0 or ids.max() >= spec.rows):
            wrong = int(ids[(ids < 0) | (ids >= spec.rows)][0])
            raise ProfileError(
                f"{where}: feature {feature} looks up id {wrong} in table {spec.name}, whose ids"
                f" run from 0 to {spec.rows - 1} ({spec.rows} rows);"
                " hash or remap the ids, or give the table more rows"
            )
        self.counters[table].add(ids, lengths)
