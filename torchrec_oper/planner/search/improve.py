"""The search itself: several starts, sweeps and moves, and pouring at the end of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.bound import Problem, replicated_cost_s
from torchrec_oper.planner.candidates import FIXED
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.relaxation import Mask, Relaxed, Summary, relax, undominated
from torchrec_oper.planner.search.board import Aim, Board, Choices, Ranks
from torchrec_oper.planner.search.effort import Effort, Start
from torchrec_oper.planner.search.moves import replace_few, replace_on_ranks, sweep
from torchrec_oper.planner.search.pour import pour
from torchrec_oper.planner.search.shortlist import one_spread, rounded, shortlists

Ints = npt.NDArray[np.int64]

# How much dearer than the best, in parts of the whole cost, a candidate may be to be tried.
WITHIN = 0.3
# Shares of the memory caps that the relaxation may use, until its rounding can be placed.
MEMORY_SHARES = (1.0, 0.97, 0.9, 0.8, 0.6)


@dataclass(frozen=True, eq=False)
class Found:
    """A plan of the search: how each unit is placed, and the slowest rank's seconds."""

    decisions: tuple[Decision, ...]
    cost_s: float


def search(
    problem: Problem,
    pinned: Sequence[Ints | None],
    banned: Sequence[Mask | None],
    effort: Effort,
    seed: int,
) -> Found:
    """The best plan found.

    Args:
        problem: the units' candidates.
        pinned: for each unit the owners of its only candidate's pieces, or None.
        banned: for each unit the ranks that may own none of it, or None.
        effort: how much to try.
        seed: of the moves.

    Raises:
        PlanError: no plan was found that fits into memory.
    """
    ranks = Ranks(problem.cluster)
    best: Found | None = None
    for start in effort.starts:
        for share in MEMORY_SHARES:
            board = _started(problem, pinned, banned, start, effort, share)
            if board is None:
                continue
            movable = [unit for unit, owners in enumerate(pinned) if owners is None]
            _improve(board, movable, effort, seed)
            if board.fits():
                found = _finished(problem, board, pinned, ranks)
                if best is None or found.cost_s < best.cost_s:
                    best = found
                break
    replicated_s = replicated_cost_s(problem)
    if replicated_s < (np.inf if best is None else best.cost_s):
        everywhere = Decision("replicated", 0, np.empty((1, 0), dtype=np.int64))
        return Found(
            tuple(replace(everywhere, hot_rows=int(c.hot_rows.max())) for c in problem.candidates),
            replicated_s,
        )
    if best is None:
        raise PlanError(
            "no plan was found that fits into the ranks' memory; give the ranks more memory, use"
            " more ranks, or shrink the tables"
        )
    return best


def _started(
    problem: Problem,
    pinned: Sequence[Ints | None],
    banned: Sequence[Mask | None],
    start: Start,
    effort: Effort,
    memory_share: float,
) -> Board | None:
    """A first state, after its sweeps; None where the relaxation has no solution."""
    allowed: Sequence[Mask] = problem.useful
    among: Sequence[Mask] = one_spread(problem)
    if not start.replicas:
        plain = [c.hot_rows == 0 for c in problem.candidates]
        among = [mask & none for mask, none in zip(among, plain, strict=True)]
        allowed = [
            undominated(s.features(problem.cluster, problem.classes), mask & none)
            for s, mask, none in zip(problem.summaries, problem.usable, plain, strict=True)
        ]
    free = _relaxed(problem, allowed, memory_share)
    if free is None:
        return None
    if np.isfinite(start.most_alone):
        least = sum(s.least_s[m].min() for s, m in zip(problem.summaries, allowed, strict=True))
        most_s = max(free.value_s - float(least), 0.0) * start.most_alone
        allowed = [_light(s, m, most_s) for s, m in zip(problem.summaries, allowed, strict=True)]
        among = [
            mask & (_light(s, mask, most_s) | c.linear)
            for s, mask, c in zip(problem.summaries, among, problem.candidates, strict=True)
        ]
        free = _relaxed(problem, allowed, memory_share)
        if free is None:
            return None
    ranks = Ranks(problem.cluster)
    lists = shortlists(problem, free, among, most=effort.choices, within_s=WITHIN * free.value_s)
    choices = [
        Choices.of(c, numbers, ranks, away)
        for c, numbers, away in zip(problem.candidates, lists, banned, strict=True)
    ]
    board = Board(choices, ranks)
    _fill(board, problem, free, rounded(problem, free, lists), pinned, start, effort)
    return board


