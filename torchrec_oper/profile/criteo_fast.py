"""The fast parser of Criteo logs. It refuses without reasons; the plain parser has them."""

from __future__ import annotations

from binascii import unhexlify
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.profile.criteo_format import (
    CATEGORICAL_FEATURES,
    COLUMNS,
    INTEGER_FEATURES,
    MOST_HEX_DIGITS,
    CriteoBlock,
)
from torchrec_oper.profile.text_log import import_pyarrow

_ALLOWED_BYTES = b"0123456789abcdefABCDEF-\t\n"


def parse(chunk: bytes, *, first_line: int) -> CriteoBlock:
    """The samples of ``chunk``, whole lines that start with line ``first_line`` of the log.

    Raises:
        ValueError: a line breaks the format, or ends in a way that Arrow doesn't know.
        VersionError: pyarrow is missing.
    """
    if b"\r" in chunk:
        chunk = chunk.replace(b"\r\n", b"\n")
    # Arrow takes more than the format allows: spaces around numbers, 0x, lone returns.
    if chunk.translate(None, _ALLOWED_BYTES):
        raise ValueError("a byte that no field may hold")
    table = _read_csv(chunk)
    return CriteoBlock(
        first_line,
        _labels(table.column("label")),
        _dense(table),
        *_hashes(table),
    )


def _read_csv(chunk: bytes) -> Any:
    pa = import_pyarrow()
    return pa.csv.read_csv(
        pa.BufferReader(chunk),
        read_options=pa.csv.ReadOptions(column_names=COLUMNS),
        parse_options=pa.csv.ParseOptions(
            delimiter="\t", quote_char=False, escape_char=False, ignore_empty_lines=False
        ),
        convert_options=pa.csv.ConvertOptions(
            column_types={
                "label": pa.int8(),
                **dict.fromkeys(INTEGER_FEATURES, pa.int64()),
                **dict.fromkeys(CATEGORICAL_FEATURES, pa.string()),
            },
            null_values=[""],
            # An empty category stays an empty text, told by its length.
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )


def _labels(column: Any) -> npt.NDArray[np.int8]:
    if column.null_count:
        raise ValueError("an empty label")
    labels: npt.NDArray[np.int8] = column.to_numpy()
    if labels.size and not 0 <= labels.min() <= labels.max() <= 1:
        raise ValueError("a label that is neither 0 nor 1")
    return labels


def _dense(table: Any) -> npt.NDArray[np.float32]:
    dense = np.empty((table.num_rows, len(INTEGER_FEATURES)), np.float32)
    for at, name in enumerate(INTEGER_FEATURES):
        column = table.column(name)
        dense[:, at] = column.fill_null(0).to_numpy()
        if column.null_count:
            dense[column.is_null().to_numpy(), at] = np.nan
    return dense


def _hashes(table: Any) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    shape = (len(CATEGORICAL_FEATURES), table.num_rows)
    hashes = np.zeros(shape, np.uint32)
    present = np.empty(shape, np.bool_)
    for at, name in enumerate(CATEGORICAL_FEATURES):
        column = table.column(name)
        lengths, digits = _texts(column)
        np.not_equal(lengths, 0, out=present[at])
        if lengths.max(initial=0) > MOST_HEX_DIGITS:
            raise ValueError("too many hexadecimal digits")
        if lengths.sum() != MOST_HEX_DIGITS * np.count_nonzero(present[at]):
            padded = import_pyarrow().compute.ascii_lpad(column, MOST_HEX_DIGITS, "0")
            _, digits = _texts(padded.filter(import_pyarrow().array(present[at])))
        # Eight digits are four bytes, the highest first. Much faster than a cast of '0x...'.
        hashes[at][present[at]] = np.frombuffer(unhexlify(digits), ">u4")
    return hashes, present


def _texts(column: Any) -> tuple[npt.NDArray[np.int32], memoryview]:
    """Lengths (int32 [n]) of the texts of a column, and the texts, one after another."""
    array = column.combine_chunks()
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return np.diff(ends), memoryview(data or b"")[ends[0] : ends[-1]]
