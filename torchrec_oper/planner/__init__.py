"""Planning: which rank owns which row, and how good that is."""

from typing import TYPE_CHECKING, Any

from torchrec_oper.planner.cluster import Cluster, RankSpec
from torchrec_oper.planner.plan import Plan, TablePlacement
from torchrec_oper.planner.report import load_table
from torchrec_oper.planner.row_map import RowMap

if TYPE_CHECKING:
    from torchrec_oper.planner.adapter import OperPlanner, OperShardingPlan, sharding_plan

# These need TorchRec, which the rest of the planner doesn't.
_FROM_ADAPTER = ("OperPlanner", "OperShardingPlan", "sharding_plan")

__all__ = [
    "Cluster",
    "OperPlanner",
    "OperShardingPlan",
    "Plan",
    "RankSpec",
    "RowMap",
    "TablePlacement",
    "load_table",
    "sharding_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM_ADAPTER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchrec_oper.planner import adapter

    return getattr(adapter, name)
