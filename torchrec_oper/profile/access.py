"""The access profile: how often the rows of each table are looked up, and by what bags."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from tqdm.auto import tqdm

from torchrec_oper.archive import content_hash
from torchrec_oper.errors import ProfileError
from torchrec_oper.profile import profile_file
from torchrec_oper.profile.batches import collect_batch
from torchrec_oper.profile.collector import HEAD_ROWS, TRACE_IDS, AccessCollector
from torchrec_oper.profile.merge import binned_table, merge_profiles
from torchrec_oper.profile.row_counter import EXACT_ROWS
from torchrec_oper.profile.table_access import TableAccess
from torchrec_oper.profile.trace import Trace
from torchrec_oper.table import check_unique_names, table_specs, whole_number

__all__ = ["AccessProfile", "TableAccess", "Trace", "merge_profiles"]


class TableShape(Protocol):
    """A ``TableSpec``, or a ``TableAccess``."""

    @property
    def name(self) -> str:
        """The table's name."""

    @property
    def rows(self) -> int:
        """The table's rows."""

    @property
    def features(self) -> tuple[str, ...]:
        """The features that look it up."""


@dataclass(frozen=True, eq=False)
class AccessProfile:
    """How the input uses the tables of a model. Compare two by ``content_hash``.

    Args:
        tables: one value for each table, with unique names.
        samples: training examples that were read, 1 or more.
        trace: some of the samples as they are, if any were kept.

    Raises:
        ProfileError: for a value outside what is said above, or a trace with other
            features than the tables, or with an id outside a table.
    """

    tables: tuple[TableAccess, ...]
    samples: int
    trace: Trace | None = None

    def __repr__(self) -> str:
        lookups = sum(table.lookups for table in self.tables)
        return (
            f"AccessProfile({len(self.tables)} tables, {self.samples} samples,"
            f" {lookups} lookups, content_hash={self.content_hash[:12]!r})"
        )

    def __post_init__(self) -> None:
        check_unique_names(self.tables)
        samples = whole_number(self.samples, "the samples of a profile", least=1)
        object.__setattr__(self, "samples", samples)
        if self.trace is not None:
            _check_trace(self.trace, self.tables, samples)

    @classmethod
    def from_batches(
        cls,
        batches: Iterable[Any],
        tables: Any,
        *,
        progress: bool = False,
        head_rows: int = HEAD_ROWS,
        exact_rows: int = EXACT_ROWS,
        trace_ids: int = TRACE_IDS,
    ) -> AccessProfile:
        """Count every lookup of ``batches``, which are read once.

        Args:
            batches: ``KeyedJaggedTensor`` values, or objects that hold one as
                ``sparse_features`` (``torchrec.datasets.utils.Batch``). Weights, and
                features that no table uses, are ignored; a feature that two tables
                share counts for both.
            tables: an ``EmbeddingBagCollection``, or ``TableSpec`` values.
            progress: show a progress bar on a terminal's stderr.
            head_rows: see ``AccessCollector``, as for the other two.
            exact_rows: how many distinct rows of a table are counted one by one.
            trace_ids: ids of the trace at most; 0 for no trace.

        Raises:
            ProfileError: no sample in ``batches``; a batch that lacks a feature of the
                tables; ids that aren't integers or are outside their table.
        """
        collector = AccessCollector(
            table_specs(tables), head_rows=head_rows, exact_rows=exact_rows, trace_ids=trace_ids
        )
        # None lets tqdm keep quiet where stderr is not a terminal.
        hidden = None if progress else True
        with tqdm(batches, desc="profile", unit=" batches", disable=hidden) as bar:
            for number, batch in enumerate(bar):
                collect_batch(collector, batch, number=number)
        return cls.from_collector(collector)

    @classmethod
    def from_collector(cls, collector: AccessCollector) -> AccessProfile:
        """The profile of everything that ``collector`` has counted.

        Raises:
            ProfileError: it has seen no sample.
        """
        if not collector.samples:
            raise ProfileError("the input holds no sample; a profile needs at least one batch")
        return cls(
            tables=tuple(_table_access(collector, table) for table in range(len(collector.tables))),
            samples=collector.samples,
            trace=collector.trace(),
        )

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the values: the same for the same samples, however batched."""
        return content_hash(*self._contents())

    def table(self, name: str) -> TableAccess:
        """The table called ``name``.

        Raises:
            ProfileError: there is none.
        """
        for table in self.tables:
            if table.name == name:
                return table
        names = ", ".join(table.name for table in self.tables)
        raise ProfileError(f"the profile has no table {name}; its tables are {names}")

    def check_fits(self, tables: Sequence[TableShape]) -> None:
        """Check that this is a profile of ``tables``; the order of features is free.

        Raises:
            ProfileError: tables are missing on either side, or have other rows or
                features; all of them are named.
        """
        found = {table.name: table for table in self.tables}
        wanted = {spec.name: spec for spec in tables}
        trouble = [
            line
            for name in [*wanted, *(name for name in found if name not in wanted)]
            for line in _differences(name, found.get(name), wanted.get(name))
        ]
        if trouble:
            raise ProfileError(
                f"this is a profile of other tables: {'; '.join(trouble)}."
                " Profile the input again with the model's tables"
            )

    def merge(self, others: Sequence[AccessProfile]) -> AccessProfile:
        """The profile of what this one and ``others`` were made of: see ``merge_profiles``.

        Raises:
            ProfileError: they are of other tables, or one has rows that aren't listed.
        """
        return merge_profiles([self, *others])

    def binned(self, head_rows: int = HEAD_ROWS) -> AccessProfile:
        """This profile with the ``head_rows`` hottest rows of each table listed at most.

        What ``AccessCollector`` would have given with this ``head_rows``, if this profile
        lists as many rows. The trace stays.

        Raises:
            ProfileError: ``head_rows`` is not an integer of 0 or more.
        """
        head = whole_number(head_rows, "head_rows")
        return replace(self, tables=tuple(binned_table(table, head) for table in self.tables))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to ``path``, all or nothing.

        Raises:
            OSError: the folder can't be written or the disk is full; an older file at
                ``path`` is untouched.
        """
        profile_file.write(path, *self._contents())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AccessProfile:
        """The profile that ``save`` wrote, checked in full.

        A file of format 1 has every row listed, and no trace.

        Raises:
            FileNotFoundError: there is no such file.
            ArchiveError: the file is damaged or isn't a profile.
            ProfileError: it was written by a newer version, or its values are wrong.
        """
        tables, samples, trace = profile_file.read(path)
        try:
            return cls(tables=tables, samples=samples, trace=trace)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error

    def _contents(self) -> profile_file.Contents:
        return profile_file.contents(self.tables, self.samples, self.trace)


