"""Moves of the search: place one table anew, or several at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchrec_oper.planner.candidates import BACKWARD, IDS, WORK
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.search.board import Aim, Board, Mask

BETTER = 1 - 1e-9
MOST_REMOVED = 24


def sweep(board: Board, order: Sequence[int], aim: Aim) -> int:
    """Place every table anew in turn, where that is better; how many changed."""
    changed = 0
    now = board.value(aim)
    for table in order:
        loads, common = board.without([table])
        value, place, owners = board.best(table, loads, common, aim)
        if value < now * BETTER:
            board.put(table, place, owners, loads, common)
            now = value
            changed += 1
    return changed


def replace_few(board: Board, movable: Sequence[int], rng: np.random.Generator, aim: Aim) -> bool:
    """Take out a few tables, some of the busiest rank's, and put them in again, if better."""
    busiest = int(board.cost_s().argmax())
    count = min(int(rng.integers(2, 6)), len(movable))
    there = [t for t in movable if board.owned[t, busiest] and _is_partial(board, t)]
    chosen: set[int] = set()
    if there:
        chosen |= set(rng.choice(there, min(len(there), 1 + count // 2), replace=False).tolist())
    while len(chosen) < count:
        chosen.add(int(movable[int(rng.integers(len(movable)))]))
    removed = sorted(chosen)
    if rng.random() < 0.6:
        removed.sort(key=lambda t: -_weight(board, t))
    else:
        rng.shuffle(removed)
    return _try(board, removed, aim, ahead=False)


def replace_on_ranks(
    board: Board, movable: Sequence[int], rng: np.random.Generator, aim: Aim
) -> bool:
    """Take out what the busiest rank and a few others own, and put it in again, if better.

    The largest go first, on top of an even spread of those that are still to come.
    """
    world = board.ranks.size
    ranks = [int(board.cost_s().argmax())]
    ranks += rng.choice(world, min(int(rng.integers(1, 4)), world), replace=False).tolist()
    there: Mask = np.asarray(board.owned[:, ranks].any(axis=1))
    few = max(2, world // 8)
    removed = [t for t in movable if there[t] and len(board.owners[t]) <= few]
    if not removed:
        return False
    if len(removed) > MOST_REMOVED:
        removed = sorted(rng.choice(removed, MOST_REMOVED, replace=False).tolist())
    weights = {t: _weight(board, t) * (1 + 0.2 * rng.random()) for t in removed}
    return _try(board, sorted(removed, key=lambda t: -weights[t]), aim, ahead=True)


def _try(board: Board, removed: Sequence[int], aim: Aim, *, ahead: bool) -> bool:
    """Put ``removed`` in again in turn; keep the old state unless the new one is better.

    Args:
        board: the state.
        removed: tables, in the order in which they are put in.
        aim: what is better.
        ahead: whether tables still to come count as spread evenly over the ranks.
    """
    before, tried = board.value(aim), board.copy()
    loads, common = board.without(removed)
    waiting: Floats = np.zeros((6, 1))
    expected: Floats = np.zeros(6)
    if ahead:
        waiting = np.sum([_even(board, t) for t in removed], axis=0)
        expected = np.sum([board.common_of(t) for t in removed], axis=0)
    for table in removed:
        if ahead:
            waiting = np.maximum(waiting - _even(board, table), 0.0)
            expected = expected - board.common_of(table)
        _, place, owners = board.best(table, loads + waiting, common + expected, aim)
        tried.put(table, place, owners, loads, common)
        loads, common = tried.loads, tried.common
    if tried.value(aim) >= before * BETTER:
        return False
    board.take(tried)
    return True


def _even(board: Board, table: int) -> Floats:
    total = board.choices[table].total(board.places[table])
    return total[:, None] / board.ranks.size


def _is_partial(board: Board, table: int) -> bool:
    return len(board.owners[table]) < board.ranks.size


def _weight(board: Board, table: int) -> float:
    """About the seconds of a table's heaviest piece."""
    pieces = board.choices[table].pieces(board.places[table])
    if not pieces.size:
        return 0.0
    volumes = pieces[IDS : BACKWARD + 1].sum(axis=0)
    return float((pieces[WORK] + volumes * board.ranks.owned_byte_s).max())
