"""The sharded EmbeddingBagCollection equals the unsharded one, for any rows anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sharded_cases import (
    Case,
    PooledModel,
    batch_of,
    difference,
    random_case,
    random_plan,
    sharded,
    train,
    weight_differences,
)
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv

from ranks import RankError, run_ranks
from torchrec_oper import AccessProfile, Cluster, Constraints, OperPlanner, OperSharder
from torchrec_oper.errors import BatchError, PlanError
from torchrec_oper.planner import Decision, OperShardingPlan, RowMap, sharding_plan
from torchrec_oper.planner.judge import served_lookups
from torchrec_oper.sharder.local_rows import local_bounds, local_rows
from torchrec_oper.sharder.row_sharding import OperSparseFeaturesDist

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


def _batch_sizes(rank: int) -> tuple[str, float]:
    case = random_case(0, 2, batch_sizes=(3, 5))
    model, whole = PooledModel(case), PooledModel(case)
    parallel = sharded(model, random_plan(model, 2, 0))
    batch = batch_of(case, rank, 0)
    with pytest.raises(BatchError) as caught:
        parallel(batch)
    with torch.no_grad():
        return str(caught.value), difference(parallel(batch), whole(batch))


def test_batches_of_different_sizes_are_refused_in_training_on_every_rank() -> None:
    for message, worst in run_ranks(2, _batch_sizes):
        assert message == (
            "the ranks' batches have 3, 5 samples; tables of type oper need batches of one size"
            " on all ranks: drop or pad the last one"
        )
        assert worst < TOLERANCE


def _mean_configs() -> tuple[EmbeddingBagConfig, ...]:
    return tuple(
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


def _means(rank: int) -> list[float]:
    case = random_case(
        5, 2, weighted=False, configs=_mean_configs(), batch_sizes=(6, 6), optimizer="sgd"
    )
    model, whole = PooledModel(case), PooledModel(case)
    parallel = sharded(model, random_plan(model, 2, 1))
    found = [train(case, parallel, whole, steps=3)]
    # TorchRec's steps one by one, as a pipeline may take them.
    module, batch = parallel.module.ebc, batch_of(case, rank, 9)
    context = module.create_context()
    received = module.input_dist(context, batch).wait().wait()
    pooled = module.output_dist(context, module.compute(context, received)).wait()
    wanted = whole.ebc(batch)
    return found + [difference(pooled[key], wanted[key]) for key in whole.names]


def test_mean_and_sum_of_shared_features_side_by_side() -> None:
    for found in run_ranks(2, _means):
        assert len(found) == 6
        assert max(found) < TOLERANCE


# Placements that a plan may ask for, on 2 ranks; the last for bags of one id only.
DECISIONS = (
    Decision("whole", 0, np.array([[1]])),
    Decision("partial", 0, np.array([[1, 0]])),
    Decision("partial", 0, np.array([[1, 0]]), np.array([0.3, 0.7])),
)


def _planned_and_measured(
    rank: int, longest_bag: int
) -> tuple[int, int, list[int], list[int], list[str]]:
    configs = tuple(
        EmbeddingBagConfig(
            name=f"t{number}", num_embeddings=100, embedding_dim=4, feature_names=features
        )
        for number, features in enumerate([["f0"], ["f0", "f1"], ["f2"], ["f1"]])
    )
    case = random_case(17, 2, batch_sizes=(9, 9), configs=configs, longest_bag=longest_bag)
    model, whole = PooledModel(case), PooledModel(case)
    batches = [batch_of(case, r, step) for step in range(6) for r in range(2)]
    profile = AccessProfile.from_batches(batches, model.ebc) if rank == 0 else None
    decisions = DECISIONS if longest_bag == 1 else DECISIONS[:2]
    fixed = {f"t{number}": decision for number, decision in enumerate(decisions)}
    planner = OperPlanner(
        profile,
        Cluster.uniform(2, memory_bytes=10**6),
        constraints=Constraints(fixed=fixed),
        batch_size=9,
    )
    plan = planner.collective_plan(model, [OperSharder()], dist.group.WORLD)
    parallel = DistributedModelParallel(model, plan=plan, sharders=[OperSharder()])
    parallel.load_state_dict(whole.state_dict())
    assert train(case, parallel, whole, steps=6) < TOLERANCE
    served = parallel.module.ebc.served_lookups
    parallel.module.ebc.reset_served_lookups()
    judged = served_lookups(plan.oper, batches).sum(axis=0).tolist()
    exchanges = [placement.decision.exchange for placement in plan.oper.placements]
    planned = list(plan.oper.planned_lookups)
    return served, parallel.module.ebc.served_lookups, judged, planned, exchanges


@pytest.mark.parametrize("longest_bag", [1, 3])
def test_planned_lookups_are_those_measured_and_those_judged(longest_bag: int) -> None:
    (served0, reset0, judged, planned, exchanges), (served1, _, _, planned1, _) = run_ranks(
        2, _planned_and_measured, longest_bag
    )
    assert exchanges[:2] == ["whole", "partial"]
    assert min(planned) > 0
    assert [served0, served1] == planned == planned1 == judged
    assert reset0 == 0


def _with_stock_table(model: PooledModel, table: str, how: Any) -> OperShardingPlan:
    """A plan with random rows, in which one table has a type of TorchRec's."""
    entries = sharding_plan(random_plan(model, 2, 3), model, [OperSharder()])
    stock = construct_module_sharding_plan(
        model.ebc,
        {config.name: how for config in model.ebc.embedding_bag_configs()},
        sharder=EmbeddingBagCollectionSharder(),
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    entries.plan["ebc"][table] = stock[table]
    return entries


def _mixed_plan(rank: int) -> tuple[float, int, int]:
    case = random_case(
        5, 2, weighted=False, configs=_mean_configs(), batch_sizes=(6, 6), optimizer="sgd"
    )
    model, whole = PooledModel(case), PooledModel(case)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    entries = _with_stock_table(model, "m", table_wise(1))
    parallel = DistributedModelParallel(model, plan=entries, sharders=[OperSharder()])
    parallel.load_state_dict(weights)
    worst = train(case, parallel, whole, steps=3)
    batches = [batch_of(case, r, step) for step in range(3) for r in range(2)]
    lookups = sum(
        int(batch[feature].lengths().sum()) for batch in batches for feature in ("f1", "f2", "f2")
    )
    return worst, parallel.module.ebc.served_lookups, lookups


def test_tables_of_stock_types_go_to_torchrec() -> None:
    (worst0, served0, lookups), (worst1, served1, _) = run_ranks(2, _mixed_plan)
    assert max(worst0, worst1) < TOLERANCE
    assert served0 + served1 == lookups


def _stock_sharder(rank: int) -> str:
    model = PooledModel(random_case(3, 2))
    entries = sharding_plan(random_plan(model, 2, 3), model, [OperSharder()])
    with pytest.raises(ValueError, match="oper") as caught:
        DistributedModelParallel(model, plan=entries, sharders=[EmbeddingBagCollectionSharder()])
    return str(caught.value)


def test_a_stock_sharder_refuses_the_plan() -> None:
    assert run_ranks(2, _stock_sharder) == ["Sharding type not supported oper"] * 2


def _refused(kind: type[Exception], call: Any, *args: Any, **kwargs: Any) -> str:
    """The message with which a call is refused."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def _two_tables() -> Case:
    configs = tuple(
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=9, feature_names=[feature])
        for name, feature in (("t", "f"), ("u", "g"))
    )
    return random_case(3, 2, configs=configs, weighted=False)


def _refused_batches(rank: int) -> dict[str, str]:
    model = PooledModel(_two_tables())
    parallel = sharded(model, random_plan(model, 2, 3))

    def refused(keys: list[str], ids: list[int], **kwargs: Any) -> str:
        lengths = torch.tensor([1] * len(ids))
        batch = KeyedJaggedTensor(keys=keys, values=torch.tensor(ids), lengths=lengths, **kwargs)
        return _refused(BatchError, parallel, batch)

    return {
        "feature": refused(["f", "h"], [1, 2]),
        "id": refused(["f", "g"], [1, 9]),
        "negative": refused(["f", "g"], [-1, 0]),
        "order": refused(["g", "f"], [0, 0]),
        "later": refused(["f"], [0]),
        "strides": refused(["f", "g"], [1, 2], stride_per_key_per_rank=[[1], [1]]),
    }


def test_refused_batches_say_what_was_found() -> None:
    for found in run_ranks(2, _refused_batches):
        assert found == {
            "feature": "table u looks up feature g, which the batch lacks; it has f, h",
            "id": "feature g of table u: id 9 is outside the table, whose ids run from 0 to 8",
            "negative": "feature f of table t: id -1 is outside the table, whose ids run from 0"
            " to 8",
            "order": "the batch has features g, f; the first one had f, g: keep one order",
            "later": "table u looks up feature g, which the batch lacks; it has f",
            "strides": "features of different batch sizes (variable batch per feature) aren't"
            " supported for tables of type oper",
        }


def _refused_plans(rank: int) -> dict[str, str]:
    sharders = [OperSharder()]
    model = PooledModel(_two_tables())
    plan = random_plan(model, 2, 3)

    def refused(model: PooledModel, entries: OperShardingPlan) -> str:
        return _refused(PlanError, DistributedModelParallel, model, plan=entries, sharders=sharders)

    missing, no_map = (sharding_plan(plan, model, sharders) for _ in range(2))
    del missing.plan["ebc"]["u"]
    no_map.plan["ebc"]["u"].row_map = None
    means = PooledModel(random_case(5, 2, weighted=False, configs=_mean_configs()))
    shard, local = OperSharder().shard, ShardingEnv.from_local(2, rank)
    entries = sharding_plan(plan, model, sharders).plan["ebc"]
    running = sharded(PooledModel(_two_tables()), plan).module.ebc
    return {
        "missing": refused(model, missing),
        "no map": refused(model, no_map),
        "world": refused(model, sharding_plan(random_plan(model, 3, 3), model, sharders)),
        "row-wise mean": refused(means, _with_stock_table(means, "m", row_wise())),
        "no group": _refused(PlanError, shard, model.ebc, entries, local),
        "reshard": _refused(PlanError, OperSharder().reshard, running, {"t": None}, None, None),
    }


def test_refused_plans_say_what_was_found() -> None:
    for found in run_ranks(2, _refused_plans):
        assert found == {
            "missing": "the plan leaves out u of module ebc; make a plan for this model",
            "no map": "table u: a plan entry of type oper needs a row map; make it with"
            " OperPlanner, or with sharding_plan from a saved plan",
            "world": "table t: the plan was made for 3 ranks, the process group has 2; make a"
            " plan for the ranks that you have",
            "row-wise mean": "table m: a mean table of type row_wise isn't supported beside tables"
            " of type oper; give it type oper, or another of TorchRec's types",
            "no group": "table t: type oper needs a process group; initialise torch.distributed,"
            " and leave the sharding environment to DistributedModelParallel",
            "reshard": "resharding while training isn't supported for tables of type oper (t, u);"
            " save the state, and load it under a new plan",
        }


def _odd_batches(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    configs = (
        EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"]),
    )
    cases = {w: random_case(3, 1, configs=configs, weighted=w) for w in (False, True)}
    models = {}
    for weighted, case in cases.items():
        model = PooledModel(case)
        models[weighted] = sharded(model, random_plan(model, 1, 3)), PooledModel(case)

    def batch(**fields: Any) -> KeyedJaggedTensor:
        values = {"values": torch.tensor([1, 2, 3]), "lengths": torch.tensor([1, 0, 2]), **fields}
        return KeyedJaggedTensor(keys=["f"], **values)

    gaps = torch.tensor([1, 5, 0, 5, 2, 5])[::2]
    spread = torch.tensor([1.0, 9.0, 2.0, 9.0, 3.0, 9.0])[::2]
    for name, weighted, odd in [
        ("lengths with gaps", False, batch(lengths=gaps)),
        ("values with gaps", False, batch(values=torch.tensor([1, 7, 2, 7, 3, 7])[::2])),
        ("weights with gaps", True, batch(weights=spread)),
        ("float64 weights", True, batch(weights=spread.double())),
        ("weights of an unweighted collection", False, batch(weights=spread)),
        ("no ids", False, batch(values=torch.tensor([1])[:0], lengths=torch.tensor([0, 0]))),
    ]:
        parallel, whole = models[weighted]
        plain = odd if not weighted else batch(weights=spread.float().contiguous())
        found[name] = difference(parallel(odd), whole(plain))
    for name, weighted, fields in [
        ("negative", False, {"lengths": torch.tensor([5, -2])}),
        ("too long", False, {"lengths": torch.tensor([5, 0])}),
        ("float ids", False, {"values": torch.tensor([1.0, 2.0, 3.0])}),
        ("int16", False, {"values": torch.tensor([1, 2, 3], dtype=torch.int16)}),
        ("weights missing", True, {}),
        ("weights short", True, {"weights": torch.tensor([1.0])}),
    ]:
        with pytest.raises(BatchError) as caught:
            models[weighted][0](batch(**fields))
        found[name] = str(caught.value)
    with pytest.raises(BatchError, match="a batch has to be a KeyedJaggedTensor, found dict"):
        models[False][0].module.ebc.input_dist(None, {})
    return found


def test_odd_batches_give_what_the_unsharded_gives_or_are_refused() -> None:
    (found,) = run_ranks(1, _odd_batches)
    numbers = {name: value for name, value in found.items() if isinstance(value, float)}
    assert len(numbers) == 6
    assert {name: value for name, value in numbers.items() if not value < TOLERANCE} == {}
    integers = "ids have to be one-dimensional int32 or int64, found torch."
    assert {name: value for name, value in found.items() if isinstance(value, str)} == {
        "negative": "a bag's length is 0 or more, found -2",
        "too long": "the bags' lengths add up to 5, but there are 3 ids",
        "float ids": f"{integers}float32 of shape [3]",
        "int16": f"{integers}int16 of shape [3]",
        "weights missing": "the collection is weighted, but the batch has no weights",
        "weights short": "weights have to be floats, one for each of 3 ids, found torch.float32"
        " of shape [1]",
    }


def _subgroup(rank: int) -> float:
    group = dist.new_group([1, 2])
    if rank == 0:
        return 0.0
    case = random_case(7, 2, batch_sizes=(4, 4))
    model, whole = PooledModel(case), PooledModel(case)
    entries = sharding_plan(random_plan(model, 2, 5), model, [OperSharder()])
    # Made by hand: TorchRec's own way to it wants all ranks of the job.
    env = ShardingEnv.from_local(2, rank - 1)
    env.process_group = group
    module = OperSharder().shard(model.ebc, entries.plan["ebc"], env, torch.device("cpu"))
    module.load_state_dict(whole.ebc.state_dict())
    batch = batch_of(case, rank - 1, 0)
    pooled, wanted = module(batch).wait(), whole.ebc(batch)
    state = module.state_dict()
    return max(
        [
            *(difference(pooled[key], wanted[key]) for key in whole.names),
            *(
                difference(shard.tensor, _rows(whole.ebc.state_dict()[key], shard.metadata))
                for key, value in state.items()
                for shard in value.local_shards()
            ),
        ]
    )


def _rows(weight: torch.Tensor, shard: Any) -> torch.Tensor:
    return weight[shard.shard_offsets[0] :][: shard.shard_sizes[0]]


def test_a_subgroup_of_the_ranks_can_hold_the_tables() -> None:
    assert max(run_ranks(3, _subgroup)) < TOLERANCE


def _wide_ids(rank: int) -> list[int]:
    rows = 2**31 - 1
    empty = np.array([], dtype=np.int64)
    row_map = RowMap(np.array([0, 0, 0, rows]), empty, empty)
    step = OperSparseFeaturesDist(dist.group.WORLD, ["f of t"], [row_map])
    ids = torch.tensor([0, rows - 1], dtype=torch.int32)
    batch = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.tensor([2]))
    return step(batch).wait().wait().values().tolist()


def test_int32_ids_reach_physical_rows_that_int32_cannot_number() -> None:
    assert run_ranks(3, _wide_ids) == [[], [], [0, 2**31 - 2] * 3]


def _dies(rank: int) -> None:
    if rank == 1:
        raise KeyError("planted")
    dist.barrier()


def test_the_harness_reports_a_rank_that_raises() -> None:
    with pytest.raises(RankError, match="planted"):
        run_ranks(2, _dies)


def test_local_rows_are_never_fewer_than_two() -> None:
    empty = np.array([], dtype=np.int64)
    row_map = RowMap(np.array([0, 0, 1, 6]), empty, empty)
    assert local_rows(row_map).tolist() == [2, 2, 5]
    assert local_bounds(row_map).tolist() == [0, 2, 4, 9]
