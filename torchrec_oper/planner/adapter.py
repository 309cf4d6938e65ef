"""The planner as TorchRec sees it: modules in, a TorchRec ``ShardingPlan`` out."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import get_module_to_default_sharders
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingPlanner,
    ShardMetadata,
)
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)

from torchrec_oper.errors import OperError, PlanError
from torchrec_oper.planner.busiest_rank import busiest_rank_bound
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.deal import deal_rows
from torchrec_oper.planner.plan import Plan, TablePlacement
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.profile import AccessProfile, TableAccess
from torchrec_oper.table import TableSpec, table_specs, whole_number

OPER = "oper"
"""The sharding type of our plan entries, which no stock sharder accepts."""

# The modules of TorchRec's that hold tables, or hold what does and change how it is used.
EMBEDDING_MODULES = (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
    *get_module_to_default_sharders(),
)

# Bytes of optimizer state for an element of a row, and for a row, by EmbOptimType: those
# that FBGEMM has for the CPU.
OPTIMIZER_STATE_BYTES = {
    "exact_sgd": (0, 0),
    "exact_adagrad": (4, 0),
    "exact_row_wise_adagrad": (0, 4),
}


@dataclass
class OperParameterSharding(ParameterSharding):
    """TorchRec's entry for one table, with the row map that the stock one can't hold."""

    row_map: RowMap | None = None


@dataclass
class OperShardingPlan(ShardingPlan):
    """A TorchRec plan that carries the ``Plan`` it was made from."""

    oper: Plan

    def report(self) -> str:
        """A readable summary of the plan."""
        return self.oper.report()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``oper`` to one file, as ``Plan.save`` does."""
        self.oper.save(path)


class OperPlanner(ShardingPlanner):
    """Places every row of every ``EmbeddingBagCollection`` that ``OperSharder`` shards.

    Args:
        profile: how the input uses the tables; without one, rows are dealt as if all
            were looked up alike.
        cluster: the ranks and their memory; by default ``Cluster.detect()``.
        seed: the search's seed; equal input and seed give an equal plan.
    """

    def __init__(
        self,
        profile: AccessProfile | None = None,
        cluster: Cluster | None = None,
        *,
        seed: int = 0,
    ) -> None:
        for name, value, kind in (
            ("profile", profile, AccessProfile),
            ("cluster", cluster, Cluster),
        ):
            if value is not None and not isinstance(value, kind):
                raise PlanError(f"{name} must be a {kind.__name__} or None, found {value!r}")
        self._profile = profile
        self._cluster = cluster
        self._seed = whole_number(seed, "seed", error=PlanError)

    def plan(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
    ) -> OperShardingPlan:
        """The plan for ``module``, made in this process alone.

        Raises:
            PlanError: a module can't be planned, or the tables don't fit into memory.
            ProfileError: the profile is of other tables.
        """
        return self._plan_for(module, sharders, self._cluster or Cluster.detect())

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]],
        pg: dist.ProcessGroup | None = None,
    ) -> OperShardingPlan:
        """The plan for ``module``, made on rank 0 of ``pg`` and sent to all its ranks.

        Only rank 0 reads the planner's profile and cluster.

        Raises:
            PlanError, ProfileError: as ``plan`` does, on every rank.
        """
        if pg is None and not dist.is_initialized():
            return self.plan(module, sharders)
        group = pg if pg is not None else dist.group.WORLD
        assert group is not None
        plan: OperShardingPlan | None = None
        failure: BaseException | None = None
        sent: list[bytes] = [b""]
        if dist.get_rank(group) == 0:
            try:
                plan = self._plan_for_ranks(module, sharders, dist.get_world_size(group))
                sent = [pickle.dumps(plan)]
            except BaseException as error:  # every failure has to reach the waiting ranks
                failure = error
                sent = [pickle.dumps(_describe(error))]
        dist.broadcast_object_list(sent, src=dist.get_global_rank(group, 0), group=group)
        if failure is not None:
            raise failure
        received = plan or pickle.loads(sent[0])
        if not isinstance(received, OperShardingPlan):
            kind, text = received
            raise kind(f"planning failed on rank 0: {text}")
        return received

    def _plan_for_ranks(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]], world_size: int
    ) -> OperShardingPlan:
        cluster = self._cluster or Cluster.detect(world_size)
        if cluster.world_size != world_size:
            raise PlanError(
                f"the cluster has {cluster.world_size} ranks, the process group {world_size}"
            )
        return self._plan_for(module, sharders, cluster)

    def _plan_for(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]], cluster: Cluster
    ) -> OperShardingPlan:
        tables = model_tables(module, sharders)
        specs = [table for _, table in tables]
        accesses = self._accesses(specs)
        row_maps = deal_rows(specs, accesses, cluster, seed=self._seed)
        placements = [
            TablePlacement(path, table, row_map, _planned_lookups(row_map, access))
            for (path, table), row_map, access in zip(tables, row_maps, accesses, strict=True)
        ]
        plan = Plan(
            placements=tuple(placements),
            cluster=cluster,
            profile_hash=self._profile.content_hash if self._profile else None,
            bound_bytes=busiest_rank_bound(specs, accesses, cluster.world_size),
            seed=self._seed,
        )
        return _as_sharding_plan(plan)

    def _accesses(self, specs: Sequence[TableSpec]) -> list[TableAccess]:
        """How each table is used: not at all, as far as is known, without a profile."""
        if self._profile is None:
            return [_unknown_access(spec) for spec in specs]
        self._profile.check_fits(specs)
        return [self._profile.table(spec.name) for spec in specs]


