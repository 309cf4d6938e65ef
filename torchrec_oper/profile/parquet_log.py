"""Parquet logs: integer columns with one id a sample, and list columns with any number."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from torchrec_oper.errors import LogFormatError
from torchrec_oper.profile.bags import BagBlock, Bags, bag_of
from torchrec_oper.profile.progress import Tick
from torchrec_oper.profile.text_log import import_pyarrow

BLOCK_ROWS = 1 << 14  # of a file at once, whatever the size of its row groups


class ParquetLog:
    """A Parquet file. A null is an empty bag, be it in place of an id or of a list.

    Args:
        path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    def features(self) -> tuple[str, ...]:
        """The columns' names.

        Raises:
            OSError: the file can't be read.
            LogFormatError: it isn't Parquet, or is damaged.
            VersionError: pyarrow is missing.
        """
        with self._opened() as file:
            return tuple(file.schema_arrow.names)

    def rows(self, feature: str) -> int | None:
        """Not known before the file is read."""
        return None

    def blocks(self, features: Sequence[str], *, tick: Tick | None = None) -> Iterator[BagBlock]:
        """The samples of the columns ``features``, in order.

        Raises:
            OSError: the file can't be read.
            LogFormatError: it isn't Parquet or is damaged, a column is missing or holds
                neither integers nor lists of them, or a list holds a null.
            VersionError: pyarrow is missing.
        """
        names = list(dict.fromkeys(features))
        first = 0
        with self._opened() as file:
            self._check(file.schema_arrow, names)
            size = os.stat(self.path).st_size
            batches = file.iter_batches(BLOCK_ROWS, columns=names, use_threads=False)
            while (batch := self._next(batches)) is not None:
                yield self._block(batch, names, first)
                if tick is not None:
                    done, total = first + batch.num_rows, file.metadata.num_rows
                    tick(size * done // total - size * first // total)
                first += batch.num_rows

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        import_pyarrow()
        import pyarrow.parquet

        with open(self.path, "rb") as source:
            try:
                file = pyarrow.parquet.ParquetFile(source)
            except pyarrow.ArrowException as error:
                raise self._damaged(error) from error
            yield file

    def _next(self, batches: Iterator[Any]) -> Any | None:
        try:
            return next(batches, None)
        except OSError as error:
            # The system's own errors have a number; those of the decoding have none.
            if error.errno is not None:
                raise
            raise self._damaged(error) from error
        except import_pyarrow().ArrowException as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> LogFormatError:
        return LogFormatError(
            f"{self.path} is no Parquet file, or damaged, or beyond pyarrow ({error});"
            " write it again"
        )

    def _check(self, schema: Any, names: Sequence[str]) -> None:
        for name in names:
            if name not in schema.names:
                raise LogFormatError(
                    f"{self.path} has no column {name}; its columns are {', '.join(schema.names)}"
                )
            if schema.names.count(name) > 1:
                raise LogFormatError(f"{self.path} has two columns {name}; rename one")
            kind = schema.field(name).type
            if not _is_integer(kind) and not (_is_list(kind) and _is_integer(kind.value_type)):
                raise LogFormatError(
                    f"{self.path}, column {name}: holds {kind}, wanted integers (null where a"
                    " sample has no id) or lists of integers; convert the column"
                )

    def _block(self, batch: Any, names: Sequence[str], first: int) -> BagBlock:
        bags = {}
        for name in names:
            column = batch.column(batch.schema.get_field_index(name))
            if _is_list(column.type):
                bags[name] = self._list_bags(column, name, first)
            else:
                lengths = column.is_valid().to_numpy(zero_copy_only=False).astype(np.int32)
                bags[name] = (self._ids(column.drop_null(), name, first), lengths)

        def locate(feature: str, at: int) -> str:
            return f"row {first + bag_of(bags[feature][1], at)} (from 0), column {feature}"

        return BagBlock(batch.num_rows, bags, locate)

    def _list_bags(self, column: Any, name: str, first: int) -> Bags:
        compute = import_pyarrow().compute
        lengths = compute.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)
        # Unlike .values, what this gives leaves out what lies under a null.
        values = column.flatten()
        if values.null_count:
            at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise LogFormatError(
                f"{self.path}, row {first + bag_of(lengths, at)} (from 0), column {name}: a list"
                " holds a null, wanted integers; leave it out of the list"
            )
        return self._ids(values, name, first), lengths

    def _ids(self, values: Any, name: str, first: int) -> Any:
        ids = values.to_numpy()
        if ids.dtype == np.uint64 and ids.size and ids.max() >= 2**63:
            raise LogFormatError(
                f"{self.path}, in the rows from {first} (from 0) on, column {name}: {ids.max()} is"
                " outside the 64-bit integers; hash it to fewer bits"
            )
        return ids


def _is_integer(kind: Any) -> bool:
    return bool(import_pyarrow().types.is_integer(kind))


def _is_list(kind: Any) -> bool:
    types = import_pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
