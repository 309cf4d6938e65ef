"""Counts bags, and the distinct rows in each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.profile.bins import BinnedSums

Ints = npt.NDArray[Any]

_KEY_BITS = 63
_SORTED_IDS = 1 << 11


class BagCounter:
    """Bags of one table, of constant size.

    Args:
        rows: the table's rows.

    Attributes:
        bags: how many, empty ones included.
        empty_bags: how many without an id.
        distinct_rows: the distinct rows of each bag that isn't empty, in bins.
    """

    def __init__(self, rows: int) -> None:
        self._dtype = id_dtype(rows)
        self.bags = 0
        self.empty_bags = 0
        self.distinct_rows = BinnedSums()

    def add(self, ids: Ints, lengths: Ints) -> None:
        """Count bags of ``lengths`` (integers, [B]) that hold ``ids`` (integers, [N])."""
        self.bags += lengths.size
        filled = int(np.count_nonzero(lengths))
        self.empty_bags += lengths.size - filled
        if filled == ids.size:
            # As many bags as ids: one id in each.
            self.distinct_rows.add_alike(1, times=filled)
            return
        # Sorting is most of the work: twice as fast in half as many bytes.
        ids = ids.astype(self._dtype, copy=False)
        lengths = lengths if filled == lengths.size else lengths[lengths > 0]
        self.distinct_rows.add(distinct_per_bag(ids, lengths))

    def merge(self, other: BagCounter) -> None:
        """Add what another counter has counted."""
        self.bags += other.bags
        self.empty_bags += other.empty_bags
        self.distinct_rows.merge(*other.distinct_rows.filled())


def id_dtype(rows: int) -> type[np.int32] | type[np.int64]:
    """The type of ids of a table, and of ``rows`` itself, with less than -1 to spare."""
    return np.int32 if rows <= np.iinfo(np.int32).max else np.int64


def distinct_per_bag(ids: Ints, lengths: Ints) -> npt.NDArray[np.int64]:
    """Distinct ids of each bag, int64 [B].

    Args:
        ids: int32 or int64 [N] from 0, the bags' ids one after another.
        lengths: integers [B], 1 or more, which sum to N.
    """
    if not ids.size:
        return np.zeros(0, np.int64)
    lengths = lengths.astype(np.int64)
    if int(lengths.max()) * lengths.size == ids.size:
        ordered = np.sort(ids.reshape(lengths.size, -1), axis=1)
        repeats = ordered[:, 1:] == ordered[:, :-1]
        return np.asarray(lengths - np.count_nonzero(repeats, axis=1))
    bits = int(ids.max()).bit_length()
    if bits + lengths.size.bit_length() > _KEY_BITS:
        _, ids = np.unique(ids, return_inverse=True)
        bits = int(ids.max()).bit_length()
    # The number of the bag above the bits of the id: so that equal ids of a bag meet.
    keys = np.repeat(np.arange(lengths.size) << bits, lengths)
    keys |= ids
    ends = np.cumsum(lengths)
    cuts = ends[np.searchsorted(ends, np.arange(_SORTED_IDS, ids.size, _SORTED_IDS))]
    for part in np.split(keys, cuts):
        part.sort()  # few bags at once, which are in order already
    repeats = np.flatnonzero(keys[1:] == keys[:-1])
    return lengths - np.bincount(keys[repeats] >> bits, minlength=lengths.size)
