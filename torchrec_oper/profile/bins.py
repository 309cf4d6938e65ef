"""Bins for numbers of any size: exact where they are small, within 3.2 % above.

The bins of HdrHistogram (G. Tene, https://hdrhistogram.org): numbers below 64 have a bin
each, and each later power of two has 32 bins of one width. A bin keeps how many numbers
fell into it and their sum, so that sums and means are exact whatever the bins' width.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

EXACT_BELOW = 64
BINS = EXACT_BELOW + (63 - 6) * 32

_BITS = 6  # of a number that its bin is told by


def bin_of(numbers: Ints) -> Ints:
    """The bin of each number of 0 or more, int64 of the same shape; it never falls."""
    _, bit_length = np.frexp(numbers.astype(np.float64))
    dropped = np.maximum(bit_length.astype(np.int64) - _BITS, 0)
    return np.asarray((dropped << (_BITS - 1)) + (numbers >> dropped))


class BinnedSums:
    """Numbers of 0 or more in bins.

    Args:
        members: int64 [BINS], how many numbers fell into each bin.
        sums: int64 [BINS], their sum.
    """

    def __init__(self) -> None:
        self.members: Ints = np.zeros(BINS, np.int64)
        self.sums: Ints = np.zeros(BINS, np.int64)

    def add(self, numbers: Ints) -> None:
        """Let integers, int64 [N], fall into their bins."""
        if not numbers.size:
            return
        if int(numbers.max()) < EXACT_BELOW:
            found = np.bincount(numbers, minlength=EXACT_BELOW)
            self.members[:EXACT_BELOW] += found
            self.sums[:EXACT_BELOW] += found * _SMALL
            return
        bins = bin_of(numbers)
        np.add.at(self.members, bins, 1)
        np.add.at(self.sums, bins, numbers)

    def add_alike(self, number: int, *, times: int) -> None:
        """Let one number below ``EXACT_BELOW`` fall into its bin so many times."""
        self.members[number] += times
        self.sums[number] += number * times

    def merge(self, members: Ints, sums: Ints) -> None:
        """Add what other bins hold: members and sums [K], one bin each, no bin empty."""
        bins = bin_of(sums // members)  # a mean lies in its bin, and so does its whole part
        np.add.at(self.members, bins, members)
        np.add.at(self.sums, bins, sums)

    def filled(self) -> tuple[Ints, Ints]:
        """Members and sums of the bins above that of 0 that aren't empty, smallest first."""
        (found,) = np.nonzero(self.members[1:])
        return self.members[1:][found], self.sums[1:][found]


_SMALL = np.arange(EXACT_BELOW)
