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
from torchrec_oper.planner.relaxation import Relaxed, relax
from torchrec_oper.planner.search.board import Aim, Board, Choices, Ranks
from torchrec_oper.planner.search.effort import Effort, Start
from torchrec_oper.planner.search.moves import replace_few, replace_on_ranks, sweep
from torchrec_oper.planner.search.pour import pour
from torchrec_oper.planner.search.shift import Laid, shift_pieces
from torchrec_oper.planner.search.shortlist import one_spread, rounded, shortlists
from torchrec_oper.planner.summary import Mask, Summary, all_undominated

Ints = npt.NDArray[np.int64]

# How much dearer than the best, in parts of the whole cost, a candidate may be to be tried.
WITHIN = 0.3
# Shares of the memory caps that the relaxation may use, until its rounding can be placed.
MEMORY_SHARES = (1.0, 0.97, 0.9, 0.8, 0.6)
ROUNDING = 1e-9  # of memory, as a share of the cap
# More sweeps, as long as some rank's memory is over its cap.
SWEEPS_TO_FIT = 4


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
    ground = _Ground(problem, pinned, banned)
    movable = [unit for unit, owners in enumerate(pinned) if owners is None]
    boards, tight = [], []
    for start in effort.starts:
        for share in MEMORY_SHARES:
            board = _started(ground, start, effort, share)
            if board is not None and board.fits():
                _improve(board, movable, effort.moves, np.random.default_rng(seed), rounds=1)
                boards.append(board)
                break
            tight += [board] if board is not None else []
    # Only the most promising start is worth the moves.
    boards.sort(key=lambda board: float(board.cost_s().max()))
    for board in boards[:1]:
        rng = np.random.default_rng(seed + 1)
        _improve(board, movable, effort.moves, rng, rounds=effort.rounds)
    # What fits nowhere in even parts may still fit when it is poured.
    different = _different(problem, boards or tight)
    ends = [_finished(problem, board, pinned, ground.ranks) for board in different]
    found = [plan for plan in ends if plan is not None]
    best = min(found, key=lambda plan: plan.cost_s, default=None)
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


class _Ground:
    """What all starts share: candidates to choose from, and relaxations, each solved once."""

    def __init__(
        self, problem: Problem, pinned: Sequence[Ints | None], banned: Sequence[Mask | None]
    ) -> None:
        self.problem, self.pinned, self.banned = problem, pinned, banned
        self.ranks = Ranks(problem.cluster)
        self._masks: dict[bool, tuple[Sequence[Mask], Sequence[Mask]]] = {}
        self._free: dict[tuple[bool, float], Relaxed | None] = {}

    def masks(self, *, replicas: bool) -> tuple[Sequence[Mask], Sequence[Mask]]:
        """[C] for each table: what the relaxation may use, and what the moves may try."""
        if replicas not in self._masks:
            self._masks[replicas] = _masks(self.problem, replicas=replicas)
        return self._masks[replicas]

    def relaxed(self, *, replicas: bool, memory_share: float) -> Relaxed | None:
        """The relaxation without a limit on single owners."""
        key = (replicas, memory_share)
        if key not in self._free:
            allowed, _ = self.masks(replicas=replicas)
            self._free[key] = _relaxed(self.problem, allowed, memory_share)
        return self._free[key]


def _masks(problem: Problem, *, replicas: bool) -> tuple[Sequence[Mask], Sequence[Mask]]:
    among = one_spread(problem)
    if replicas:
        return problem.useful, among
    plain = [c.hot_rows == 0 for c in problem.candidates]
    among = [mask & none for mask, none in zip(among, plain, strict=True)]
    usable = [mask & none for mask, none in zip(problem.usable, plain, strict=True)]
    return all_undominated(problem.summaries, usable, problem.cluster, problem.classes), among


