"""Decimal integers out of the bytes of a text, many at a time. The fast parsers share it.

It refuses without reasons: the caller reads what it refuses once more, slowly, to say why.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]

WORD_BYTES = 8
MOST_DIGITS = 19  # of 2**63 - 1; any number of so many digits is below 2**64

_ZEROS = np.uint64(0x3030303030303030)
_MINUS = ord("-")


class Text:
    """The bytes of a text, to be read in words of eight from any place.

    Args:
        content: the text.
    """

    def __init__(self, content: bytes | bytearray | memoryview) -> None:
        size = len(content)
        padded = np.zeros(size + 2 * WORD_BYTES, np.uint8)
        padded[WORD_BYTES : WORD_BYTES + size] = np.frombuffer(content, np.uint8)
        self.bytes = padded[WORD_BYTES : WORD_BYTES + size]
        # Word k is the eight bytes that end before byte k of the text.
        self._words: npt.NDArray[np.uint64] = np.ndarray(
            (size + WORD_BYTES + 1,), "<u8", padded, strides=(1,)
        )

    def words_before(self, ends: Positions) -> npt.NDArray[np.uint64]:
        """The eight bytes before each place, the first of them lowest; 0 before the text."""
        return self._words[ends]

    def words_from(self, starts: Positions) -> npt.NDArray[np.uint64]:
        """The eight bytes from each place on, the first of them lowest; 0 after the text."""
        return self._words[starts + WORD_BYTES]

    def integers(self, starts: Positions, ends: Positions) -> npt.NDArray[np.int64]:
        """The numbers written in ``[start, end)`` of each of some fields, [N].

        Raises:
            ValueError: a field is anything but digits, 1 to ``MOST_DIGITS``, after an
                optional minus; or its number is 2**63 or more, whatever the sign.
        """
        if not starts.size:
            return np.empty(0, np.int64)
        if not (starts < ends).all():
            raise ValueError("an empty field")
        negative = self.bytes[starts] == _MINUS
        digits = ends - starts - negative
        if digits.min() < 1 or digits.max() > MOST_DIGITS:
            raise ValueError("too few or too many digits")
        values = _eight(self.words_before(ends), digits)
        for group in range(WORD_BYTES, MOST_DIGITS, WORD_BYTES):
            longer = np.flatnonzero(digits > group)
            if not longer.size:
                break
            words = self.words_before(ends[longer] - group)
            values[longer] += _eight(words, digits[longer] - group) * np.uint64(10**group)
        signed = values.view(np.int64)
        if signed.min() < 0:
            raise ValueError("a number of 2**63 or more")
        np.negative(signed, out=signed, where=negative)
        return signed


def _eight(words: npt.NDArray[np.uint64], digits: Positions) -> npt.NDArray[np.uint64]:
    """The numbers that the last ``digits`` bytes, eight at most, of each word write."""
    unused = ((WORD_BYTES - np.minimum(digits, WORD_BYTES)) * 8).astype(np.uint64)
    values = ((words ^ _ZEROS) >> unused) << unused
    # A byte of 10 or more carries into its highest bit, or has it.
    over = (values + np.uint64(0x7676767676767676)) | values
    if (over & np.uint64(0x8080808080808080)).any():
        raise ValueError("a byte that is no digit")
    # Neighbours are joined, in twos, fours and eights: Lemire's eight digits at once,
    # https://lemire.me/blog/2022/01/21/swar-explained-parsing-eight-digits/
    values = (values * np.uint64(2561)) >> np.uint64(8)
    values = ((values & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(6553601)) >> np.uint64(16)
    values = (values & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(42949672960001)
    return values >> np.uint64(32)
