"""Models whose modules OperSharder and TorchRec's sharders share out."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sharded_cases import (
    OPTIMIZERS,
    Case,
    PooledModel,
    batch_of,
    difference,
    gathered,
    random_case,
    train,
    weight_differences,
)
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from ranks import run_ranks
from torchrec_oper import AccessProfile, Cluster, Constraints, OperPlanner, OperSharder
from torchrec_oper.errors import PlanError
from torchrec_oper.planner import Decision, Plan, sharding_plan
from torchrec_oper.planner.cluster import RankSpec

TOLERANCE = 1e-6
SEQUENCE_ROWS, SEQUENCE_DIM = 100, 8
AMPLE = Cluster.uniform(2, memory_bytes=10**8)


def sharders() -> list[Any]:
    return [OperSharder(), EmbeddingCollectionSharder()]


class MixedModel(PooledModel):
    """Pooled features, and the summed rows of a feature's ids, one by one."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        table = EmbeddingConfig(
            name="s",
            num_embeddings=SEQUENCE_ROWS,
            embedding_dim=SEQUENCE_DIM,
            feature_names=["f0"],
        )
        self.ec = EmbeddingCollection(tables=[table], device=torch.device("cpu"))
        kind, settings = OPTIMIZERS[case.optimizer]
        _apply_optimizer_in_backward(kind, self.ec.parameters(), dict(settings))

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ec(batch)["f0"]
        samples = torch.repeat_interleave(torch.arange(len(rows.lengths())), rows.lengths())
        sums = torch.zeros(len(rows.lengths()), SEQUENCE_DIM).index_add(0, samples, rows.values())
        return torch.cat([super().forward(batch), sums], dim=1)


def a_case(optimizer: str = "sgd") -> Case:
    configs = tuple(
        EmbeddingBagConfig(
            name=name,
            num_embeddings=100,
            embedding_dim=4,
            feature_names=["f0", feature],
            pooling=pooling,
        )
        for name, feature, pooling in [
            ("t", "f1", PoolingType.SUM),
            ("u", "f2", PoolingType.MEAN),
        ]
    )
    return random_case(
        11,
        2,
        configs=configs,
        weighted=False,
        optimizer=optimizer,
        batch_sizes=(6, 6),
        id_type=torch.int64,
    )


def _trained(rank: int, optimizer: str, folder: str) -> tuple[float, list[str], bool, bool]:
    case = a_case(optimizer)
    model, whole = MixedModel(case), MixedModel(case)
    batches = [batch_of(case, r, step) for r in range(2) for step in range(4)]
    profile = AccessProfile.from_batches(batches, model.ebc) if rank == 0 else None
    both = Constraints(fixed={"t": Decision("partial", 0, np.array([[1, 0]]))})
    planner = OperPlanner(profile, AMPLE, batch_size=6, constraints=both)
    plan = planner.collective_plan(model, sharders())
    if rank == 0:
        plan.save(f"{folder}/a.plan")
    dist.barrier()
    again = sharding_plan(Plan.load(f"{folder}/a.plan"), model, sharders())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=sharders()
    )
    parallel.load_state_dict(weights)
    before = gathered(parallel.state_dict()["ec.embeddings.s.weight"])
    worst = [train(case, parallel, whole, steps=4), *weight_differences(parallel, whole)]
    rows = gathered(parallel.state_dict()["ec.embeddings.s.weight"])
    changed = not torch.equal(rows, before)
    worst.append(difference(rows, whole.ec.embeddings["s"].weight))
    types = [entry.sharding_type for part in plan.plan.values() for entry in part.values()]
    same_again = again.oper == plan.oper and again.plan["ec"] == plan.plan["ec"]
    return max(worst), types, changed, same_again


@pytest.mark.parametrize("optimizer", ["sgd", "row_wise_adagrad"])
def test_bags_and_sequences_train_as_the_unsharded_model(optimizer: str, tmp_path: Any) -> None:
    for worst, types, changed, same_again in run_ranks(2, _trained, optimizer, str(tmp_path)):
        assert worst < TOLERANCE
        assert types[:2] == ["oper", "oper"]
        assert types[2] in ("table_wise", "row_wise")
        assert changed
        assert same_again


def _left_out(rank: int) -> float:
    case = a_case()
    model, whole = TwoCollections(case), TwoCollections(case)
    constraints = {"w": ParameterConstraints(sharding_types=["table_wise", "column_wise"])}
    plan = OperPlanner(cluster=AMPLE, constraints=constraints).collective_plan(
        model, [OperSharder()]
    )
    assert plan.plan["other"]["w"].sharding_type != "oper"
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[OperSharder()]
    )
    parallel.load_state_dict(weights)
    return train(case, parallel, whole, steps=3)


