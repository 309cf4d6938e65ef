"""Checks what a plan says of itself, by the judge, which shares no code with the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.judge import (
    HOT,
    Verdict,
    expected_cost,
    placed_table,
    verify_certificate,
)
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.readable import bytes_text, percent, seconds_text
from torchrec_oper.profile import AccessProfile, TableAccess

# Sums of floats in another order may differ so much.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Check:
    """One thing that was recomputed.

    Args:
        what: the thing.
        found: what the judge finds, in words.
        trouble: how that differs from what the plan says; empty where it doesn't.
    """

    what: str
    found: str
    trouble: tuple[str, ...] = ()


def verify_plan(
    plan: Plan, demands: Sequence[TableDemand], profile: AccessProfile | None
) -> tuple[Check, ...]:
    """Recompute the cost, the memory, the placement of rows, and the bound.

    Args:
        plan: the plan.
        demands: of its tables, in order, as ``plan_demands`` gives them.
        profile: that they come from, if any.
    """
    try:
        found = expected_cost(
            [placement.decision for placement in plan.placements],
            demands,
            plan.cluster,
            plan.workload.objective,
        )
    except PlanError as error:
        return (Check("cost", "can't be computed", (str(error),)),)
    checks = [_cost(plan, found), _memory(plan, found)]
    if profile is not None:
        checks.append(_rows(plan, profile))
    checks.append(_bound(plan, demands))
    return tuple(checks)


def _cost(plan: Plan, found: Verdict) -> Check:
    parts = found.seconds.parts
    trouble = []
    for name in dict.fromkeys([*parts, *plan.seconds]):
        nothing = (0.0,) * plan.world_size
        says = np.array(plan.seconds.get(name, nothing))
        judged = parts.get(name, np.array(nothing))
        apart = np.abs(says - judged)
        rank = int(apart.argmax())
        if apart[rank] > ROUNDING * max(found.cost_s, plan.cost_s):
            trouble.append(
                f"{name} of rank {rank}: the plan says {seconds_text(float(says[rank]))},"
                f" the judge finds {seconds_text(float(judged[rank]))}"
            )
    return Check("cost", f"{seconds_text(found.cost_s)} on rank {found.busiest_rank}", (*trouble,))


def _memory(plan: Plan, found: Verdict) -> Check:
    """Rows and state as placed, and the judge's count with the buffers of lookups."""
    needs = found.memory_bytes
    fullest = int((needs / plan.cluster.memory_bytes).argmax())
    cap = plan.cluster.memory_bytes[fullest]
    trouble = [
        f"rank {rank} needs {bytes_text(float(needs[rank]))}, buffers of lookups included, but its"
        f" cap is {bytes_text(float(plan.cluster.memory_bytes[rank]))}"
        for rank in found.over_memory
    ]
    told = f"{bytes_text(float(needs[fullest]))} on rank {fullest}, the fullest"
    return Check(
        "memory", f"{told}, {percent(float(needs[fullest] / cap))} of its cap", (*trouble,)
    )


def _rows(plan: Plan, profile: AccessProfile) -> Check:
    """Whether the rows lie as the decisions say: the hottest are hot, lookups as told."""
    trouble = [
        f"table {placement.key}: {line}"
        for placement in plan.placements
        for line in _misplaced(placement, profile.table(placement.table.name))
    ]
    rows = sum(placement.table.rows for placement in plan.placements)
    return Check("rows", f"{rows:,} rows placed, those of the profile one by one", (*trouble,))


def _misplaced(placement: TablePlacement, access: TableAccess) -> Iterator[str]:
    placed = placed_table(placement)
    parts = placed.parts(access.ids)
    hot = placed.hot_rows
    if hot < placement.table.rows:
        hottest = int(access.counts[:hot].sum())
        served = int(access.counts[parts == HOT].sum())
        if hottest != served:
            yield (
                f"its {hot:,} hot rows have {served:,} lookups of the profile, the hottest"
                f" {hottest:,}"
            )
    if not len(placed.part_rows):
        return
    cold = parts != HOT
    listed = np.bincount(parts[cold], minlength=len(placed.part_rows))
    served_by = np.zeros(len(placed.part_rows), dtype=np.int64)
    np.add.at(served_by, parts[cold], access.counts[cold])
    # Rows that aren't listed are alike as far as is known.
    tail = access.lookups - int(access.counts.sum())
    unlisted = placed.part_rows - listed
    wanted = served_by + tail * (unlisted / max(int(unlisted.sum()), 1))
    for owners in placed.owners:
        says = placement.planned_lookups[owners]
        apart = np.abs(says - wanted)
        part = int(apart.argmax())
        if apart[part] > 1:
            yield (
                f"rank {owners[part]} is said to serve {says[part]:,} lookups of the profile, but"
                f" its rows have {wanted[part]:,.0f}"
            )
            return


def _bound(plan: Plan, demands: Sequence[TableDemand]) -> Check:
    try:
        found = verify_certificate(
            plan.certificate, demands, plan.cluster, plan.workload.objective, plan.space
        )
    except PlanError as error:
        return Check("bound", "not proven", (str(error),))
    trouble = []
    if plan.bound_s > found.bound_s * (1 + ROUNDING):
        trouble.append(
            f"the plan says {seconds_text(plan.bound_s)}, only {seconds_text(found.bound_s)} is"
            " proven"
        )
    if found.bound_s > plan.cost_s * (1 + ROUNDING):
        trouble.append(
            f"{seconds_text(found.bound_s)} is proven, but the plan takes only"
            f" {seconds_text(plan.cost_s)}: it is not of the search space that it says"
        )
    return Check("bound", f"{seconds_text(found.bound_s)} proven", (*trouble,))