def _table_access(collector: AccessCollector, table: int) -> TableAccess:
    spec, bags = collector.tables[table], collector.bags[table]
    ids, counts, tail, sketched = collector.counters[table].head_and_tail(collector.head_rows)
    bag_counts, bag_rows = bags.distinct_rows.filled()
    return TableAccess(
        name=spec.name,
        rows=spec.rows,
        features=spec.features,
        ids=ids,
        counts=counts,
        bags=bags.bags,
        empty_bags=bags.empty_bags,
        tail_rows=tail[0],
        tail_counts=tail[1],
        bag_rows=bag_rows,
        bag_counts=bag_counts,
        sketched=sketched,
    )


def _check_trace(trace: Trace, tables: Sequence[TableAccess], samples: int) -> None:
    used = {feature for table in tables for feature in table.features}
    if set(trace.features) != used:
        raise ProfileError(
            f"the profile's trace has features {', '.join(trace.features)}, but its tables have"
            f" {', '.join(sorted(used))}"
        )
    if trace.samples > samples:
        raise ProfileError(
            f"the profile's trace has {trace.samples} samples, more than the {samples} read"
        )
    for half in (trace.planning, trace.judging):
        highest = half.highest_ids()
        for table in tables:
            for feature in table.features:
                if highest[feature] >= table.rows:
                    raise ProfileError(
                        f"the profile's trace looks up id {highest[feature]} by feature {feature},"
                        f" but the ids of table {table.name} run from 0 to {table.rows - 1}"
                    )


def _differences(name: str, found: TableAccess | None, wanted: TableShape | None) -> list[str]:
    """What keeps the profile's table ``found`` from being ``wanted``, in words."""
    if found is None:
        return [f"table {name} isn't in the profile"]
    if wanted is None:
        return [f"table {name} is only in the profile"]
    trouble = []
    if found.rows != wanted.rows:
        trouble.append(f"table {name} has {found.rows} rows in the profile, wanted {wanted.rows}")
    if set(found.features) != set(wanted.features):
        trouble.append(
            f"table {name} has features {', '.join(found.features)} in the profile,"
            f" wanted {', '.join(wanted.features)}"
        )
    return trouble
