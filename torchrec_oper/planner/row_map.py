"""Which rank owns a row, and where: the map from logical ids to owners and slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowMap:
    """The owner and slot of every row of one table.

    A table's rows are numbered a second time, in the order of their owners: owner r
    holds the physical rows ``bounds[r]`` to ``bounds[r + 1] - 1``, and a slot is a
    physical row less its owner's bound. Some ids are listed with their physical row;
    an owner's listed rows fill its first slots. The ids that aren't listed, in
    ascending order, fill the remaining slots of owner 0, then those of owner 1, and
    so on; so a table of any size costs 16 bytes for a listed id and 8 for a rank.

    Args:
        bounds: [W + 1] int64, from 0 to the table's rows, not falling.
        listed_ids: [L] int64, ascending.
        listed_rows: [L] int64, the physical row of each listed id.

    Raises:
        PlanError: the arrays don't describe a map of every id to a row of its own.
    """

    bounds: Ints
    listed_ids: Ints
    listed_rows: Ints

    def __post_init__(self) -> None:
        for name in ("bounds", "listed_ids", "listed_rows"):
            array = _integers(getattr(self, name), f"a row map's {name}").copy()
            if array.ndim != 1:
                raise PlanError(f"a row map's {name} must have 1 dimension, found {array.ndim}")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        self._check_bounds()
        self._check_listed()

    def _check_bounds(self) -> None:
        bounds = self.bounds
        if len(bounds) < 2 or bounds[0] != 0 or np.any(np.diff(bounds) < 0) or bounds[-1] < 1:
            raise PlanError(
                "a row map's bounds must rise from 0 to the table's rows with one entry more"
                f" than there are ranks, found {bounds.tolist()[:9]}"
            )

    def _check_listed(self) -> None:
        ids, physical = self.listed_ids, self.listed_rows
        if len(ids) != len(physical):
            raise PlanError(
                f"a row map lists {len(ids)} ids but {len(physical)} physical rows for them"
            )
        if len(ids) and (ids[0] < 0 or ids[-1] >= self.rows or np.any(np.diff(ids) <= 0)):
            raise PlanError(
                f"a row map's listed ids must ascend within 0 to {self.rows - 1} without repeats"
            )
        if len(ids) and (physical.min() < 0 or physical.max() >= self.rows):
            raise PlanError(f"a row map lists physical rows outside 0 to {self.rows - 1}")
        first_slots = np.concatenate(
            [
                np.arange(b, b + n)
                for b, n in zip(self.bounds[:-1], self._listed_counts, strict=True)
            ]
        )
        if not np.array_equal(np.sort(physical), first_slots):
            raise PlanError("a row map's listed ids must fill the first slots of their owners")

    def __reduce__(self) -> tuple[Any, ...]:
        # Through __init__, which checks and freezes the arrays again.
        return RowMap, (self.bounds, self.listed_ids, self.listed_rows)

    @classmethod
    def from_owners(cls, *, listed_ids: Ints, listed_owners: Ints, unlisted_counts: Ints) -> RowMap:
        """The map that gives listed ids to owners, and each owner a number of other rows.

        Args:
            listed_ids: [L] distinct ids; an owner's ids take its slots in this order.
            listed_owners: [L], the owner of each listed id.
            unlisted_counts: [W], how many of the other ids each owner holds.

        Raises:
            PlanError: an owner is not a rank, or the arrays don't fit together.
        """
        if listed_ids.shape != listed_owners.shape or unlisted_counts.ndim != 1:
            raise PlanError(
                f"listed_ids and listed_owners must be of one shape, found {listed_ids.shape} and"
                f" {listed_owners.shape}, and unlisted_counts of 1 dimension"
            )
        if len(listed_owners) and not (
            listed_owners.min() >= 0 and listed_owners.max() < len(unlisted_counts)
        ):
            raise PlanError(
                f"owners must be ranks from 0 to {len(unlisted_counts) - 1}, found"
                f" {listed_owners.min()} to {listed_owners.max()}"
            )
        listed_counts = np.bincount(listed_owners, minlength=len(unlisted_counts))
        bounds = np.concatenate([[0], np.cumsum(listed_counts + unlisted_counts)])
        by_owner = np.argsort(listed_owners, kind="stable")
        owners = listed_owners[by_owner]
        slots = np.arange(len(owners)) - (np.cumsum(listed_counts) - listed_counts)[owners]
        physical = np.empty(len(owners), dtype=np.int64)
        physical[by_owner] = bounds[owners] + slots
        by_id = np.argsort(listed_ids, kind="stable")
        return cls(bounds, listed_ids[by_id], physical[by_id])

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return int(self.bounds[-1])

    @property
    def world_size(self) -> int:
        """Number of ranks that the map was made for."""
        return len(self.bounds) - 1

    @property
    def owned_rows(self) -> Ints:
        """[W] rows that each rank owns."""
        counts: Ints = np.diff(self.bounds)
        return counts

    @cached_property
    def _listed_counts(self) -> Ints:
        """[W] listed ids of each owner."""
        owners = np.searchsorted(self.bounds, self.listed_rows, side="right") - 1
        counts: Ints = np.bincount(owners, minlength=self.world_size)
        return counts

    @cached_property
    def range_starts(self) -> Ints:
        """[W] how many unlisted ids the owners before each owner hold."""
        unlisted = self.owned_rows - self._listed_counts
        starts: Ints = np.cumsum(unlisted) - unlisted
        return starts

    @cached_property
    def range_rows(self) -> Ints:
        """[W] physical row of each owner's first unlisted id."""
        return self.bounds[:-1] + self._listed_counts

    def physical_rows(self, ids: npt.ArrayLike) -> Ints:
        """The physical row of each id.

        Raises:
            PlanError: an id is outside the table.
        """
        wanted = _integers(ids, "ids")
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.rows):
            bad = wanted[(wanted < 0) | (wanted >= self.rows)][0]
            raise PlanError(f"id {bad} is outside the table, whose ids end at {self.rows - 1}")
        before = np.searchsorted(self.listed_ids, wanted)
        number = wanted - before
        range_ = np.searchsorted(self.range_starts, number, side="right") - 1
        physical = self.range_rows[range_] + number - self.range_starts[range_]
        if len(self.listed_ids):
            at = np.minimum(before, len(self.listed_ids) - 1)
            listed = self.listed_ids[at] == wanted
            physical = np.where(listed, self.listed_rows[at], physical)
        return physical

    def place(self, ids: npt.ArrayLike) -> tuple[Ints, Ints]:
        """The owner and the slot of each id."""
        physical = self.physical_rows(ids)
        owner = np.searchsorted(self.bounds, physical, side="right") - 1
        return owner, physical - self.bounds[owner]

    def logical_ids(self, rank: int) -> Ints:
        """The ids that ``rank`` owns, in the order of their slots."""
        if not 0 <= rank < self.world_size:
            raise PlanError(f"the row map is for {self.world_size} ranks, found rank {rank}")
        begin, end = self.bounds[rank], self.bounds[rank + 1]
        mine = np.flatnonzero((self.listed_rows >= begin) & (self.listed_rows < end))
        listed = self.listed_ids[mine[np.argsort(self.listed_rows[mine])]]
        start = self.range_starts[rank]
        numbers = np.arange(start, start + end - begin - len(listed))
        # The n-th unlisted id is n plus the listed ids that come before it.
        gaps = self.listed_ids - np.arange(len(self.listed_ids))
        unlisted = numbers + np.searchsorted(gaps, numbers, side="right")
        return np.concatenate([listed, unlisted])

    def arrays(self) -> dict[str, Ints]:
        """The arrays that describe the map; ``from_arrays`` reads them back."""
        return {
            "bounds": self.bounds,
            "listed_ids": self.listed_ids,
            "listed_rows": self.listed_rows,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> RowMap:
        """The map that ``arrays`` describes.

        Raises:
            PlanError: an array is missing or wrong.
        """
        try:
            return cls(arrays["bounds"], arrays["listed_ids"], arrays["listed_rows"])
        except KeyError as error:
            raise PlanError(f"a row map needs the array {error}, which is missing") from error


def _integers(values: npt.ArrayLike, name: str) -> Ints:
    """``values`` as int64; an empty list is one of integers."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise PlanError(f"{name} must be integers, found {array.dtype}")
    return array.astype(np.int64, copy=False)
