"""Ids out of text fields: fast where all is well, and with the reason where it isn't."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import LogFormatError
from torchrec_oper.profile.bags import Bags
from torchrec_oper.profile.digits import Positions, Text

_INTEGER = re.compile(rb"-?[0-9]+")
_WHOLE_FLOAT = re.compile(rb"-?[0-9]+\.0*")
_SHOWN_BYTES = 40
_INT64_DIGITS = 19


def bags_in_fields(
    content: bytes | memoryview, offsets: Positions, *, separator: str, place: Callable[[int], str]
) -> Bags:
    """Ids that fields of a text write, one after another in each; an empty field has none.

    Args:
        content: the fields, one after another without anything between them.
        offsets: int64 [fields + 1], where each starts, and where the last ends.
        separator: one ASCII character, between the ids of a field.
        place: names a field by its position, for messages.

    Returns:
        Ids, int64 [N], and how many each field has, int64 [fields].

    Raises:
        LogFormatError: what stands for an id is no integer, or outside the 64-bit integers.
    """
    text = Text(content)
    fields = offsets[:-1] < offsets[1:]
    separators = np.flatnonzero(text.bytes == ord(separator))
    lengths = fields.astype(np.int64)
    starts, ends = offsets[:-1][fields], offsets[1:][fields]
    if separators.size:
        lengths += np.diff(np.searchsorted(separators, offsets))
        starts = np.sort(np.concatenate([starts, separators + 1]))
        ends = np.sort(np.concatenate([ends, separators]))
    try:
        return text.integers(starts, ends), lengths
    except ValueError:
        whole = text.bytes.tobytes()
        owners = np.repeat(np.arange(lengths.size), lengths).tolist()
        words = [whole[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        return integers(words, lambda at: place(owners[at])), lengths


def integers(words: Sequence[bytes], place: Callable[[int], str]) -> npt.NDArray[np.int64]:
    """The numbers that ``words`` write, int64 [N]; ``place`` names a word by its position.

    Raises:
        LogFormatError: a word is no integer, or outside the 64-bit integers.
    """
    values = np.empty(len(words), np.int64)
    for at, word in enumerate(words):
        if not _INTEGER.fullmatch(word):
            hint = ""
            if _WHOLE_FLOAT.fullmatch(word):
                hint = "; write the column as integers (pandas: astype('Int64'), not float)"
            raise LogFormatError(f"{place(at)}: found {shown(word)}, wanted an integer{hint}")
        # Counted first: Python refuses to convert thousands of digits.
        if len(word.lstrip(b"-0")) > _INT64_DIGITS or not -(2**63) <= int(word) < 2**63:
            raise LogFormatError(
                f"{place(at)}: {shown(word)} is outside the 64-bit integers; hash it to fewer bits"
            )
        values[at] = int(word)
    return values


def shown(word: bytes) -> str:
    """A field for a message: of bounded length, and in ASCII."""
    text = word.decode(errors="backslashreplace")
    return ascii(text if len(text) <= _SHOWN_BYTES else f"{text[:_SHOWN_BYTES]}...")
