"""What a table asks of the machine in one step: the planner's view of a profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.table import TableSpec

Floats = npt.NDArray[np.float64]
Objective = Literal["train", "infer"]


@dataclass(frozen=True, eq=False)
class TableDemand:
    """One table and how a rank's batch looks it up; rows are told apart by hotness only.

    Args:
        table: the table.
        lookups: lookups of a rank in a step.
        bags: bags of a rank in a step that aren't empty.
        bag_lengths: [K], distinct rows of a bag, 1 or more; not always whole numbers.
        bag_shares: [K], share of ``bags`` of each length; they sum to 1.
        block_rows: [N], rows in each block of rows of equal hotness, hottest first;
            whole numbers, which sum to the table's rows.
        block_chances: [N], the chance that a lookup is of one given row of the block;
            not rising, and ``sum(block_rows * block_chances)`` is 1.
        listed_rows: how many of the hottest rows are known by their ids. Only these can
            be replicated or placed one by one.

    Raises:
        PlanError: for a value outside what is said above.
    """

    table: TableSpec
    lookups: float
    bags: float
    bag_lengths: Floats
    bag_shares: Floats
    block_rows: Floats
    block_chances: Floats
    listed_rows: int

    def __post_init__(self) -> None:
        for field in ("bag_lengths", "bag_shares", "block_rows", "block_chances"):
            array = np.array(getattr(self, field), dtype=np.float64)
            if array.ndim != 1 or not np.isfinite(array).all() or (array < 0).any():
                raise self._wrong(f"{field} must be finite numbers of 0 or more in one dimension")
            array.flags.writeable = False
            object.__setattr__(self, field, array)
        for field in ("lookups", "bags"):
            value = float(getattr(self, field))
            if not 0 <= value < np.inf:
                raise self._wrong(f"{field} must be a finite number of 0 or more, found {value}")
            object.__setattr__(self, field, value)
        self._check_blocks()
        if self.bag_lengths.shape != self.bag_shares.shape or (self.bag_lengths < 1).any():
            raise self._wrong("bag_lengths must be 1 or more, with one share for each")
        if self.bags and abs(self.bag_shares.sum() - 1) > 1e-6:
            raise self._wrong(f"bag_shares must sum to 1, found {self.bag_shares.sum()}")

    def _check_blocks(self) -> None:
        rows, chances = self.block_rows, self.block_chances
        if rows.shape != chances.shape or (rows < 1).any() or rows.sum() != self.table.rows:
            raise self._wrong(
                f"block_rows must hold {self.table.rows} rows in blocks of 1 or more, with one"
                f" chance for each block, found {rows.sum():.0f} rows in {len(rows)} blocks"
            )
        if self.lookups and abs(float(rows @ chances) - 1) > 1e-6:
            raise self._wrong(f"its rows' chances must sum to 1, found {float(rows @ chances)}")
        if (np.diff(chances) > 1e-12 * chances[:-1]).any():
            raise self._wrong("block_chances must not rise: the hottest rows come first")
        if not 0 <= self.listed_rows <= self.table.rows:
            raise self._wrong(f"listed_rows must be 0 to {self.table.rows}")

    def _wrong(self, what: str) -> PlanError:
        return PlanError(f"demand of table {self.table.name}: {what}")
