"""The last step of the search: single pieces move off the slowest rank while that pays.

Pouring levels what is in proportion to rows, but not the overhead of each piece; here
the whole cost counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.search.board import Mask, Ranks

MOVES_PER_RANK = 4
BETTER = 1 - 1e-9
# Above this many ranks a move's evaluation takes too long for what it brings.
MOST_RANKS = 128


@dataclass(frozen=True, eq=False)
class Laid:
    """One table as it is laid out.

    Args:
        decision: its placement.
        pieces: [6, owners] what each owner of ``decision.owners``, in order, bears.
        movable: whether its pieces may move.
        banned: [W] ranks that may own none of it, or None.
    """

    decision: Decision
    pieces: Floats
    movable: bool
    banned: Mask | None


def shift_pieces(
    tables: Sequence[Laid], loads: Floats, common: Floats, ranks: Ranks
) -> tuple[list[Decision], Floats]:
    """The decisions after the moves, and the loads [6, W].

    Args:
        tables: all tables.
        loads: [6, W] of all their pieces.
        common: [6] what every rank bears.
        ranks: the cluster.
    """
    owners = [laid.decision.owners.ravel().copy() for laid in tables]
    owned = np.zeros((len(tables), ranks.size), dtype=np.bool_)
    for table, (laid, mine) in enumerate(zip(tables, owners, strict=True)):
        owned[table, mine] = laid.movable
    if 1 < ranks.size <= MOST_RANKS:
        for _ in range(MOVES_PER_RANK * ranks.size):
            slowest = int(ranks.cost_s(loads, common).argmax())
            there = np.flatnonzero(owned[:, slowest]).tolist()
            moved = _best_move(tables, owners, there, loads, common, ranks)
            if moved is None:
                break
            table, piece, to = moved
            vector = tables[table].pieces[:, piece]
            loads = loads.copy()
            loads[:, owners[table][piece]] -= vector
            loads[:, to] += vector
            loads = np.maximum(loads, 0.0)
            owned[table, [slowest, to]] = False, True
            owners[table][piece] = to
    decisions = [
        replace(laid.decision, owners=mine.reshape(laid.decision.owners.shape))
        for laid, mine in zip(tables, owners, strict=True)
    ]
    return decisions, loads


def _best_move(
    tables: Sequence[Laid],
    owners: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.int64]]],
    there: Sequence[int],
    loads: Floats,
    common: Floats,
    ranks: Ranks,
) -> tuple[int, int, int] | None:
    """Table, piece and new owner that make the slowest rank fastest, if any does.

    Args:
        tables, owners: all tables, and the owners of their pieces now.
        there: the tables with a piece on the slowest rank that may move.
        loads, common, ranks: as in ``shift_pieces``.
    """
    before = ranks.cost_s(loads, common)
    slowest = int(before.argmax())
    best, found = float(before.max()) * BETTER, None
    full = np.maximum(ranks.memory(loads, common), 1.0)
    for table in there:
        laid, mine = tables[table], owners[table]
        for piece in np.flatnonzero(mine == slowest):
            free = np.ones(ranks.size, dtype=np.bool_) if laid.banned is None else ~laid.banned
            free[mine] = False
            targets = np.flatnonzero(free)
            if not len(targets):
                continue
            tried = np.repeat(loads[:, None], len(targets), axis=1)
            tried[:, :, slowest] -= laid.pieces[:, piece, None]
            tried[:, np.arange(len(targets)), targets] += laid.pieces[:, piece, None]
            everywhere = np.repeat(common[:, None], len(targets), axis=1)
            seconds = ranks.cost_s(np.maximum(tried, 0.0), everywhere).max(axis=-1)
            over = (ranks.memory(tried, everywhere) > full).any(axis=-1)
            seconds = np.where(over, np.inf, seconds)
            at = int(seconds.argmin())
            if seconds[at] < best:
                best, found = float(seconds[at]), (table, int(piece), int(targets[at]))
    return found
