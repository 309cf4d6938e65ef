"""Which placements the planner may choose from: what the search tries and the bound covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.decision import EXCHANGES, Exchange
from torchrec_oper.table import whole_number


@dataclass(frozen=True)
class SearchSpace:
    """The candidates of every table.

    * Hot cuts: no row, all rows (``replicated``), and for each power of ``hot_step`` (above
      2**20 rows, where memory is at stake, for each power of its fourth root) the first
      end of a block of rows at or above it, as far as rows are listed.
    * Column slices: powers of 2 that divide ``dim`` into slices of ``min_slice_width``
      elements or more, no more than ranks.
    * Row parts: 1, 2, 4, 8, ..., with ``fine_parts`` also 3, 6, 12, ..., and as many as
      there are ranks for each slice; 8 rows or more for each part.
    * ``partial`` and ``whole`` take any of these grids without a hot cut, and with one 1
      part or as many as there are ranks. ``rows`` takes column slices or row parts,
      ``direct`` row parts, and both with a hot cut one part for each rank.
    * ``rows`` may deal the parts of one column unevenly, and so may the others where every
      bag has one id, and ``direct`` where no gradient of a bag travels.

    Args:
        exchanges: those that may be used; ``direct`` also needs ranks that share memory.
        min_slice_width: elements of a column slice at least.
        hot_step: from one hot cut to the next.
        fine_parts: see above.
        hot_rows: whether a table may have hot rows besides others.

    Raises:
        PlanError: for a value outside what is said above.
    """

    exchanges: tuple[Exchange, ...] = EXCHANGES
    min_slice_width: int = 16
    hot_step: int = 2
    fine_parts: bool = True
    hot_rows: bool = True

    def __post_init__(self) -> None:
        unknown = [name for name in self.exchanges if name not in EXCHANGES]
        if unknown or not self.exchanges:
            raise PlanError(f"exchanges must be some of {EXCHANGES}, found {self.exchanges}")
        for field, least in (("min_slice_width", 1), ("hot_step", 2)):
            value = whole_number(getattr(self, field), field, least=least, error=PlanError)
            object.__setattr__(self, field, value)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; ``from_json`` reads them back."""
        return {**asdict(self), "exchanges": list(self.exchanges)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SearchSpace:
        """The space that ``to_json`` wrote."""
        return cls(**{**fields, "exchanges": tuple(fields["exchanges"])})
