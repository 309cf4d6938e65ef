"""Where the rows of one table live, and how its values travel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.table import TableSpec


@dataclass(frozen=True, eq=False)
class TablePlacement:
    """Where the rows of one table live, and how its values travel.

    Args:
        module: path of the table's module in the model.
        table: the table.
        decision: its exchange, column slices and owners. The parts of ``row_map`` are the
            decision's, in ascending order of the first slice's owners.
        row_map: part and slot of every row; where there are hot rows, they are in one more
            part, the last.
        planned_lookups: [W] int64, lookups of the profiled data that each rank serves as
            an owner. Those of replicas aren't counted.

    Raises:
        PlanError: the parts don't fit together.
    """

    module: str
    table: TableSpec
    decision: Decision
    row_map: RowMap
    planned_lookups: Ints

    def __post_init__(self) -> None:
        lookups = np.array(self.planned_lookups, dtype=np.int64)
        lookups.flags.writeable = False
        object.__setattr__(self, "planned_lookups", lookups)
        if lookups.ndim != 1 or np.any(lookups < 0):
            raise self._wrong(f"planned_lookups must be counts, found {lookups.tolist()}")
        if self.row_map.rows != self.table.rows:
            raise self._wrong(f"it has {self.table.rows} rows, its row map {self.row_map.rows}")
        decision, hot = self.decision, self.decision.hot_rows
        parts = decision.parts + (hot > 0)
        if self.row_map.world_size != parts:
            raise self._wrong(f"it has {parts} parts, its row map {self.row_map.world_size}")
        if hot and int(self.row_map.owned_rows[-1]) != hot:
            raise self._wrong(f"it has {hot} hot rows, its row map {self.row_map.owned_rows[-1]}")
        if self.table.dim % decision.columns:
            raise self._wrong(f"{self.table.dim} elements can't be cut in {decision.columns}")
        if decision.owners.size and int(decision.owners.max()) >= len(lookups):
            raise self._wrong(
                f"rank {decision.owners.max()} owns rows, but the ranks are 0 to {len(lookups) - 1}"
            )

    def _wrong(self, what: str) -> PlanError:
        return PlanError(f"table {self.table.name}: {what}")

    def __reduce__(self) -> tuple[Any, ...]:
        # Through __init__, which checks and freezes the arrays again.
        values = (self.module, self.table, self.decision, self.row_map, self.planned_lookups)
        return TablePlacement, values

    @property
    def key(self) -> str:
        """The table's path in the model."""
        return f"{self.module}.{self.table.name}" if self.module else self.table.name

    @property
    def world_size(self) -> int:
        """Number of ranks that the placement was made for."""
        return len(self.planned_lookups)

    @cached_property
    def owners(self) -> Ints:
        """[columns, parts] the rank of each piece, in the order of ``row_map``'s parts."""
        owners = self.decision.owners
        if not owners.shape[1]:
            return owners
        return owners[:, np.argsort(owners[0], kind="stable")]

    @cached_property
    def owned_rows(self) -> Ints:
        """[W] rows, of one column slice or another, that each rank owns."""
        rows = np.zeros(self.world_size, dtype=np.int64)
        parts = self.decision.parts
        rows[self.owners] = self.row_map.owned_rows[:parts]
        return rows

    def rank_bytes(self, *, optimizer: bool) -> list[int]:
        """[W] bytes that the table takes on each rank, replicas included.

        Args:
            optimizer: whether the rows' optimizer state is kept; each slice keeps its own.
        """
        table, columns = self.table, self.decision.columns
        state = table.optimizer_bytes_per_row if optimizer else 0
        owned, replica = table.row_bytes // columns + state, table.row_bytes + state
        everywhere = self.decision.hot_rows * replica
        return [rows * owned + everywhere for rows in self.owned_rows.tolist()]

    @cached_property
    def rank_map(self) -> RowMap:
        """Owner and slot of every row, where there is one column slice and no hot row.

        Raises:
            PlanError: the columns are cut, or there are hot rows.
        """
        if self.decision.columns > 1 or self.decision.hot_rows:
            raise self._wrong("its rows don't have one owner each: columns are cut or rows hot")
        bounds = np.concatenate([[0], np.cumsum(self.owned_rows)])
        # Parts come in the order of their owners, so the physical rows stay what they are.
        return RowMap(bounds, self.row_map.listed_ids, self.row_map.listed_rows)
