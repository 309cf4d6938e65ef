"""Counts the input's lookups while batches stream by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.bag_counter import BagCounter
from torchrec_oper.profile.row_counter import EXACT_ROWS, PENDING_IDS, RowCounter
from torchrec_oper.profile.sampler import TraceSampler
from torchrec_oper.profile.trace import Trace
from torchrec_oper.table import TableSpec, check_unique_names, whole_number

HEAD_ROWS = 1 << 16
TRACE_IDS = 1 << 18


class AccessCollector:
    """Lookups of several tables, from one pass over the input; ``samples`` were read.

    It can be pickled, and ``merge`` adds what another one has seen: so that processes
    and ranks count apart. Memory is bounded however long the input is: see ``RowCounter``
    for each table's rows and ``TraceSampler`` for the trace; bags take a constant.

    Args:
        tables: the tables that the input looks up.
        head_rows: how many rows of each table the profile lists by id, the hottest; the
            others are in blocks. Profiles that list every row can be merged afterwards.
        exact_rows: how many distinct rows of a table are counted one by one, see
            ``RowCounter``.
        trace_ids: the budget of the trace in ids of all tables, see ``TraceSampler``; 0
            for none.
        pending_ids: see ``RowCounter``.

    Raises:
        ProfileError: for no table, two tables of one name, or a number that is too low.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        head_rows: int = HEAD_ROWS,
        exact_rows: int = EXACT_ROWS,
        trace_ids: int = TRACE_IDS,
        pending_ids: int = PENDING_IDS,
    ) -> None:
        check_unique_names(tables)
        self.tables = tuple(tables)
        self.head_rows = whole_number(head_rows, "head_rows")
        exact_rows = whole_number(exact_rows, "exact_rows", least=2)
        pending_ids = whole_number(pending_ids, "pending_ids", least=1)
        self.counters = tuple(
            RowCounter(spec.rows, exact_rows=exact_rows, pending_ids=pending_ids)
            for spec in self.tables
        )
        self.bags = tuple(BagCounter(spec.rows) for spec in self.tables)
        self.samples = 0
        self._limits = (self.head_rows, exact_rows, trace_ids)
        self._traced_samples = 0
        features = dict.fromkeys(feature for spec in self.tables for feature in spec.features)
        self._sampler = (
            TraceSampler(tuple(features), limit_ids=trace_ids)
            if whole_number(trace_ids, "trace_ids")
            else None
        )

    def add(
        self,
        table: int,
        feature: str,
        ids: npt.NDArray[Any],
        lengths: npt.NDArray[Any],
        *,
        where: str,
    ) -> None:
        """Count the bags of one feature; whoever calls this adds to ``samples`` itself.

        There is no trace of samples whose features are counted one by one.

        Args:
            table: position of the table in ``tables``.
            feature: the feature's name, for messages.
            ids: integers [N], the bags' ids one after another.
            lengths: integers [B], ids in each bag, which sum to N.
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
        self.counters[table].add(ids)
        self.bags[table].add(ids, lengths)

    def add_samples(
        self, bags: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]], *, where: str
    ) -> None:
        """Count whole samples, and let the trace choose among them.

        Args:
            bags: for each feature of the tables ids, integers [N], and bag lengths,
                integers [B], one bag for each of B samples; others are ignored.
            where: which part of the input this is, for messages.

        Raises:
            ProfileError: a feature is missing, the numbers of bags differ, ids or lengths
                aren't integers, lengths don't sum to the ids, or an id is outside its table.
        """
        used = self._used(bags, where=where)
        lengths = np.stack([lengths for _, lengths in used.values()])
        sums = lengths.sum(axis=1, dtype=np.int64).tolist()
        for (feature, (ids, _)), total in zip(used.items(), sums, strict=True):
            if total != ids.size:
                raise ProfileError(
                    f"{where}: the lengths of feature {feature} sum to {total}, but it has"
                    f" {ids.size} ids"
                )
        if lengths.size and lengths.min() < 0:
            raise ProfileError(f"{where}: a bag's length is {lengths.min()}, wanted 0 or more")
        for table, spec in enumerate(self.tables):
            for feature in spec.features:
                self.add(table, feature, *used[feature], where=where)
        self.samples += lengths.shape[1]
        self._traced_samples += lengths.shape[1]
        if self._sampler is not None:
            self._sampler.add(list(used.values()))

    def merge(self, other: AccessCollector) -> None:
        """Add what another collector has seen, which stays as it is.

        The result is what one collector would have seen: exactly, in any order, while no
        table has more than ``exact_rows`` distinct rows. Above that ``RowSketch`` merges
        within its bounds. There is a trace if both have one.

        Raises:
            ProfileError: the other collects for other tables, or has other limits.
        """
        if [_shape(spec) for spec in self.tables] != [_shape(spec) for spec in other.tables]:
            raise ProfileError(
                "these collectors count for different tables, and can't be merged: tables"
                f" {_listed(self.tables)}, and {_listed(other.tables)}"
            )
        if self._limits != other._limits:
            raise ProfileError(
                "these collectors have different limits, and can't be merged: head_rows,"
                f" exact_rows and trace_ids are {self._limits} and {other._limits}"
            )
        for mine, theirs in zip(self.counters, other.counters, strict=True):
            mine.merge(theirs)
        for bags, more in zip(self.bags, other.bags, strict=True):
            bags.merge(more)
        if self._sampler is not None and other._sampler is not None:
            self._sampler.merge(other._sampler)
        self.samples += other.samples
        self._traced_samples += other._traced_samples

    def trace(self) -> Trace | None:
        """The trace; none if it is off, or not all samples were given whole."""
        if self._sampler is None or self._traced_samples != self.samples:
            return None
        return self._sampler.trace()

    def _used(
        self, bags: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]], *, where: str
    ) -> dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """The bags of each feature that a table has, in the order of the trace's features."""
        used = {}
        for spec in self.tables:
            for feature in spec.features:
                if feature not in bags:
                    raise ProfileError(
                        f"{where} lacks feature {feature} of table {spec.name};"
                        f" its keys are {', '.join(bags) or 'none'}"
                    )
                used[feature] = bags[feature]
        samples = next(iter(used.values()))[1].size
        for feature, (ids, lengths) in used.items():
            for what, array in (("ids", ids), ("lengths", lengths)):
                if array.dtype.kind not in "iu" or array.ndim != 1:
                    raise ProfileError(
                        f"{where}: {what} of feature {feature} must be integers in one dimension,"
                        f" found {array.dtype} of shape {array.shape}"
                    )
            if lengths.size != samples:
                raise ProfileError(
                    f"{where}: feature {feature} has {lengths.size} bags, others {samples};"
                    " each needs one for each sample"
                )
        return used


def _shape(spec: TableSpec) -> tuple[str, int, tuple[str, ...]]:
    return spec.name, spec.rows, spec.features


def _listed(tables: Sequence[TableSpec]) -> str:
    return ", ".join(f"{spec.name} ({spec.rows} rows)" for spec in tables)
