"""The sharder that TorchRec calls, and the sharded ``EmbeddingBagCollection``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    replace_placement_with_meta_device,
)
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    ShardedTensor,
    ShardingEnv,
    ShardingEnv2D,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_oper.errors import BatchError, PlanError
from torchrec_oper.planner.adapter import OPER, OperParameterSharding
from torchrec_oper.planner.row_map import RowMap
from torchrec_oper.sharder.batch import checked_batch
from torchrec_oper.sharder.local_rows import WithLocalRows, with_local_rows
from torchrec_oper.sharder.logical_state import LogicalState
from torchrec_oper.sharder.mean_pooling import OperContext, mean_scale, with_means
from torchrec_oper.sharder.row_sharding import OperPooledSharding, row_map_of


class ShardedOperEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """An ``EmbeddingBagCollection`` whose tables of type ``oper`` have rows on any rank.

    Tables of other types in the same plan are sharded by TorchRec's own code.
    ``state_dict``, ``load_state_dict`` and the state of ``fused_optimizer`` have
    TorchRec's names and logical row order. For tables of type ``oper`` they move rows
    between ranks, so every rank has to call them with the same keys, and ``state_dict``
    holds copies: what is written into them counts only once ``load_state_dict`` is called.

    An error about a batch is raised on the rank that has the batch, while the others wait
    for its part of the exchange: let it end the job, as torchrun does.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        **kwargs: Any,
    ) -> None:
        shardings = dict(table_name_to_parameter_sharding)
        row_maps = {}
        for config in module.embedding_bag_configs():
            sharding = shardings[config.name]
            if isinstance(sharding, OperParameterSharding):
                row_map = row_maps[config.name] = row_map_of(sharding)
                shardings[config.name] = with_local_rows(
                    sharding, row_map, config.embedding_dim, env.process_group
                )
        super().__init__(
            cast(EmbeddingBagCollection, WithLocalRows(module, row_maps)), shardings, env, **kwargs
        )
        self._embedding_bag_configs = module.embedding_bag_configs()
        self._oper_tables = tuple(row_maps)
        self._served_lookups = 0
        self._batch_keys: list[str] = []
        self._mean_features = self._find_mean_features()
        for optimizer in self._table_optimizers():
            self._show_logical_state(optimizer)
        self._register_state_dict_hook(self._put_logical_weights)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> EmbeddingSharding[Any, KeyedJaggedTensor, torch.Tensor, torch.Tensor]:
        """Our sharding for tables of type ``oper``, TorchRec's for the others."""
        if sharding_infos[0].param_sharding.sharding_type != OPER:
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        if device is not None and device.type == "meta":
            replace_placement_with_meta_device(sharding_infos)
        return OperPooledSharding(
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )

    @property
    def served_lookups(self) -> int:
        """Lookups that this rank has served from its rows of tables of type ``oper``."""
        return self._served_lookups

    def reset_served_lookups(self) -> None:
        """Start counting ``served_lookups`` from 0."""
        self._served_lookups = 0

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send the ids of a batch to the owners of their rows.

        Raises:
            BatchError: the batch isn't one that this module takes, or an id is outside
                its table.
        """
        if not self._oper_tables:
            return super().input_dist(ctx, features)
        features = checked_batch(features, weighted=self._is_weighted)
        self._check_features(features.keys())
        if any(self._mean_features):
            assert isinstance(ctx, OperContext), "a context comes from create_context()"
            ctx.scale = mean_scale(features, self._mean_features, self._embedding_dims)
        return super().input_dist(ctx, features)

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Send the sums back."""
        return with_means(super().output_dist(ctx, output), ctx)

    def compute_and_output_dist(
        self, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look rows up for all ranks and send the sums back."""
        for sharding, features in zip(self._embedding_shardings, input, strict=True):
            if isinstance(sharding, OperPooledSharding):
                self._served_lookups += features.values().numel()
        return with_means(super().compute_and_output_dist(ctx, input), ctx)

    def create_context(self) -> OperContext:
        """An empty context for a batch."""
        return OperContext()

    def update_shards(
        self,
        changed_sharding_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """Move stock shards while training.

        Raises:
            PlanError: a table of this module has type ``oper``.
        """
        if self._oper_tables:
            raise PlanError(
                "resharding while training isn't supported for tables of type oper"
                f" ({', '.join(self._oper_tables)}); save the state, and load it under a new plan"
            )
        super().update_shards(changed_sharding_params, env, device)

    def _find_mean_features(self) -> list[str | None]:
        """For each block of columns of the result, the feature that it is a mean of."""
        means = {}
        for table in self._oper_tables:
            config = self._table_name_to_config[table]
            if config.pooling == PoolingType.MEAN:
                means.update({f"{f}@{table}": f for f in config.feature_names})
                # A feature that no other table shares goes by its own name.
                means.update({f: f for f in config.feature_names})
        return [means.get(name) for name in self._embedding_names]

    def _check_features(self, keys: list[str]) -> None:
        """Check the features of a batch: all there, in the order of the first one."""
        if keys == self._batch_keys:
            return
        for config in self._embedding_bag_configs:
            for name in config.feature_names:
                if name not in keys:
                    raise BatchError(
                        f"table {config.name} looks up feature {name}, which the batch lacks;"
                        f" it has {', '.join(keys)}"
                    )
        if not self._has_uninitialized_input_dist:
            raise BatchError(
                f"the batch has features {', '.join(keys)}; the first one had"
                f" {', '.join(self._batch_keys)}: keep one order"
            )
        self._batch_keys = list(keys)

    def _row_map(self, table: str) -> RowMap:
        return row_map_of(self.module_sharding_plan[table])

    def _local_weight(self, table: str) -> torch.Tensor:
        """[local rows, dim] where this rank's rows of the table live."""
        return cast(torch.Tensor, self._model_parallel_name_to_local_shards[table][0].tensor)

    def _state(self, table: str, name: str, local: torch.Tensor) -> LogicalState:
        """A state of the table's rows, from where the rows that this rank holds live."""
        group = self._env.process_group
        assert group is not None
        row_map = self._row_map(table)
        owned = local[: int(row_map.owned_rows[self._env.rank])]
        return LogicalState(name, owned, row_map, group)

    def _weight(self, table: str) -> LogicalState:
        return self._state(table, f"embedding_bags.{table}.weight", self._local_weight(table))

    @staticmethod
    def _put_logical_weights(
        module: ShardedOperEmbeddingBagCollection,
        destination: dict[str, Any],
        prefix: str,
        _local_metadata: dict[str, Any],
    ) -> None:
        for table in module._oper_tables:
            destination[f"{prefix}embedding_bags.{table}.weight"] = module._weight(
                table
            ).state_dict()

    @staticmethod
    def _pre_load_state_dict_hook(
        self: ShardedOperEmbeddingBagCollection,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,
    ) -> None:
        """Replace logical weights by this rank's rows; TorchRec does so for its types."""
        local = {}
        for table in self._oper_tables:
            key = f"{prefix}embedding_bags.{table}.weight"
            if key in state_dict:
                rows = self._weight(table).owned_rows(state_dict.pop(key))
                spare = self._local_weight(table)[len(rows) :]
                local[key] = torch.cat([rows.to(spare.dtype), spare])
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *args)
        state_dict.update(local)

    def _table_optimizers(self) -> Iterator[KeyedOptimizer]:
        """Every fused optimizer that shows state: the lookups' and the parameters'."""
        for _, optimizer in self._optim.optimizers:
            yield optimizer
        for table in self._oper_tables:
            yield from getattr(self.embedding_bags[table].weight, "_in_backward_optimizers", [])

    def _show_logical_state(self, optimizer: KeyedOptimizer) -> None:
        """Let the optimizer show the rows of its state in logical order."""
        for state in optimizer.state.values():
            for name, value in state.items():
                table = name.rsplit(".", 1)[0]
                if table in self._oper_tables and isinstance(value, ShardedTensor):
                    state[name] = self._state(table, name, value.local_shards()[0].tensor)


