"""The bound: no plan costs less, whoever made it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from judge_brute_force import AllPlans
from planner_cases import AMPLE, Case, RandomPlans, cases, cluster, problem_of, table_demand

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.bound import (
    Problem,
    affordable,
    certified_bound,
    replicated_cost_s,
    start_s,
)
from torchrec_oper.planner.certificate import Certificate, Multipliers
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.planner.judge.certificate import verify_certificate
from torchrec_oper.planner.optimize import optimize
from torchrec_oper.planner.relaxation import proven_s
from torchrec_oper.planner.space import SearchSpace

SEEDS = st.integers(0, 2**32 - 1)
CLOSE = 1 - 1e-9


def problem_or_none(case: Case) -> Problem:
    try:
        return problem_of(case)
    except PlanError:  # a table fits nowhere
        assume(False)
        raise


def random_multipliers(problem: Problem, rng: np.random.Generator) -> Multipliers:
    classes, tables = len(problem.classes), len(problem.summaries)
    weights = rng.dirichlet(np.full(classes + tables, rng.choice([0.1, 1.0])))
    if rng.random() < 0.5:
        weights[classes:] = 0.0
    weights /= weights.sum()
    cost_s = min(float(s.busiest_s.min()) for s in problem.summaries)
    prices = cost_s / problem.classes.memory_bytes * 10.0 ** rng.uniform(-2, 1, classes)
    return Multipliers(
        cost=weights[:classes],
        sent_share=rng.choice([0.0, 0.5, 1.0], size=(2, 3, classes)),
        memory=prices * rng.integers(0, 2, classes),
        owners=weights[classes:],
    )


@given(cases(most_rows=5000), SEEDS)
@settings(max_examples=40)
def test_no_random_plan_costs_less(case: Case, seed: int) -> None:
    problem = problem_or_none(case)
    costs = RandomPlans(case, seed).costs(starts=3, tries=12)
    assume(costs)
    best = min(costs)
    # A bound that stops at the cost of a known plan can't be seen to be wrong: take more.
    for known in (np.inf, best * 3, best * 1.1):
        assert certified_bound(problem, known).bound_s * CLOSE <= best


@given(cases(most_tables=3, most_rows=5000), SEEDS)
@settings(max_examples=40)
def test_any_multipliers_prove_a_bound(case: Case, seed: int) -> None:
    problem = problem_or_none(case)
    costs = RandomPlans(case, seed).costs(starts=2, tries=12)
    assume(costs)
    best, rng = min(costs), np.random.default_rng(seed)
    # Latency that every plan has that isn't replicated altogether.
    latency_s = problem.latency_s(exchanged=True, replicas=False)
    for _ in range(8):
        target_s = best * rng.choice([0.5, 0.95, 1.2, 10])
        left = affordable(problem, target_s, problem.usable)
        value_s = np.inf
        if all(mask.any() for mask in left):
            multipliers = random_multipliers(problem, rng)
            value_s = proven_s(
                problem.summaries, left, problem.cluster, problem.classes, multipliers
            )
        bound_s = min(latency_s + min(target_s, value_s), replicated_cost_s(problem))
        assert bound_s * CLOSE <= best


TINY = {
    "two whole tables": (
        [table_demand("a", rows=8, lookups=100), table_demand("b", rows=8, lookups=100)],
        cluster(0, 0),
    ),
    "a heavy row": (
        [
            table_demand("a", rows=40, dim=32, skew=1.5, lookups=300, lengths={5: 1}),
            table_demand("b", rows=30, dim=32, lookups=500),
        ],
        cluster(0, 0),
    ),
    "unlike speeds": (
        [
            table_demand("a", rows=40, dim=32, skew=2, lookups=300, lengths={5: 1}),
            table_demand("b", rows=30, skew=1, lookups=500),
        ],
        cluster(0, 0, speeds=(1.0, 0.2)),
    ),
    "unlike memory": (
        [
            table_demand("a", rows=400, dim=32, skew=2, lookups=300, lengths={5: 1}),
            table_demand("b", rows=300, skew=1, lookups=500),
        ],
        cluster(0, 0, memory_bytes=(80_000, 20_000), speeds=(0.3, 1.0)),
    ),
    "tight memory": (
        [
            table_demand("a", rows=400, dim=32, skew=1, lookups=300),
            table_demand("b", rows=300, dim=32, lookups=500, lengths={5: 1}),
        ],
        cluster(0, 0, memory_bytes=90_000),
    ),
    "two hosts": (
        [table_demand("a", rows=30, skew=1, lookups=300), table_demand("b", rows=9, lookups=90)],
        cluster(0, 1),
    ),
    "two hosts of different size": (
        [
            table_demand("a", rows=30, dim=32, skew=1.2, lookups=300, lengths={5: 1}),
            table_demand("b", rows=9, lookups=90),
        ],
        cluster(0, 0, 1, overhead_s=1e-5),
    ),
    "starting is dear": (
        [table_demand("a", rows=30, skew=1, lookups=300), table_demand("b", rows=9, lookups=90)],
        cluster(0, 0, latency_s=1e-3),
    ),
}


INFERENCE = ("unlike speeds", "two hosts of different size")


@pytest.mark.parametrize("name", TINY)
def test_below_the_best_of_all_plans(name: str) -> None:
    demands, ranks = TINY[name]
    objective = "infer" if name in INFERENCE else "train"
    space = SearchSpace(hot_step=4)
    case = Case(tuple(demands), ranks, objective, space)
    best = AllPlans(demands, space, ranks, objective).best_cost_s()
    found = optimize(demands, ranks, objective=objective, space=space)
    judged = expected_cost(found.decisions, demands, ranks, objective)
    assert judged.feasible
    # All plans have only some of the uneven weights: the search may do better.
    assert found.cost_s <= best * 1.03
    problem = problem_of(case)
    for known in (np.inf, best * 1.5, best, found.cost_s):
        bound_s = certified_bound(problem, known).bound_s
        assert bound_s * CLOSE <= min(best, found.cost_s)
        assert bound_s >= 0.5 * best


@given(cases(most_tables=3, most_rows=5000))
@settings(max_examples=25)
def test_the_judge_verifies_it(case: Case) -> None:
    problem = problem_or_none(case)
    for known in (np.inf, 1e-3, 1e-5):
        found = certified_bound(problem, known)
        again = Certificate.from_json(json.loads(json.dumps(found.to_json())))
        assert again.to_json() == found.to_json()
        verify_certificate(again, case.demands, case.cluster, case.objective, case.space)


def test_alike_tables_that_just_fill_the_ranks_are_bounded_exactly() -> None:
    # 4 tables on 4 ranks, only whole: each rank owns one, and nothing is wasted.
    demands = [table_demand(f"t{n}", rows=64, dim=16, lookups=64) for n in range(4)]
    ranks = cluster(0, 0, 0, 0)
    found = optimize(demands, ranks, space=SearchSpace(exchanges=("whole",)))
    assert found.gap <= 1e-9
    assert sorted(int(d.owners[0, 0]) for d in found.decisions) == [0, 1, 2, 3]


def test_memory_binds() -> None:
    # Replicating is free of links, but 3 times 512,000 bytes don't fit: memory has a price.
    demands = [table_demand(f"t{n}", rows=4000, dim=32, skew=1, lookups=300) for n in range(3)]
    roomy = optimize(demands, cluster(0, 0), objective="infer")
    tight = optimize(demands, cluster(0, 0, memory_bytes=1_000_000), objective="infer")
    assert all(decision.exchange == "replicated" for decision in roomy.decisions)
    assert tight.bound_s > roomy.bound_s * 1.05
    assert any(proof.multipliers.memory.any() for proof in tight.certificate.proofs)


def test_the_start_of_phases() -> None:
    one, two, lone = cluster(0, 0, latency_s=1.0), cluster(0, 0, 1, latency_s=1.0), cluster(0)
    assert start_s(one, "train", exchanged=True, replicas=False) == 3
    assert start_s(one, "train", exchanged=True, replicas=True) == 5
    assert start_s(one, "train", exchanged=False, replicas=True) == 2
    assert start_s(one, "infer", exchanged=True, replicas=True) == 2
    assert start_s(one, "infer", exchanged=False, replicas=True) == 0
    assert start_s(two, "train", exchanged=True, replicas=False) == 9
    assert start_s(cluster(0, 1, latency_s=1.0), "infer", exchanged=True, replicas=False) == 4
    assert start_s(lone, "train", exchanged=True, replicas=True) == 0


def test_a_plan_cheaper_than_the_start_of_a_case_proves_that_case() -> None:
    # With replicas 5 phases start, without them 3: no plan with replicas can be better.
    case = Case((table_demand(lookups=10.0),), cluster(0, 0, latency_s=1.0))
    found = certified_bound(problem_of(case), 3.5)
    case_with_replicas = next(proof for proof in found.proofs if proof.with_hot_rows)
    assert case_with_replicas.bound_s == 5
    verify_certificate(found, case.demands, case.cluster, case.objective, case.space)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cost": np.array([1.5])}, "cost and owners must sum to 1, found 1.5"),
        ({"memory": np.array([-1.0])}, "memory must be finite and 0 or more"),
        ({"sent_share": np.full((2, 3, 1), 1.5)}, "sent_share must be 0 to 1"),
        ({"sent_share": np.ones((2, 3, 2))}, r"\[2, 3, classes\]"),
        ({"owners": np.array([np.nan])}, "owners must be finite"),
    ],
)
def test_wrong_multipliers_are_refused(changes: dict, message: str) -> None:
    good = {
        "cost": np.array([1.0]),
        "sent_share": np.ones((2, 3, 1)),
        "memory": np.zeros(1),
        "owners": np.zeros(1),
    }
    Multipliers(**good)
    with pytest.raises(PlanError, match=message):
        Multipliers(**{**good, **changes})


def test_ample_memory_costs_nothing() -> None:
    case = Case((table_demand(),), cluster(0, 0, memory_bytes=AMPLE))
    found = certified_bound(problem_of(case), 1.0)
    assert not any(proof.multipliers.memory.any() for proof in found.proofs)
