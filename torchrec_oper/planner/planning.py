"""From tables, profile and cluster to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.deal import apportioned, deal
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Objective, TableDemand
from torchrec_oper.planner.demands import SKEW, table_demands
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.planner.optimize import Outcome, default_space, optimize
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.plan import Plan, Workload
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.planner.space import SearchSpace
from torchrec_oper.profile import AccessProfile, TableAccess
from torchrec_oper.table import TableSpec, check_unique_names, whole_number

DEFAULT_BATCH_SIZE = 512  # TorchRec's planner assumes the same


@dataclass(frozen=True)
class Request:
    """What a plan is to be made for.

    Args:
        cluster: the ranks.
        profile: how the input uses the tables; without one a Zipf law is assumed.
        objective: ``train`` or ``infer``.
        batch_size: samples of a rank in a step.
        space: what may be chosen from; by default everything.
        constraints: limits on single tables.
        pooling_factors: ids of a bag by table name, where there is no profile; by default 1.
        seed: of the search, and of the order of rows that are used alike.

    Raises:
        PlanError: for a value of another kind, a batch size below 1, or a seed below 0.
    """

    cluster: Cluster
    profile: AccessProfile | None = None
    objective: Objective = "train"
    batch_size: int = DEFAULT_BATCH_SIZE
    space: SearchSpace | None = None
    constraints: Constraints = field(default_factory=Constraints)
    pooling_factors: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        kinds: tuple[tuple[str, object, type], ...] = (
            ("cluster", self.cluster, Cluster),
            ("profile", self.profile, AccessProfile),
            ("space", self.space, SearchSpace),
            ("constraints", self.constraints, Constraints),
        )
        for name, value, kind in kinds:
            optional = name in ("profile", "space")
            if not isinstance(value, kind) and not (optional and value is None):
                raise PlanError(f"{name} must be a {kind.__name__}, found {value!r}")
        whole_number(self.batch_size, "batch_size", least=1, error=PlanError)
        whole_number(self.seed, "seed", error=PlanError)

    @property
    def workload(self) -> Workload:
        """What the plan will say that it was made for."""
        found = self.profile
        return Workload(
            objective=self.objective,
            batch_size=self.batch_size,
            profile_hash=found.content_hash if found else None,
            skew=None if found else SKEW,
            pooling_factors={} if found else dict(self.pooling_factors),
        )


def make_plan(tables: Sequence[tuple[str, TableSpec]], request: Request) -> Plan:
    """The plan for tables, each given with the path of its module in the model.

    Raises:
        PlanError: the tables don't fit into memory, or a constraint can't be met.
        ProfileError: the profile is of other tables.
    """
    specs = [table for _, table in tables]
    check_unique_names(specs)
    if request.profile is not None:
        request.profile.check_fits(specs)
    check_total_memory(specs, request.cluster, request.objective)
    demands = table_demands(specs, request.profile, request.workload)
    accesses = [_access(spec, request.profile) for spec in specs]
    outcome = _optimum(demands, request, 0.0)
    certificate = outcome.certificate  # of all the memory, whatever is left alone below
    # Rows are whole, so that a rank may take a few more than its share.
    for spare in (0.002, 0.02, None):
        placements = tuple(
            _placed(path, access, demand, decision, request)
            for (path, _), access, demand, decision in zip(
                tables, accesses, demands, outcome.decisions, strict=True
            )
        )
        if spare is None or _fits(placements, request):
            break
        outcome = _optimum(demands, request, spare)
    verdict = expected_cost(outcome.decisions, demands, request.cluster, request.objective)
    return Plan(
        placements=placements,
        cluster=request.cluster,
        workload=request.workload,
        seconds={name: tuple(part.tolist()) for name, part in verdict.seconds.parts.items()},
        certificate=certificate,
        space=outcome.space,
        seed=request.seed,
    )


def _optimum(demands: Sequence[TableDemand], request: Request, spare: float) -> Outcome:
    """The search's outcome with a part of the memory left alone."""
    ranks = tuple(
        replace(rank, memory_bytes=rank.memory_bytes - int(rank.memory_bytes * spare))
        for rank in request.cluster.ranks
    )
    return optimize(
        demands,
        replace(request.cluster, ranks=ranks),
        objective=request.objective,
        space=request.space or default_space(len(demands)),
        constraints=request.constraints,
        seed=request.seed,
    )


