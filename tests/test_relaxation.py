"""The relaxation: summaries of candidates, the linear program, and what its duals prove."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import Case, RandomPlans, cases, cluster, problem_of, table_demand

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.candidates import FIXED, PHASES, WORK
from torchrec_oper.planner.certificate import Multipliers
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.judge import expected_cost, verdict
from torchrec_oper.planner.linear_program import Entries, linear_program, solve
from torchrec_oper.planner.rank_classes import rank_classes
from torchrec_oper.planner.relaxation import proven_s, relax
from torchrec_oper.planner.search.board import Ranks
from torchrec_oper.planner.summary import summarise, undominated

SEEDS = st.integers(0, 2**32 - 1)


@given(cases(most_tables=1, most_rows=5000), SEEDS)
@settings(max_examples=80)
def test_views_hold_for_any_owners(case: Case, seed: int) -> None:
    """By either direction of the links: all ranks pay the least, some rank the busiest."""
    plans = RandomPlans(case, seed)
    (candidates,) = plans.candidates
    summary = summarise(candidates, case.cluster, rank_classes(case.cluster))
    for _ in range(10):
        made, loads = plans.decision(0)
        alike = [
            candidate
            for candidate in range(len(candidates))
            if candidates.exchange[candidate] == made.exchange
            and candidates.hot_rows[candidate] == made.hot_rows
            and candidates.columns[candidate] == made.columns
            and candidates.parts[candidate] == made.parts
        ]
        (number,) = alike
        found = verdict(loads, case.cluster).seconds
        rates, sides = case.cluster.rates, {}
        for side in ("sent", "received"):
            links = sum(
                getattr(phase, f"{side}_intra") / rates.intra_host.bytes_per_s
                + getattr(phase, f"{side}_inter") / rates.inter_host.bytes_per_s
                # What owners send of ids and gradients is what their requesters receive.
                for phase in (loads.ids.reversed(), loads.forward, loads.backward.reversed())
            )
            sides[side] = found.memory + found.shards + found.allreduce + links
        for side, seconds in sides.items():
            view = getattr(summary, side)
            assert view.least_s[number] * (1 - 1e-9) <= seconds.min() + 1e-15
            assert view.busiest_s[number] * (1 - 1e-9) <= seconds.max() + 1e-15
        held = verdict(loads, case.cluster).memory_bytes.max()
        assert summary.busiest_bytes[number] * (1 - 1e-9) <= held


@given(cases(most_tables=1))
def test_kinds_sum_up_to_what_all_owners_bear(case: Case) -> None:
    (candidates,) = case.candidates()
    summary = summarise(candidates, case.cluster, rank_classes(case.cluster))
    totals = np.zeros_like(summary.owned)
    np.add.at(totals, (slice(None), summary.kind_of), summary.kinds)
    np.testing.assert_allclose(totals, summary.owned, rtol=1e-9)
    np.testing.assert_allclose(summary.owned, candidates.totals(), rtol=1e-9)
    assert (np.diff(summary.kind_of) >= 0).all()


@given(cases(most_tables=3, most_rows=5000))
@settings(max_examples=40)
def test_the_duals_prove_the_optimum(case: Case) -> None:
    problem = problem_of_or_skip(case)
    if problem is None:
        return
    where = (problem.cluster, problem.classes)
    found = relax(problem.summaries, problem.useful, *where)
    if found is None:
        # Lent memory makes it feasible, and what its price proves is still a bound.
        found = relax(problem.summaries, problem.useful, *where, lend=True)
        assert found is not None and found.multipliers.memory.any()
        return
    proven = proven_s(problem.summaries, problem.useful, *where, found.multipliers)
    scale = max(found.value_s, 1e-12)
    assert proven <= found.value_s + 1e-6 * scale
    if len(problem.classes) == 1:
        assert proven >= found.value_s - 1e-6 * scale
        # Leaving out candidates that others beat leaves the bound as it is.
        all_of_them = proven_s(problem.summaries, problem.usable, *where, found.multipliers)
        assert all_of_them == pytest.approx(proven, rel=1e-9)
    for share in found.shares:
        assert share.sum() == pytest.approx(1, abs=1e-6)
        assert (share >= 0).all()


def problem_of_or_skip(case: Case):
    try:
        return problem_of(case)
    except PlanError as error:
        assert "bytes on some rank" in str(error)
        return None


def test_less_memory_never_makes_it_cheaper() -> None:
    tables = tuple(table_demand(f"t{n}", rows=4000, skew=1, lookups=300.0) for n in range(3))
    problem = problem_of(Case(tables, cluster(0, 0, memory_bytes=600_000), "infer"))
    where = (problem.cluster, problem.classes)
    values = []
    for share in (1.0, 0.9, 0.8, 0.7):
        found = relax(problem.summaries, problem.useful, *where, memory_share=share)
        assert found is not None
        values.append(found.value_s)
    assert values == sorted(values) and values[-1] > values[0] * 1.01
    assert relax(problem.summaries, problem.useful, *where, memory_share=0.01) is None
    none = [np.zeros_like(mask) for mask in problem.useful]
    assert relax(problem.summaries, none, *where) is None


def test_the_mean_of_two_ranks_on_paper() -> None:
    # One table, whole on either of 2 ranks. Its owner works and sends, the other receives
    # as much as the owner sends: the mean over both has half of the work and the overhead,
    # and half of each phase's bytes, as a rank sends W - 1 = 1 times what it owns.
    case = Case((table_demand(rows=64, lookups=100.0),), cluster(0, 0))
    problem = problem_of(case)
    (candidates,), (summary,) = problem.candidates, problem.summaries
    number = next(
        n
        for n, name in enumerate(candidates.exchange)
        if (name, candidates.columns[n], candidates.hot_rows[n]) == ("whole", 1, 0)
    )
    only = np.arange(len(candidates)) == number
    found = relax([summary], [only], problem.cluster, problem.classes)
    assert found is not None
    piece = candidates.piece[:, number]
    link_s = piece[list(PHASES)].sum() / 1e9
    mean_s = (piece[WORK] + piece[FIXED] + link_s) / 2 + candidates.common[WORK, number]
    owner_s = piece[WORK] + piece[FIXED] + link_s + candidates.common[WORK, number]
    # The owner's cut is the better bound: the table lies on one rank.
    assert owner_s > mean_s
    assert found.value_s == pytest.approx(owner_s, rel=1e-7)
    assert found.multipliers.owners[0] == pytest.approx(1)


def test_a_heavy_row_may_be_with_fast_ranks_and_the_rest_where_there_is_room() -> None:
    # Rank 0 is fast but has no room for the 20,000 cold rows, rank 1 has room. In 2 parts,
    # the hot row, which nearly all lookups ask for, goes to rank 0 and the rest to rank 1:
    # work and bytes of one table part ways, though both are shared out over all ranks.
    table = table_demand(rows=20_001, dim=64, lookups=1000.0)
    table = replace(
        table,
        block_rows=np.array([1.0, 20_000.0]),
        block_chances=np.array([0.95, 0.05 / 20_000]),
        listed_rows=1,
    )
    ranks = cluster(0, 0, memory_bytes=(400_000, 10**8), speeds=(4.0, 0.05))
    problem = problem_of(Case((table,), ranks))
    (candidates,), (summary,) = problem.candidates, problem.summaries
    shapes = zip(candidates.exchange, candidates.parts, candidates.hot_rows, strict=True)
    only = np.array([shape == ("partial", 2, 0) for shape in shapes])
    assert only.sum() == 1
    found = relax([summary], [only], ranks, problem.classes, lend=True)
    made = Decision("partial", 0, np.array([[0, 1]]))
    judged = expected_cost([made], [table], ranks, "train")
    assert judged.feasible
    cost_s = judged.cost_s - problem.latency_s(exchanged=True, replicas=False)
    assert found is not None and found.value_s > cost_s * 1.05  # the program leaves this out
    proven = proven_s([summary], [only], ranks, problem.classes, found.multipliers)
    assert proven <= cost_s


def test_empty_parts_cost_their_owners_but_hold_no_rows() -> None:
    # All rows on rank 0, and an empty part, which has its overhead, on rank 1.
    table = table_demand(rows=900, lookups=100.0)
    ranks = cluster(0, 0, memory_bytes=(10**6, 8000), overhead_s=1e-3)
    problem = problem_of(Case((table,), ranks))
    (candidates,), (summary,) = problem.candidates, problem.summaries
    shapes = zip(candidates.exchange, candidates.parts, candidates.hot_rows, strict=True)
    only = np.array([shape == ("rows", 2, 0) for shape in shapes])
    assert only.sum() == 1
    made = Decision("rows", 0, np.array([[0, 1]]), np.array([1.0, 0.0]))
    judged = expected_cost([made], [table], ranks, "train")
    assert judged.feasible
    cost_s = judged.cost_s - problem.latency_s(exchanged=True, replicas=False)
    # Rows are dear on rank 1: 61,200 bytes at this price are more than all else costs.
    price = 1e-7
    assert price * 61_200 > cost_s + 2e-3
    for weight in (0.0, 0.3, 0.7, 1.0):
        multipliers = Multipliers(
            cost=np.array([weight, 1 - weight]),
            sent_share=np.ones((2, 3, 2)),
            memory=np.array([0.0, price]),
            owners=np.zeros(1),
        )
        assert proven_s([summary], [only], ranks, problem.classes, multipliers) <= cost_s


def test_undominated() -> None:
    features = np.array([[1.0, 2.0, 1.0, 3.0, 1.0], [2.0, 1.0, 2.0, 3.0, 0.5]])
    allowed = np.array([True, True, True, True, False])
    kept = undominated(features, allowed)
    # Of the equal first and third the first stays; the fourth loses; the last may not be.
    assert kept.tolist() == [True, True, False, False, False]
    assert undominated(features, np.zeros(5, dtype=bool)).tolist() == [False] * 5


@given(SEEDS)
def test_undominated_keeps_the_best_at_any_prices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.integers(0, 4, size=(3, 12)).astype(float)
    allowed = rng.random(12) < 0.7
    kept = undominated(features, allowed)
    assert not (kept & ~allowed).any()
    if allowed.any():
        prices = rng.random(3)
        values = prices @ features
        assert values[kept].min() == pytest.approx(values[allowed].min())


def test_rank_classes() -> None:
    # Ranks 0 and 2 share a host with a slow rank, 4 and 5 have hosts of their own.
    ranks = cluster(0, 0, 0, 1, 2, 2, speeds=(2.0, 1.0, 2.0, 2.0, 2.0, 1.0))
    classes = rank_classes(ranks)
    assert classes.of_rank.tolist() == [0, 1, 0, 2, 3, 4]
    assert classes.sizes.tolist() == [2, 1, 1, 1, 1]
    assert classes.local.tolist() == [3, 3, 1, 2, 2]
    assert classes.neighbours.tolist() == [
        [2, 1, 0, 0, 0],
        [2, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1],
    ]


def test_a_linear_program_on_paper() -> None:
    # min x + 2 y with x + y >= 3 and x <= 2: x = 2, y = 1, and 3 more is worth 2 each.
    entries = Entries()
    entries.add(0, [0, 1], 1.0)
    entries.add(1, 0, 1.0)
    infinite = np.inf
    program = linear_program(
        entries, np.array([1.0, 2.0]), np.array([3.0, -infinite]), np.array([infinite, 2.0])
    )
    solution = solve(program)
    assert solution is not None
    values, duals = solution
    np.testing.assert_allclose(values, [2, 1])
    np.testing.assert_allclose(duals, [2, -1])
    impossible = linear_program(
        entries, np.ones(2), np.array([3.0, 5.0]), np.array([infinite, 2.0])
    )
    assert solve(impossible) is None


def test_loads_of_the_search_and_the_judge_agree_on_links() -> None:
    rng = np.random.default_rng(0)
    ranks = cluster(0, 1, 0, 1, 2)
    volumes = rng.random((4, 5)) * 1e6
    seconds = Ranks(ranks).link_s(volumes)
    for row, wanted in zip(volumes, seconds, strict=True):
        near = np.array([row[ranks.hosts == host].sum() for host in ranks.hosts])
        local = ranks.local_sizes
        intra = np.maximum((local - 1) * row, near - row) / 1e9
        inter = np.maximum((5 - local) * row, row.sum() - near) / 2e8
        np.testing.assert_allclose(wanted, intra + inter, rtol=1e-12)
