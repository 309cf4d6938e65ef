"""``OperPlanner``, and a saved plan as ``DistributedModelParallel`` takes it."""

from __future__ import annotations

import pickle
import reprlib
import warnings
from collections.abc import Mapping, Sequence
from typing import get_args

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlanner

from torchrec_oper.errors import OperError, PlanError, UnusedConstraintWarning
from torchrec_oper.planner.adapter.entries import OperShardingPlan, oper_entries
from torchrec_oper.planner.adapter.limits import (
    TorchRecConstraints,
    check_constraints,
    pooling_factors,
    tables_kept_from_oper,
    unused_constraints,
)
from torchrec_oper.planner.adapter.model import EmbeddingModules, read_model
from torchrec_oper.planner.adapter.stock import plan_others
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.demand import Objective
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.planning import DEFAULT_BATCH_SIZE, Request, make_plan
from torchrec_oper.planner.runnable import RUNNABLE
from torchrec_oper.planner.space import SearchSpace
from torchrec_oper.profile import AccessProfile
from torchrec_oper.table import whole_number


class OperPlanner(ShardingPlanner):
    """Places the tables of every ``EmbeddingBagCollection`` that ``OperSharder`` shards.

    Other embedding modules that one of the sharders takes go to TorchRec's
    ``EmbeddingShardingPlanner``, with the memory that is left: the plan holds both. So do
    modules all of whose tables have ``sharding_types`` without ``oper``.

    Args:
        profile: how the input uses the tables; without one, Zipf's law is assumed.
        cluster: the ranks, their memory and speed; by default ``Cluster.detect()``.
        topology: TorchRec's description of the ranks instead, as
            ``Cluster.from_topology`` reads it.
        constraints: limits on single tables: ours, or TorchRec's by the tables' names. Of
            the latter, tables of type ``oper`` follow ``sharding_types`` and, without a
            profile, ``pooling_factors``; an ``UnusedConstraintWarning`` names the rest.
        batch_size: samples of a rank in a step.
        objective: ``train`` or ``infer``.
        space: what may be chosen from; by default ``RUNNABLE``, all that ``OperSharder``
            can run.
        seed: the search's seed; equal input and seed give an equal plan.

    Raises:
        PlanError: an argument is of another kind, or both ``cluster`` and ``topology`` are
            given.
    """

    def __init__(
        self,
        profile: AccessProfile | None = None,
        cluster: Cluster | None = None,
        *,
        topology: Topology | None = None,
        constraints: Constraints | Mapping[str, ParameterConstraints] | None = None,
        batch_size: int = DEFAULT_BATCH_SIZE,
        objective: Objective = "train",
        space: SearchSpace | None = None,
        seed: int = 0,
    ) -> None:
        for name, value, kind in (
            ("profile", profile, AccessProfile),
            ("cluster", cluster, Cluster),
            ("topology", topology, Topology),
            ("space", space, SearchSpace),
        ):
            if value is not None and not isinstance(value, kind):
                found = reprlib.repr(value)
                raise PlanError(f"{name} must be a {kind.__name__} or None, found {found}")
        if cluster is not None and topology is not None:
            raise PlanError("cluster and topology both say what the ranks are: give one of them")
        if objective not in get_args(Objective):
            raise PlanError(f"objective must be train or infer, found {objective!r}")
        check_constraints(constraints)
        self._profile = profile
        self._cluster = cluster if topology is None else Cluster.from_topology(topology)
        self._constraints = constraints
        self._batch_size = whole_number(batch_size, "batch_size", least=1, error=PlanError)
        self._objective = objective
        self._space = space or RUNNABLE
        self._seed = whole_number(seed, "seed", error=PlanError)
        self._warned = ""

    def plan(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
    ) -> OperShardingPlan:
        """The plan for ``module``, made in this process alone.

        Raises:
            PlanError: a module can't be planned, the tables don't fit into memory, or a
                constraint can't be met.
            ProfileError: the profile is of other tables.
        """
        return self._plan_for(module, sharders, self._cluster or Cluster.detect())

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]],
        pg: dist.ProcessGroup | None = None,
    ) -> OperShardingPlan:
        """The plan for ``module``, made on rank 0 of ``pg`` and sent to all its ranks.

        Only rank 0 reads the planner's profile, cluster and constraints.

        Raises:
            PlanError, ProfileError: as ``plan`` does, on every rank.
        """
        if pg is None and not dist.is_initialized():
            return self.plan(module, sharders)
        group = pg if pg is not None else dist.group.WORLD
        assert group is not None
        plan: OperShardingPlan | None = None
        failure: BaseException | None = None
        sent: list[bytes] = [b""]
        if dist.get_rank(group) == 0:
            try:
                plan = self._plan_for_ranks(module, sharders, dist.get_world_size(group))
                sent = [pickle.dumps(plan)]
            except BaseException as error:  # every failure has to reach the waiting ranks
                failure = error
                sent = [pickle.dumps(_describe(error))]
        dist.broadcast_object_list(sent, src=dist.get_global_rank(group, 0), group=group)
        if failure is not None:
            raise failure
        received = plan or pickle.loads(sent[0])
        if not isinstance(received, OperShardingPlan):
            kind, text = received
            raise kind(f"planning failed on rank 0: {text}")
        return received

    def _plan_for_ranks(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]], world_size: int
    ) -> OperShardingPlan:
        cluster = self._cluster or Cluster.detect(world_size)
        if cluster.world_size != world_size:
            raise PlanError(
                f"the cluster has {cluster.world_size} ranks, the process group {world_size}"
            )
        return self._plan_for(module, sharders, cluster)

    def _plan_for(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]], cluster: Cluster
    ) -> OperShardingPlan:
        ours, torchrecs = _told_apart(self._constraints)
        model = read_model(module, sharders, not_oper=tables_kept_from_oper(torchrecs))
        self._warn_of_unused(torchrecs, model)
        request = Request(
            cluster=cluster,
            profile=self._profile,
            objective=self._objective,
            batch_size=self._batch_size,
            space=self._space,
            constraints=ours,
            pooling_factors={} if self._profile else pooling_factors(torchrecs, model.specs),
            seed=self._seed,
        )
        return _joined(make_plan(model.tables, request), model, torchrecs)

    def _warn_of_unused(self, constraints: TorchRecConstraints, model: EmbeddingModules) -> None:
        unused = unused_constraints(constraints, model, profiled=self._profile is not None)
        if unused and unused != self._warned:
            self._warned = unused
            text = f"constraints that tables of type oper don't follow: {unused}"
            warnings.warn(text, UnusedConstraintWarning, stacklevel=4)


