"""Moves the rows of a table between their owners and row-wise shards in logical order.

A state dict of TorchRec's holds a table in logical row order, cut into ranges of rows,
while an owner holds its rows in the order of its slots. All ranks of the group take
part in a transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchrec_oper.planner.row_map import Ints, RowMap


class RowRange(NamedTuple):
    """The logical rows ``begin`` to ``end - 1``, held by ``rank``."""

    begin: int
    end: int
    rank: int


def even_ranges(rows: int, world_size: int) -> list[RowRange]:
    """TorchRec's row-wise cut: blocks of ``ceil(rows / W)``, without the empty ones."""
    block = -(-rows // world_size)
    return [
        RowRange(begin, min(begin + block, rows), begin // block) for begin in range(0, rows, block)
    ]


class RowTransfer:
    """Moves rows between a row map's owners and ranges of logical rows.

    Args:
        row_map: owner and slot of every row.
        ranges: what each rank holds in logical order; a rank's ranges ascend, and
            together the ranges cover every row once.
        group: the process group, whose ranks are those of the row map.
    """

    def __init__(
        self, row_map: RowMap, ranges: Sequence[RowRange], group: dist.ProcessGroup
    ) -> None:
        self._group = group
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        mine = [np.arange(r.begin, r.end) for r in ranges if r.rank == rank]
        held = np.concatenate([np.empty(0, dtype=np.int64), *mine])
        owners, _ = row_map.place(held)
        owned = row_map.logical_ids(rank)
        holders = _holders(owned, ranges)
        # Both ends put the rows of a pair of ranks in ascending order of id.
        self._held_order = torch.from_numpy(np.lexsort((held, owners)))
        self._held_splits = np.bincount(owners, minlength=world_size).tolist()
        self._owned_order = torch.from_numpy(np.lexsort((owned, holders)))
        self._owned_splits = np.bincount(holders, minlength=world_size).tolist()

    def to_logical(self, owned: Tensor) -> Tensor:
        """This rank's ranges of logical rows, from the rows of all owners.

        Args:
            owned: [owned rows, ...], this rank's rows by slot.

        Returns:
            [rows of this rank's ranges, ...], in logical order.
        """
        return self._exchange(
            owned, self._owned_order, self._owned_splits, self._held_order, self._held_splits
        )

    def to_owned(self, logical: Tensor) -> Tensor:
        """This rank's rows by slot, from the ranges of all ranks: ``to_logical`` undone."""
        return self._exchange(
            logical, self._held_order, self._held_splits, self._owned_order, self._owned_splits
        )

    def _exchange(
        self,
        rows: Tensor,
        send_order: Tensor,
        send_splits: list[int],
        receive_order: Tensor,
        receive_splits: list[int],
    ) -> Tensor:
        row_shape = rows.shape[1:]
        row_bytes = rows.element_size() * row_shape.numel()
        sent = rows.detach()[send_order].contiguous().view(torch.uint8).reshape(-1)
        received = torch.empty(sum(receive_splits) * row_bytes, dtype=torch.uint8)
        dist.all_to_all_single(
            received,
            sent,
            [count * row_bytes for count in receive_splits],
            [count * row_bytes for count in send_splits],
            group=self._group,
        )
        arrived = received.view(rows.dtype).reshape(sum(receive_splits), *row_shape)
        out = torch.empty_like(arrived)
        out[receive_order] = arrived
        return out


def _holders(ids: Ints, ranges: Sequence[RowRange]) -> Ints:
    """The rank whose range holds each id."""
    ordered = sorted(ranges)
    ends = np.array([r.end for r in ordered], dtype=np.int64)
    ranks = np.array([r.rank for r in ordered], dtype=np.int64)
    return ranks[np.searchsorted(ends, ids, side="right")]
