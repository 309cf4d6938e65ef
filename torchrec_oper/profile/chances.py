"""What counts say of the next lookups: each row's chance, and distinct rows in many."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_SLICE = 1 << 20  # elements of a temporary array
_SURE = -1e100  # in place of minus infinity, which times 0 is no number


def row_chances(rows: Ints, counts: Ints, *, table_rows: int) -> tuple[Floats, Floats]:
    """The chance that the next lookup is of a given row, by blocks of alike rows.

    Rows never seen get the Good-Turing share of the lookups, ``f1 / n`` for ``f1`` rows
    seen once in ``n`` lookups (Good, "The population frequencies of species and the
    estimation of population parameters", Biometrika 1953), in equal parts; those seen
    share the rest by their counts. The ``u`` rows never seen get no more than
    ``u / (n + u)``, at which each of them has the chance of a row seen once: were all
    lookups of different rows, all rows of the table would have the same.

    Args:
        rows: int64 [N], rows of each block that were seen, hottest first.
        counts: int64 [N], lookups of the block's rows together.
        table_rows: all rows, those never seen included.

    Returns:
        Rows of each block, float64, with the rows never seen as the last block if there
        are any, and the chance of each single row of it, float64, which never rises.
    """
    lookups, unseen = float(counts.sum()), table_rows - int(rows.sum())
    if not lookups:
        return np.array([float(table_rows)]), np.array([1 / table_rows])
    once = float(rows[counts == rows].sum())
    mass = min(once / lookups, unseen / (lookups + unseen))
    chance = (1 - mass) * (counts / lookups) / rows
    if unseen:
        chance = np.append(chance, mass / unseen)
        rows = np.append(rows, unseen)
    # Where the share is at its limit, rounding may let the last chance rise.
    return rows.astype(np.float64), np.minimum.accumulate(chance)


def distinct(rows: Floats, chance: Floats, lookups: Floats) -> Floats:
    """Distinct rows expected in so many independent lookups.

    ``sum over blocks of rows * (1 - (1 - chance) ** lookups)``

    Args:
        rows: float64 [N], rows of each block, 0 allowed.
        chance: float64 [N], chance of each single row of it.
        lookups: float64 [K], 0 or more.

    Returns:
        float64 [K].
    """
    with np.errstate(divide="ignore"):  # a row of chance 1: log(0) is -inf
        missed = np.maximum(np.log1p(-np.minimum(chance, 1.0)), _SURE)
    step = max(1, _SLICE // max(1, rows.size))
    found = np.zeros(lookups.size)
    for at in range(0, lookups.size, step):
        found[at : at + step] = -np.expm1(lookups[at : at + step, None] * missed) @ rows
    return found
