"""OperPlanner: what it refuses, and that a failure on rank 0 reaches every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import PooledModel, batch_of, difference, random_case, sharded
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import RowWiseAdagrad

from ranks import run_ranks
from torchrec_oper import AccessProfile, Cluster, OperPlanner, OperSharder, Plan
from torchrec_oper.errors import PlanError, ProfileError
from torchrec_oper.planner import Workload, sharding_plan
from torchrec_oper.planner.adapter import optimizer_bytes_per_row, read_model
from torchrec_oper.planner.demands import SKEW
from torchrec_oper.table import TableSpec

AMPLE = 10**9


def bags(*configs: EmbeddingBagConfig, weighted: bool = False) -> nn.Module:
    collection = EmbeddingBagCollection(
        tables=list(configs), is_weighted=weighted, device=torch.device("meta")
    )
    return nn.Sequential(collection)


def config(name: str = "t", **fields: Any) -> EmbeddingBagConfig:
    values = {"num_embeddings": 9, "embedding_dim": 4, "feature_names": [f"{name}_f"], **fields}
    return EmbeddingBagConfig(name=name, **values)


def test_plans_in_one_process_and_is_deterministic(tmp_path: Path) -> None:
    case = random_case(7, 3)
    model = PooledModel(case)
    profile = AccessProfile.from_batches([batch_of(case, 0, step) for step in range(5)], model.ebc)
    planner = OperPlanner(profile, Cluster.uniform(3, memory_bytes=AMPLE), seed=4)
    first, second = (planner.plan(model, [OperSharder()]).oper for _ in range(2))
    assert first == second
    assert sum(first.planned_lookups) == sum(table.lookups for table in profile.tables)
    assert first.workload == Workload("train", 512, profile.content_hash)
    assert first.bound_s <= first.cost_s
    first.save(tmp_path / "a.plan")
    entries = sharding_plan(Plan.load(tmp_path / "a.plan"), model, [OperSharder()])
    assert entries.report() == first.report()
    assert {entry.sharding_type for entry in entries.plan["ebc"].values()} == {"oper"}


def test_without_a_profile_a_zipf_law_is_assumed_and_told() -> None:
    planner = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=AMPLE), batch_size=64)
    model = bags(config(num_embeddings=3), config("u", num_embeddings=200))
    plan = planner.plan(model, [OperSharder()]).oper
    assert plan.workload == Workload("train", 64, None, SKEW)
    assert "no profile" in plan.report()
    # A table of 3 rows isn't worth cutting.
    assert sorted(plan.placement("0", "t").owned_rows.tolist()) == [0, 3]
    assert 0 <= plan.gap < 0.2


def test_inference_needs_no_room_for_optimizer_state() -> None:
    model = bags(config(num_embeddings=100))
    model[0].embedding_bags["t"].weight._optimizer_classes = [torch.optim.Adagrad]
    cluster = Cluster.uniform(1, memory_bytes=3000)
    infers = OperPlanner(cluster=cluster, batch_size=8, objective="infer")
    plan = infers.plan(model, [OperSharder()])
    assert plan.oper.memory_bytes == (1600,)
    with pytest.raises(PlanError, match="need 3200 bytes with optimizer state"):
        OperPlanner(cluster=cluster, batch_size=8).plan(model, [OperSharder()])


def test_a_huge_table_is_planned_on_the_meta_device() -> None:
    model = bags(config(num_embeddings=2_000_000_000, embedding_dim=128))
    plan = OperPlanner(cluster=Cluster.uniform(4, memory_bytes=2**39)).plan(model, [OperSharder()])
    rows = plan.oper.placements[0].owned_rows
    assert rows.sum() == 2_000_000_000
    assert (rows > 0).sum() >= 2  # no rank has room for all


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (bags(config(embedding_dim=6)), "table t isn't supported: its dim is 6, and FBGEMM needs"),
        (bags(config(data_type=DataType.BF16)), "no bfloat16 rows on the CPU"),
        (
            bags(config(pooling=PoolingType.MEAN), weighted=True),
            "table t isn't supported: it takes the mean of weighted bags",
        ),
        (bags(config(total_num_buckets=3)), "table t isn't supported: its rows come in buckets"),
        (nn.Linear(1, 1), "the model has no EmbeddingBagCollection to plan"),
        (
            nn.Sequential(
                EmbeddingCollection(
                    tables=[
                        EmbeddingConfig(
                            name="s", num_embeddings=4, embedding_dim=4, feature_names=["f"]
                        )
                    ]
                )
            ),
            "module 0 is of type EmbeddingCollection, which OperPlanner can't plan with these"
            " sharders; they shard EmbeddingBagCollection: pass a sharder of this type too",
        ),
        (
            nn.Sequential(*bags(config()), *bags(config())),
            r"table names must be unique in the model, found twice: \['t'\]",
        ),
    ],
)
def test_refuses_by_name_what_it_cannot_plan(model: nn.Module, message: str) -> None:
    planner = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=AMPLE))
    with pytest.raises(PlanError, match=message):
        planner.plan(model, [OperSharder()])


def test_refuses_collections_inside_modules_that_change_their_use() -> None:
    processed = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(tables=[config()], is_weighted=True, device=torch.device("cpu")),
        PositionWeightedModuleCollection({"t_f": 3}),
    )
    plain = EmbeddingBagCollection(tables=[config()], device=torch.device("cpu"))
    collisions = MCHManagedCollisionModule(9, torch.device("cpu"), DistanceLFU_EvictionPolicy(), 1)
    managed = ManagedCollisionEmbeddingBagCollection(
        plain, ManagedCollisionCollection({"t": collisions}, plain.embedding_bag_configs())
    )
    planner = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=AMPLE))
    for module in (processed, managed):
        name = type(module).__name__
        with pytest.raises(PlanError, match=f"module 0 is of type {name}, which OperPlanner"):
            planner.plan(nn.Sequential(module), [OperSharder()])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"profile": "a.profile"}, "profile must be a AccessProfile or None, found 'a.profile'"),
        ({"cluster": 4}, "cluster must be a Cluster or None, found 4"),
        ({"topology": "cpu"}, "topology must be a Topology or None, found 'cpu'"),
        ({"space": "all"}, "space must be a SearchSpace or None, found 'all'"),
        ({"batch_size": 0}, "batch_size must be an integer of 1 or more, found 0"),
        ({"objective": "serve"}, "objective must be train or infer, found 'serve'"),
        ({"constraints": ["t"]}, "constraints must be a Constraints, or TorchRec's Param"),
        ({"constraints": {"t": 1}}, "or TorchRec's ParameterConstraints by table, found 1 for 't'"),
        ({"seed": -1}, "seed must be an integer of 0 or more, found -1"),
        ({"seed": 1.5}, "seed must be an integer of 0 or more, found 1.5"),
    ],
)
def test_refuses_arguments_of_other_kinds(arguments: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        OperPlanner(**arguments)


def test_refuses_a_sharder_class_in_place_of_a_sharder() -> None:
    planner = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=AMPLE))
    with pytest.raises(PlanError, match="sharders must be ModuleSharder values, found <class"):
        planner.plan(bags(config()), [OperSharder])


@pytest.mark.parametrize("memory_bytes", [2**62, 2**63 - 1])
def test_a_huge_cap_means_no_cap(memory_bytes: int) -> None:
    planner = OperPlanner(cluster=Cluster.uniform(4, memory_bytes=memory_bytes))
    plan = planner.plan(bags(config(num_embeddings=40)), [OperSharder()]).oper
    assert sum(plan.memory_bytes) == 4 * 160


def test_refuses_types_of_rows_that_it_does_not_know() -> None:
    planner = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=AMPLE))
    with pytest.raises(ProfileError, match="table t: dtype must be one of .*, found 'INT8'"):
        planner.plan(bags(config(data_type=DataType.INT8)), [OperSharder()])


def test_refuses_to_plan_without_our_sharder() -> None:
    planner = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=AMPLE))
    with pytest.raises(
        PlanError, match="pass OperSharder\\(\\) too, found .*EmbeddingBagCollectionS"
    ):
        planner.plan(bags(config()), [EmbeddingBagCollectionSharder()])


def test_refuses_a_sharder_that_would_take_ours_place() -> None:
    planner = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=AMPLE))
    stock = EmbeddingBagCollectionSharder()
    with pytest.raises(
        PlanError, match="both shard EmbeddingBagCollection, .* takes the last: leave EmbeddingBag"
    ):
        planner.plan(bags(config()), [OperSharder(), stock])
    plan = planner.plan(bags(config()), [stock, OperSharder()])
    assert plan.plan["0"]["t"].sharding_type == "oper"


def test_refuses_the_profile_of_other_tables() -> None:
    case = random_case(7, 2)
    model = PooledModel(case)
    profile = AccessProfile.from_batches([batch_of(case, 0, 0)], model.ebc)
    planner = OperPlanner(profile, Cluster.uniform(2, memory_bytes=AMPLE))
    with pytest.raises(ProfileError, match="other"):
        planner.plan(bags(config("other")), [OperSharder()])


def test_refuses_a_plan_of_another_model() -> None:
    plan = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=AMPLE)).plan(
        bags(config("a")), [OperSharder()]
    )
    with pytest.raises(PlanError, match="leaves out table b of module 0"):
        sharding_plan(plan.oper, bags(config("a"), config("b")), [OperSharder()])


def test_over_memory_names_the_table_the_need_and_the_cap() -> None:
    planner = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=100))
    with pytest.raises(
        PlanError,
        match="need 14400 bytes .* add up to 200 bytes, .* tables are t \\(14400 bytes\\)",
    ):
        planner.plan(bags(config(num_embeddings=900)), [OperSharder()])


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (None, 0),
        (torch.optim.SGD, 0),
        (torch.optim.Adagrad, 4 * 8),
        (RowWiseAdagrad, 4),
    ],
)
def test_counts_optimizer_state(optimizer: type | None, wanted: int) -> None:
    table = TableSpec(name="t", rows=2, dim=8, features=("f",))
    parameter = nn.Parameter(torch.zeros(2, 8))
    if optimizer:
        parameter._optimizer_classes = [optimizer]
    assert optimizer_bytes_per_row(table, parameter, {}) == wanted


def test_counts_the_optimizer_state_of_fused_params() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    table = TableSpec(name="t", rows=2, dim=8, features=("f",))
    parameter = nn.Parameter(torch.zeros(2, 8))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    assert optimizer_bytes_per_row(table, parameter, fused) == 4
    model = bags(config(embedding_dim=8))
    (found,) = read_model(model, [OperSharder(fused_params=fused)]).specs
    assert found.optimizer_bytes_per_row == 4
    with pytest.raises(PlanError, match="table t: optimizer shampoo isn't supported; supported"):
        optimizer_bytes_per_row(table, parameter, {"optimizer": EmbOptimType.SHAMPOO})
    parameter._optimizer_classes = [torch.optim.Adam]
    with pytest.raises(PlanError, match="table t: optimizer adam isn't supported; supported are"):
        optimizer_bytes_per_row(table, parameter, {})
    parameter._optimizer_classes = [torch.optim.Rprop]
    with pytest.raises(PlanError, match="table t: FBGEMM has no fused Rprop"):
        optimizer_bytes_per_row(table, parameter, {})


class _Broken(OperPlanner):
    def _plan_for(self, *args: Any) -> Any:
        raise RuntimeError("out of luck")


def _failures(rank: int) -> list[str]:
    found = []
    small = OperPlanner(cluster=Cluster.uniform(2, memory_bytes=10) if rank == 0 else None)
    other = OperPlanner(cluster=Cluster.uniform(3, memory_bytes=AMPLE) if rank == 0 else None)
    for planner in (small, other, _Broken()):
        try:
            planner.collective_plan(bags(config()), [OperSharder()], dist.group.WORLD)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_failure_on_rank_0_reaches_every_rank() -> None:
    first, second = run_ranks(2, _failures)
    memory = (
        "the tables need 144 bytes with optimizer state, but the 2 ranks' caps add up to 20 bytes,"
        " 124 too few; the largest tables are t (144 bytes); give each rank 62 bytes more, or add"
        " 13 such ranks, or shrink the tables"
    )
    ranks = "the cluster has 3 ranks, the process group 2"
    assert first == [
        f"PlanError: {memory}",
        f"PlanError: {ranks}",
        "RuntimeError: out of luck",
    ]
    assert second == [
        f"PlanError: planning failed on rank 0: {memory}",
        f"PlanError: planning failed on rank 0: {ranks}",
        "PlanError: planning failed on rank 0: RuntimeError: out of luck",
    ]


def _stock_planner(rank: int) -> float:
    case = random_case(3, 2)
    model, whole = PooledModel(case), PooledModel(case)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cpu"))
    plan = planner.collective_plan(model, [OperSharder()], dist.group.WORLD)
    parallel = DistributedModelParallel(model, plan=plan, sharders=[OperSharder()])
    parallel.load_state_dict(weights)
    batch = batch_of(case, rank, 0)
    return difference(parallel(batch), whole(batch))


def test_the_stock_planner_works_with_our_sharder() -> None:
    assert max(run_ranks(2, _stock_planner)) < 1e-6


def _all_ranks_get_the_plan(rank: int) -> tuple[str, bool, float]:
    case = random_case(8, 2)
    model, whole = PooledModel(case), PooledModel(case)
    batches = [batch_of(case, 0, step) for step in range(3)]
    profile = AccessProfile.from_batches(batches, model.ebc) if rank == 0 else None
    planner = OperPlanner(profile, Cluster.uniform(2, memory_bytes=AMPLE))
    plan = planner.collective_plan(model, [OperSharder()])
    parallel = sharded(model, plan.oper)
    batch = batch_of(case, rank, 0)
    writeable = [
        array.flags.writeable
        for placement in plan.oper.placements
        for array in (placement.planned_lookups, *placement.row_map.arrays().values())
    ]
    return plan.oper.content_hash, any(writeable), difference(parallel(batch), whole(batch))


def test_every_rank_gets_the_plan_of_rank_0_and_cannot_change_it() -> None:
    (first, *rest), (second, *others) = run_ranks(2, _all_ranks_get_the_plan)
    assert first == second
    for writeable, worst in (rest, others):
        assert not writeable
        assert worst < 1e-6
