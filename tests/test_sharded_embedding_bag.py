"""The sharded EmbeddingBagCollection equals the unsharded one, for any rows anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sharded_cases import (
    PooledModel,
    batch_of,
    random_case,
    random_plan,
    sharded,
    train,
    weight_differences,
)
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise

from ranks import RankError, run_ranks
from torchrec_oper import AccessProfile, Cluster, OperPlanner, OperSharder
from torchrec_oper.errors import PlanError, ProfileError
from torchrec_oper.planner import sharding_plan

TOLERANCE = 1e-6


def _equality(rank: int, seeds: range) -> list[tuple[int, float]]:
    world_size = dist.get_world_size()
    found = []
    for seed in seeds:
        case = random_case(seed, world_size)
        model, whole = PooledModel(case), PooledModel(case)
        parallel = sharded(model, random_plan(model, world_size, seed))
        worst = train(case, parallel, whole, steps=3)
        found.append((seed, max([worst, *weight_differences(parallel, whole)])))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_outputs_weights_and_optimizer_state_equal_the_unsharded(world_size: int) -> None:
    for found in run_ranks(world_size, _equality, range(100 * world_size, 100 * world_size + 12)):
        assert [one for one in found if not one[1] < TOLERANCE] == []


def _batch_sizes(rank: int) -> str:
    case = random_case(0, 2, batch_sizes=(3, 5))
    model = PooledModel(case)
    parallel = sharded(model, random_plan(model, 2, 0))
    with pytest.raises(PlanError) as caught:
        parallel(batch_of(case, rank, 0))
    return str(caught.value)


def test_batches_of_different_sizes_are_refused_on_every_rank() -> None:
    assert (
        run_ranks(2, _batch_sizes)
        == [
            "the ranks' batches have 3, 5 samples; tables of type oper need batches of one size on"
            " all ranks: drop or pad the last one"
        ]
        * 2
    )


def _means(rank: int) -> float:
    configs = tuple(
        EmbeddingBagConfig(
            name=name,
            embedding_dim=4,
            num_embeddings=9,
            feature_names=features,
            pooling=pooling,
        )
        for name, features, pooling in [
            ("m", ["f0", "f1"], PoolingType.MEAN),
            ("s", ["f1", "f2"], PoolingType.SUM),
            ("n", ["f2"], PoolingType.MEAN),
        ]
    )
    case = random_case(5, 2, weighted=False, configs=configs, batch_sizes=(6, 6))
    model, whole = PooledModel(case), PooledModel(case)
    return train(case, sharded(model, random_plan(model, 2, 1)), whole, steps=3)


def test_mean_and_sum_of_shared_features_side_by_side() -> None:
    assert max(run_ranks(2, _means)) < TOLERANCE


def _planned_and_measured(rank: int) -> tuple[int, int, list[int], list[int]]:
    case = random_case(17, 2, batch_sizes=(9, 9))
    model = PooledModel(case)
    batches = [batch_of(case, r, step) for step in range(6) for r in range(2)]
    profile = AccessProfile.from_batches(batches, model.ebc) if rank == 0 else None
    planner = OperPlanner(profile, Cluster.uniform(2, memory_bytes=10**6))
    plan = planner.collective_plan(model, [OperSharder()], dist.group.WORLD)
    parallel = DistributedModelParallel(model, plan=plan, sharders=[OperSharder()])
    train(case, parallel, None, steps=6)
    served = parallel.module.ebc.served_lookups
    parallel.module.ebc.reset_served_lookups()
    from torchrec_oper.planner.judge import served_lookups

    judged = served_lookups(plan.oper, batches).sum(axis=0).tolist()
    return served, parallel.module.ebc.served_lookups, judged, list(plan.oper.planned_lookups)


def test_planned_lookups_are_those_measured_and_those_judged() -> None:
    (served0, reset0, judged, planned), (served1, _, _, planned1) = run_ranks(
        2, _planned_and_measured
    )
    assert sum(planned) > 0
    assert [served0, served1] == planned == planned1 == judged
    assert reset0 == 0


def _mixed_plan(rank: int) -> float:
    case = random_case(21, 2, weighted=False)
    assert len(case.configs) > 1
    model, whole = PooledModel(case), PooledModel(case)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    entries = sharding_plan(random_plan(model, 2, 3), model, [OperSharder()])
    first = case.configs[0].name
    stock = construct_module_sharding_plan(
        model.ebc,
        {config.name: table_wise(1) for config in case.configs},
        sharder=EmbeddingBagCollectionSharder(),
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    entries.plan["ebc"][first] = stock[first]
    parallel = DistributedModelParallel(model, plan=entries, sharders=[OperSharder()])
    parallel.load_state_dict(weights)
    worst = train(case, parallel, whole, steps=3)
    state = parallel.state_dict()
    assert state[f"ebc.embedding_bags.{first}.weight"].metadata().shards_metadata[0].placement
    return worst


def test_tables_of_stock_types_go_to_torchrec() -> None:
    assert max(run_ranks(2, _mixed_plan)) < TOLERANCE


def _stock_sharder(rank: int) -> str:
    model = PooledModel(random_case(3, 2))
    entries = sharding_plan(random_plan(model, 2, 3), model, [OperSharder()])
    with pytest.raises(ValueError, match="oper") as caught:
        DistributedModelParallel(model, plan=entries, sharders=[EmbeddingBagCollectionSharder()])
    return str(caught.value)


def test_a_stock_sharder_refuses_the_plan() -> None:
    assert run_ranks(2, _stock_sharder) == ["Sharding type not supported oper"] * 2


def _refusals(rank: int) -> dict[str, str]:
    found = {}

    def refused(name: str, kind: type[Exception], call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind) as caught:
            call(*args, **kwargs)
        found[name] = str(caught.value)

    configs = (
        EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"]),
        EmbeddingBagConfig(name="u", embedding_dim=4, num_embeddings=9, feature_names=["g"]),
    )
    case = random_case(3, 2, configs=configs, weighted=False)
    model = PooledModel(case)
    plan = random_plan(model, 2, 3)
    parallel = sharded(PooledModel(case), plan)

    def batch(keys: list[str], ids: list[int], **kwargs: Any) -> KeyedJaggedTensor:
        lengths = torch.tensor([1] * len(ids))
        return KeyedJaggedTensor(keys=keys, values=torch.tensor(ids), lengths=lengths, **kwargs)

    refused("feature", PlanError, parallel, batch(["f", "h"], [1, 2]))
    strides = [[1], [1]]
    refused(
        "strides", PlanError, parallel, batch(["f", "g"], [1, 2], stride_per_key_per_rank=strides)
    )
    refused("id", ProfileError, parallel, batch(["f", "g"], [1, 9]))
    refused("negative", ProfileError, parallel, batch(["f", "g"], [-1, 0]))
    refused("order", PlanError, parallel, batch(["g", "f"], [0, 0]))
    three = sharding_plan(random_plan(model, 3, 3), model, [OperSharder()])
    refused(
        "world", PlanError, DistributedModelParallel, model, plan=three, sharders=[OperSharder()]
    )
    entries = sharding_plan(plan, model, [OperSharder()])
    del entries.plan["ebc"]["u"]
    refused(
        "missing",
        PlanError,
        DistributedModelParallel,
        model,
        plan=entries,
        sharders=[OperSharder()],
    )
    entries = sharding_plan(plan, model, [OperSharder()])
    entries.plan["ebc"]["u"].row_map = None
    refused(
        "no map", PlanError, DistributedModelParallel, model, plan=entries, sharders=[OperSharder()]
    )
    refused(
        "reshard", PlanError, OperSharder().reshard, parallel.module.ebc, {"t": None}, None, None
    )
    return found


def test_refusals_say_what_was_found() -> None:
    for found in run_ranks(2, _refusals):
        assert found == {
            "feature": "table u looks up feature g, which the batch lacks; it has f, h",
            "strides": "features of different batch sizes (variable batch per feature) aren't"
            " supported for tables of type oper",
            "id": "feature g of table u: id 9 is outside the table, whose ids run from 0 to 8",
            "negative": "feature f of table t: id -1 is outside the table, whose ids run from 0"
            " to 8",
            "order": "the batch has features g, f; the first one had f, g: keep one order",
            "world": "table t: the plan was made for 3 ranks, the process group has 2; make a"
            " plan for 2 ranks",
            "missing": "the plan leaves out u of module ebc; make a plan for this model",
            "no map": "table u: a plan entry of type oper needs a row map; make it with"
            " OperPlanner, or with sharding_plan from a saved plan",
            "reshard": "resharding while training isn't supported for tables of type oper (t, u);"
            " save the state, and load it under a new plan",
        }


def _dies(rank: int) -> None:
    if rank == 1:
        raise KeyError("planted")
    dist.barrier()


def test_the_harness_reports_a_rank_that_raises() -> None:
    with pytest.raises(RankError, match="planted"):
        run_ranks(2, _dies)


def test_local_rows_are_never_fewer_than_two() -> None:
    from torchrec_oper.planner import RowMap
    from torchrec_oper.sharder.local_rows import local_bounds, local_rows

    empty = np.array([], dtype=np.int64)
    row_map = RowMap(np.array([0, 0, 1, 6]), empty, empty)
    assert local_rows(row_map).tolist() == [2, 2, 5]
    assert local_bounds(row_map).tolist() == [0, 2, 4, 9]
