"""State of the sharded module: logical row order, TorchRec's names, any plan to any plan."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from sharded_cases import (
    Case,
    PooledModel,
    batch_of,
    gathered,
    random_case,
    random_plan,
    sharded,
    train,
    weight_differences,
)
from torch import nn
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan

from ranks import run_ranks
from torchrec_oper.errors import PlanError
from torchrec_oper.sharder.row_transfer import RowRange, even_ranges

TOLERANCE = 1e-6


def sharded_state(parallel: nn.Module) -> dict[str, ShardedTensor]:
    """Weights and optimizer state of the tables, as far as this rank knows of them."""
    state = {k: v for k, v in parallel.state_dict().items() if "embedding_bags" in k}
    for key, parts in parallel.fused_optimizer.state_dict()["state"].items():
        state.update({f"{key} {name}": value for name, value in parts.items()})
    return state


def full_state(parallel: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, gathered whole on every rank."""
    return {key: gathered(value) for key, value in sharded_state(parallel).items()}


def matches(parallel: nn.Module, wanted: dict[str, torch.Tensor]) -> bool:
    """Whether this rank's shards of all states are those of ``wanted``."""
    state = sharded_state(parallel)
    return state.keys() <= wanted.keys() and all(
        torch.equal(shard.tensor, wanted[key][_slices(shard.metadata)])
        for key, value in state.items()
        for shard in value.local_shards()
    )


def _slices(shard: ShardMetadata) -> tuple[slice, ...]:
    sides = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
    return tuple(slice(offset, offset + size) for offset, size in sides)


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def _names(rank: int) -> tuple[list[str], list[str], list[str], list[str]]:
    case = random_case(31, 2, optimizer="adagrad")
    model = PooledModel(case)
    plain = list(model.state_dict())
    parallel = sharded(model, random_plan(model, 2, 1))
    fused = parallel.fused_optimizer.state_dict()["state"]
    return (
        plain,
        list(parallel.state_dict()),
        sorted(name for name, _ in parallel.named_parameters()),
        sorted(f"{key} {name}" for key, parts in fused.items() for name in parts),
    )


def test_names_are_those_of_the_unsharded_module() -> None:
    plain, ours, parameters, fused = run_ranks(2, _names)[0]
    assert sorted(ours) == sorted(plain) == parameters
    tables = [key for key in plain if "embedding_bags" in key]
    assert fused == sorted(f"{key} {key.split('.')[-2]}.momentum1" for key in tables)


def _whole_tensors(rank: int) -> list[bool]:
    found = []
    for seed in range(6):
        case = random_case(seed, dist.get_world_size())
        model = PooledModel(case)
        plain = {key: value.clone() for key, value in model.state_dict().items()}
        parallel = sharded(model, random_plan(model, dist.get_world_size(), seed))
        state = parallel.state_dict()
        found += [
            torch.equal(gathered(state[key]), value)
            for key, value in plain.items()
            if isinstance(state[key], ShardedTensor)
        ]
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plain_state_dict_comes_back_in_logical_order(world_size: int) -> None:
    for found in run_ranks(world_size, _whole_tensors):
        assert found and all(found)


