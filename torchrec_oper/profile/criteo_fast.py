"""The fast parser of Criteo logs. It refuses without reasons; the plain parser has them."""

from __future__ import annotations

from binascii import unhexlify

import numpy as np
import numpy.typing as npt

from torchrec_oper.profile.criteo_format import (
    COLUMNS,
    INTEGER_FEATURES,
    MOST_HEX_DIGITS,
    CriteoBlock,
)
from torchrec_oper.profile.digits import Positions, Text

_TAB, _NEWLINE = b"\t\n"
_HEX_ZEROS = np.uint64(0x3030303030303030)


def parse(chunk: bytes, *, first_line: int) -> CriteoBlock:
    """The samples of ``chunk``, whole lines that start with line ``first_line`` of the log.

    Raises:
        ValueError: a line breaks the format, or has more digits than are read fast.
    """
    if b"\r" in chunk:
        chunk = chunk.replace(b"\r\n", b"\n")
    if not chunk.endswith(b"\n"):
        chunk += b"\n"
    text = Text(chunk)
    starts, ends = _fields(text)
    integers = 1 + len(INTEGER_FEATURES)
    return CriteoBlock(
        first_line,
        _labels(text, starts[:, 0], ends[:, 0]),
        _dense(text, starts[:, 1:integers], ends[:, 1:integers]),
        *_hashes(text, starts[:, integers:], ends[:, integers:]),
    )


def _fields(text: Text) -> tuple[Positions, Positions]:
    """Where the fields start and end, int64 [samples, 40] each."""
    # No byte of a field is as low as these two.
    ends = np.flatnonzero(text.bytes <= _NEWLINE)
    lines = int(np.count_nonzero(text.bytes == _NEWLINE))
    tabs = int(np.count_nonzero(text.bytes == _TAB))
    if (lines * len(COLUMNS), tabs) != (ends.size, lines * (len(COLUMNS) - 1)):
        raise ValueError("a line with a wrong number of fields, or a byte that none may hold")
    if not (text.bytes[ends[len(COLUMNS) - 1 :: len(COLUMNS)]] == _NEWLINE).all():
        raise ValueError("a line with a wrong number of fields")
    starts = np.empty_like(ends)
    starts[:1] = 0
    np.add(ends[:-1], 1, out=starts[1:])
    shape = (lines, len(COLUMNS))
    return starts.reshape(shape), ends.reshape(shape)


def _labels(text: Text, starts: Positions, ends: Positions) -> npt.NDArray[np.int8]:
    labels = text.integers(starts, ends)
    if labels.size and not 0 <= labels.min() <= labels.max() <= 1:
        raise ValueError("a label that is neither 0 nor 1")
    return labels.astype(np.int8)


def _dense(text: Text, starts: Positions, ends: Positions) -> npt.NDArray[np.float32]:
    dense = np.full(starts.shape, np.nan, np.float32)
    present = starts < ends
    dense[present] = text.integers(starts[present], ends[present])
    return dense


def _hashes(
    text: Text, starts: Positions, ends: Positions
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    digits = ends - starts
    if digits.max(initial=0) > MOST_HEX_DIGITS:
        raise ValueError("too many hexadecimal digits")
    # Eight digits fill a word, filled up with zeros on the left: its lowest bytes.
    words = text.words_before(ends)
    short = digits != MOST_HEX_DIGITS
    unused = ((MOST_HEX_DIGITS - digits[short]) * 8).astype(np.uint64)
    kept = ((words[short] ^ _HEX_ZEROS) >> unused) << unused
    words[short] = kept ^ _HEX_ZEROS
    # Eight digits are four bytes, the highest first.
    hashes = np.frombuffer(unhexlify(words.data), ">u4").reshape(starts.shape)
    return hashes.T.astype(np.uint32, order="C"), np.ascontiguousarray((digits > 0).T)
