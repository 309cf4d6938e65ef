"""OperPlanner under TorchRec's topology and constraints: what counts, what is told of the rest."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import CustomTopologyData

from torchrec_oper import AccessProfile, Cluster, Constraints, OperPlanner, OperSharder
from torchrec_oper.errors import PlanError, UnusedConstraintWarning
from torchrec_oper.planner import Decision, OperShardingPlan, SearchSpace, sharding_plan

CLUSTER = Cluster.uniform(2, memory_bytes=10**9)


class Model(nn.Module):
    """Two collections: tables a and b, and table c of two features."""

    def __init__(self) -> None:
        super().__init__()
        self.first = collection(("a", ["fa"]), ("b", ["fb"]))
        self.second = collection(("c", ["fc", "fd"]))


def collection(*tables: tuple[str, list[str]]) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=200, embedding_dim=32, feature_names=features)
        for name, features in tables
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def planned(constraints: Any = None, **fields: Any) -> OperShardingPlan:
    planner = OperPlanner(**{"cluster": CLUSTER, "constraints": constraints, **fields})
    return planner.plan(Model(), [OperSharder()])


def told(constraints: Any, **fields: Any) -> list[str]:
    """What the planner warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned(constraints, **fields)
    return [str(one.message) for one in caught if one.category is UnusedConstraintWarning]


def test_our_constraints_hold() -> None:
    uneven = Decision("partial", 0, np.array([[1, 0]]), np.array([0.25, 0.75]))
    plan = planned(Constraints(fixed={"a": uneven}, not_on={"b": [1]}, together=(("b", "c"),))).oper
    assert plan.placement("first", "a").owned_rows.tolist() == [150, 50]
    assert plan.placement("first", "b").owned_rows.tolist() == [200, 0]
    assert plan.placement("second", "c").owned_rows.tolist() == [200, 0]
    with pytest.raises(PlanError, match="a constraint names table x, which there isn't"):
        planned(Constraints(not_on={"x": [1]}))


def test_pooling_factors_count_without_a_profile() -> None:
    def lookups_cost_s(**factors: list[float]) -> float:
        return planned(
            {name: ParameterConstraints(pooling_factors=many) for name, many in factors.items()}
        ).oper.cost_s

    assert lookups_cost_s(a=[50.0], c=[30.0, 50.0]) > 2 * lookups_cost_s()
    assert lookups_cost_s(c=[30.0, 50.0]) == lookups_cost_s(c=[40.0, 40.0])
    with pytest.raises(PlanError, match="table c: 1 pooling_factors for 2 features; give one for"):
        lookups_cost_s(c=[30.0])
    with pytest.raises(PlanError, match="table a: a pooling factor must be a finite number of 0"):
        lookups_cost_s(a=[-1.0])


def test_every_field_that_is_not_used_is_named_with_its_tables() -> None:
    constraints = {
        "a": ParameterConstraints(min_partition=8, sharding_types=["row_wise", "oper"]),
        "b": ParameterConstraints(
            min_partition=8, compute_kernels=["dense"], device_group="cuda", is_weighted=True
        ),
        "c": ParameterConstraints(
            pooling_factors=[2.0, 2.0], compute_kernels=["fused"], device_group="cpu"
        ),
        "x": ParameterConstraints(min_partition=4),
    }
    text = (
        "constraints that tables of type oper don't follow: min_partition of tables a, b;"
        " compute_kernels of table b; is_weighted of table b; device_group of table b;"
        " all for table x, which the model lacks"
    )
    assert told(constraints) == [text]
    assert told({"a": ParameterConstraints(), "c": constraints["c"]}) == []
    batch = KeyedJaggedTensor(
        keys=["fa", "fb", "fc", "fd"], values=torch.arange(4), lengths=torch.ones(4).int()
    )
    configs = [
        config for one in (Model().first, Model().second) for config in one.embedding_bag_configs()
    ]
    whole = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    profile = AccessProfile.from_batches([batch], whole)
    (line,) = told({"c": constraints["c"]}, profile=profile)
    assert line.endswith("follow: pooling_factors of table c")


def test_each_planner_tells_once() -> None:
    planner = OperPlanner(cluster=CLUSTER, constraints={"a": ParameterConstraints(min_partition=8)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            planner.plan(Model(), [OperSharder()])
    assert [one.category for one in caught if "constraints" in str(one.message)] == [
        UnusedConstraintWarning
    ]
    assert caught[0].filename == __file__


def test_a_module_kept_from_oper_goes_to_torchrec() -> None:
    constraints = {
        name: ParameterConstraints(sharding_types=["table_wise"], min_partition=8)
        for name in ("a", "b")
    }
    assert told(constraints) == []
    plan = planned(constraints)
    types = {
        name: entry.sharding_type for part in plan.plan.values() for name, entry in part.items()
    }
    assert types == {"a": "table_wise", "b": "table_wise", "c": "oper"}
    assert [p.key for p in plan.oper.placements] == ["second.c"]
    report = plan.report()
    assert report.startswith(plan.oper.report())
    assert re.search(r"placed by TorchRec's planner:\n.*\n.*\nfirst.a +table_wise +\d\n", report)
    again = sharding_plan(plan.oper, Model(), [OperSharder()], constraints=constraints)
    assert again.plan == plan.plan
    with pytest.raises(PlanError, match="leaves out table a of module first"):
        sharding_plan(plan.oper, Model(), [OperSharder()])


def test_a_table_can_not_leave_its_module() -> None:
    with pytest.raises(
        PlanError,
        match="module first: the constraints keep tables b from sharding type oper, but not a",
    ):
        planned({"b": ParameterConstraints(sharding_types=["table_wise"])})
    everything = {n: ParameterConstraints(sharding_types=["table_wise"]) for n in ("a", "b", "c")}
    with pytest.raises(PlanError, match="no table for OperSharder, only modules that TorchRec"):
        planned(everything)


def test_a_topology_in_place_of_a_cluster() -> None:
    topology = Topology(2, "cpu", ddr_cap=10**7, ddr_mem_bw=1e6)
    plan = planned(cluster=None, topology=topology).oper
    assert plan.cluster == Cluster.from_topology(topology)
    with pytest.raises(PlanError, match="cluster and topology both say what the ranks are"):
        planned(topology=topology)
    caps = CustomTopologyData({"ddr_cap": [10**5, 10**4]}, world_size=2)
    uneven = Topology(2, "cpu", custom_topology_data=caps)
    small = planned(cluster=None, topology=uneven, batch_size=8).oper
    assert [rank.memory_bytes for rank in small.cluster.ranks] == [10**5, 10**4]
    assert small.memory_bytes[1] <= 10**4


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (SearchSpace(exchanges=("rows",)), "table a has exchange rows; table b has exchange rows;"),
        (SearchSpace(exchanges=("replicated",)), "table a has exchange replicated;"),
    ],
)
def test_a_plan_that_can_not_run_is_refused_by_name(space: SearchSpace, message: str) -> None:
    with pytest.raises(PlanError, match=f"OperSharder can't run this plan: {message}") as caught:
        planned(space=space)
    assert "It runs the exchanges partial and whole, with whole rows" in str(caught.value)