def _fits(placements: Sequence[TablePlacement], request: Request) -> bool:
    training = request.objective == "train"
    needs = np.sum([p.rank_bytes(optimizer=training) for p in placements], axis=0, dtype=np.float64)
    return bool((needs <= request.cluster.memory_bytes).all())


def _access(spec: TableSpec, profile: AccessProfile | None) -> TableAccess:
    if profile is not None:
        return profile.table(spec.name)
    none = np.empty(0, dtype=np.int64)
    return TableAccess(spec.name, spec.rows, spec.features, none, none, bags=0, empty_bags=0)


def _placed(
    module: str, access: TableAccess, demand: TableDemand, decision: Decision, request: Request
) -> TablePlacement:
    row_map = _in_order_of_owners(deal(access, decision, seed=request.seed), decision)
    lookups = np.zeros(request.cluster.world_size, dtype=np.int64)
    if decision.parts:
        owners = decision.owners[:, np.argsort(decision.owners[0], kind="stable")]
        lookups[owners] = _served(row_map, access, decision.parts)
    return TablePlacement(module, demand.table, decision, row_map, lookups)


def _in_order_of_owners(row_map: RowMap, decision: Decision) -> RowMap:
    """The map with its parts renumbered by the rank that owns them; hot rows stay last."""
    if decision.parts < 2:
        return row_map
    rank = np.empty(row_map.world_size, dtype=np.int64)
    rank[np.argsort(decision.owners[0], kind="stable")] = np.arange(decision.parts)
    rank[decision.parts :] = np.arange(decision.parts, row_map.world_size)
    parts, slots = row_map.place(row_map.listed_ids)
    order = np.lexsort((slots, parts))
    listed = np.bincount(parts, minlength=row_map.world_size)
    unlisted = np.empty(row_map.world_size, dtype=np.int64)
    unlisted[rank] = row_map.owned_rows - listed
    return RowMap.from_owners(
        listed_ids=row_map.listed_ids[order],
        listed_owners=rank[parts[order]],
        unlisted_counts=unlisted,
    )


def _served(row_map: RowMap, access: TableAccess, parts: int) -> Ints:
    """[parts] lookups of the profiled data that each part gets; hot rows aside."""
    owners, _ = row_map.place(access.ids)
    served = np.zeros(row_map.world_size, dtype=np.int64)
    np.add.at(served, owners, access.counts)
    listed = np.bincount(owners, minlength=row_map.world_size)
    unlisted = (row_map.owned_rows - listed).astype(np.float64)
    tail = int(access.lookups - access.counts.sum())
    if tail:
        served += apportioned(tail, unlisted / unlisted.sum())
    return served[:parts]


def check_total_memory(specs: Sequence[TableSpec], cluster: Cluster, objective: Objective) -> None:
    """Check that the ranks have room for every row once.

    Raises:
        PlanError: they lack it; says how much, which tables are large, and what would do.
    """
    training = objective == "train"
    sizes = {
        spec.name: spec.rows * (spec.stored_row_bytes if training else spec.row_bytes)
        for spec in specs
    }
    need, have = sum(sizes.values()), sum(rank.memory_bytes for rank in cluster.ranks)
    if need <= have:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} ({sizes[name]} bytes)" for name in largest)
    missing = need - have
    each = -(-missing // cluster.world_size)
    more = -(-need * cluster.world_size // have) - cluster.world_size
    raise PlanError(
        f"the tables need {need} bytes{' with optimizer state' if training else ''}, but the"
        f" {cluster.world_size} ranks' caps add up to {have} bytes, {missing} too few; the largest"
        f" tables are {named}; give each rank {each} bytes more, or add {more} such ranks, or"
        " shrink the tables"
    )
