"""What commands that read a plan have in common."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec_oper.planner.demand import TableDemand
    from torchrec_oper.planner.plan import Plan
    from torchrec_oper.profile import AccessProfile


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Declare the plan and the profile that it was made with."""
    parser.add_argument("plan", metavar="PLAN", type=Path, help="what `oper plan` wrote")
    parser.add_argument(
        "--profile", metavar="P", type=Path, help="the profile that the plan was made with"
    )


def read_plan(
    arguments: argparse.Namespace,
) -> tuple[Plan, AccessProfile | None, list[TableDemand]]:
    """The plan, its profile, and what its tables ask for.

    Raises:
        OSError: a file can't be read.
        OperError: a file is damaged or of another kind, or the profile isn't the plan's.
    """
    from torchrec_oper.errors import PlanError
    from torchrec_oper.planner.explain import plan_demands
    from torchrec_oper.planner.plan import Plan
    from torchrec_oper.profile import AccessProfile

    plan = Plan.load(arguments.plan)
    wanted = plan.workload.profile_hash
    if arguments.profile is None and wanted is not None:
        raise PlanError(
            f"{arguments.plan} was made with profile {wanted[:12]}, which says what its tables"
            " are asked for; give it with --profile"
        )
    profile = None if arguments.profile is None else AccessProfile.load(arguments.profile)
    return plan, profile, plan_demands(plan, profile)


def print_json(value: Any) -> None:
    """Print a value as one JSON document."""
    print(json.dumps(value, indent=2))
