"""Blocks of rows of equal hotness under Zipf's law."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from torchrec_oper.planner.demand import Floats

EXACT_ROWS = 4096
BIN_RATIO = 1.03


@lru_cache(maxsize=256)
def zipf_blocks(rows: int, skew: float) -> tuple[Floats, Floats]:
    """Rows and the chance of each row in blocks, hottest first.

    The i-th hottest row is looked up in proportion to ``i ** -skew``. The hottest 4,096
    rows are a block each; behind them a block's last row is 3 % further than its first,
    and its rows share the integral of the law over it (within 1e-8 of the sum there).

    Args:
        rows: rows of the table, 1 or more.
        skew: the exponent, 0 or more.

    Returns:
        [N] and [N] float64, read-only; the chances of all rows sum to 1.
    """
    exact = min(rows, EXACT_ROWS)
    ranks = np.arange(1, exact + 1, dtype=np.float64)
    counts, masses = np.ones(exact), ranks**-skew
    if rows > exact:
        bins = int(np.ceil(np.log(rows / exact) / np.log(BIN_RATIO)))
        edges = np.unique(np.round(exact * (rows / exact) ** (np.arange(bins + 1) / bins)))
        edges[-1] = rows
        low, high = edges[:-1] + 0.5, edges[1:] + 0.5
        if abs(skew - 1) < 1e-9:
            tail = np.log(high / low)
        else:
            tail = (high ** (1 - skew) - low ** (1 - skew)) / (1 - skew)
        counts, masses = np.concatenate([counts, np.diff(edges)]), np.concatenate([masses, tail])
    chances = np.minimum.accumulate(masses / counts)
    chances /= float((counts * chances).sum())
    counts.flags.writeable = chances.flags.writeable = False
    return counts, chances
