"""The parts of the search: states, moves, short lists, and pouring."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import Case, cases, cluster, problem_of, table_demand

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.bound import Problem, start_s
from torchrec_oper.planner.candidates import BACKWARD, BYTES, FIXED, FORWARD, IDS, PHASES, WORK
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.planner.relaxation import relax
from torchrec_oper.planner.search.board import Aim, Board, Choices, Ranks
from torchrec_oper.planner.search.effort import effort_for
from torchrec_oper.planner.search.moves import replace_few, replace_on_ranks, sweep
from torchrec_oper.planner.search.pour import pour
from torchrec_oper.planner.search.shortlist import one_spread, rounded, shortlists

SEEDS = st.integers(0, 2**32 - 1)


def problem_or_none(case: Case) -> Problem | None:
    try:
        return problem_of(case)
    except PlanError:
        return None


def random_board(problem: Problem, seed: int, banned=None) -> Board:
    """Candidates whose parts are even or heavy on random ranks."""
    rng, ranks = np.random.default_rng(seed), Ranks(problem.cluster)
    choices = []
    for candidates, usable in zip(problem.candidates, problem.usable, strict=True):
        numbers = np.flatnonzero(usable & ~candidates.linear)
        most = min(len(numbers), 8)
        picked = np.sort(rng.choice(numbers, most, replace=False))
        if banned is not None:
            owners = candidates.columns * candidates.parts
            picked = numbers[owners[numbers] <= (~banned).sum()][:8]
        choices.append(Choices.of(candidates, picked, ranks, banned))
    board = Board(choices, ranks)
    free = np.arange(ranks.size) if banned is None else np.flatnonzero(~banned)
    for table, choice in enumerate(choices):
        place = int(rng.integers(len(choice.numbers)))
        owners = rng.permutation(free)[: choice.owners[place]]
        board.put(table, place, owners, board.loads, board.common)
    return board


def decisions_of(problem: Problem, board: Board) -> list[Decision]:
    """The board's decisions, by its definition: pieces are heaviest first."""
    made = []
    for candidates, choice, place, owners in zip(
        problem.candidates, board.choices, board.places, board.owners, strict=True
    ):
        number = int(choice.numbers[place])
        pieces = candidates.pieces(number)
        shape = (int(candidates.columns[number]), int(candidates.parts[number]))
        by_piece = np.empty(len(owners), dtype=np.int64)
        left = list(range(len(owners)))
        for owner, piece in zip(owners, choice.pieces(place).T, strict=True):
            at = next(n for n in left if np.array_equal(pieces[:, n], piece))
            left.remove(at)
            by_piece[at] = owner
        made.append(
            Decision(
                candidates.exchange[number],
                int(candidates.hot_rows[number]),
                by_piece.reshape(shape),
            )
        )
    return made


@given(cases(most_rows=5000), SEEDS)
def test_a_state_costs_what_the_judge_says(case: Case, seed: int) -> None:
    problem = problem_or_none(case)
    if problem is None or any(
        (~c.linear & m).sum() == 0 for c, m in zip(problem.candidates, problem.usable, strict=True)
    ):
        return
    board = random_board(problem, seed)
    decisions = decisions_of(problem, board)
    judged = expected_cost(decisions, case.demands, case.cluster, case.objective)
    start = start_s(
        case.cluster,
        case.objective,
        exchanged=any(d.parts for d in decisions),
        replicas=any(d.hot_rows for d in decisions),
    )
    np.testing.assert_allclose(board.cost_s() + start, judged.seconds.total, rtol=1e-9)
    held = judged.memory_bytes / case.cluster.memory_bytes
    np.testing.assert_allclose(board.memory(), held, rtol=1e-9)
    assert board.fits() == judged.feasible


@given(cases(most_rows=5000), SEEDS)
@settings(max_examples=25)
def test_moves_never_make_a_state_worse(case: Case, seed: int) -> None:
    problem = problem_or_none(case)
    if problem is None or any(
        (~c.linear & m).sum() == 0 for c, m in zip(problem.candidates, problem.usable, strict=True)
    ):
        return
    board = random_board(problem, seed)
    rng = np.random.default_rng(seed)
    movable = list(range(len(board.choices)))
    for power in (2.0, 48.0):
        aim = Aim(power, float(board.cost_s().max()), 0.0)
        before = board.value(aim)
        sweep(board, movable, aim)
        after = board.value(aim)
        assert after <= before * (1 + 1e-9)
        for move in (replace_few, replace_on_ranks):
            better = move(board, movable, rng, aim)
            now = board.value(aim)
            assert now < after if better else now == pytest.approx(after, rel=1e-9)
            after = now
    loads, common = board.loads.copy(), board.common.copy()
    board.recount()
    # What is left of loads that were taken off again is small beside what came and went.
    largest = [c.piece.max(axis=1) + c.totals().max(axis=1) for c in problem.candidates]
    scale = np.maximum(np.max(largest, axis=0), 1e-300)[:, None]
    np.testing.assert_allclose(loads / scale, board.loads / scale, atol=1e-9)
    np.testing.assert_allclose(common, board.common, rtol=1e-9, atol=1e-18)


