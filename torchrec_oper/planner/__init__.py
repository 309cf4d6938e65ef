"""Planning: which rank owns which row, and how good that is."""

from typing import TYPE_CHECKING, Any

from torchrec_oper.planner.cluster import Cluster, RankSpec
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.plan import Plan, Workload
from torchrec_oper.planner.planning import Request, make_plan
from torchrec_oper.planner.report import load_table
from torchrec_oper.planner.row_map import RowMap
from torchrec_oper.planner.runnable import RUNNABLE
from torchrec_oper.planner.space import SearchSpace

if TYPE_CHECKING:
    from torchrec_oper.planner.adapter import OperPlanner, OperShardingPlan, sharding_plan

# These need TorchRec, which the rest of the planner doesn't.
_FROM_ADAPTER = ("OperPlanner", "OperShardingPlan", "sharding_plan")

__all__ = [
    "RUNNABLE",
    "Cluster",
    "Constraints",
    "Decision",
    "OperPlanner",
    "OperShardingPlan",
    "Plan",
    "RankSpec",
    "Request",
    "RowMap",
    "SearchSpace",
    "TablePlacement",
    "Workload",
    "load_table",
    "make_plan",
    "sharding_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM_ADAPTER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrec_oper.planner import adapter

    return getattr(adapter, name)
