"""``map_ids``: logical ids of several tables -> physical rows.

A table's physical rows are its rows in the order of their owners: rank 0's first.
A row map lists the physical rows of some ids one by one and lays the ids that it
doesn't list, in ascending order, over a few ranges of physical rows. A map that
lists every id is a permutation and is looked up without a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_oper.errors import BatchError
from torchrec_oper.ops.library import load_kernels

load_kernels()


class RowMapTensors(NamedTuple):
    """The row maps of S segments of ids, on one device; segments may share a map.

    Args:
        tables: [S, 7] int64, for each segment: rows of its table; the half-open span of
            its map in ``listed_*``; where its map begins in ``buckets`` and the binary
            logarithm of a bucket's ids; the half-open span in ``range_*``.
        listed_ids: [L] int64, ascending within a map.
        listed_rows: [L] int64, the physical row of each listed id.
        buckets: [K] int64, for each bucket of ids of a map, how far into ``listed_ids``
            they begin, and then where the last one's end. A map that lists every id
            needs none.
        range_starts: [R] int64, ascending from 0 within a map: how many unlisted ids
            come before the range.
        range_rows: [R] int64, the physical row of a range's first id.
    """

    tables: Tensor
    listed_ids: Tensor
    listed_rows: Tensor
    buckets: Tensor
    range_starts: Tensor
    range_rows: Tensor


def map_ids(
    ids: Tensor, offsets: Tensor, maps: RowMapTensors, *, names: Sequence[str] = ()
) -> Tensor:
    """The physical row of each id.

    Args:
        ids: [N] int32 or int64; segment s is ``ids[offsets[s]:offsets[s + 1]]``.
        offsets: [S + 1] int64, from 0 to N, not falling.
        maps: the row maps of the S segments.
        names: a name of each segment, for messages.

    Returns:
        [N], of the type and on the device of ``ids``.

    Raises:
        BatchError: an id is negative or not below its table's rows.
        RuntimeError: shapes, types or devices other than said above.
    """
    try:
        return torch.ops.oper.map_ids(ids, offsets, *maps)
    except RuntimeError as error:
        outside = _first_outside(ids, offsets, maps.tables) if "is outside" in str(error) else None
        if outside is None:
            raise
        position, segment, rows = outside
        name = names[segment] if segment < len(names) else f"segment {segment}"
        raise BatchError(
            f"{name}: id {int(ids[position])} is outside the table, whose ids run from 0 to"
            f" {rows - 1}"
        ) from None


def map_ids_reference(ids: Tensor, offsets: Tensor, maps: RowMapTensors) -> Tensor:
    """The definition of ``map_ids``, an id at a time."""
    out = torch.empty_like(ids)
    for segment, span in enumerate(maps.tables.tolist()):
        rows, listed_begin, listed_end, _, _, range_begin, range_end = span
        listed = dict(
            zip(
                maps.listed_ids[listed_begin:listed_end].tolist(),
                maps.listed_rows[listed_begin:listed_end].tolist(),
                strict=True,
            )
        )
        physical = dict(listed)
        unlisted = [id_ for id_ in range(rows) if id_ not in listed]
        for number, id_ in enumerate(unlisted):
            for range_ in range(range_begin, range_end):
                start = int(maps.range_starts[range_])
                if start <= number:
                    physical[id_] = int(maps.range_rows[range_]) + number - start
        for position in range(int(offsets[segment]), int(offsets[segment + 1])):
            out[position] = physical[int(ids[position])]
    return out


@torch.library.register_fake("oper::map_ids")
def _map_ids_fake(
    ids: Tensor,
    offsets: Tensor,
    tables: Tensor,
    listed_ids: Tensor,
    listed_rows: Tensor,
    buckets: Tensor,
    range_starts: Tensor,
    range_rows: Tensor,
) -> Tensor:
    return torch.empty_like(ids)


def _first_outside(ids: Tensor, offsets: Tensor, tables: Tensor) -> tuple[int, int, int] | None:
    """Position, segment and table rows of the first id outside its table."""
    for segment, rows in enumerate(tables[:, 0].tolist()):
        begin, end = int(offsets[segment]), int(offsets[segment + 1])
        bad = torch.nonzero((ids[begin:end] < 0) | (ids[begin:end] >= rows))
        if len(bad):
            return begin + int(bad[0]), segment, rows
    return None
