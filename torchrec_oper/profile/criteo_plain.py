"""The definition of the Criteo format: a plain parser that says what is wrong, and where.

It reads what the fast parser refuses, so it decides what a log may hold.
"""

from __future__ import annotations

import os
import re

import numpy as np

from torchrec_oper.errors import LogFormatError
from torchrec_oper.profile.criteo_format import (
    CATEGORICAL_FEATURES,
    COLUMNS,
    INTEGER_FEATURES,
    MOST_HEX_DIGITS,
    CriteoBlock,
)

_LABEL = re.compile("-?0+|0*1")
_INTEGER = re.compile("-?[0-9]+")
_HEX = re.compile("[0-9a-fA-F]+")
_INT64_DIGITS = 19
_SHOWN_CHARACTERS = 40


def parse(chunk: bytes, *, first_line: int, path: str | os.PathLike[str]) -> CriteoBlock:
    """The samples of ``chunk``, whole lines that start with line ``first_line`` of ``path``.

    Raises:
        LogFormatError: the first line that breaks the format, and in which column.
    """
    lines = chunk.split(b"\n")
    if not lines[-1]:
        lines.pop()
    labels = np.empty(len(lines), np.int8)
    dense = np.empty((len(lines), len(INTEGER_FEATURES)), np.float32)
    hashes = np.zeros((len(CATEGORICAL_FEATURES), len(lines)), np.uint32)
    present = np.zeros((len(CATEGORICAL_FEATURES), len(lines)), np.bool_)
    for at, line in enumerate(lines):
        try:
            fields = _fields(line.removesuffix(b"\r"))
            label, *rest = fields
            labels[at] = _label(label)
            for column, name in enumerate(INTEGER_FEATURES):
                dense[at, column] = _integer(rest[column], name)
            for column, name in enumerate(CATEGORICAL_FEATURES):
                text = rest[len(INTEGER_FEATURES) + column]
                hashes[column, at] = _hash(text, name)
                present[column, at] = bool(text)
        except LogFormatError as error:
            raise LogFormatError(f"{path}, line {first_line + at}: {error}") from None
    return CriteoBlock(first_line, labels, dense, hashes, present)


def _fields(line: bytes) -> list[str]:
    if not line:
        raise LogFormatError(f"a blank line, wanted {_WANTED}")
    if b"\0" in line:
        raise LogFormatError(f"{_column(line, line.index(0))}: found a NUL byte, wanted text")
    try:
        fields = line.decode().split("\t")
    except UnicodeDecodeError as error:
        raise LogFormatError(
            f"{_column(line, error.start)}: byte 0x{line[error.start]:02x} isn't UTF-8 text"
        ) from None
    if len(fields) != len(COLUMNS):
        unlabelled = len(fields) == len(COLUMNS) - 1
        raise LogFormatError(
            f"found {len(fields)} field{'s' * (len(fields) != 1)}, wanted {_WANTED}"
            + "; is this a log without labels, like test.txt?" * unlabelled
        )
    return fields


_WANTED = (
    f"{len(COLUMNS)} fields separated by tabs (label, {len(INTEGER_FEATURES)} integers,"
    f" {len(CATEGORICAL_FEATURES)} categories)"
)


def _column(line: bytes, position: int) -> str:
    at = line.count(b"\t", 0, position)
    return COLUMNS[at] if at < len(COLUMNS) else f"field {at + 1}"


def _label(text: str) -> int:
    if not _LABEL.fullmatch(text):
        raise LogFormatError(f"label: found {_shown(text)}, wanted 0 or 1")
    return int(text[-1])


def _integer(text: str, name: str) -> np.float32:
    if not text:
        return np.float32(np.nan)
    if not _INTEGER.fullmatch(text):
        raise LogFormatError(f"{name}: found {_shown(text)}, wanted an integer or nothing")
    # Counted first: Python refuses to convert thousands of digits.
    if len(text.lstrip("-0")) > _INT64_DIGITS or not -(2**63) <= int(text) < 2**63:
        raise LogFormatError(f"{name}: {_shown(text)} is outside the 64-bit integers")
    return np.int64(int(text)).astype(np.float32)


def _hash(text: str, name: str) -> int:
    if not text:
        return 0
    if not _HEX.fullmatch(text):
        raise LogFormatError(
            f"{name}: found {_shown(text)}, wanted up to {MOST_HEX_DIGITS}"
            " hexadecimal digits or nothing"
        )
    if len(text) > MOST_HEX_DIGITS:
        raise LogFormatError(
            f"{name}: found {len(text)} hexadecimal digits, {_shown(text)},"
            f" wanted {MOST_HEX_DIGITS} at most"
        )
    return int(text, 16)


def _shown(text: str) -> str:
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
    return ascii(shown)
