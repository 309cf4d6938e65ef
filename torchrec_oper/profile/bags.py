"""What every reader of a log gives: the bags of some samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from torchrec_oper.profile.progress import Tick

Bags = tuple[npt.NDArray[Any], npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class BagBlock:
    """Consecutive samples of a log, n of them.

    Args:
        samples: n.
        bags: of each feature the ids, integers [N], and the bags' lengths, integers [n].
        locate: says where an id stands, given its feature and its place in ``ids``.
    """

    samples: int
    bags: Mapping[str, Bags]
    locate: Callable[[str, int], str]


class BagLog(Protocol):
    """A log on disk, read by one of the readers."""

    path: str | os.PathLike[str]

    def features(self) -> tuple[str, ...]:
        """The names that the log's columns or arrays give."""

    def rows(self, feature: str) -> int | None:
        """Rows that a table of ``feature`` needs, where the log says so without being read."""

    def blocks(self, features: Sequence[str], *, tick: Tick | None = None) -> Iterator[BagBlock]:
        """The samples in order, read anew by each call; ``tick`` is told the bytes read."""


def bag_of(lengths: npt.NDArray[Any], at: int) -> int:
    """The bag that holds id ``at``, where the bags have ``lengths``."""
    return int(np.searchsorted(np.cumsum(lengths), at, side="right"))


def modulo(ids: npt.NDArray[Any], rows: int) -> npt.NDArray[np.int64]:
    """``ids`` hashed to 0 to ``rows - 1`` by the remainder; that of a negative id counts up."""
    if ids.dtype == np.uint32 and rows <= np.iinfo(np.uint32).max:
        # Several times as fast as %, which has no vector instructions.
        short: npt.NDArray[np.uint32] = ids - ids // np.uint32(rows) * np.uint32(rows)
        return short.astype(np.int64)
    hashed: npt.NDArray[np.int64] = ids.astype(np.int64, copy=False) % np.int64(rows)
    return hashed