def _started(ground: _Ground, start: Start, effort: Effort, memory_share: float) -> Board | None:
    """A first state, after its sweeps; None where the relaxation has no solution."""
    problem = ground.problem
    allowed, among = ground.masks(replicas=start.replicas)
    free = ground.relaxed(replicas=start.replicas, memory_share=memory_share)
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
    lists = shortlists(problem, free, among, most=effort.choices, within_s=WITHIN * free.value_s)
    choices = [
        Choices.of(c, numbers, ground.ranks, away)
        for c, numbers, away in zip(problem.candidates, lists, ground.banned, strict=True)
    ]
    board = Board(choices, ground.ranks)
    _fill(board, problem, free, rounded(problem, free, lists), ground.pinned, start, effort)
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
    price_s = float(relaxed.multipliers.memory @ problem.classes.memory_bytes)
    for unit in order:
        owners = pinned[unit]
        if owners is None:
            away = choices[unit].banned
            free = np.arange(ranks.size) if away is None else np.flatnonzero(~away)
            owners = free[: choices[unit].owners[places[unit]]]
        else:
            owners = owners[choices[unit].unsorted.get(places[unit], slice(None))]
        board.put(unit, places[unit], owners, board.loads, board.common)
    if start.spread and movable:
        _put_in_one_by_one(board, movable, price_s)
    powers = [p for p in effort.powers if p >= 16] if start.spread else effort.powers
    for number, power in enumerate(powers):
        # The price of memory falls, so that what is left gets used in the end.
        left = 1 - number / max(len(powers) - 1, 1)
        seconds = board.cost_s()
        scale_s = float(seconds.mean() if power < 20 else seconds.max())
        sweep(board, movable, Aim(power, scale_s, price_s * min(1.0, 1.5 * left)))
    for _ in range(SWEEPS_TO_FIT):
        if board.fits():
            break
        aim = Aim(powers[-1], float(board.cost_s().max()), price_s)
        if not sweep(board, movable, aim):
            break


def _put_in_one_by_one(board: Board, movable: Sequence[int], price_s: float) -> None:
    """Take all tables out and put them in, on top of an even spread of those to come."""
    size = board.ranks.size
    even = {unit: board.choices[unit].total(board.places[unit]) / size for unit in movable}
    loads, common = board.without(movable)
    waiting: Floats = np.sum([even[unit] for unit in movable], axis=0)[:, None]
    expected: Floats = np.sum([board.common_of(unit) for unit in movable], axis=0)
    level_s = float(board.ranks.cost_s(loads + waiting, common + expected).max())
    aim = Aim(24.0, level_s * 1.05, price_s)
    for unit in movable:
        waiting = np.maximum(waiting - even[unit][:, None], 0.0)
        expected = expected - board.common_of(unit)
        _, place, owners = board.best(unit, loads + waiting, common + expected, aim)
        board.put(unit, place, owners, loads, common)
        loads, common = board.loads, board.common


def _improve(
    board: Board, movable: Sequence[int], moves: int, rng: np.random.Generator, *, rounds: int
) -> None:
    """Rounds of moves that make the slowest ranks faster."""
    if not movable or board.ranks.size == 1:
        return
    for _ in range(rounds):
        changed = False
        for _ in range(moves):
            aim = Aim(48.0, float(board.cost_s().max()), 0.0)
            changed |= replace_on_ranks(board, movable, rng, aim)
            aim = replace(aim, scale_s=float(board.cost_s().max()))
            changed |= replace_few(board, movable, rng, aim)
        if not changed:
            return


def _different(problem: Problem, boards: Sequence[Board]) -> list[Board]:
    """The boards without those that pouring would make equal to an earlier one."""
    kept: dict[tuple[tuple[int, bytes], ...], Board] = {}
    for board in boards:
        state = []
        for place, owners, choices, candidates in zip(
            board.places, board.owners, board.choices, problem.candidates, strict=True
        ):
            number = int(choices.numbers[place])
            state.append((number, b"" if candidates.linear[number] else owners.tobytes()))
        kept.setdefault(tuple(state), board)
    return list(kept.values())


