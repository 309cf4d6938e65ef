"""What each freedom of the planner gains: placement, exchanges, hot rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tqdm.auto import tqdm

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.decision import EXCHANGES, Decision, Exchange
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.planner.optimize import optimize
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.readable import percent, seconds_text, table_of

# What stock collectives do for a pooled table, whole or by rows or columns.
SUMMED: tuple[Exchange, ...] = ("partial", "whole")


@dataclass(frozen=True)
class Rung:
    """A plan with some of the freedoms.

    Args:
        freedom: what it may choose, in words.
        cost_s: seconds of its slowest rank; None where no such plan fits.
        trouble: why there is none.
    """

    freedom: str
    cost_s: float | None
    trouble: str = ""


def ladder(
    plan: Plan, demands: Sequence[TableDemand], *, progress: bool = False
) -> tuple[Rung, ...]:
    """The cost of plans with one freedom more each, up to the plan itself.

    Two of them are searched for, which takes about as long as the plan took each.
    Constraints on single tables aren't in a plan, and aren't kept here.

    Args:
        plan: the plan.
        demands: of its tables, in order.
        progress: show a bar on a terminal's stderr.
    """
    cold = tuple(name for name in plan.space.exchanges if name != "replicated")
    hidden = None if progress else True
    rungs = []
    with tqdm(total=2, desc="ladder", unit=" plans", disable=hidden) as bar:
        rungs.append(_even(plan, demands))
        # Rows that stay apart can't be summed: their tables exchange rows.
        unpooled = {demand.table.name for demand in demands if demand.table.pooling == "none"}
        one = {d.table.name: SUMMED for d in demands if d.table.name not in unpooled}
        exchanges = (*SUMMED, "rows") if unpooled else SUMMED
        rungs.append(_searched("placement: owners and cuts", plan, demands, exchanges, one))
        bar.update()
        rungs.append(_searched("+ exchanges", plan, demands, cold, {}))
        bar.update()
    rungs.append(Rung("+ hot rows on every rank: the plan", plan.cost_s))
    return tuple(rungs)


def _even(plan: Plan, demands: Sequence[TableDemand]) -> Rung:
    """Every table's rows dealt evenly to all ranks."""
    freedom = "none: all tables by rows, evenly"
    decisions = []
    for demand in demands:
        parts = min(plan.world_size, demand.table.rows)
        exchange: Exchange = "rows" if demand.table.pooling == "none" else "partial"
        decisions.append(Decision(exchange, 0, np.arange(parts)[None]))
    found = expected_cost(decisions, demands, plan.cluster, plan.workload.objective)
    if not found.feasible:
        return Rung(freedom, None, f"rank {found.over_memory[0]} has too little memory")
    return Rung(freedom, found.cost_s)


def _searched(
    freedom: str,
    plan: Plan,
    demands: Sequence[TableDemand],
    exchanges: tuple[Exchange, ...],
    limits: dict[str, tuple[Exchange, ...]],
) -> Rung:
    space = replace(plan.space, exchanges=exchanges or EXCHANGES, hot_rows=False)
    try:
        outcome = optimize(
            demands,
            plan.cluster,
            objective=plan.workload.objective,
            space=space,
            constraints=Constraints(exchanges=limits),
            seed=plan.seed,
        )
    except PlanError as error:
        return Rung(freedom, None, str(error))
    return Rung(freedom, outcome.cost_s)


def ladder_text(rungs: Sequence[Rung]) -> str:
    """The ladder for people."""
    rows = []
    before_s: float | None = None
    for rung in rungs:
        if rung.cost_s is None:
            rows.append([rung.freedom, "-", "-", rung.trouble])
            continue
        gain = percent(1 - rung.cost_s / before_s) if before_s else "-"
        rows.append([rung.freedom, seconds_text(rung.cost_s), gain, ""])
        before_s = rung.cost_s
    titles = ["what may be chosen", "step", "shorter by", ""]
    if not any(row[3] for row in rows):
        titles, rows = titles[:3], [row[:3] for row in rows]
    return table_of(titles, rows)