def test_the_best_place_is_what_it_says_and_none_that_is_banned() -> None:
    tables = tuple(table_demand(f"t{n}", rows=300 + 50 * n, skew=1.2) for n in range(4))
    problem = problem_of(Case(tables, cluster(0, 0, 1, 1)))
    banned = np.array([True, False, False, True])
    board = random_board(problem, 0, banned)
    aim = Aim(8.0, float(board.cost_s().max()), 0.0)
    for table in range(4):
        loads, common = board.without([table])
        value, place, owners = board.best(table, loads, common, aim)
        assert not banned[owners].any()
        board.put(table, place, owners, loads, common)
        assert board.value(aim) == pytest.approx(value, rel=1e-12)
        assert sorted(np.flatnonzero(board.owned[table])) == sorted(owners)


def test_a_copy_changes_on_its_own() -> None:
    problem = problem_of(Case((table_demand("a"), table_demand("b")), cluster(0, 0)))
    board = random_board(problem, 0)
    before = board.cost_s()
    other = board.copy()
    other.put(0, 0, np.arange(other.choices[0].owners[0]), *other.without([0]))
    other.owned[:] = False
    np.testing.assert_array_equal(board.cost_s(), before)
    assert board.owned.any()
    board.take(other)
    np.testing.assert_array_equal(board.cost_s(), other.cost_s())


def test_an_aim_prefers_what_fits_and_what_is_level() -> None:
    aim = Aim(16.0, 1.0, 0.0)
    level, peak = np.array([0.8, 0.8]), np.array([0.4, 1.2])
    room, full = np.array([0.5, 0.5]), np.array([0.5, 1.01])
    assert aim.of(level, room) < aim.of(peak, room)
    assert aim.of(peak, room) < aim.of(level, full)
    with np.errstate(all="raise"):
        assert np.isfinite(Aim(48.0, 0.0, 0.0).of(np.zeros(2), room))
        assert Aim(64.0, 1e-9, 0.0).of(level, room) == np.inf


@given(cases(most_rows=5000), st.integers(1, 6))
def test_short_lists(case: Case, most: int) -> None:
    problem = problem_or_none(case)
    if problem is None:
        return
    relaxed = relax(problem.summaries, problem.useful, problem.cluster, problem.classes)
    if relaxed is None:
        return
    among = one_spread(problem)
    lists = shortlists(problem, relaxed, among, most=most, within_s=0.3 * relaxed.value_s)
    places = rounded(problem, relaxed, lists)
    for numbers, mask, usable, place in zip(lists, among, problem.usable, places, strict=True):
        assert 1 <= len(numbers) <= most
        assert len(set(numbers.tolist())) == len(numbers)
        assert mask[numbers].all() and usable[numbers].all()
        assert 0 <= place < len(numbers)


def test_one_candidate_stands_for_an_uneven_spread() -> None:
    problem = problem_of(Case((table_demand(rows=900),), cluster(0, 0, 0, 0)))
    (mask,), (candidates,) = one_spread(problem), problem.candidates
    kept = [
        (int(candidates.columns[n]), int(candidates.parts[n]))
        for n in np.flatnonzero(mask)
        if candidates.exchange[n] == "rows" and candidates.hot_rows[n] == 0
    ]
    assert kept == [(1, 4)]


def test_more_work_for_few_tables() -> None:
    efforts = [effort_for(tables, 128) for tables in (10, 100, 300, 1000, 10_000)]
    assert [e.choices for e in efforts] == sorted((e.choices for e in efforts), reverse=True)
    assert [len(e.starts) for e in efforts] == sorted(
        (len(e.starts) for e in efforts), reverse=True
    )


POURED = {
    "alike": cluster(0, 0, 0),
    "unlike speeds": cluster(0, 0, 0, speeds=(1.0, 4.0, 0.5)),
    "two hosts": cluster(0, 0, 1),
    "two hosts with fast links between": cluster(0, 1, 1, inter=3e9),
    "hosts that take turns": cluster(0, 1, 0),
    "little memory": cluster(0, 0, 0, memory_bytes=(70, 500, 120)),
    "no room on one": cluster(0, 0, 0, memory_bytes=(50, 500, 500)),
}
# [6] of one table or two: seconds of work, none fixed, bytes in three phases, and held.
TOTALS = {
    0: np.array([3e-6, 0, 200.0, 900.0, 900.0, 240.0]),
    1: np.array([1e-6, 0, 900.0, 2500.0, 0.0, 130.0]),
}
LOADS = np.array(
    [[1e-6, 2e-6, 0], [0, 1e-7, 0], [10, 0, 50], [0, 800, 300], [0, 0, 100], [50, 0, 10.0]]
)
COMMON = np.array([1e-7, 1e-7, 0, 0, 0, 0.0])


