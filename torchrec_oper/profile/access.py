"""The access profile: how often each row of each table is looked up."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from torchrec_oper.archive import content_hash, read_archive, write_archive
from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.batches import collect_batch
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.table import (
    COUNT_LIMIT,
    TableSpec,
    check_unique_names,
    table_specs,
    whole_number,
)

FORMAT = 1
KIND = "profile"


@dataclass(frozen=True, eq=False)
class TableAccess:
    """How one table is used.

    Args:
        name: the table's name.
        rows: the table's rows; ids run from 0 to ``rows - 1``.
        features: the input features that look the table up.
        ids: int64 [U], the distinct ids that were looked up, hottest first; of ids
            with equal counts the smaller comes first. Copied, and read-only here.
        counts: int64 [U], lookups of each of ``ids``. Copied, and read-only here.
        bags: bags of all features, empty ones included.
        empty_bags: bags without an id.

    Raises:
        ProfileError: for a value outside what is said above.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    bags: int
    empty_bags: int

    def __post_init__(self) -> None:
        # The rules for names, rows and features are TableSpec's; dim has no say here.
        spec = TableSpec(name=self.name, rows=self.rows, dim=1, features=self.features)
        object.__setattr__(self, "rows", spec.rows)
        for field in ("ids", "counts"):
            array = self._copied(field)
            array.flags.writeable = False
            object.__setattr__(self, field, array)
        self._check_arrays()
        self._check_bags()

    @property
    def lookups(self) -> int:
        """Lookups of all rows together."""
        return int(self.counts.sum())

    def share_of_hottest(self, fraction: float) -> float:
        """The share of the lookups, 0 to 1, that the hottest ``fraction`` of all rows gets."""
        hottest = self.counts[: ceil(self.rows * fraction)]
        return int(hottest.sum()) / self.lookups if self.lookups else 0.0

    def _copied(self, field: str) -> npt.NDArray[np.int64]:
        array = np.asarray(getattr(self, field))
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise self._wrong(
                f"{field} must be a one-dimensional array of integers,"
                f" found {array.dtype} of shape {array.shape}"
            )
        return array.astype(np.int64)

    def _check_arrays(self) -> None:
        ids, counts = self.ids, self.counts
        if ids.size != counts.size:
            raise self._wrong(f"{ids.size} ids, but {counts.size} counts")
        if not ids.size:
            return
        if ids.min() < 0 or ids.max() >= self.rows:
            wrong = ids[(ids < 0) | (ids >= self.rows)][0]
            raise self._wrong(f"id {wrong} is outside 0 to {self.rows - 1}")
        ascending = np.sort(ids)
        repeated = ascending[1:][ascending[1:] == ascending[:-1]]
        if repeated.size:
            raise self._wrong(f"id {repeated[0]} is listed twice")
        if counts.min() < 1:
            raise self._wrong(f"counts must be 1 or more, found {counts.min()}")
        if counts.sum(dtype=np.float64) >= COUNT_LIMIT:
            raise self._wrong("its counts add up to 2**63 lookups or more")
        in_order = (counts[:-1] > counts[1:]) | ((counts[:-1] == counts[1:]) & (ids[:-1] < ids[1:]))
        if not in_order.all():
            at = int(np.argmin(in_order)) + 1
            raise self._wrong(
                f"ids must come hottest first, smaller id first among equals;"
                f" id {ids[at]} at place {at} doesn't"
            )

    def _check_bags(self) -> None:
        for field in ("bags", "empty_bags"):
            count = whole_number(getattr(self, field), f"profile of table {self.name}: {field}")
            object.__setattr__(self, field, count)
        filled = self.bags - self.empty_bags
        if not (0 < filled <= self.lookups or filled == self.lookups == 0):
            raise self._wrong(
                f"{self.lookups} lookups can't come from {self.bags} bags"
                f" of which {self.empty_bags} are empty"
            )

    def _wrong(self, what: str) -> ProfileError:
        return ProfileError(f"profile of table {self.name}: {what}")


