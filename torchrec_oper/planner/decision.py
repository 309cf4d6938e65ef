"""How one table is placed, before its rows are dealt out one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError

Exchange = Literal["direct", "rows", "partial", "whole", "replicated"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)


@dataclass(frozen=True, eq=False)
class Decision:
    """An exchange, a hot cut, and the owners of what is left.

    Args:
        exchange: how the values of the rows that aren't hot travel.
        hot_rows: how many of the hottest rows every rank keeps a replica of; all of them
            for ``replicated``.
        owners: [columns, parts] int64, the rank of each piece: the table's columns are cut
            into ``columns`` slices of equal width, and the rows that aren't hot into
            ``parts``. No rank owns two pieces. ``replicated`` has 1 column and no part,
            ``whole`` 1 part.
        weights: [parts], the share of every part where they are uneven, of 1 column;
            None where the rows are dealt out evenly.

    Raises:
        PlanError: for a value outside what is said above.
    """

    exchange: Exchange
    hot_rows: int
    owners: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise PlanError(f"exchange must be one of {EXCHANGES}, found {self.exchange!r}")
        owners = np.array(self.owners, dtype=np.int64)
        if owners.ndim != 2 or (owners.size and owners.min() < 0):
            raise PlanError(f"owners must be ranks, [columns, parts], found shape {owners.shape}")
        if len(np.unique(owners)) != owners.size:
            raise PlanError("a rank owns two pieces of one table")
        wanted = {"replicated": (1, 0), "whole": (owners.shape[0], 1)}.get(self.exchange)
        if owners.shape != (wanted or (owners.shape[0], max(owners.shape[1], 1))):
            raise PlanError(f"{self.exchange} can't have owners of shape {owners.shape}")
        owners.flags.writeable = False
        object.__setattr__(self, "owners", owners)
        if self.weights is not None:
            weights = np.array(self.weights, dtype=np.float64)
            if owners.shape != (1, len(weights)) or not (weights >= 0).all():
                raise PlanError("weights must be 0 or more, one for each part of 1 column")
            if abs(weights.sum() - 1) > 1e-9:
                raise PlanError(f"weights must sum to 1, found {weights.sum()}")
            weights.flags.writeable = False
            object.__setattr__(self, "weights", weights)

    @property
    def columns(self) -> int:
        """Into how many slices the columns are cut."""
        return self.owners.shape[0]

    @property
    def parts(self) -> int:
        """Into how many parts the rows that aren't hot are dealt."""
        return self.owners.shape[1]
