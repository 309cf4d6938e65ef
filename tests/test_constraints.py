"""What a user may ask of single tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import NOBODY, cluster, table_demand

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.decision import EXCHANGES, Decision
from torchrec_oper.planner.explain import plan_demands
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.planner.optimize import Outcome, optimize
from torchrec_oper.planner.planning import Request, make_plan
from torchrec_oper.planner.search.effort import Start, effort_for
from torchrec_oper.planner.verify import verify_plan
from torchrec_oper.table import TableSpec

NAMES = ("long", "short", "small", "raw", "other")
TABLES = (
    table_demand("long", rows=20_000, dim=64, skew=1.1, lookups=3000, lengths={20: 1}),
    table_demand("short", rows=9000, dim=32, skew=0.6, lookups=2000),
    table_demand("small", rows=50, dim=16, lookups=500),
    table_demand("raw", rows=2000, dim=32, skew=1.3, lookups=800, pooling="none"),
    table_demand("other", rows=9000, dim=32, skew=0.9, lookups=1500),
)
FOUR = cluster(0, 0, 0, 0)
LITTLE = (Start(float("inf")), Start(0.5, spread=True), Start(float("inf"), replicas=False))


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch) -> None:
    """Constraints hold however little is tried."""
    little = replace(effort_for(1, 1), starts=LITTLE, choices=8, rounds=1, moves=4)
    monkeypatch.setattr("torchrec_oper.planner.optimize.effort_for", lambda *_: little)


def planned(constraints: Constraints, ranks=FOUR, objective="train", tables=TABLES) -> Outcome:
    """The outcome, which the judge must confirm."""
    found = optimize(tables, ranks, objective=objective, constraints=constraints)
    verdict = expected_cost(found.decisions, tables, ranks, objective)
    assert verdict.feasible
    assert found.cost_s == pytest.approx(verdict.cost_s, rel=1e-9)
    assert found.bound_s <= found.cost_s * (1 + 1e-9)
    return found


def by_name(found: Outcome) -> dict[str, Decision]:
    return dict(zip(NAMES, found.decisions, strict=True))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanges(exchange) -> None:
    found = planned(Constraints(exchanges={"short": [exchange], "long": {exchange}}))
    chosen = by_name(found)
    assert chosen["short"].exchange == chosen["long"].exchange == exchange


def test_two_exchanges_for_one_table() -> None:
    free = planned(Constraints())
    found = planned(Constraints(exchanges={"short": ("partial", "whole")}))
    assert by_name(found)["short"].exchange in ("partial", "whole")
    assert found.bound_s >= free.bound_s * (1 - 1e-3)


@pytest.mark.parametrize(
    ("exchanges", "away"),
    [
        (EXCHANGES, (0,)),
        (("rows",), (0,)),
        (("partial",), (0, 2)),
        (("direct",), (0, 2)),
        (("rows",), (1, 2, 3)),
        (("partial",), (1, 2, 3)),
    ],
)
def test_ranks_that_own_nothing_of_a_table(exchanges, away) -> None:
    allowed = {"long": exchanges, "short": exchanges}
    if away == (1, 2, 3):  # on one rank partial is whole
        allowed = {name: {*exchanges, "whole"} for name in allowed}
    found = planned(Constraints(exchanges=allowed, not_on={"short": away, "long": {*away}}))
    for name in ("short", "long"):
        decision = by_name(found)[name]
        assert decision.exchange in allowed[name]
        assert decision.parts >= 1
        assert decision.hot_rows == 0
        assert not np.isin(decision.owners, away).any()


@pytest.mark.parametrize("ranks", [FOUR, cluster(0, 0, 1, 1, speeds=(1, 2, 1, 1))])
def test_tables_kept_together(ranks) -> None:
    together = (("short", "other"), ("raw", "long"))
    chosen = by_name(planned(Constraints(together=together), ranks))
    for one, other in together:
        first, second = chosen[one], chosen[other]
        assert first.exchange == second.exchange
        np.testing.assert_array_equal(first.owners, second.owners)
        assert first.weights is None and second.weights is None


def test_kept_together_and_away_and_by_an_exchange() -> None:
    asked = Constraints(
        together=(("short", "other"),), not_on={"other": [3]}, exchanges={"short": ["rows"]}
    )
    chosen = by_name(planned(asked))
    assert chosen["short"].exchange == chosen["other"].exchange == "rows"
    assert not (chosen["short"].owners == 3).any()
    np.testing.assert_array_equal(chosen["short"].owners, chosen["other"].owners)


FIXED = {
    "slices": Decision("whole", 0, np.array([[3], [1]])),
    "even rows": Decision("rows", 0, np.array([[3, 1]])),
    "uneven rows": Decision("rows", 0, np.array([[0, 3]]), np.array([0.75, 0.25])),
    "no rows on one": Decision("rows", 0, np.array([[2, 0, 1]]), np.array([0.5, 0.0, 0.5])),
    "hot rows": Decision("partial", 64, np.array([[2, 0, 1, 3]])),
    "everywhere": Decision("replicated", 9000, NOBODY),
}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_tables(name) -> None:
    wanted, ranks = FIXED[name], cluster(0, 0, 1, 1, speeds=(1, 2, 1, 1))
    found = planned(Constraints(fixed={"short": wanted}), ranks)
    chosen = by_name(found)["short"]
    assert (chosen.exchange, chosen.hot_rows) == (wanted.exchange, wanted.hot_rows)
    np.testing.assert_array_equal(chosen.owners, wanted.owners)
    if wanted.weights is None:
        assert chosen.weights is None
    else:
        np.testing.assert_array_equal(chosen.weights, wanted.weights)


def test_all_tables_fixed() -> None:
    decisions = [
        Decision("whole", 0, np.array([[1]])),
        Decision("rows", 0, np.array([[0, 1, 2, 3]]), np.array([0.1, 0.2, 0.3, 0.4])),
        Decision("replicated", 50, NOBODY),
        Decision("rows", 0, np.array([[0, 1, 2, 3]])),
        Decision("partial", 0, np.array([[2, 3], [0, 1]])),
    ]
    found = planned(Constraints(fixed=dict(zip(NAMES, decisions, strict=True))))
    assert [d.owners.tolist() for d in found.decisions] == [d.owners.tolist() for d in decisions]


def test_the_rest_is_levelled_around_a_fixed_table() -> None:
    tables = [
        table_demand("fixed", rows=500, lookups=5000),
        *(table_demand(f"t{n}", rows=500, lookups=5000) for n in range(3)),
    ]
    fixed = Constraints(
        fixed={"fixed": Decision("whole", 0, np.array([[2]]))},
        exchanges={f"t{n}": ["whole"] for n in range(3)},
    )
    found = optimize(tables, FOUR, constraints=fixed)
    assert sorted(int(d.owners[0, 0]) for d in found.decisions[1:]) == [0, 1, 3]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"exchanges": {"long": ["rowwise"]}},
            r"table long: exchanges must be some of direct.*found \['rowwise'\]",
        ),
        ({"exchanges": {"long": []}}, r"table long: exchanges must be some of .*, found \[\]"),
        (
            {"together": (("long", "short"), ("short", "raw"))},
            "table short is to be kept together twice",
        ),
        (
            {"together": (("long", "short"),), "fixed": {"long": FIXED["slices"]}},
            "table long is fixed, so it can't be kept together",
        ),
        ({"exchanges": {"lang": ["rows"]}}, "a constraint names table lang, which there isn't"),
        ({"not_on": {"lang": [0]}}, "names table lang"),
        ({"together": (("lang", "long"),)}, "names table lang"),
        ({"fixed": {"lang": FIXED["slices"]}}, "names table lang"),
        ({"not_on": {"long": [0, 4]}}, "table long: there is no rank 4, only 0 to 3"),
        ({"not_on": {"long": [-1]}}, "table long: a rank of not_on must be an integer of 0"),
        ({"not_on": {"long": [0, 1, 2, 3]}}, "table long may lie on no rank at all"),
        (
            {"fixed": {"long": Decision("whole", 0, np.array([[4]]))}},
            "table long is fixed on rank 4, but the ranks are 0 to 3",
        ),
        (
            {"exchanges": {"raw": ["partial"]}},
            "leave no way to place table raw; allow it more exchanges",
        ),
        (
            {"not_on": {"small": [0]}, "exchanges": {"small": ["replicated"]}},
            "leave no way to place table small",
        ),
        (
            {"together": (("raw", "long"),), "exchanges": {"long": ["partial"]}},
            "leave no way to place table long, raw",
        ),
    ],
)
def test_what_cannot_be_met_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        optimize(TABLES, FOUR, constraints=Constraints(**fields))


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (
            Decision("partial", 0, np.array([[0, 1]])),
            "raw is fixed as partial, .* pooling is none: take rows",
        ),
        (Decision("whole", 0, np.array([[0]])), "raw is fixed as whole"),
        (Decision("direct", 0, np.array([[0], [1]])), "raw is fixed in slices .* direct can't"),
        (Decision("rows", 0, np.array([[0], [1], [2]])), "raw is fixed with 3 slices .* has 32"),
        (Decision("rows", 2000, np.array([[0]])), "raw is fixed with 2000 hot rows, but has 2000"),
        (Decision("rows", 2001, np.array([[0]])), "raw is fixed with 2001 hot rows"),
        (Decision("replicated", 7, NOBODY), "raw is fixed with 7 hot rows"),
    ],
)
def test_fixed_placements_that_the_table_cannot_have(decision, message) -> None:
    with pytest.raises(PlanError, match=message):
        optimize(TABLES, FOUR, constraints=Constraints(fixed={"raw": decision}))


def test_direct_needs_shared_memory() -> None:
    fixed = Constraints(fixed={"raw": Decision("direct", 0, np.array([[0, 1]]))})
    with pytest.raises(PlanError, match="raw is fixed as direct, but the ranks share no memory"):
        optimize(TABLES, cluster(0, 0, direct=False), constraints=fixed)


def test_uneven_parts_of_long_bags_cannot_be_fixed() -> None:
    uneven = Decision("partial", 0, np.array([[0, 1]]), np.array([0.5, 0.5]))
    with pytest.raises(PlanError, match="table long is fixed as partial with weights.* leave"):
        optimize(TABLES, FOUR, constraints=Constraints(fixed={"long": uneven}))


def test_tables_kept_together_may_differ_in_rows_where_all_are_replicated() -> None:
    tables = [
        ("", TableSpec("a", rows=1000, dim=16, features=("a",))),
        ("", TableSpec("b", rows=50, dim=16, features=("b",))),
    ]
    constraints = Constraints(together=(("b", "a"),), exchanges={"a": ("replicated",)})
    cluster = Cluster.uniform(4, memory_bytes=2**22)
    plan = make_plan(tables, Request(cluster, constraints=constraints))
    assert [p.decision.hot_rows for p in plan.placements] == [1000, 50]


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(exchanges={"a": ("whole",)}),
        Constraints(together=(("a", "b"),)),
        Constraints(not_on={"b": (0, 1)}),
        Constraints(fixed={"a": Decision("partial", 0, np.array([[3, 1]]))}),
    ],
)
def test_the_bound_of_a_constrained_plan_can_be_checked(constraints: Constraints) -> None:
    tables = [
        ("", TableSpec("a", rows=1000, dim=16, features=("a",))),
        ("", TableSpec("b", rows=50, dim=16, features=("b",))),
    ]
    plan = make_plan(
        tables, Request(Cluster.uniform(4, memory_bytes=2**22), constraints=constraints)
    )
    checks = verify_plan(plan, plan_demands(plan, None), None)
    assert [check.trouble for check in checks] == [()] * len(checks)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exchanges": {"a": "whole"}}, "table a: exchanges must be a list of values"),
        ({"not_on": {"a": 0}}, "table a: not_on must be a list of values, found 0"),
        ({"not_on": {"a": [0.5]}}, "a rank of not_on must be an integer"),
        ({"together": ("ab",)}, "together must hold tuples of table names, found 'ab'"),
        ({"fixed": {"a": "whole"}}, "table a: fixed must be a Decision, found 'whole'"),
        (
            {"fixed": {"a": Decision("partial", 0, [[0, 1]])}, "not_on": {"a": [0]}},
            "table a is fixed on rank 0, on which it may not lie",
        ),
        (
            {"fixed": {"a": Decision("partial", 0, [[0, 1]])}, "exchanges": {"a": ["whole"]}},
            "table a is fixed with exchange partial, but may use only whole",
        ),
    ],
)
def test_values_that_cannot_hold_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Constraints(**fields)
