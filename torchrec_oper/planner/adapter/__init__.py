"""The planner as TorchRec sees it: modules in, a TorchRec ``ShardingPlan`` out."""

from torchrec_oper.planner.adapter.entries import (
    OPER,
    OperParameterSharding,
    OperShardingPlan,
    row_shards,
)
from torchrec_oper.planner.adapter.model import (
    EMBEDDING_MODULES,
    EmbeddingModules,
    optimizer_bytes_per_row,
    read_model,
)
from torchrec_oper.planner.adapter.oper_planner import OperPlanner, sharding_plan

__all__ = [
    "EMBEDDING_MODULES",
    "OPER",
    "EmbeddingModules",
    "OperParameterSharding",
    "OperPlanner",
    "OperShardingPlan",
    "optimizer_bytes_per_row",
    "read_model",
    "row_shards",
    "sharding_plan",
]
