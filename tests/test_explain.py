"""Where the seconds of a plan come from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from plan_cases import TABLES, assumed_plan, changed, cluster, plan, profile
from test_plan_report import with_multipliers

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import Plan
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.explain import LEAST_GAIN, explain, plan_demands
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.planner.ladder import ladder, ladder_text
from torchrec_oper.planner.planning import Request, make_plan
from torchrec_oper.planner.rates import Rate
from torchrec_oper.planner.report import binding_proof
from torchrec_oper.planner.space import SearchSpace


@lru_cache
def hot_plan() -> Plan:
    """Some items are hot, all hours are replicated, and the rest travels."""
    fixed = {
        "item": Decision("partial", 63, np.array([[2, 0, 1, 3]])),
        "user": Decision("rows", 0, np.array([[1, 2]])),
        "hour": Decision("replicated", 24, np.zeros((1, 0))),
    }
    request = Request(cluster(), profile(), batch_size=256, constraints=Constraints(fixed=fixed))
    return make_plan([("", table) for table in TABLES], request)


@pytest.mark.parametrize("planned", [plan, hot_plan])
def test_the_tables_parts_add_up_to_the_plan(planned: Callable[[], Plan]) -> None:
    made = planned()
    found = explain(made, plan_demands(made, profile()))
    busiest = found.busiest_rank
    assert made.rank_s[busiest] == made.cost_s
    for name, values in made.seconds.items():
        if name == "latency":
            assert found.latency_s == values[busiest]
            continue
        assert sum(t.busiest_s[name] for t in found.tables) == pytest.approx(values[busiest])
        assert sum(t.mean_s[name] for t in found.tables) == pytest.approx(np.mean(values))
    assert found.agrees
    costs = [sum(table.busiest_s.values()) for table in found.tables]
    assert costs == sorted(costs, reverse=True)


def test_a_remedy_is_what_the_judge_finds_on_the_better_machine() -> None:
    made = hot_plan()
    demands = plan_demands(made, profile())
    rates = made.cluster.rates
    points = [
        tuple((size, rate * 1.1) for size, rate in r.points) for r in (rates.read, rates.update)
    ]
    intra, inter = rates.intra_host, rates.inter_host
    better = {
        "rows read and updated 10% faster": {"read": Rate(points[0]), "update": Rate(points[1])},
        "10% less overhead of a piece": {"shard_overhead_s": rates.shard_overhead_s * 0.9},
        "links within a host 10% faster": {
            "intra_host": replace(intra, bytes_per_s=intra.bytes_per_s * 1.1)
        },
        "links between hosts 10% faster": {
            "inter_host": replace(inter, bytes_per_s=inter.bytes_per_s * 1.1)
        },
        "10% less latency": {
            "intra_host": replace(intra, latency_s=intra.latency_s * 0.9),
            "inter_host": replace(inter, latency_s=inter.latency_s * 0.9),
        },
    }
    decisions = [placement.decision for placement in made.placements]
    found = {remedy.change: remedy.saves for remedy in explain(made, demands).remedies}
    for change, fields in better.items():
        machine = replace(made.cluster, rates=replace(rates, **fields))
        after_s = expected_cost(decisions, demands, machine, "train").cost_s
        saved = 1 - after_s / made.cost_s
        assert found.get(change, 0.0) == pytest.approx(saved if saved >= LEAST_GAIN else 0.0)
    assert len(found) >= 3


def test_more_memory_lowers_the_bound_by_its_price() -> None:
    made = plan()
    price = np.full_like(binding_proof(made).multipliers.memory, 1e-11)
    scarce = with_multipliers(made, memory=price)
    found = explain(scarce, plan_demands(scarce, profile()))
    (remedy,) = [remedy for remedy in found.remedies if remedy.of == "bound"]
    assert remedy.saves == pytest.approx(1e-11 * len(price) * 1e5 / made.bound_s)
    assert remedy.told().startswith("97.66 KiB more memory for each rank (10%): the bound falls")
    assert not any(r.of == "bound" for r in explain(made, plan_demands(made, profile())).remedies)


def test_text_and_json() -> None:
    made = plan()
    found = explain(made, plan_demands(made, profile()))
    text = found.text(most=1)
    assert "ebc.item" in text
    assert "... 2 other tables" in text
    assert "(latency)" in text
    assert "what would help:" in text
    assert "note:" not in text
    told = json.loads(json.dumps(found.to_json()))
    assert told["cost_s"] == made.cost_s
    assert {table["table"] for table in told["tables"]} == {"ebc.item", "ebc.user", "ebc.hour"}


def test_other_demands_are_noticed() -> None:
    made = plan()
    seconds = {**made.seconds, "memory": tuple(s * 2 for s in made.seconds["memory"])}
    wrong = changed(made, seconds=seconds)
    found = explain(wrong, plan_demands(wrong, profile()))
    assert not found.agrees
    assert "note: the tables' demands are not those of the plan" in found.text()


def test_the_profile_must_be_the_plans() -> None:
    hash_ = profile().content_hash[:12]
    with pytest.raises(PlanError, match=f"made with profile {hash_}, but none is given"):
        plan_demands(plan(), None)
    with pytest.raises(PlanError, match=f"made with profile {hash_}, but the one given is "):
        plan_demands(plan(), profile(1))
    with pytest.raises(PlanError, match="made without a profile, but the one given is"):
        plan_demands(assumed_plan(), profile())
    other = make_plan([("ebc", replace(TABLES[0], rows=3001))], Request(cluster()))
    with pytest.raises(PlanError, match="made without a profile, but the one given is"):
        plan_demands(other, profile())  # of other tables, which isn't the trouble to name
    assert len(plan_demands(assumed_plan(), None)) == 3


def test_each_rung_has_one_freedom_more() -> None:
    made = plan()
    rungs = ladder(made, plan_demands(made, profile()))
    costs = [rung.cost_s for rung in rungs]
    # The searches aren't exact.
    assert all(after <= before * 1.02 for before, after in itertools.pairwise(costs))
    assert costs[-1] == made.cost_s
    assert ladder_text(rungs).splitlines()[0].split()[-2:] == ["shorter", "by"]


def test_a_rung_that_does_not_fit_says_why() -> None:
    tight = changed(plan(), space=SearchSpace(exchanges=("replicated",)))
    demands = plan_demands(tight, profile())
    small = replace(tight.cluster.ranks[0], memory_bytes=10)
    object.__setattr__(tight, "cluster", replace(tight.cluster, ranks=(small,) * 4))
    rungs = ladder(tight, demands)
    assert [rung.cost_s for rung in rungs[:3]] == [None] * 3
    assert "too little memory" in rungs[0].trouble
    assert "needs" in rungs[1].trouble
    assert "needs" in ladder_text(rungs)