def _finished(
    problem: Problem, board: Board, pinned: Sequence[Ints | None], ranks: Ranks
) -> Found | None:
    """The plan of a state, levelled by pouring what can be poured; None where it doesn't fit."""
    poured, away = {}, {}
    board.recount()
    for unit, choices in enumerate(board.choices):
        number = choices.numbers[board.places[unit]]
        if pinned[unit] is None and problem.candidates[unit].linear[number]:
            total = choices.total(board.places[unit])
            poured[unit] = np.where(np.arange(6) == FIXED, 0.0, total)
            away[unit] = choices.banned
    loads, common = board.without(list(poured))
    for unit in poured:
        common = common + board.common_of(unit)
    even: dict[int, tuple[Ints, Floats]] = {}
    for unit in poured:
        owners = board.owners[unit]
        even[unit] = (owners, np.full(len(owners), 1 / len(owners)))
    ways = (pour(poured, loads, common, ranks, away), even) if poured else (even,)
    plans = [
        _dealt(problem, board, pinned, shares, loads, common)
        for shares in ways
        if shares is not None
    ]
    fitting = [plan for plan in plans if plan is not None]
    return min(fitting, key=lambda plan: plan.cost_s, default=None)


def _dealt(
    problem: Problem,
    board: Board,
    pinned: Sequence[Ints | None],
    shares: dict[int, tuple[Ints, Floats]],
    loads: Floats,
    common: Floats,
) -> Found | None:
    """The plan with these shares of poured tables, on top of the loads without them."""
    laid = []
    for unit, choices in enumerate(board.choices):
        if unit in shares:
            decision, load = _uneven(problem, board, unit, *shares[unit])
            loads = loads + load
            pieces = load[:, decision.owners.ravel()]
        else:
            decision = _even_decision(problem, board, unit)
            place = board.places[unit]
            pieces = np.empty((6, len(board.owners[unit])))
            pieces[:, choices.unsorted.get(place, slice(None))] = choices.pieces(place)
        laid.append(Laid(decision, pieces, pinned[unit] is None, choices.banned))
    decisions, loads = shift_pieces(laid, loads, common, board.ranks)
    if board.ranks.memory(loads, common).max() > 1 + ROUNDING:
        return None
    replicas = any(decision.hot_rows for decision in decisions)
    exchanged = any(decision.parts for decision in decisions)
    latency_s = problem.latency_s(exchanged=exchanged, replicas=replicas)
    cost_s = float(board.ranks.cost_s(loads, common).max())
    return Found(tuple(decisions), cost_s + latency_s)


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
    candidates, choices = problem.candidates[unit], board.choices[unit]
    number = int(board.choices[unit].numbers[board.places[unit]])
    hot_rows, exchange = candidates.hot_rows[number], candidates.exchange[number]
    possible = [
        int(parts)
        for other, parts, columns, hot, usable in zip(
            candidates.exchange,
            candidates.parts,
            candidates.columns,
            candidates.hot_rows,
            problem.usable[unit],
            strict=True,
        )
        if _pours_alike(exchange, other, int(parts)) and (columns, hot) == (1, hot_rows) and usable
    ]
    parts = min((k for k in possible if k >= len(owners)), default=max(possible))
    if len(owners) > parts:  # a table of few rows can't be cut that finely
        largest = np.sort(np.argsort(-weights, kind="stable")[:parts])
        owners, weights = owners[largest], weights[largest]
    free = (
        np.arange(board.ranks.size) if choices.banned is None else np.flatnonzero(~choices.banned)
    )
    spare = np.setdiff1d(free, owners)[: parts - len(owners)]
    all_owners = np.concatenate([owners, spare])
    shares = np.concatenate([weights / weights.sum(), np.zeros(len(spare))])
    if parts == 1:
        name = "whole" if exchange == "partial" else exchange
        decision = Decision(name, int(hot_rows), all_owners[:, None])
    else:
        decision = Decision(exchange, int(hot_rows), all_owners[None, :], shares)
    total = board.choices[unit].total(board.places[unit]).copy()
    overhead_s = candidates.piece[FIXED, number]
    total[FIXED] = 0.0
    load = np.zeros((6, board.ranks.size))
    load[:, all_owners] = total[:, None] * shares
    load[FIXED, all_owners] = overhead_s
    return decision, load


def _pours_alike(exchange: str, other: str, parts: int) -> bool:
    """Whether a candidate is of the same uneven spread: partial on one rank is whole."""
    return other == exchange or (exchange == "partial" and other == "whole" and parts == 1)