def poured_cost_s(shares: dict, ranks: Ranks) -> tuple[float, float]:
    """The slowest rank's seconds and the fullest one's memory; shares [W] of each table."""
    loads = LOADS + sum(TOTALS[table][:, None] * share for table, share in shares.items())
    return float(ranks.cost_s(loads, COMMON).max()), float(ranks.memory(loads, COMMON).max())


def grid_best_s(tables: list[int], ranks: Ranks, banned: dict, steps: int) -> float:
    """The least cost of shares in whole ``steps``-ths that fit."""
    parts = [
        np.array(split) / steps
        for split in itertools.product(range(steps + 1), repeat=3)
        if sum(split) == steps
    ]
    best = np.inf
    for shares in itertools.product(parts, repeat=len(tables)):
        dealt = dict(zip(tables, shares, strict=True))
        if any(mask is not None and dealt[t][mask].any() for t, mask in banned.items()):
            continue
        cost_s, memory = poured_cost_s(dealt, ranks)
        if memory <= 1:
            best = min(best, cost_s)
    return best


@pytest.mark.parametrize("tables", [[0], [1], [0, 1]], ids=str)
@pytest.mark.parametrize("away", [None, 1])
@pytest.mark.parametrize("name", POURED)
def test_pouring_beats_a_fine_grid(name: str, away, tables: list[int]) -> None:
    ranks = Ranks(POURED[name])
    banned = {table: None for table in tables}
    if away is not None:
        banned[tables[-1]] = np.arange(3) == away
    best = grid_best_s(tables, ranks, banned, 40 if len(tables) == 1 else 10)
    found = pour({t: TOTALS[t] for t in tables}, LOADS, COMMON, ranks, banned)
    if found is None:
        assert best == np.inf
        return
    shares = {}
    for table, (owners, weights) in found.items():
        assert weights.sum() == pytest.approx(1, abs=1e-12) and (weights > 0).all()
        assert len(set(owners.tolist())) == len(owners)
        shares[table] = np.zeros(3)
        shares[table][owners] = weights
        if banned[table] is not None:
            assert shares[table][banned[table]].sum() == 0
    cost_s, memory = poured_cost_s(shares, ranks)
    assert memory <= 1 + 1e-9
    # The margin that pouring leaves of memory may cost a little.
    assert cost_s <= best * (1 + 1e-5)
    if best < np.inf:
        assert cost_s >= best * 0.9


def test_equal_tables_take_turns() -> None:
    # 6 equal tables on 3 equal ranks: 2 each, and none is torn apart.
    totals = {table: TOTALS[0] for table in range(6)}
    ranks = Ranks(cluster(0, 0, 0))
    nothing = np.zeros((6, 3))
    found = pour(totals, nothing, np.zeros(6), ranks, {table: None for table in range(6)})
    assert found is not None
    load = np.zeros(3)
    for owners, weights in found.values():
        load[owners] += weights
    np.testing.assert_allclose(load, 2, atol=1e-6)
    assert sum(len(owners) for owners, _ in found.values()) <= 6 + 2


def test_pouring_nothing_and_what_fits_nowhere() -> None:
    ranks = Ranks(cluster(0, 0, 0, memory_bytes=100))
    assert pour({}, LOADS, COMMON, ranks, {}) == {}
    assert pour({0: TOTALS[0]}, np.zeros((6, 3)), np.zeros(6), ranks, {0: None}) is not None
    assert pour({0: TOTALS[0]}, LOADS, COMMON, ranks, {0: None}) is None


def test_kinds_that_are_too_many_for_the_program_are_spread(monkeypatch) -> None:
    monkeypatch.setattr("torchrec_oper.planner.search.pour.MOST_VARIABLES", 2 * 4)
    ranks = Ranks(cluster(0, 0, 0, 0))
    totals = {table: TOTALS[0] / (1 + table) for table in range(4)}
    away = {table: None for table in totals}
    away[3] = np.array([True, True, False, False])
    found = pour(totals, np.zeros((6, 4)), np.zeros(6), ranks, away)
    assert found is not None
    load = np.zeros(4)
    for table, (owners, weights) in found.items():
        load[owners] += weights * TOTALS[0][WORK] / (1 + table)
    # The two largest level what the spread of the others leaves.
    np.testing.assert_allclose(load, load.mean(), rtol=1e-5)
    assert found[2][1].tolist() == [0.25] * 4
    assert found[3][0].tolist() == [2, 3] and found[3][1].tolist() == [0.5, 0.5]


def test_amounts_are_in_the_order_that_these_tests_take() -> None:
    assert tuple(range(6)) == (WORK, FIXED, IDS, FORWARD, BACKWARD, BYTES)
    assert PHASES == (IDS, FORWARD, BACKWARD)