def sharding_plan(
    plan: Plan, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> OperShardingPlan:
    """A plan, a loaded one for example, as ``DistributedModelParallel`` takes it.

    Raises:
        PlanError: the plan doesn't place exactly the tables of ``module``.
    """
    plan.check_fits(model_tables(module, sharders))
    return _as_sharding_plan(plan)


def _as_sharding_plan(plan: Plan) -> OperShardingPlan:
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for placement in plan.placements:
        entry = modules.setdefault(placement.module, EmbeddingModuleShardingPlan())
        entry[placement.table.name] = _parameter_sharding(placement)
    return OperShardingPlan(plan=dict(modules), oper=plan)


def model_tables(
    module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> list[tuple[str, TableSpec]]:
    """Module path and description of every embedding table of the model.

    Raises:
        PlanError: there is no table, two tables have one name, or an embedding module
            isn't one that ``OperSharder`` shards.
    """
    for sharder in sharders:
        if not isinstance(sharder, ModuleSharder):
            raise PlanError(f"sharders must be ModuleSharder values, found {sharder!r}")
    ours = {sharder.module_type: sharder for sharder in sharders if takes_row_maps(sharder)}
    found: list[tuple[str, TableSpec]] = []
    for path, child in module.named_modules():
        if not isinstance(child, EMBEDDING_MODULES):
            continue
        if type(child) not in ours:  # a wrapper comes before the collection inside it
            raise PlanError(
                f"{f'module {path}' if path else 'the model'} is of type {type(child).__name__},"
                " which OperPlanner can't plan with these sharders; it plans"
                f" {', '.join(kind.__name__ for kind in ours) or 'nothing'}: pass OperSharder()"
                " among the sharders, and keep other embedding modules out of the model"
            )
        fused_params = getattr(ours[type(child)], "fused_params", None) or {}
        for spec, config in zip(table_specs(child), child.embedding_bag_configs(), strict=True):
            _check_supported(spec, config, weighted=child.is_weighted())
            parameter = child.embedding_bags[spec.name].weight
            size = optimizer_bytes_per_row(spec, parameter, fused_params)
            found.append((path, replace(spec, optimizer_bytes_per_row=size)))
    names = [table.name for _, table in found]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PlanError(f"table names must be unique in the model, found twice: {repeated}")
    if not found:
        raise PlanError("the model has no EmbeddingBagCollection to plan")
    return found


def _check_supported(spec: TableSpec, config: Any, *, weighted: bool) -> None:
    """Raise ``PlanError`` for a table that the run-time couldn't train."""
    reasons = {
        f"its dim is {spec.dim}, and FBGEMM needs a multiple of 4": spec.dim % 4,
        "FBGEMM has no bfloat16 rows on the CPU": spec.dtype == "bfloat16",
        "it takes the mean of weighted bags": weighted and spec.pooling == "mean",
        "it is a virtual table": getattr(config, "use_virtual_table", False),
        "its rows come in buckets": getattr(config, "total_num_buckets", None),
        "it was pruned": getattr(config, "num_embeddings_post_pruning", None),
    }
    for reason, found in reasons.items():
        if found:
            raise PlanError(f"table {spec.name} isn't supported: {reason}")


def takes_row_maps(sharder: ModuleSharder[nn.Module]) -> bool:
    """Whether a sharder accepts plan entries of type ``oper``."""
    return OPER in getattr(sharder, "row_map_sharding_types", ())


def optimizer_bytes_per_row(
    table: TableSpec, parameter: nn.Parameter, fused_params: dict[str, Any]
) -> int:
    """Bytes of optimizer state of a row, from what will train it.

    Args:
        table: the table.
        parameter: its weight, marked by ``apply_optimizer_in_backward`` or not.
        fused_params: the sharder's, whose ``optimizer`` applies to unmarked weights.

    Raises:
        PlanError: an optimizer that FBGEMM doesn't have, or of unknown state.
    """
    classes = getattr(parameter, "_optimizer_classes", [])
    if len(classes) > 1:
        raise PlanError(
            f"table {table.name}: {len(classes)} optimizers in backward found, one is supported"
        )
    try:
        kind = (
            optimizer_type_to_emb_opt_type(classes[0]) if classes else fused_params.get("optimizer")
        )
    except ValueError as error:
        raise PlanError(f"table {table.name}: FBGEMM has no fused {classes[0].__name__}") from error
    name = str(getattr(kind, "value", kind)).lower() if kind is not None else "exact_sgd"
    if name not in OPTIMIZER_STATE_BYTES:
        raise PlanError(
            f"table {table.name}: optimizer {name} isn't supported; supported are"
            f" {', '.join(OPTIMIZER_STATE_BYTES)}"
        )
    for_element, for_row = OPTIMIZER_STATE_BYTES[name]
    return for_element * table.dim + for_row


def _unknown_access(spec: TableSpec) -> TableAccess:
    none = np.empty(0, dtype=np.int64)
    return TableAccess(
        name=spec.name,
        rows=spec.rows,
        features=spec.features,
        ids=none,
        counts=none,
        bags=0,
        empty_bags=0,
    )


def _planned_lookups(row_map: RowMap, access: TableAccess) -> Ints:
    """[W] lookups of the profiled data that each rank serves."""
    owners, _ = row_map.place(access.ids)
    lookups = np.zeros(row_map.world_size, dtype=np.int64)
    np.add.at(lookups, owners, access.counts)
    return lookups


def _parameter_sharding(placement: TablePlacement) -> OperParameterSharding:
    row_map = placement.row_map
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


def _describe(error: BaseException) -> tuple[type[OperError], str]:
    """What the other ranks raise: our own errors as they are, others as a PlanError."""
    if isinstance(error, OperError):
        return type(error), str(error)
    return PlanError, f"{type(error).__name__}: {error}"
