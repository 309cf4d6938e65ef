"""TorchRec's plan entries for our placements."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.readable import table_of
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.planner.runnable import check_runnable

OPER = "oper"
"""The sharding type of our plan entries, which no stock sharder accepts."""


@dataclass
class OperParameterSharding(ParameterSharding):
    """TorchRec's entry for one table, with the row map that the stock one can't hold."""

    row_map: RowMap | None = None


@dataclass
class OperShardingPlan(ShardingPlan):
    """A TorchRec plan that carries the ``Plan`` it was made from.

    Tables of other types than ``oper`` are TorchRec's: ``oper`` says nothing of them.
    """

    oper: Plan

    def report(self) -> str:
        """A readable summary of the plan."""
        others = [
            (f"{path}.{name}" if path else name, entry.sharding_type, _ranks(entry))
            for path, entries in self.plan.items()
            for name, entry in entries.items()
            if entry.sharding_type != OPER
        ]
        if not others:
            return self.oper.report()
        listed = table_of(("table", "type", "ranks"), others)
        return f"{self.oper.report()}\nplaced by TorchRec's planner:\n{listed}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``oper`` to one file, as ``Plan.save`` does."""
        self.oper.save(path)


def oper_entries(plan: Plan) -> dict[str, EmbeddingModuleShardingPlan]:
    """The entries of a plan's tables, by the path of their module.

    Raises:
        PlanError: a table is placed in a way that ``OperSharder`` can't run.
    """
    check_runnable(plan.placements)
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for placement in plan.placements:
        entry = modules.setdefault(placement.module, EmbeddingModuleShardingPlan())
        entry[placement.table.name] = _parameter_sharding(placement)
    return modules


def _parameter_sharding(placement: TablePlacement) -> OperParameterSharding:
    row_map = placement.rank_map
    return OperParameterSharding(
        sharding_type=OPER,
        compute_kernel=EmbeddingComputeKernel.FUSED.value,
        ranks=list(range(row_map.world_size)),
        sharding_spec=row_shards(row_map.bounds, placement.table.dim, range(row_map.world_size)),
        row_map=row_map,
    )


def row_shards(bounds: Ints, dim: int, ranks: Sequence[int]) -> EnumerableShardingSpec:
    """TorchRec's description of ranges of whole rows.

    Args:
        bounds: [W + 1] where each rank's rows begin, and where the last one's end.
        dim: elements of a row.
        ranks: [W] the global rank of each holder.
    """
    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[int(begin), 0],
                shard_sizes=[int(end - begin), dim],
                placement=f"rank:{rank}/cpu",
            )
            for (begin, end), rank in zip(itertools.pairwise(bounds), ranks, strict=True)
        ]
    )


def _ranks(entry: ParameterSharding) -> str:
    return " ".join(map(str, entry.ranks)) if entry.ranks else "all"
