"""Counts what one batch of every rank asks of the parts of one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.judge.placed import PlacedTable
from torchrec_oper.table import TableSpec

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepCounts:
    """How often the batches of one step name rows of one table.

    Args:
        lookups: [W, parts] int64, ids in each rank's batch that are in each part, every
            repeat counted.
        rows: [W, parts] int64, distinct ids among them.
        bags: [W, parts] int64, bags of each rank with an id of the part.
        updated_rows: [parts] int64, distinct ids in the batches of all ranks together.
        hot_lookups: [W] int64, ids in each rank's batch of rows that every rank has.
        hot_rows: [W] int64, distinct ids among them.
        hot_updated_rows: distinct ids among them in all batches together.
    """

    lookups: Ints
    rows: Ints
    bags: Ints
    updated_rows: Ints
    hot_lookups: Ints
    hot_rows: Ints
    hot_updated_rows: int


def count_step(placed: PlacedTable, batches: Sequence[Any]) -> StepCounts:
    """Count the lookups of one step.

    Args:
        placed: the table's placement.
        batches: [W] the batch of each rank; see ``feature_lookups``.

    Raises:
        PlanError: a batch can't be read, or an id is outside the table.
    """
    world_size, parts = len(batches), len(placed.part_rows)
    ids, rank_of, bag_of, rank_of_bag = _gather(placed.table, batches)
    distinct, position = np.unique(ids, return_inverse=True)
    part_of_distinct = placed.parts(distinct)
    part_of = part_of_distinct[position]
    columns = parts + 1  # the hot rows count as one more part, the last

    def table_of(ranks: Ints, parts_named: Ints) -> Ints:
        """[W, parts + 1] how often each rank comes with each part."""
        cells = ranks * columns + np.where(parts_named < 0, parts, parts_named)
        flat = np.bincount(cells, minlength=world_size * columns)
        return flat.reshape(world_size, columns)

    named = max(len(distinct), 1)  # a step may have no lookup at all
    rank, row = np.divmod(np.unique(rank_of * named + position), named)
    bag, part = np.divmod(np.unique(bag_of * columns + part_of % columns), columns)
    lookups = table_of(rank_of, part_of)
    rows = table_of(rank, part_of_distinct[row])
    updated = np.bincount(part_of_distinct % columns, minlength=columns)
    return StepCounts(
        lookups=lookups[:, :parts],
        rows=rows[:, :parts],
        bags=table_of(rank_of_bag[bag], part)[:, :parts],
        updated_rows=updated[:parts],
        hot_lookups=lookups[:, parts],
        hot_rows=rows[:, parts],
        hot_updated_rows=int(updated[parts]),
    )


def feature_lookups(batch: Any, feature: str) -> tuple[Ints, Ints]:
    """The ids of one feature in one rank's batch, and the length of each of its bags.

    Args:
        batch: a mapping from a feature to its (ids [N], bag lengths [B]); or a
            KeyedJaggedTensor, or an object that carries one as ``sparse_features``.
        feature: the feature.

    Raises:
        PlanError: the batch lacks the feature, or its bag lengths don't sum to its ids.
    """
    jagged = getattr(batch, "sparse_features", batch)
    known = list(jagged.keys())
    if feature not in known:
        raise PlanError(f"the batch has no feature {feature}, only {', '.join(map(str, known))}")
    values = jagged[feature]
    ids, lengths = values if isinstance(jagged, Mapping) else (values.values(), values.lengths())
    ids, lengths = _whole_numbers(ids, feature), _whole_numbers(lengths, feature)
    if lengths.sum() != len(ids) or (lengths < 0).any():
        raise PlanError(
            f"feature {feature}: the batch has {len(ids)} ids, but its bags' lengths sum to"
            f" {lengths.sum()}"
        )
    return ids, lengths


def _gather(table: TableSpec, batches: Sequence[Any]) -> tuple[Ints, Ints, Ints, Ints]:
    """All ids of a step [N], the rank [N] and the bag [N] of each, the rank of each bag."""
    read = []
    for rank, batch in enumerate(batches):
        for feature in table.features:
            try:
                read.append((rank, *feature_lookups(batch, feature)))
            except PlanError as error:
                whose = f", rank {rank}" if len(batches) > 1 else ""
                raise PlanError(f"table {table.name}{whose}: {error}") from None
    ids = np.concatenate([ids for _, ids, _ in read])
    lengths = np.concatenate([lengths for _, _, lengths in read])
    ranks = np.array([rank for rank, _, _ in read])
    rank_of_bag = np.repeat(ranks, [len(lengths) for _, _, lengths in read])
    bag_of = np.repeat(np.arange(len(lengths)), lengths)
    return ids, rank_of_bag[bag_of], bag_of, rank_of_bag


def _whole_numbers(values: Any, feature: str) -> Ints:
    """Integers of numpy, torch or Python, on whatever device, as int64 [N]."""
    array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PlanError(
            f"feature {feature}: wanted integers in one dimension, found {array.dtype} in"
            f" {array.ndim}"
        )
    return array.astype(np.int64, copy=False)
