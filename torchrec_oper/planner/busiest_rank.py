"""A lower bound on the load of the busiest rank, true for every placement of whole rows."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_oper.profile import TableAccess
from torchrec_oper.table import TableSpec


def busiest_rank_bound(
    tables: Sequence[TableSpec], accesses: Sequence[TableAccess], world_size: int
) -> float:
    """Bytes that some rank must read at least, whatever rows it owns.

    The busiest rank reads no less than the mean, and no less than the heaviest row,
    which one rank owns whole: ``max(sum(load) / W, max(load))``.
    """
    pairs = list(zip(tables, accesses, strict=True))
    total = sum(access.lookups * table.row_bytes for table, access in pairs)
    heaviest = max(
        (int(access.counts[0]) * table.row_bytes for table, access in pairs if len(access.counts)),
        default=0,
    )
    return max(total / world_size, float(heaviest))
