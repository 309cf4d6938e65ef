"""How many rows of a table FBGEMM holds on each rank, which is never fewer than two.

FBGEMM's CPU optimizers take a table of no rows for a second feature of the next table,
and TorchRec takes an optimizer state of one value for a state of the whole table. So
an owner of no row or of one row gets rows that no id maps to.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_oper.planner.adapter import OperParameterSharding, row_shards
from torchrec_oper.planner.row_map import Ints, RowMap

FEWEST_ROWS = 2


def local_rows(row_map: RowMap) -> Ints:
    """[W] rows that each rank holds of a table, those without an id included."""
    return np.maximum(row_map.owned_rows, FEWEST_ROWS)


def local_bounds(row_map: RowMap) -> Ints:
    """[W + 1] where each rank's rows begin when all ranks' rows are numbered in turn."""
    return np.concatenate([[0], np.cumsum(local_rows(row_map))])


def with_local_rows(
    sharding: OperParameterSharding, row_map: RowMap, dim: int, group: dist.ProcessGroup
) -> OperParameterSharding:
    """The plan entry, with shards of as many rows as each rank holds."""
    local = copy.copy(sharding)
    local.sharding_spec = row_shards(
        local_bounds(row_map), dim, dist.get_process_group_ranks(group)
    )
    return local


class WithLocalRows:
    """An ``EmbeddingBagCollection`` whose configs count the rows that ranks hold.

    Args:
        module: the collection, which isn't changed.
        row_maps: by table name; other tables keep their rows.
    """

    def __init__(self, module: EmbeddingBagCollection, row_maps: Mapping[str, RowMap]) -> None:
        self._module = module
        self._row_maps = row_maps

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Copies of the module's configs, with the rows that ranks hold in all."""
        configs = [copy.copy(config) for config in self._module.embedding_bag_configs()]
        for config in configs:
            if config.name in self._row_maps:
                config.num_embeddings = int(local_rows(self._row_maps[config.name]).sum())
        return configs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