def sharding_plan(
    plan: Plan,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    *,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> OperShardingPlan:
    """A plan, a loaded one for example, as ``DistributedModelParallel`` takes it.

    Modules that ``OperSharder`` doesn't take are planned by TorchRec, as ``OperPlanner``
    has it done.

    Args:
        plan: the plan.
        module: the model.
        sharders: what will shard it.
        constraints: TorchRec's, as they were when the plan was made.

    Raises:
        PlanError: the plan doesn't place exactly the tables of ``module`` that
            ``OperSharder`` shards, or places one in a way that it can't run.
    """
    check_constraints(constraints)
    _, torchrecs = _told_apart(constraints)
    model = read_model(module, sharders, not_oper=tables_kept_from_oper(torchrecs))
    plan.check_fits(model.tables)
    return _joined(plan, model, torchrecs)


def _joined(
    plan: Plan, model: EmbeddingModules, constraints: TorchRecConstraints
) -> OperShardingPlan:
    """Our entries, and TorchRec's for the modules that it plans."""
    entries = oper_entries(plan)
    return OperShardingPlan(
        plan={**entries, **plan_others(model.others, plan, constraints)}, oper=plan
    )


def _told_apart(
    constraints: Constraints | TorchRecConstraints | None,
) -> tuple[Constraints, TorchRecConstraints]:
    """The constraints by whose they are; those of the other kind are empty."""
    if constraints is None:
        return Constraints(), {}
    if isinstance(constraints, Constraints):
        return constraints, {}
    return Constraints(), constraints


def _describe(error: BaseException) -> tuple[type[OperError], str]:
    """What the other ranks raise: our own errors as they are, others as a PlanError."""
    if isinstance(error, OperError):
        return type(error), str(error)
    return PlanError, f"{type(error).__name__}: {error}"
