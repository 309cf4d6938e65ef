"""A finished placement as the judge sees it: which part has a row, and who owns the part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.decision import Decision, Exchange
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.table import TableSpec

Ints = npt.NDArray[np.int64]

HOT = -1  # in place of a part: every rank has the row


@dataclass(frozen=True, eq=False)
class PlacedTable:
    """Where the rows of one table lie.

    Args:
        table: the table.
        exchange: how the values of rows that aren't hot travel.
        owners: [columns, parts] int64, the rank of each piece, as in ``Decision``.
        part_rows: [parts] int64, rows of each part; one without rows is no piece.
        parts_of: from ids [N] int64 of the table to the part of each [N], ``HOT`` for rows
            that every rank has.

    Raises:
        PlanError: the owners don't suit the exchange, nor the exchange the pooling, a part's
            rows are below 0, or the parts have more rows than the table.
    """

    table: TableSpec
    exchange: Exchange
    owners: Ints
    part_rows: Ints
    parts_of: Callable[[Ints], npt.ArrayLike]

    def __post_init__(self) -> None:
        rows = np.array(self.part_rows, dtype=np.int64)
        owners = Decision(self.exchange, 0, self.owners).owners
        if rows.shape != owners.shape[1:] or (rows < 0).any() or rows.sum() > self.table.rows:
            raise self._wrong(
                f"part_rows must hold its {self.table.rows} rows or fewer, a number for each of"
                f" {owners.shape[1]} parts, found {rows.tolist()[:9]}"
            )
        if owners.shape[0] < 1 or self.table.dim % owners.shape[0]:
            raise self._wrong(
                f"{self.table.dim} elements can't be cut into {owners.shape[0]} slices of equal"
                " width"
            )
        if self.exchange in ("partial", "whole") and self.table.pooling == "none":
            raise self._wrong(f"{self.exchange} sums the rows of a bag, but its pooling is 'none'")
        rows.flags.writeable = False
        object.__setattr__(self, "part_rows", rows)
        object.__setattr__(self, "owners", owners)

    @property
    def hot_rows(self) -> int:
        """Rows that every rank has."""
        return self.table.rows - int(self.part_rows.sum())

    @property
    def slice_bytes(self) -> float:
        """Bytes of a row of one column slice."""
        return self.table.row_bytes / self.owners.shape[0]

    def parts(self, ids: Ints) -> Ints:
        """[N] the part of each id, or ``HOT``.

        Raises:
            PlanError: an id is outside the table, or gets a part that there isn't.
        """
        if ids.size and (ids.min() < 0 or ids.max() >= self.table.rows):
            bad = ids[(ids < 0) | (ids >= self.table.rows)][0]
            raise self._wrong(f"id {bad} is outside its {self.table.rows} rows")
        parts = np.asarray(self.parts_of(ids), dtype=np.int64)
        if parts.shape != ids.shape or (
            parts.size and not HOT <= parts.min() <= parts.max() < len(self.part_rows)
        ):
            raise self._wrong(f"parts_of must give a part below {len(self.part_rows)} for each id")
        return parts

    def _wrong(self, what: str) -> PlanError:
        return PlanError(f"placement of table {self.table.name}: {what}")


def placed_table(placement: TablePlacement) -> PlacedTable:
    """A plan's table as the judge sees it."""
    row_map, parts = placement.row_map, placement.decision.parts

    def parts_of(ids: Ints) -> Ints:
        part, _ = row_map.place(ids)
        return np.where(part == parts, HOT, part)  # the part after all others is hot

    return PlacedTable(
        table=placement.table,
        exchange=placement.decision.exchange,
        owners=placement.owners,
        part_rows=row_map.owned_rows[:parts],
        parts_of=parts_of,
    )
