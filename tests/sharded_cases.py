"""Random models, row maps and batches, the same on every rank, for the sharder's tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hand_made_plans import placement_of, plan_of
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad

from torchrec_oper.planner import Plan, RowMap, sharding_plan
from torchrec_oper.planner.adapter import read_model
from torchrec_oper.sharder import OperSharder

OPTIMIZERS: dict[str, tuple[type, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.2, "eps": 1e-8}),
    "row_wise_adagrad": (RowWiseAdagrad, {"lr": 0.2, "eps": 1e-8}),
}


@dataclass(frozen=True)
class Case:
    """Tables, and how they are looked up."""

    seed: int
    configs: tuple[EmbeddingBagConfig, ...]
    optimizer: str
    weighted: bool
    id_type: torch.dtype
    batch_sizes: tuple[int, ...]
    longest_bag: int = 3

    @property
    def features(self) -> dict[str, int]:
        """Each feature and the rows that its ids may name."""
        rows: dict[str, int] = {}
        for config in self.configs:
            for feature in config.feature_names:
                rows[feature] = min(rows.get(feature, 10**9), config.num_embeddings)
        return rows


def random_case(seed: int, world_size: int, **fixed: Any) -> Case:
    """A case: few tables, sizes from one row up, features shared by tables and not."""
    draw = np.random.default_rng(seed)
    weighted = bool(fixed.pop("weighted", draw.integers(2)))
    names = [f"f{number}" for number in range(5)]
    configs = []
    for number in range(draw.integers(1, 5)):
        features = draw.choice(names, draw.integers(1, 4), replace=False)
        configs.append(
            EmbeddingBagConfig(
                name=f"t{number}",
                embedding_dim=int(draw.choice([4, 8, 12])),
                num_embeddings=int(draw.choice([1, 2, 3, 17, 100])),
                feature_names=[str(feature) for feature in features],
                pooling=PoolingType.SUM if weighted or draw.integers(2) else PoolingType.MEAN,
            )
        )
    batch = int(draw.choice([1, 2, 7]))
    values: dict[str, Any] = {
        "optimizer": str(draw.choice(list(OPTIMIZERS))),
        "id_type": torch.int32 if draw.integers(2) else torch.int64,
        "batch_sizes": (batch,) * world_size,
        "configs": tuple(configs),
        **fixed,
    }
    return Case(seed=seed, weighted=weighted, **values)


class PooledModel(nn.Module):
    """The pooled features in a fixed order, times fixed numbers, summed."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.ebc = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(**vars(config)) for config in case.configs],
            is_weighted=case.weighted,
            device=torch.device("cpu"),
        )
        kind, settings = OPTIMIZERS[case.optimizer]
        _apply_optimizer_in_backward(kind, self.ebc.parameters(), dict(settings))
        self.names = sorted(self.ebc._embedding_names)
        self.dense = nn.Linear(1, 1)  # so that DistributedModelParallel has one to wrap

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(batch)
        return torch.cat([pooled[key] for key in self.names], dim=1)


def batch_of(case: Case, rank: int, step: int) -> KeyedJaggedTensor:
    """A rank's batch: short bags, empty ones too, some features empty altogether."""
    draw = np.random.default_rng([case.seed, rank, step])
    size = case.batch_sizes[rank]
    keys = [*reversed(case.features), "unused"]
    rows = {**case.features, "unused": 5}
    lengths = [draw.integers(0, case.longest_bag + 1, size) * (draw.random() < 0.9) for _ in keys]
    ids = [draw.integers(0, rows[k], n.sum()) for k, n in zip(keys, lengths, strict=True)]
    values = torch.from_numpy(np.concatenate(ids)).to(case.id_type)
    weights = torch.from_numpy(draw.random(len(values), dtype=np.float32))
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=torch.from_numpy(np.concatenate(lengths)).to(torch.int32),
        weights=weights if case.weighted else None,
    )


def random_plan(model: nn.Module, world_size: int, seed: int) -> Plan:
    """Any row on any rank; some tables on a few ranks only."""
    draw = np.random.default_rng(seed)
    placements = []
    for path, table in read_model(model, [OperSharder()]).tables:
        some = world_size if draw.integers(4) else draw.integers(1, world_size + 1)
        owners = draw.permutation(world_size)[:some]
        listed = draw.permutation(table.rows)[: draw.integers(0, table.rows + 1)]
        rest = draw.integers(0, some, table.rows - len(listed))
        row_map = RowMap.from_owners(
            listed_ids=listed,
            listed_owners=draw.integers(0, some, len(listed)),
            unlisted_counts=np.bincount(rest, minlength=some),
        )
        placements.append(
            placement_of(path, table, row_map, owners=owners.tolist(), world_size=world_size)
        )
    return plan_of(*placements)


def sharded(model: nn.Module, plan: Plan) -> DistributedModelParallel:
    """The model under a plan, with the weights it had."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    entries = sharding_plan(plan, model, [OperSharder()])
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=entries, sharders=[OperSharder()]
    )
    parallel.load_state_dict(weights)
    return parallel


def train(case: Case, parallel: nn.Module, whole: PooledModel | None, steps: int) -> float:
    """Steps on all ranks, and on the unsharded model with all ranks' batches.

    Returns the largest relative difference of the pooled outputs.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    worst = 0.0
    for step in range(steps):
        out = parallel(batch_of(case, rank, step))
        _loss(out, step).backward()
        if whole is None:
            continue
        outs = [whole(batch_of(case, r, step)) for r in range(world_size)]
        (sum(_loss(one, step) for one in outs) / world_size).backward()  # type: ignore[union-attr]
        worst = max(worst, difference(out, outs[rank]))
    return worst


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value where that is above 1."""
    if not wanted.numel():
        return 0.0
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item()


def _loss(out: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (out * torch.randn(out.shape, generator=generator)).sum()


def gathered(value: Any) -> torch.Tensor:
    """A ShardedTensor of float32, whole, on every rank."""
    whole = torch.zeros(value.size())
    value.gather(0, whole if dist.get_rank() == 0 else None)
    dist.broadcast(whole, 0)
    return whole


def weight_differences(parallel: nn.Module, whole: PooledModel) -> Iterator[float]:
    """Difference of each table's weight and optimizer state to the unsharded."""
    state = parallel.state_dict()
    fused = parallel.fused_optimizer.state_dict()["state"]
    for name, bag in whole.ebc.embedding_bags.items():
        key = f"ebc.embedding_bags.{name}.weight"
        yield difference(gathered(state[key]), bag.weight)
        theirs = bag.weight._in_backward_optimizers[0].state.get(bag.weight, {})
        if "sum" in theirs:
            ours = gathered(fused[key][f"{name}.momentum1"])
            yield difference(ours, theirs["sum"].reshape(ours.shape))