def _relaxed(problem: Problem, allowed: Sequence[Mask], memory_share: float) -> Relaxed | None:
    if not all(mask.any() for mask in allowed):
        return None
    return relax(
        problem.summaries, allowed, problem.cluster, problem.classes, memory_share=memory_share
    )


def _light(summary: Summary, mask: Mask, most_s: float) -> Mask:
    """The candidates whose busiest owner costs little alone, or those where it costs least."""
    alone = summary.busiest_s - summary.least_s
    light: Mask = mask & (alone <= most_s)
    if not light.any():
        light = mask & (alone <= alone[mask].min() * 1.001)
    return light


def _fill(
    board: Board,
    problem: Problem,
    relaxed: Relaxed,
    places: Sequence[int],
    pinned: Sequence[Ints | None],
    start: Start,
    effort: Effort,
) -> None:
    """Put every table on the board, and sweep."""
    ranks, choices = board.ranks, board.choices
    alone = [
        float(s.busiest_s[c.numbers[place]] - s.least_s[c.numbers[place]])
        for s, c, place in zip(problem.summaries, choices, places, strict=True)
    ]
    order = sorted(range(len(choices)), key=lambda unit: -alone[unit])
    movable = [unit for unit in order if pinned[unit] is None]
    even = [c.total(place)[:, None] / ranks.size for c, place in zip(choices, places, strict=True)]
    price_s = float(relaxed.multipliers.memory @ problem.classes.memory_bytes)
    waiting: Floats = np.sum(even, axis=0)
    expected: Floats = np.sum(
        [c.common[:, p] for c, p in zip(choices, places, strict=True)], axis=0
    )
    level_s = float(ranks.cost_s(np.repeat(waiting, ranks.size, axis=1), expected).max())
    aim = Aim(24.0 if start.spread else effort.powers[0], level_s * 1.05, price_s)
    loads: Floats = np.zeros((6, ranks.size))
    common: Floats = np.zeros(6)
    for unit in [unit for unit in order if pinned[unit] is not None] + movable:
        waiting = np.maximum(waiting - even[unit], 0.0)
        expected = expected - choices[unit].common[:, places[unit]]
        owners = pinned[unit]
        place = places[unit]
        if owners is None:
            background = loads + waiting
            _, place, owners = board.best(unit, background, common + expected, aim)
        board.put(unit, place, owners, loads, common)
        loads, common = board.loads, board.common
    powers = [p for p in effort.powers if p >= 16] if start.spread else effort.powers
    for number, power in enumerate(powers):
        # The price of memory falls, so that what is left gets used in the end.
        left = 1 - number / max(len(powers) - 1, 1)
        seconds = board.cost_s()
        scale_s = float(seconds.mean() if power < 20 else seconds.max())
        sweep(board, movable, Aim(power, scale_s, price_s * min(1.0, 1.5 * left)))


def _improve(board: Board, movable: Sequence[int], effort: Effort, seed: int) -> None:
    """Rounds of moves that make the slowest ranks faster."""
    if not movable or board.ranks.size == 1:
        return
    rng = np.random.default_rng(seed)
    for _ in range(effort.rounds):
        changed = False
        for _ in range(effort.moves):
            aim = Aim(48.0, float(board.cost_s().max()), 0.0)
            changed |= replace_on_ranks(board, movable, rng, aim)
            aim = replace(aim, scale_s=float(board.cost_s().max()))
            changed |= replace_few(board, movable, rng, aim)
        if not changed:
            return


