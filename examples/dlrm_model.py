"""TorchRec's DLRM: built, sharded by a planner or left whole, and set to equal values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ranks import Ranks
from torchrec_oper.planner import OperPlanner
from torchrec_oper.profile import AccessProfile
from torchrec_oper.sharder import OperSharder, ShardedOperEmbeddingBagCollection
from torchrec_oper.table import TableSpec

CPU = torch.device("cpu")
DENSE_FIELDS = 13
# Given to every implementation of row-wise Adagrad, since their defaults differ.
ADAGRAD_EPS = 1e-8


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a DLRM.

    Args:
        tables: the embedding tables, all of one dim.
        bottom: widths of the hidden layers that the dense values go through.
        top: widths of the hidden layers after the interaction.
    """

    tables: tuple[TableSpec, ...]
    bottom: tuple[int, ...]
    top: tuple[int, ...]


def build_model(shape: ModelShape, *, seed: int) -> DLRMTrain:
    """A DLRM with its loss, its dense weights drawn from ``seed``.

    Its tables take no memory yet (they are on the meta device): sharding, or
    ``materialise``, gives each rank the rows that it needs.
    """
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=list(table.features),
        )
        for table in shape.tables
    ]
    torch.manual_seed(seed)
    return DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables=configs, device=torch.device("meta")),
            dense_in_features=DENSE_FIELDS,
            dense_arch_layer_sizes=[*shape.bottom, shape.tables[0].dim],
            over_arch_layer_sizes=[*shape.top, 1],
            dense_device=CPU,
        )
    )


def train_rows_in_backward(model: DLRMTrain, *, lr: float) -> None:
    """Have row-wise Adagrad update the rows of the tables during the backward pass."""
    rows = embedding_bags(model).parameters()
    _apply_optimizer_in_backward(RowWiseAdagrad, rows, {"lr": lr, "eps": ADAGRAD_EPS})


def embedding_bags(model: DLRMTrain) -> EmbeddingBagCollection:
    """The model's tables."""
    return model.model.sparse_arch.embedding_bag_collection


def make_plan(
    planner: str, model: DLRMTrain, profile: AccessProfile | None, *, batch_size: int, seed: int
) -> tuple[ShardingPlan, list[ModuleSharder[Any]]]:
    """A plan that all ranks share, and the sharders that carry it out.

    Args:
        planner: "oper" or "torchrec".
        model: the model to shard.
        profile: how the log uses the tables, for "oper"; only rank 0 needs it.
        batch_size: samples of one rank in a step.
        seed: seed of the search, for "oper".

    Raises:
        PlanError: on every rank, when the tables don't fit.
    """
    group = dist.group.WORLD
    if planner == "oper":
        sharders: list[ModuleSharder[Any]] = [OperSharder()]
        ours = OperPlanner(profile=profile, batch_size=batch_size, seed=seed)
        return ours.collective_plan(model, sharders, group), sharders
    sharders = get_default_sharders()
    world_size = dist.get_world_size()
    topology = Topology(world_size, "cpu", local_world_size=world_size)
    stock = EmbeddingShardingPlanner(topology=topology, batch_size=batch_size, debug=False)
    return stock.collective_plan(model, sharders, group), sharders


def shard(
    model: DLRMTrain, plan: ShardingPlan, sharders: Sequence[ModuleSharder[Any]]
) -> DistributedModelParallel:
    """The model spread over the ranks as ``plan`` says."""
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=list(sharders))


def materialise(model: DLRMTrain) -> None:
    """Give the model whole tables in this process's memory, their values not yet set."""
    embedding_bags(model).to_empty(device=CPU)


def set_initial_rows(model: nn.Module, shape: ModelShape, *, seed: int) -> None:
    """Set the tables to values that depend on ``seed`` alone, not on how they are sharded.

    Whole tables go in, one at a time, and each rank keeps its rows.
    """
    prefix = "model.sparse_arch.embedding_bag_collection.embedding_bags"
    for index, table in enumerate(shape.tables):
        generator = torch.Generator().manual_seed(seed * len(shape.tables) + index)
        bound = table.rows**-0.5
        weight = torch.empty(table.rows, table.dim).uniform_(-bound, bound, generator=generator)
        keys = model.load_state_dict({f"{prefix}.{table.name}.weight": weight}, strict=False)
        assert not keys.unexpected_keys, keys.unexpected_keys


def make_optimizer(model: nn.Module, *, lr: float) -> CombinedOptimizer:
    """One optimizer for all: the rows' runs in backward, Adagrad trains the dense layers.

    Tables that TorchRec's planner copies to every rank aren't updated in backward: the
    rows' rule is applied to them here.
    """
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    tables = {name: rest.pop(name) for name in list(rest) if ".embedding_bags." in name}
    dense_rule = partial(torch.optim.Adagrad, lr=lr, eps=ADAGRAD_EPS)
    optimizers = [KeyedOptimizerWrapper(rest, dense_rule)]
    if tables:
        rows_rule = partial(RowWiseAdagrad, lr=lr, eps=ADAGRAD_EPS)
        optimizers.append(KeyedOptimizerWrapper(tables, rows_rule))
    fused = [model.fused_optimizer] if isinstance(model, DistributedModelParallel) else []
    return CombinedOptimizer([*fused, *optimizers])


class LookupCounter:
    """Counts the ids that this rank looks up in its rows, as the sharded modules see them."""

    def __init__(self, model: nn.Module) -> None:
        self._ours = [
            module
            for module in model.modules()
            if isinstance(module, ShardedOperEmbeddingBagCollection)
        ]
        self._counted = 0
        if self._ours:
            return
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingBagCollection):
                for lookup in module._lookups:
                    lookup.register_forward_pre_hook(self._count)
            elif isinstance(module, EmbeddingBagCollection):
                module.register_forward_pre_hook(self._count)

    def of_all_ranks(self, ranks: Ranks) -> list[int]:
        """The count of each rank, in rank order."""
        own = self._counted + sum(int(module.served_lookups) for module in self._ours)
        counts: list[int] = [0] * ranks.world_size
        dist.all_gather_object(counts, own)
        return counts

    def _count(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._counted += arguments[0].values().numel()
