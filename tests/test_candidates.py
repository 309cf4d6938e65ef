"""The candidates of a table, against the judge."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import Case, cases, cluster, demands, random_decision, table_demand

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.bound import start_s
from torchrec_oper.planner.candidates import (
    BYTES,
    FIXED,
    Candidates,
    fixed_candidate,
    list_candidates,
)
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.planner.judge.choices import choices_of
from torchrec_oper.planner.search.board import Ranks
from torchrec_oper.planner.space import SearchSpace


def predicted(case: Case, candidates: Candidates, number: int, decision: Decision) -> tuple:
    """[W] seconds and bytes of every rank for a table alone, from the search's amounts."""
    ranks = Ranks(case.cluster)
    loads = np.zeros((6, case.world_size))
    if decision.parts and decision.weights is None:
        loads[:, decision.owners.ravel()] = candidates.pieces(number)
    elif decision.parts:
        even = candidates.piece[:, number]
        loads[:, decision.owners[0]] = (even * decision.parts)[:, None] * decision.weights
        loads[FIXED, decision.owners[0]] = even[FIXED]
    common = candidates.common[:, number]
    start = start_s(
        case.cluster,
        case.objective,
        exchanged=decision.parts > 0,
        replicas=decision.hot_rows > 0,
    )
    return ranks.cost_s(loads, common) + start, loads[BYTES] + common[BYTES]


def assert_judged_alike(case: Case, rng: np.random.Generator, most: int = 12) -> None:
    """The judge agrees with up to ``most`` candidates of the case's only table."""
    (candidates,) = case.candidates()
    numbers = np.arange(len(candidates))
    if len(numbers) > most:
        numbers = np.sort(rng.choice(numbers, most, replace=False))
    for number in numbers.tolist():
        decision = random_decision(candidates, number, case.world_size, rng)
        seconds, held = predicted(case, candidates, number, decision)
        verdict = expected_cost([decision], case.demands, case.cluster, case.objective)
        what = f"{decision}"
        np.testing.assert_allclose(verdict.seconds.total, seconds, rtol=1e-9, err_msg=what)
        np.testing.assert_allclose(verdict.memory_bytes, held, rtol=1e-9, err_msg=what)


