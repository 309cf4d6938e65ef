"""How fast a rank reads and updates random rows, through the kernels that train them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrec_oper.bench.group import Group

Floats = npt.NDArray[np.float64]

ELEMENT_BYTES = 4  # float32
# Ids of a bag: with one, writing the bag would cost as much as reading its row.
BAG = 4
# Of rows that a pass reads at most, so that its bags stay in memory that was used before:
# the first touch of new pages would be timed as reading.
PASS_BYTES = 2**25
# A table of this many times the largest cache: few of its rows are there by chance.
CACHES = 4
LEAST_TABLE_BYTES = 2**28
MOST_TABLE_BYTES = 2**30
CACHE_BYTES = 2**25  # where Linux doesn't say
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def row_rates(
    group: Group,
    *,
    row_bytes: tuple[int, ...],
    table_bytes: int,
    lookups: int,
    repeats: int,
    tick: Callable[[], None],
) -> tuple[Floats, Floats]:
    """Bytes per second of random reads and of random updates, by row size.

    A table of FBGEMM with fused row-wise Adagrad is looked up with ids drawn anew each
    time, all ranks at once, row size by row size, ``repeats`` times over after a first time
    that doesn't count. Medians of the repeats are returned.

    Reading is the forward pass. The backward pass reads a gradient for each bag, at the rate
    of reading, and updates each distinct row: what is left after the gradients, but at least
    half of the pass, is the update.

    Args:
        group: all ranks.
        row_bytes: row sizes, multiples of 16, ascending.
        table_bytes: size of a table.
        lookups: ids of a pass, a multiple of ``BAG``; fewer where the rows would be more
            than ``PASS_BYTES``.
        repeats: how often.
        tick: called after each of ``(repeats + 1) * len(row_bytes)`` measurements.

    Returns:
        [sizes] read, [sizes] update.
    """
    weights = torch.full((table_bytes // ELEMENT_BYTES,), 0.01)
    tables = [_table(size, weights) for size in row_bytes]
    counts = np.array([min(lookups, PASS_BYTES // size // BAG * BAG) for size in row_bytes])
    # [repeats + 1, sizes, (forward seconds, backward seconds, distinct rows)]
    measured = np.empty((repeats + 1, len(row_bytes), 3))
    for repeat in range(repeats + 1):
        for index, (rows, table) in enumerate(tables):
            measured[repeat, index] = _pass(group, table, rows, int(counts[index]))
            tick()
    forward, backward, distinct = np.moveaxis(measured[1:], 2, 0)
    sizes = np.array(row_bytes, dtype=np.float64)
    read = np.median(counts * sizes / forward, axis=0)
    gradients_s = counts // BAG * sizes / read
    update_s = np.maximum(backward - gradients_s, backward / 2)
    return read, np.median(distinct * sizes / update_s, axis=0)


def fitting_table_bytes(memory_bytes: int) -> int:
    """The size of a table that caches hold little of, and the rank's memory a few times."""
    wanted = max(CACHES * _largest_cache_bytes(), LEAST_TABLE_BYTES)
    return max(min(wanted, MOST_TABLE_BYTES, memory_bytes // 4), 2**20)


def _table(row_bytes: int, weights: torch.Tensor) -> tuple[int, Any]:
    """A table of rows of ``row_bytes`` over ``weights``, which all tables share."""
    # Imported here, as it takes long.
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    dim = row_bytes // ELEMENT_BYTES
    rows = len(weights) // dim
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=1e-3,
        eps=1e-8,
    )
    table.weights_host.data = weights[: rows * dim]
    return rows, table


def _pass(group: Group, table: Any, rows: int, lookups: int) -> tuple[float, float, float]:
    ids = torch.randint(rows, (lookups,))
    offsets = torch.arange(0, lookups + 1, BAG)
    distinct = len(torch.unique(ids))
    group.barrier()
    start = time.perf_counter()
    bags = table(ids, offsets)
    forward_s = time.perf_counter() - start
    gradients = torch.ones_like(bags)
    group.barrier()
    start = time.perf_counter()
    bags.backward(gradients)
    return forward_s, time.perf_counter() - start, float(distinct)


def _largest_cache_bytes(folder: Path = _CACHES) -> int:
    sizes = []
    for file in folder.glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        if text[:-1].isdecimal() and text[-1] in "KM":
            sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes, default=CACHE_BYTES)