def _stock(case: Case, how: Any) -> DistributedModelParallel:
    model = PooledModel(case)
    plan = construct_module_sharding_plan(
        model.ebc,
        {config.name: how(number % 2) for number, config in enumerate(case.configs)},
        sharder=EmbeddingBagCollectionSharder(),
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    return DistributedModelParallel(
        model, plan=ShardingPlan({"ebc": plan}), sharders=[EmbeddingBagCollectionSharder()]
    )


def _trained(case: Case, seed: int) -> tuple[DistributedModelParallel, PooledModel]:
    model, whole = PooledModel(case), PooledModel(case)
    parallel = sharded(model, random_plan(model, dist.get_world_size(), seed))
    train(case, parallel, whole, steps=2)
    return parallel, whole


def _save(parallel: DistributedModelParallel, folder: str) -> None:
    state = {"model": parallel.state_dict(), "optim": parallel.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)


def _load(parallel: DistributedModelParallel, folder: str) -> None:
    state = {"model": parallel.state_dict(), "optim": parallel.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    parallel.load_state_dict(state["model"])
    parallel.fused_optimizer.load_state_dict(state["optim"])


def _checkpoints(rank: int, folder: str) -> dict[str, bool]:
    # A table for each rank under table-wise, large enough to be cut by rows and columns.
    configs = tuple(
        EmbeddingBagConfig(
            name=f"t{number}", num_embeddings=rows, embedding_dim=8, feature_names=[f"f{number}"]
        )
        for number, rows in enumerate([100, 31])
    )
    case = random_case(2, 2, configs=configs, optimizer="row_wise_adagrad", weighted=True)
    parallel, whole = _trained(case, 1)
    wanted = full_state(parallel)
    _save(parallel, f"{folder}/ours")
    other = sharded(PooledModel(case), random_plan(PooledModel(case), 2, 9))
    _load(other, f"{folder}/ours")
    found = {"other plan": matches(other, wanted)}
    for name, how in {
        "table-wise": table_wise,
        "row-wise": lambda _: row_wise(),
    }.items():
        stock = _stock(case, how)
        _load(stock, f"{folder}/ours")
        found[f"to {name}"] = matches(stock, wanted)
        _save(stock, f"{folder}/{name}")
        again = sharded(PooledModel(case), random_plan(PooledModel(case), 2, 5))
        _load(again, f"{folder}/{name}")
        found[f"from {name}"] = matches(again, wanted)
    columns = _stock(case, lambda _: column_wise(ranks=[0, 1]))
    dcp.save({"model": columns.state_dict()}, checkpoint_id=f"{folder}/columns")
    again = sharded(PooledModel(case), random_plan(PooledModel(case), 2, 5))
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/columns")
    again.load_state_dict(state["model"])
    theirs = {k: v for k, v in columns.state_dict().items() if "embedding_bags" in k}
    found["from column-wise"] = all(
        torch.equal(gathered(again.state_dict()[k]), gathered(v)) for k, v in theirs.items()
    )
    worst = train(case, other, None, steps=0)
    found["still equal"] = max([worst, *weight_differences(other, whole)]) < TOLERANCE
    return found


def test_checkpoints_move_to_other_plans_and_stock_types_and_back(tmp_path: Path) -> None:
    for found in run_ranks(2, _checkpoints, str(tmp_path)):
        assert len(found) == 7
        assert [name for name, same in found.items() if not same] == []


def _world_sizes(rank: int, folder: str, save: bool) -> dict[str, list[float]]:
    case = random_case(4, 4, optimizer="adagrad", batch_sizes=(3,) * 4)
    if save:
        parallel, _ = _trained(case, 1)
        _save(parallel, folder)
    else:
        model = PooledModel(case)
        parallel = sharded(model, random_plan(model, dist.get_world_size(), 7))
        _load(parallel, folder)
    return {key: value.tolist() for key, value in full_state(parallel).items()}


def test_checkpoints_move_between_world_sizes(tmp_path: Path) -> None:
    wanted = run_ranks(2, _world_sizes, str(tmp_path), True)[0]
    for world_size in (1, 3):
        for found in run_ranks(world_size, _world_sizes, str(tmp_path), False):
            assert found == wanted


def _in_place(rank: int, folder: str) -> list[bool]:
    case = random_case(4, 2, batch_sizes=(3, 3))
    parallel, _ = _trained(case, 1)
    wanted = full_state(parallel)
    _save(parallel, folder)
    other = sharded(PooledModel(case), random_plan(PooledModel(case), 2, 7))
    before = full_state(other)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    unchanged = equal(full_state(other), before)
    other.load_state_dict(state["model"])
    weights = [k for k in wanted if k.endswith(".weight")]
    after = full_state(other)
    return [unchanged, all(torch.equal(after[k], wanted[k]) for k in weights)]


def test_a_state_dict_is_a_copy_that_counts_once_it_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(2, _in_place, str(tmp_path)) == [[True, True], [True, True]]


def _without_wrapper(rank: int) -> list[bool]:
    """The optimizers on the parameters, which TorchRec's composable use reads."""
    case = random_case(12, 2, optimizer="row_wise_adagrad")
    parallel, whole = _trained(case, 1)
    found = []
    for name, bag in parallel.module.ebc.embedding_bags.items():
        (optimizer,) = bag.weight._in_backward_optimizers
        (state,) = optimizer.state_dict()["state"].values()
        plain = whole.ebc.embedding_bags[name].weight
        theirs = plain._in_backward_optimizers[0].state[plain]["sum"].flatten()
        ours = gathered(state[f"{name}.momentum1"])
        found.append(bool(torch.allclose(ours, theirs, rtol=1e-5)))
    return found


def test_optimizers_on_the_parameters_show_logical_order_too() -> None:
    for found in run_ranks(2, _without_wrapper):
        assert found and all(found)


def _shards_out_of_order(rank: int) -> bool:
    """A ShardedTensor with two shards on each rank, given last first."""
    case = random_case(4, 2)
    parallel = sharded(PooledModel(case), random_plan(PooledModel(case), 2, 1))
    key = f"ebc.embedding_bags.{case.configs[0].name}.weight"
    rows, dim = parallel.state_dict()[key].size()
    assert rows >= 4
    wanted = torch.arange(rows * dim, dtype=torch.float32).reshape(rows, dim)
    cuts = [0, 1, 2, 3, rows]
    shards = [
        ShardMetadata([begin, 0], [end - begin, dim], f"rank:{number % 2}/cpu")
        for number, (begin, end) in enumerate(itertools.pairwise(cuts))
    ]
    mine = [Shard(wanted[_slices(one)], one) for one in shards[rank::2]]
    value = ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=mine[::-1],
        sharded_tensor_metadata=ShardedTensorMetadata(
            shards, wanted.size(), TensorProperties(dtype=torch.float32)
        ),
    )
    parallel.load_state_dict({key: value}, strict=False)
    return torch.equal(gathered(parallel.state_dict()[key]), wanted)


def test_shards_in_any_order_are_put_together() -> None:
    assert run_ranks(2, _shards_out_of_order) == [True, True]


def _resumed(rank: int, folder: str) -> float:
    case = random_case(12, 2, optimizer="row_wise_adagrad")
    parallel, whole = _trained(case, 1)
    _save(parallel, folder)
    resumed = sharded(PooledModel(case), random_plan(PooledModel(case), 2, 2))
    _load(resumed, folder)
    worst = train(case, resumed, whole, steps=3)
    return max([worst, *weight_differences(resumed, whole)])


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    assert max(run_ranks(2, _resumed, str(tmp_path))) < TOLERANCE


def _refusals(rank: int) -> list[str]:
    case = random_case(4, 2)
    parallel = sharded(PooledModel(case), random_plan(PooledModel(case), 2, 1))
    key = "ebc.embedding_bags.t0.weight"
    shape = list(parallel.state_dict()[key].size())
    columns = _stock(case, lambda _: column_wise(ranks=[0, 1])).state_dict()[key]
    found = []
    for value in (torch.zeros(shape[0] + 1, shape[1]), "text", columns):
        with pytest.raises(PlanError) as caught:
            parallel.load_state_dict({key: value}, strict=False)
        found.append(str(caught.value))
    return [f"{shape}", *found]


def test_a_state_that_does_not_fit_is_refused() -> None:
    for shape, size, kind, columns in run_ranks(2, _refusals):
        name = "embedding_bags.t0.weight"
        assert f"{name}: the model has shape {shape}, the state to load [" in size
        assert kind == f"{name}: can load a tensor or a ShardedTensor, found str"
        assert f"{name}: can load shards of whole rows, found one of columns" in columns


def _pipelines(rank: int) -> list[bool]:
    configs = tuple(
        EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=40,
            embedding_dim=4,
            feature_names=[f"f{number}", "f9"],
            pooling=pooling,
        )
        for number, pooling in enumerate([PoolingType.MEAN, PoolingType.SUM])
    )
    case = random_case(12, 2, optimizer="sgd", batch_sizes=(5, 5), configs=configs, weighted=False)
    direct = sharded(PooledModel(case), random_plan(PooledModel(case), 2, 1))
    train_steps = [batch_of(case, rank, step) for step in range(4)]
    results = []
    for kind in (TrainPipelineBase, TrainPipelineSparseDist):
        model = _WithLoss(PooledModel(case))
        parallel = sharded(model, random_plan(model, 2, 1))
        optimizer = torch.optim.SGD(parallel.module.model.dense.parameters(), lr=0.1)
        pipeline = kind(parallel, optimizer, torch.device("cpu"))
        batches = iter(train_steps)
        for _ in train_steps:
            pipeline.progress(batches)
        results.append(
            {
                k.replace("model.", "", 1): gathered(v)
                for k, v in parallel.state_dict().items()
                if "ebc" in k
            }
        )
    for batch in train_steps:
        direct(batch).sum().backward()
    wanted = {k: gathered(v) for k, v in direct.state_dict().items() if "ebc" in k}
    return [equal(found, wanted) for found in results]


class _WithLoss(nn.Module):
    """A model as the pipelines take it: loss and output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(batch)
        return out.sum(), out


def test_train_pipelines_give_the_weights_of_plain_steps() -> None:
    assert run_ranks(2, _pipelines) == [[True, True], [True, True]]


@given(st.integers(1, 50), st.integers(1, 8))
def test_even_ranges_cover_every_row_once(rows: int, world_size: int) -> None:
    ranges = even_ranges(rows, world_size)
    assert [row for r in ranges for row in range(r.begin, r.end)] == list(range(rows))
    assert [r.rank for r in ranges] == list(range(len(ranges)))
    assert len(ranges) <= world_size


def test_even_ranges_by_hand() -> None:
    # As TorchRec cuts 5 rows on 4 ranks: blocks of 2, the last rank has none.
    assert even_ranges(5, 4) == [RowRange(0, 2, 0), RowRange(2, 4, 1), RowRange(4, 5, 2)]
