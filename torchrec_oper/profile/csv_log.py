"""Text logs with a header and named columns: CSV, TSV and the like."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from torchrec_oper.errors import LogFormatError, ProfileError
from torchrec_oper.profile.bags import BagBlock, Bags, bag_of
from torchrec_oper.profile.fields import bags_in_fields, shown
from torchrec_oper.profile.progress import Tick
from torchrec_oper.profile.text_log import import_pyarrow, line_chunks

BLOCK_BYTES = 1 << 20
LIST_SEPARATOR = "|"

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class CsvLog:
    """A text file whose first line names the columns; plain, or packed by gzip or zstd.

    A field holds the ids of one sample: none, one, or several with ``separator`` between
    them. Fields may be quoted by ``"``, but hold no newline.

    Args:
        path: the file.
        delimiter: one character between columns; by default a tab for a file called
            ``.tsv``, also before ``.gz`` and ``.zst``, and a comma for any other.
        separator: one character between the ids of a field.

    Raises:
        ProfileError: one of the two isn't one ASCII character, or they are the same.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        delimiter: str | None = None,
        separator: str = LIST_SEPARATOR,
    ) -> None:
        name = os.fspath(path).lower().removesuffix(".gz").removesuffix(".zst")
        self.path = path
        self.delimiter = delimiter or ("\t" if name.endswith(".tsv") else ",")
        self.separator = separator
        for what, text in (("delimiter", self.delimiter), ("list separator", separator)):
            if len(text) != 1 or not text.isascii() or text.isalnum() or text in '-"\r\n':
                raise ProfileError(
                    f"the {what} must be one ASCII character, no letter, digit, quote or minus,"
                    f" found {text!r}"
                )
        if self.delimiter == separator:
            raise ProfileError(f"delimiter and list separator are both {separator!r}")

    def features(self) -> tuple[str, ...]:
        """The columns' names.

        Raises:
            OSError: the file can't be read.
            LogFormatError: it is no text file, or its header is wrong.
        """
        _, chunk = next(line_chunks(self.path, block_bytes=BLOCK_BYTES))
        return self._header(chunk)[0]

    def rows(self, feature: str) -> int | None:
        """Not known before the file is read."""
        return None

    def blocks(self, features: Sequence[str], *, tick: Tick | None = None) -> Iterator[BagBlock]:
        """The samples of the columns ``features``, in order.

        Raises:
            OSError: the file can't be read.
            LogFormatError: a column is missing, or a line breaks the format.
            VersionError: pyarrow is missing.
        """
        columns: tuple[str, ...] = ()
        for line, chunk in line_chunks(self.path, block_bytes=BLOCK_BYTES, tick=tick):
            if not columns:
                columns, chunk = self._header(chunk)
                line += 1
                self._check(columns, features)
            if chunk:
                yield self._block(line, chunk, columns, features)

    def _header(self, chunk: bytes) -> tuple[tuple[str, ...], bytes]:
        """The columns' names, and the lines after them."""
        head, _, rest = chunk.partition(b"\n")
        try:
            text = head.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\r").decode()
            (names,) = csv.reader([text], delimiter=self.delimiter, strict=True)
        except (ValueError, csv.Error) as error:
            raise LogFormatError(
                f"{self.path}, line 1: no header that names the columns: {shown(head)}"
            ) from error
        if len(set(names)) != len(names):
            raise LogFormatError(f"{self.path}, line 1: a column is named twice: {shown(head)}")
        return tuple(names), rest

    def _check(self, columns: Sequence[str], features: Sequence[str]) -> None:
        missing = [feature for feature in features if feature not in columns]
        if missing:
            raise LogFormatError(
                f"{self.path} has no column {missing[0]}; its header, split at"
                f" {self.delimiter!r}, names {shown(', '.join(columns).encode())}"
            )

    def _block(
        self, line: int, chunk: bytes, columns: Sequence[str], features: Sequence[str]
    ) -> BagBlock:
        pa = import_pyarrow()
        # To Arrow a blank line is one of empty fields.
        if len(columns) > 1 and (chunk[0] in b"\r\n" or b"\n\n" in chunk or b"\n\r" in chunk):
            raise self._complaint(line, chunk, columns, ValueError("a blank line"))
        try:
            table = pa.csv.read_csv(
                pa.BufferReader(chunk),
                read_options=pa.csv.ReadOptions(column_names=columns, use_threads=False),
                parse_options=pa.csv.ParseOptions(
                    delimiter=self.delimiter, ignore_empty_lines=False
                ),
                convert_options=pa.csv.ConvertOptions(
                    include_columns=list(dict.fromkeys(features)),
                    column_types=dict.fromkeys(features, pa.binary()),
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            raise self._complaint(line, chunk, columns, error) from error
        bags = {
            name: _bags(table.column(name), self.separator, self._place(line, name))
            for name in features
        }

        def locate(feature: str, at: int) -> str:
            return f"line {line + bag_of(bags[feature][1], at)}, column {feature}"

        return BagBlock(table.num_rows, bags, locate)

    def _place(self, line: int, column: str) -> Callable[[int], str]:
        return lambda at: f"{self.path}, line {line + at}, column {column}"

    def _complaint(
        self, line: int, chunk: bytes, columns: Sequence[str], error: Exception
    ) -> LogFormatError:
        """Which line has the wrong number of fields; or else what Arrow says."""
        text = chunk.decode(errors="replace")
        with io.StringIO(text, newline="") as lines:
            for at, fields in enumerate(csv.reader(lines, delimiter=self.delimiter)):
                if len(fields) != len(columns):
                    return LogFormatError(
                        f"{self.path}, line {line + at}: found {len(fields)} fields, wanted"
                        f" {len(columns)} as in the header"
                    )
        return LogFormatError(f"{self.path}, in the lines from {line} on: {error}")


def _bags(column: Any, separator: str, place: Callable[[int], str]) -> Bags:
    """The bags of a column of texts."""
    array = column.combine_chunks()
    _, offsets, content = array.buffers()
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4).astype(np.int64)
    fields = memoryview(content or b"")[ends[0] : ends[-1]]
    return bags_in_fields(fields, ends - ends[0], separator=separator, place=place)
