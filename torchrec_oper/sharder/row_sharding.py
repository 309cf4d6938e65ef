"""Rows of every table on any rank, over collectives: ids out, partial sums back.

TorchRec's row-wise sharding cuts a table into equal ranges of rows and sums the
owners' parts by reduce-scatter. Here an id is mapped to its physical row first (rows
in the order of their owners), so that ranges of physical rows, as uneven as the plan
wants them, reach any placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    bucketize_kjt_before_all2all,
)
from torchrec.distributed.sharding.rw_sharding import (
    RwPooledEmbeddingDist,
    RwPooledEmbeddingSharding,
    RwSparseFeaturesDist,
)
from torchrec.distributed.types import Awaitable, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_oper.errors import BatchError
from torchrec_oper.ops import map_ids
from torchrec_oper.planner.adapter import OperParameterSharding
from torchrec_oper.planner.row_map import RowMap
from torchrec_oper.sharder.local_rows import local_bounds
from torchrec_oper.sharder.row_map_tensors import row_map_tensors


def row_map_of(sharding: Any) -> RowMap:
    """The row map of a plan entry of type ``oper``."""
    assert isinstance(sharding, OperParameterSharding) and sharding.row_map is not None
    return sharding.row_map


class OperSparseFeaturesDist(RwSparseFeaturesDist):
    """Sends each id to its row's owner, as the row's slot there.

    Args:
        pg: the process group.
        names: [F] a name of each feature, for messages.
        row_maps: [F] the row map of each feature's table.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        names: Sequence[str],
        row_maps: Sequence[RowMap],
    ) -> None:
        bounds = [local_bounds(row_map) for row_map in row_maps]
        sizes = [int(one[-1]) for one in bounds]
        super().__init__(pg=pg, num_features=len(row_maps), feature_hash_sizes=sizes)
        self._names = list(names)
        # Spare rows can lift physical rows over what int32 ids can number.
        self._wide = max(sizes) > torch.iinfo(torch.int32).max
        distinct = {id(row_map): row_map for row_map in row_maps}
        numbers = {key: number for number, key in enumerate(distinct)}
        self._maps = row_map_tensors(
            list(distinct.values()), [numbers[id(row_map)] for row_map in row_maps]
        )
        self._bounds = [torch.from_numpy(one) for one in bounds]

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Start the exchange of ids.

        Raises:
            BatchError: an id is outside its table.
        """
        ids = sparse_features.values()
        physical = map_ids(
            ids.to(torch.int64) if self._wide else ids,
            torch.tensor(sparse_features.offset_per_key()),
            self._maps,
            names=self._names,
        )
        mapped = KeyedJaggedTensor(
            keys=sparse_features.keys(),
            values=physical,
            weights=sparse_features.weights_or_none(),
            lengths=sparse_features.lengths(),
            stride=sparse_features.stride(),
        )
        bucketized, self.unbucketize_permute_tensor = bucketize_kjt_before_all2all(
            mapped,
            num_buckets=self._world_size,
            block_sizes=cast(torch.Tensor, self._feature_block_sizes_tensor),
            block_bucketize_row_pos=self._bounds,
        )
        return cast("Awaitable[Awaitable[KeyedJaggedTensor]]", self._dist(bucketized))


class OperPooledEmbeddingDist(RwPooledEmbeddingDist):
    """Sums the owners' parts of each bag on the rank that asked."""

    def forward(
        self, local_embs: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[torch.Tensor]:
        """Start the exchange of partial sums.

        Raises:
            BatchError: the ranks' batches differ in size, which gloo's all-gather in
                TorchRec's backward can't carry.
        """
        sizes = sharding_ctx.batch_size_per_rank if sharding_ctx is not None else []
        if len(set(sizes)) > 1 and local_embs.requires_grad:
            raise BatchError(
                f"the ranks' batches have {', '.join(map(str, sizes))} samples; tables of type"
                " oper need batches of one size on all ranks: drop or pad the last one"
            )
        return cast("Awaitable[torch.Tensor]", super().forward(local_embs, sharding_ctx))


class OperPooledSharding(RwPooledEmbeddingSharding):
    """Sharding of the tables of type ``oper`` of one ``EmbeddingBagCollection``."""

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry)
        self._row_maps = {
            info.embedding_config.name: row_map_of(info.param_sharding) for info in sharding_infos
        }

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """The step that sends ids to the owners of their rows."""
        features = [
            (feature, table.name)
            for group in self._grouped_embedding_configs
            for table in group.embedding_tables
            for feature in table.feature_names
        ]
        return OperSparseFeaturesDist(
            self._pg,
            [f"feature {feature} of table {table}" for feature, table in features],
            [self._row_maps[table] for _, table in features],
        )

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, torch.Tensor, torch.Tensor]:
        """The step that sums the owners' parts of each bag."""
        return OperPooledEmbeddingDist(
            self._pg,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            embedding_dims=self.embedding_dims(),
        )
