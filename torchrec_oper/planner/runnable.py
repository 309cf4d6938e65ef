"""What the run-time of today can carry out of all that a plan may say."""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.space import SearchSpace

RUNNABLE = SearchSpace(exchanges=("partial", "whole"), min_slice_width=2**31, hot_rows=False)
"""The placements that ``OperSharder`` runs: every row on one rank, in one piece."""

MOST_NAMED = 3  # tables that one message lists


def check_runnable(placements: Iterable[TablePlacement]) -> None:
    """Check that ``OperSharder`` can run the placements.

    Raises:
        PlanError: it can't; says which tables are placed how.
    """
    wrong = [(p.table.name, trouble) for p in placements if (trouble := _trouble(p))]
    if not wrong:
        return
    named = "; ".join(f"table {name} has {trouble}" for name, trouble in wrong[:MOST_NAMED])
    more = f"; and {len(wrong) - MOST_NAMED} more tables" if len(wrong) > MOST_NAMED else ""
    raise PlanError(
        f"OperSharder can't run this plan: {named}{more}. It runs the exchanges"
        f" {' and '.join(RUNNABLE.exchanges)}, with whole rows and none hot: plan with OperPlanner"
        " and no space of your own, or with Request(space=torchrec_oper.planner.RUNNABLE)"
    )


def _trouble(placement: TablePlacement) -> str:
    """What the run-time can't do of a placement, in words."""
    decision = placement.decision
    found = []
    if decision.exchange not in RUNNABLE.exchanges:
        found.append(f"exchange {decision.exchange}")
    if decision.columns > 1:
        found.append(f"columns in {decision.columns} slices")
    if decision.hot_rows and decision.exchange != "replicated":
        found.append(f"{decision.hot_rows} hot rows")
    return " and ".join(found)