@dataclass(frozen=True, eq=False)
class AccessProfile:
    """How the input uses the tables of a model. Compare two by ``content_hash``.

    Args:
        tables: one value for each table, with unique names.
        samples: training examples that were read, 1 or more.

    Raises:
        ProfileError: for a value outside what is said above.
    """

    tables: tuple[TableAccess, ...]
    samples: int

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

    @classmethod
    def from_batches(
        cls, batches: Iterable[Any], tables: Any, *, progress: bool = False
    ) -> AccessProfile:
        """Count every lookup of ``batches``, which are read once.

        Args:
            batches: ``KeyedJaggedTensor`` values, or objects that hold one as
                ``sparse_features`` (``torchrec.datasets.utils.Batch``). Weights, and
                features that no table uses, are ignored; a feature that two tables
                share counts for both.
            tables: an ``EmbeddingBagCollection``, or ``TableSpec`` values.
            progress: show a progress bar on a terminal's stderr.

        Raises:
            ProfileError: no sample in ``batches``; a batch that lacks a feature of the
                tables; ids that aren't integers or are outside their table.
        """
        collector = AccessCollector(table_specs(tables))
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
            tables=tuple(
                TableAccess(
                    spec.name,
                    spec.rows,
                    spec.features,
                    *counter.hottest_first(),
                    bags=counter.bags,
                    empty_bags=counter.empty_bags,
                )
                for spec, counter in zip(collector.tables, collector.counters, strict=True)
            ),
            samples=collector.samples,
        )

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 (hex) of the values: the same for the same lookups, however batched."""
        return content_hash(self._header(), self._arrays())

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

    def check_fits(self, tables: Sequence[TableSpec]) -> None:
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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to ``path``, all or nothing.

        Raises:
            OSError: the folder can't be written or the disk is full; an older file at
                ``path`` is untouched.
        """
        small = {name: _smallest(array) for name, array in self._arrays().items()}
        write_archive(path, KIND, {"format": FORMAT, **self._header()}, small)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AccessProfile:
        """The profile that ``save`` wrote, checked in full.

        Raises:
            FileNotFoundError: there is no such file.
            ArchiveError: the file is damaged or isn't a profile.
            ProfileError: it was written by a newer version, or its values are wrong.
        """
        header, arrays = read_archive(path, KIND)
        _check_format(path, header)
        try:
            tables = tuple(
                _table_from_file(fields, arrays, at) for at, fields in enumerate(header["tables"])
            )
            return cls(tables=tables, samples=header["samples"])
        except (KeyError, TypeError) as error:
            raise ProfileError(
                f"{path}: a value is missing or of the wrong type: {error}"
            ) from error
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error

    def _header(self) -> dict[str, Any]:
        tables = [
            {
                "name": table.name,
                "rows": table.rows,
                "features": list(table.features),
                "bags": table.bags,
                "empty_bags": table.empty_bags,
            }
            for table in self.tables
        ]
        return {"samples": self.samples, "tables": tables}

    def _arrays(self) -> dict[str, npt.NDArray[np.int64]]:
        # By position: a table's name may hold what a file name mustn't.
        return {
            f"{at}.{field}": getattr(table, field)
            for at, table in enumerate(self.tables)
            for field in ("ids", "counts")
        }


def _check_format(path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
    found = whole_number(header.get("format"), f"{path}: format", least=1)
    if found > FORMAT:
        raise ProfileError(
            f"{path} has profile format {found}, but this version of torchrec-oper reads"
            f" up to {FORMAT}; upgrade torchrec-oper, or profile the input again"
        )


def _table_from_file(
    fields: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], at: int
) -> TableAccess:
    features = fields["features"]
    return TableAccess(
        name=fields["name"],
        rows=fields["rows"],
        # Anything but a list is left for TableAccess to refuse.
        features=tuple(features) if isinstance(features, list) else features,
        ids=arrays[f"{at}.ids"],
        counts=arrays[f"{at}.counts"],
        bags=fields["bags"],
        empty_bags=fields["empty_bags"],
    )


def _differences(name: str, found: TableAccess | None, wanted: TableSpec | None) -> list[str]:
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


def _smallest(array: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """``array`` in the smallest unsigned type that holds it."""
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))
