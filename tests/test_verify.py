"""The judge's check of a finished plan finds what is wrong with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan_cases import assumed_plan, changed, plan, profile

from torchrec_oper.planner import Plan, RowMap
from torchrec_oper.planner.certificate import Certificate
from torchrec_oper.planner.explain import plan_demands
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.verify import verify_plan


def troubles(made: Plan) -> dict[str, tuple[str, ...]]:
    """What is wrong, by what was checked."""
    used = profile() if made.workload.profile_hash else None
    checks = verify_plan(made, plan_demands(made, used), used)
    return {check.what: check.trouble for check in checks if check.trouble}


def with_placement(made: Plan, number: int, **fields: object) -> Plan:
    placements = list(made.placements)
    placements[number] = replace(placements[number], **fields)
    return changed(made, placements=tuple(placements))


def swapped(placement: TablePlacement) -> RowMap:
    """The row map with the hottest row of part 0 in place of the last row of part 1."""
    row_map = placement.row_map
    rows = row_map.listed_rows.copy()
    first, last = row_map.bounds[0], row_map.bounds[1] + row_map._listed_counts[1] - 1
    a, b = np.flatnonzero(rows == first)[0], np.flatnonzero(rows == last)[0]
    rows[[a, b]] = rows[[b, a]]
    return RowMap(row_map.bounds, row_map.listed_ids, rows)


@pytest.mark.parametrize("made", [plan, assumed_plan], ids=["profiled", "assumed"])
def test_what_the_planner_makes_is_right(made) -> None:
    assert troubles(made()) == {}
    used = profile() if made is plan else None
    checks = verify_plan(made(), plan_demands(made(), used), used)
    assert [check.what for check in checks] == ["cost", "memory"] + ["rows"] * (made is plan) + [
        "bound"
    ]


def test_wrong_seconds() -> None:
    made = plan()
    forward = list(made.seconds["forward"])
    forward[2] /= 2
    found = troubles(changed(made, seconds={**made.seconds, "forward": tuple(forward)}))
    assert list(found) == ["cost"]
    (line,) = found["cost"]
    assert line.startswith("forward of rank 2: the plan says ")
    extra = {**made.seconds, "coffee": (1e-3,) * 4}
    assert troubles(changed(made, seconds=extra))["cost"][0].startswith("coffee of rank 0: ")
    missing = {name: values for name, values in made.seconds.items() if name != "memory"}
    assert "memory of rank" in troubles(changed(made, seconds=missing))["cost"][0]


def test_buffers_that_do_not_fit() -> None:
    made = plan()
    most = max(made.memory_bytes)
    ranks = tuple(replace(rank, memory_bytes=most) for rank in made.cluster.ranks)
    found = troubles(changed(made, cluster=replace(made.cluster, ranks=ranks)))
    assert any("buffers of lookups included, but its cap is" in line for line in found["memory"])


def test_rows_that_lie_elsewhere() -> None:
    made = plan()
    number = next(n for n, p in enumerate(made.placements) if p.decision.parts > 1)
    wrong = with_placement(made, number, row_map=swapped(made.placements[number]))
    found = troubles(wrong)
    assert list(found) == ["rows"]
    name = made.placements[number].key
    assert found["rows"][0].startswith(f"table {name}: rank ")
    assert "lookups of the profile, but its rows have" in found["rows"][0]


def test_a_bound_that_is_not_proven() -> None:
    made = plan()
    proofs = tuple(
        replace(proof, bound_s=proof.bound_s * 1.01) for proof in made.certificate.proofs
    )
    found = troubles(changed(made, certificate=Certificate(proofs, np.inf)))
    assert list(found) == ["bound"]
    assert "the certificate is wrong" in found["bound"][0]
    none = troubles(changed(made, certificate=Certificate(proofs[:0], 1e-9)))
    assert "no proof" in none["bound"][0]


def test_a_decision_that_cannot_be() -> None:
    made = plan()
    number = next(n for n, p in enumerate(made.placements) if p.decision.columns == 1)
    owners = made.placements[number].decision
    wrong = with_placement(made, number, decision=replace(owners, exchange="direct"))
    assert "direct needs ranks that share memory" in troubles(wrong)["cost"][0]


def test_a_plan_outside_its_space_may_cost_less_than_the_bound() -> None:
    made = plan()
    cheap = {name: tuple(s / 2 for s in values) for name, values in made.seconds.items()}
    found = troubles(changed(made, seconds=cheap))
    assert "is not of the search space" in found["bound"][0]