def _finished(problem: Problem, board: Board, pinned: Sequence[Ints | None], ranks: Ranks) -> Found:
    """The decisions of a state, levelled by pouring what can be poured."""
    poured = {}
    for unit, choices in enumerate(board.choices):
        number = choices.numbers[board.places[unit]]
        if pinned[unit] is None and problem.candidates[unit].linear[number]:
            total = choices.total(board.places[unit])
            poured[unit] = np.where(np.arange(6) == FIXED, 0.0, total)
    loads, common = board.without(list(poured))
    for unit in poured:
        common = common + board.common_of(unit)
    shares = pour(poured, loads, common, ranks) if poured else {}
    even = np.full(ranks.size, 1 / ranks.size)
    if shares is None:
        shares = {unit: (np.arange(ranks.size), even) for unit in poured}
    decisions = []
    for unit in range(len(board.choices)):
        if unit in shares:
            decision, load = _uneven(problem, board, unit, *shares[unit])
            loads = loads + load
        else:
            decision = _even_decision(problem, board, unit)
        decisions.append(decision)
    replicas = any(decision.hot_rows for decision in decisions)
    exchanged = any(decision.parts for decision in decisions)
    latency_s = problem.latency_s(exchanged=exchanged, replicas=replicas)
    return Found(tuple(decisions), float(ranks.cost_s(loads, common).max()) + latency_s)


def _even_decision(problem: Problem, board: Board, unit: int) -> Decision:
    choices, place = board.choices[unit], board.places[unit]
    candidates, number = problem.candidates[unit], int(choices.numbers[place])
    owners = np.empty(len(board.owners[unit]), dtype=np.int64)
    owners[choices.unsorted.get(place, slice(None))] = board.owners[unit]
    shape = (int(candidates.columns[number]), int(candidates.parts[number]))
    return Decision(
        exchange=candidates.exchange[number],
        hot_rows=int(candidates.hot_rows[number]),
        owners=owners.reshape(shape),
    )


def _uneven(
    problem: Problem, board: Board, unit: int, owners: Ints, weights: Floats
) -> tuple[Decision, Floats]:
    """The decision of a poured table, and its load [6, W].

    Its parts are as many as some candidate has; those without rows go to the first ranks
    that have none.
    """
    candidates, world = problem.candidates[unit], board.ranks.size
    number = int(board.choices[unit].numbers[board.places[unit]])
    hot_rows, exchange = candidates.hot_rows[number], candidates.exchange[number]
    fitting = [
        int(parts)
        for other, parts, columns, hot in zip(
            candidates.exchange,
            candidates.parts,
            candidates.columns,
            candidates.hot_rows,
            strict=True,
        )
        if _pours_alike(exchange, other, int(parts))
        and columns == 1
        and hot == hot_rows
        and parts >= len(owners)
    ]
    parts = min(fitting)
    spare = np.setdiff1d(np.arange(world), owners)[: parts - len(owners)]
    all_owners = np.concatenate([owners, spare])
    shares = np.concatenate([weights, np.zeros(len(spare))])
    if parts == 1:
        name = "whole" if exchange == "partial" else exchange
        decision = Decision(name, int(hot_rows), all_owners[:, None])
    else:
        decision = Decision(exchange, int(hot_rows), all_owners[None, :], shares / shares.sum())
    total = board.choices[unit].total(board.places[unit]).copy()
    overhead_s = candidates.piece[FIXED, number]
    total[FIXED] = 0.0
    load = np.zeros((6, world))
    load[:, all_owners] = total[:, None] * shares
    load[FIXED, all_owners] = overhead_s
    return decision, load


def _pours_alike(exchange: str, other: str, parts: int) -> bool:
    """Whether a candidate is of the same uneven spread: partial on one rank is whole."""
    return other == exchange or (exchange == "partial" and other == "whole" and parts == 1)