@given(cases(most_tables=1), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_judge_agrees_on_any_candidate(case: Case, seed: int) -> None:
    assert_judged_alike(case, np.random.default_rng(seed))


@pytest.mark.parametrize("objective", ["train", "infer"])
@pytest.mark.parametrize("hosts", [(0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1)])
@pytest.mark.parametrize(
    "demand",
    [
        table_demand(rows=10**6, dim=128, skew=1.3, lookups=4000.0, lengths={20: 1}),
        table_demand(rows=10**6, dim=128, skew=1.3, lookups=4000.0),
        table_demand(rows=5000, dim=64, skew=2.5, lookups=1000.0, pooling="none"),
        table_demand(rows=100, dim=32, skew=0.0, lookups=9000.0, lengths={1: 0.5, 50: 0.5}),
    ],
    ids=["heavy long bags", "heavy one id", "unpooled", "alike"],
)
def test_judge_agrees_on_eight_ranks(demand, hosts, objective) -> None:
    speeds = tuple(1.0 + 0.5 * (rank % 3) for rank in range(len(hosts)))
    case = Case((demand,), cluster(*hosts, speeds=speeds), objective)
    assert_judged_alike(case, np.random.default_rng(0), most=60)


@given(
    cases(most_tables=1),
    st.booleans(),
    st.booleans(),
    st.sampled_from([2, 4]),
    st.sampled_from([4, 16]),
)
def test_lists_what_the_judge_lists(
    case: Case, fine_parts: bool, hot_rows: bool, hot_step: int, width: int
) -> None:
    space = SearchSpace(
        fine_parts=fine_parts, hot_rows=hot_rows, hot_step=hot_step, min_slice_width=width
    )
    (demand,) = case.demands
    found = list_candidates(demand, case.cluster, case.objective, space)
    shapes = list(
        zip(
            found.hot_rows.tolist(),
            found.exchange,
            found.columns.tolist(),
            found.parts.tolist(),
            strict=True,
        )
    )
    wanted = [
        (choice.hot_rows, choice.exchange, choice.columns, choice.parts)
        for choice in choices_of(demand, space, case.cluster)
    ]
    assert sorted(shapes) == sorted(wanted)


@given(cases(most_tables=1))
def test_totals_are_the_sums_of_all_pieces(case: Case) -> None:
    (candidates,) = case.candidates()
    totals = candidates.totals()
    for number in range(len(candidates)):
        pieces = candidates.pieces(number)
        assert pieces.shape == (6, candidates.columns[number] * candidates.parts[number])
        np.testing.assert_allclose(totals[:, number], pieces.sum(axis=1), rtol=1e-9)


@given(demands(), st.integers(0, 2**32 - 1))
def test_a_fixed_decision_is_its_candidate(demand, seed: int) -> None:
    rng, two_hosts = np.random.default_rng(seed), cluster(0, 0, 1, 1)
    case = Case((demand,), two_hosts)
    (listed,) = case.candidates()
    number = int(rng.integers(len(listed)))
    decision = random_decision(listed, number, 4, rng)
    only = fixed_candidate(demand, two_hosts, "train", decision)
    assert len(only) == 1 and not only.linear[0]
    load = np.zeros((6, 4))
    load[:, decision.owners.ravel()] = only.pieces(0)
    seconds = Ranks(two_hosts).cost_s(load, only.common[:, 0])
    seconds = seconds + start_s(
        two_hosts, "train", exchanged=decision.parts > 0, replicas=decision.hot_rows > 0
    )
    verdict = expected_cost([decision], [demand], two_hosts, "train")
    np.testing.assert_allclose(verdict.seconds.total, seconds, rtol=1e-9)
    np.testing.assert_allclose(verdict.memory_bytes, load[BYTES] + only.common[BYTES], rtol=1e-9)


def test_a_fixed_hot_cut_ends_with_a_block() -> None:
    demand = table_demand("clicks", rows=64, skew=0.0)
    blocks = [10.0, 54.0]
    demand = type(demand)(
        table=demand.table,
        lookups=100.0,
        bags=100.0,
        bag_lengths=np.ones(1),
        bag_shares=np.ones(1),
        block_rows=np.array(blocks),
        block_chances=np.array([0.05, 0.5 / 54]),
        listed_rows=64,
    )
    decision = Decision("rows", 12, np.array([[0, 1]]))
    with pytest.raises(PlanError, match="table clicks is fixed with 12 hot rows.* take 10"):
        fixed_candidate(demand, cluster(0, 0), "train", decision)


def test_a_row_as_hot_as_an_even_share_is_no_part_of_its_own() -> None:
    # The hottest row has half of all lookups. The next, with a quarter, has just an even
    # share of what the 2 parts left get: no rounding may make it a part of its own.
    rows = np.concatenate([[1.0, 1.0], [64.0]])
    chances = np.array([0.5, 0.25, 0.25 / 64])
    demand = table_demand(rows=66)
    demand = type(demand)(
        table=demand.table,
        lookups=100.0,
        bags=100.0,
        bag_lengths=np.ones(1),
        bag_shares=np.ones(1),
        block_rows=rows,
        block_chances=chances,
        listed_rows=66,
    )
    case = Case((demand,), cluster(0, 0, 0))
    (candidates,) = case.candidates()
    split = [
        number
        for number, name in enumerate(candidates.exchange)
        if name == "partial" and candidates.parts[number] == 3 and not candidates.hot_rows[number]
    ]
    assert [candidates.heavy[number].shape[1] for number in split] == [1]
    assert_judged_alike(case, np.random.default_rng(0))
