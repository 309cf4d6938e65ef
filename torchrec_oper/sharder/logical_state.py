"""State of one table in logical row order, as ``state_dict`` shows it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import DTensor

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.row_map import RowMap
from torchrec_oper.sharder.row_transfer import RowRange, RowTransfer, even_ranges


class LogicalState:
    """Shows the owned rows of a table's weight or optimizer state in logical order.

    It has the ``state_dict`` and ``load_state_dict`` of PyTorch's stateful protocol,
    which TorchRec's ``KeyedOptimizer`` calls for the values of its state. Both are
    collective: every rank of the group has to call them.

    Args:
        name: the state's name, for messages.
        owned: [owned rows, ...], this rank's rows by slot, where they live.
        row_map: owner and slot of every row.
        group: the process group.
    """

    def __init__(self, name: str, owned: Tensor, row_map: RowMap, group: dist.ProcessGroup) -> None:
        self._name = name
        self._owned = owned
        self._row_map = row_map
        self._group = group
        self._size = torch.Size([row_map.rows, *owned.shape[1:]])

    def state_dict(self) -> ShardedTensor:
        """A copy in logical order, cut into TorchRec's even blocks of rows."""
        ranges = even_ranges(self._row_map.rows, self._row_map.world_size)
        rows = RowTransfer(self._row_map, ranges, self._group).to_logical(self._owned)
        return self._sharded(rows, ranges)

    def load_state_dict(self, value: Any) -> None:
        """Take the state from ``value``, as ``owned_rows`` says."""
        with torch.no_grad():
            self._owned.copy_(self.owned_rows(value))

    def owned_rows(self, value: Any) -> Tensor:
        """[owned rows, ...], this rank's rows of ``value``.

        Args:
            value: the whole state in logical order as a tensor, the same on all ranks,
                or a ``ShardedTensor`` of whole rows on the same ranks.

        Raises:
            PlanError: ``value`` has another shape, or is cut in a way that isn't
                supported.
        """
        if isinstance(value, DTensor) or not isinstance(value, Tensor | ShardedTensor):
            raise PlanError(
                f"{self._name}: can load a tensor or a ShardedTensor, found {type(value).__name__}"
            )
        if value.size() != self._size:
            raise PlanError(
                f"{self._name}: the model has shape {list(self._size)}, the state to load"
                f" {list(value.size())}"
            )
        if isinstance(value, ShardedTensor):
            transfer = RowTransfer(self._row_map, self._ranges(value), self._group)
            return transfer.to_owned(self._held(value))
        mine = self._row_map.logical_ids(dist.get_rank(self._group))
        return value.detach()[torch.from_numpy(mine)]

    def _sharded(self, rows: Tensor, ranges: list[RowRange]) -> ShardedTensor:
        tail = list(self._size[1:])
        shards = [
            ShardMetadata(
                shard_offsets=[r.begin] + [0] * len(tail),
                shard_sizes=[r.end - r.begin, *tail],
                placement=f"rank:{dist.get_global_rank(self._group, r.rank)}/{rows.device}",
            )
            for r in ranges
        ]
        rank = dist.get_rank(self._group)
        mine = [
            Shard(rows, shard)
            for range_, shard in zip(ranges, shards, strict=True)
            if range_.rank == rank
        ]
        metadata = ShardedTensorMetadata(
            shards_metadata=shards,
            size=self._size,
            tensor_properties=TensorProperties(dtype=rows.dtype),
        )
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            local_shards=mine, sharded_tensor_metadata=metadata, process_group=self._group
        )

    def _ranges(self, value: ShardedTensor) -> list[RowRange]:
        ranges = []
        for shard in value.metadata().shards_metadata:
            if list(shard.shard_sizes[1:]) != list(self._size[1:]):
                raise PlanError(
                    f"{self._name}: can load shards of whole rows, found one of columns"
                    f" {shard.shard_offsets[1]} to {shard.shard_offsets[1] + shard.shard_sizes[1]};"
                    " load the checkpoint into this model's state_dict first"
                    " (torch.distributed.checkpoint.load)"
                )
            assert shard.placement is not None
            rank = dist.get_group_rank(self._group, shard.placement.rank() or 0)
            begin = shard.shard_offsets[0]
            ranges.append(RowRange(begin, begin + shard.shard_sizes[0], rank))
        return sorted(r for r in ranges if r.end > r.begin)

    def _held(self, value: ShardedTensor) -> Tensor:
        """This rank's rows of ``value``, in logical order."""
        local = sorted(value.local_shards(), key=lambda shard: shard.metadata.shard_offsets)
        empty = self._owned.new_empty((0, *self._size[1:]))
        return torch.cat([empty, *(shard.tensor.to(self._owned.dtype) for shard in local)])