class TwoCollections(PooledModel):
    """A second collection, for TorchRec to plan."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        table = EmbeddingBagConfig(
            name="w", num_embeddings=100, embedding_dim=8, feature_names=["f2"]
        )
        self.other = EmbeddingBagCollection(tables=[table], device=torch.device("cpu"))
        _apply_optimizer_in_backward(torch.optim.SGD, self.other.parameters(), {"lr": 0.2})

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([super().forward(batch), self.other(batch)["f2"]], dim=1)


def test_a_module_kept_from_oper_trains_beside_one_of_type_oper() -> None:
    assert max(run_ranks(2, _left_out)) < TOLERANCE


def test_torchrec_gets_the_memory_that_is_left_on_each_rank() -> None:
    model = MixedModel(a_case())
    # Both of our tables on rank 0, and room for the whole of TorchRec's on one rank.
    not_on = Constraints(not_on={"t": [1], "u": [1]})
    ours = 2 * 100 * 16
    for roomy in (0, 1):
        cluster = Cluster((RankSpec(ours + (50_000, 2000)[roomy]), RankSpec((2000, 50_000)[roomy])))
        planner = OperPlanner(cluster=cluster, constraints=not_on, batch_size=4)
        plan = planner.plan(model, [OperSharder(), TableWise()])
        assert plan.oper.memory_bytes == (ours, 0)
        assert plan.plan["ec"]["s"].ranks == [roomy]
    cluster = Cluster((RankSpec(ours + 2000), RankSpec(1000)))
    with pytest.raises(
        PlanError,
        match="TorchRec's planner found no plan for ec, in the 2000, 1000 bytes that tables of type"
        " oper leave on the ranks: Unable to find a plan",
    ):
        OperPlanner(cluster=cluster, constraints=not_on, batch_size=4).plan(model, sharders())


class TableWise(EmbeddingCollectionSharder):
    """Whole tables only."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise"]


def test_uneven_memory_does_not_cut_rows_unevenly() -> None:
    """TorchRec would train such shards wrongly: see its RwSparseFeaturesDist."""
    cluster = Cluster((RankSpec(10**6), RankSpec(10**5)))
    constraints = {"s": ParameterConstraints(sharding_types=["row_wise"])}
    planner = OperPlanner(cluster=cluster, constraints=constraints)
    plan = planner.plan(MixedModel(a_case()), sharders())
    sizes = [shard.shard_sizes for shard in plan.plan["ec"]["s"].sharding_spec.shards]
    assert sizes == [[SEQUENCE_ROWS // 2, SEQUENCE_DIM]] * 2


def test_wrapped_collections_go_to_their_sharder_whole() -> None:
    processed = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="p", num_embeddings=9, embedding_dim=4, feature_names=["fp"]
                )
            ],
            is_weighted=True,
            device=torch.device("cpu"),
        ),
        PositionWeightedModuleCollection({"fp": 3}),
    )
    model = nn.Module()
    model.bags, model.deep = PooledModel(a_case()), nn.Sequential(nn.Identity(), processed)
    both = [OperSharder(), FeatureProcessedEmbeddingBagCollectionSharder()]
    plan = OperPlanner(cluster=AMPLE).plan(model, both)
    assert {path: list(part) for path, part in plan.plan.items()} == {
        "bags.ebc": ["t", "u"],
        "deep.1": ["p"],
    }
    with pytest.raises(PlanError, match=r"module deep\.1 is of type FeatureProcessed"):
        OperPlanner(cluster=AMPLE).plan(model, [OperSharder()])


def test_a_table_that_torchrec_skips_is_named() -> None:
    constraints = {"s": ParameterConstraints(device_group="cuda")}
    planner = OperPlanner(cluster=AMPLE, constraints=constraints)
    with pytest.raises(PlanError, match="TorchRec's planner left out tables s of ec"):
        planner.plan(MixedModel(a_case()), sharders())


def test_torchrec_wants_hosts_of_one_size() -> None:
    cluster = Cluster((RankSpec(10**6, 0), RankSpec(10**6, 0), RankSpec(10**6, 1)))
    with pytest.raises(PlanError, match=r"which plans ec, wants hosts of one size .* \[0, 0, 1\]"):
        OperPlanner(cluster=cluster).plan(MixedModel(a_case()), sharders())


def test_torchrecs_planner_keeps_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        OperPlanner(cluster=AMPLE).plan(MixedModel(a_case()), sharders())
    assert caplog.records == []
