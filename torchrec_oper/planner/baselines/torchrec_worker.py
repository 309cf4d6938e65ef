"""Runs TorchRec's planner in a process of its own: one task a line in, one plan a line out.

``python -m torchrec_oper.planner.baselines.torchrec_worker`` reads tasks as JSON lines, as
``TorchRecPlanner`` writes them, and writes ``{"ready": true}`` once TorchRec is imported.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any, TextIO

import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ParameterSharding
from torchrec.optim import RowWiseAdagrad

# The ranks have one kind of memory: without these, TorchRec would also weigh host memory.
KERNELS = [EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value]


class Tables(nn.Module):
    """The tables on the meta device: pooled ones in one collection, others by dim."""

    def __init__(self, tables: list[dict[str, Any]]) -> None:
        super().__init__()
        pooled: list[EmbeddingBagConfig] = []
        sequences: dict[int, list[EmbeddingConfig]] = {}
        for number, table in enumerate(tables):
            shape = {
                "name": f"t{number}",
                "embedding_dim": table["dim"],
                "num_embeddings": table["rows"],
                "feature_names": [f"t{number}_{i}" for i in range(table["features"])],
            }
            if table["pooled"]:
                pooled.append(EmbeddingBagConfig(**shape, pooling=PoolingType.SUM))
            else:  # a collection takes tables of one dim only
                sequences.setdefault(table["dim"], []).append(EmbeddingConfig(**shape))
        device = torch.device("meta")
        if pooled:
            self.pooled = EmbeddingBagCollection(tables=pooled, device=device)
        for dim, configs in sequences.items():
            setattr(self, f"dim{dim}", EmbeddingCollection(tables=configs, device=device))
        for parameter in self.parameters():
            # What apply_optimizer_in_backward would leave: 4 bytes of state for each row.
            parameter._optimizer_classes = [RowWiseAdagrad]  # type: ignore[attr-defined]


def solve(task: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one task: seconds, and of each table its type and shards.

    A shard is its rank, first row, first column, rows and columns. For inference the
    estimators that the enumerator asks are told ``is_inference``: TorchRec has no other
    place to say it, and leaves it False in those that a planner makes by default.
    """
    topology = Topology(**task["topology"], compute_device="cuda")
    constraints = {
        f"t{number}": ParameterConstraints(
            pooling_factors=[table["lookups"] / table["features"]] * table["features"],
            min_partition=task["min_partition"],
            compute_kernels=KERNELS,
        )
        for number, table in enumerate(task["tables"])
    }
    told = {"constraints": constraints, "is_inference": task["objective"] == "infer"}
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=task["batch_size"],
        constraints=constraints,
        enumerator=EmbeddingEnumerator(
            topology=topology,
            batch_size=task["batch_size"],
            constraints=constraints,
            estimator=[
                EmbeddingPerfEstimator(topology, **told),
                EmbeddingStorageEstimator(topology, **told),
            ],
        ),
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
        stats=NoopEmbeddingStats(),
        debug=False,
        timeout_seconds=task["search_s"],
    )
    module = Tables(task["tables"])
    begin = time.perf_counter()
    plan = planner.plan(module, [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()])
    seconds = time.perf_counter() - begin
    found = {name: entry for part in plan.plan.values() for name, entry in part.items()}
    tables = [_entry(found[f"t{number}"]) for number in range(len(task["tables"]))]
    return {"seconds": seconds, "tables": tables}


def _entry(sharding: ParameterSharding) -> dict[str, Any]:
    shards = getattr(sharding.sharding_spec, "shards", [])
    return {
        "sharding": sharding.sharding_type,
        "shards": [
            [shard.placement.rank(), *shard.shard_offsets, *shard.shard_sizes] for shard in shards
        ],
    }


def serve(tasks: TextIO, answers: TextIO) -> None:
    """Answer tasks until there are no more."""
    _write(answers, {"ready": True})
    for line in tasks:
        try:
            answer = solve(json.loads(line))
        except Exception as error:  # whatever TorchRec raises is its answer
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        _write(answers, answer)


def _write(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(f"{json.dumps(answer)}\n")
    answers.flush()


def main() -> None:
    """Serve on stdin and stdout; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
