"""Replays batches through a plan and counts what every rank really serves.

It reads the placement as the run-time does, row by row, and shares nothing with the
search.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.plan import Plan


def served_lookups(plan: Plan, batches: Iterable[Any]) -> npt.NDArray[np.int64]:
    """[tables, W] lookups that each rank serves for each table of the plan.

    Args:
        plan: the plan; rows of the result follow ``plan.placements``.
        batches: KeyedJaggedTensors of all ranks, or objects that carry one as
            ``sparse_features``.

    Raises:
        PlanError: a batch lacks a feature of the plan's tables, or an id is outside
            its table.
    """
    served = np.zeros((len(plan.placements), plan.world_size), dtype=np.int64)
    for batch in batches:
        jagged = getattr(batch, "sparse_features", batch)
        keys, offsets = jagged.keys(), jagged.offset_per_key()
        for t, placement in enumerate(plan.placements):
            for feature in placement.table.features:
                if feature not in keys:
                    raise PlanError(
                        f"table {placement.table.name}: the batch has no feature {feature},"
                        f" only {', '.join(keys)}"
                    )
                key = keys.index(feature)
                ids = jagged.values()[offsets[key] : offsets[key + 1]].cpu().numpy()
                owners, _ = placement.row_map.place(ids)
                served[t] += np.bincount(owners, minlength=plan.world_size)
    return served