class OperSharder(EmbeddingBagCollectionSharder):
    """Shards an ``EmbeddingBagCollection`` by the row maps of an ``OperPlanner``'s plan.

    It takes TorchRec's arguments, and shards tables of TorchRec's own types as
    TorchRec does.
    """

    row_map_sharding_types = (OPER,)

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedOperEmbeddingBagCollection:
        """The sharded module.

        Raises:
            PlanError: the plan leaves a table out, is for another world size, or asks
                for what isn't supported.
        """
        names = [config.name for config in module.embedding_bag_configs()]
        missing = [name for name in names if name not in params]
        if missing:
            raise PlanError(
                f"the plan leaves out {', '.join(missing)} of module {module_fqn};"
                " make a plan for this model"
            )
        ours = [name for name in names if params[name].sharding_type == OPER]
        for name in ours:
            _check_supported(name, params[name], env, device)
        if ours:
            _check_neighbours(module, params)
        return ShardedOperEmbeddingBagCollection(
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        """The type that ``shard`` returns."""
        return cast("type[ShardedEmbeddingBagCollection]", ShardedOperEmbeddingBagCollection)


def _check_supported(
    table: str, sharding: ParameterSharding, env: ShardingEnv, device: torch.device | None
) -> None:
    if not isinstance(sharding, OperParameterSharding) or sharding.row_map is None:
        raise PlanError(
            f"table {table}: a plan entry of type oper needs a row map; make it with OperPlanner,"
            " or with sharding_plan from a saved plan"
        )
    if sharding.row_map.world_size != env.world_size:
        raise PlanError(
            f"table {table}: the plan was made for {sharding.row_map.world_size} ranks, the"
            f" process group has {env.world_size}; make a plan for the ranks that you have"
        )
    if env.process_group is None:
        raise PlanError(
            f"table {table}: type oper needs a process group; initialise torch.distributed, and"
            " leave the sharding environment to DistributedModelParallel"
        )
    if isinstance(env, ShardingEnv2D):
        raise PlanError(f"table {table}: 2-D parallelism isn't supported for type oper")
    if env.output_dtensor:
        raise PlanError(f"table {table}: DTensor state isn't supported for type oper")
    if device is not None and device.type not in ("cpu", "meta"):
        raise PlanError(
            f"table {table}: type oper runs on the CPU so far, found device {device.type}"
        )


def _check_neighbours(module: EmbeddingBagCollection, params: dict[str, ParameterSharding]) -> None:
    """Raise for tables of stock types that TorchRec would get wrong beside ours.

    TorchRec divides the sums of row-wise means by feature, over all columns of the
    collection, those of other tables too.
    """
    by_rows = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)
    for config in module.embedding_bag_configs():
        kind = params[config.name].sharding_type
        if kind in by_rows and config.pooling == PoolingType.MEAN:
            raise PlanError(
                f"table {config.name}: a mean table of type {kind} isn't supported beside tables"
                " of type oper; give it type oper, or another of TorchRec's types"
            )
