"""Random small planning problems, and plans for them that the search had no part in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from torchrec_oper.planner.bound import Problem
from torchrec_oper.planner.candidates import Candidates, list_candidates
from torchrec_oper.planner.cluster import Cluster, Link, RankSpec, Rate, Rates
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Objective, TableDemand
from torchrec_oper.planner.judge import RankLoads, Verdict, decision_loads, verdict
from torchrec_oper.planner.optimize import _problem
from torchrec_oper.planner.space import SearchSpace
from torchrec_oper.planner.units import units
from torchrec_oper.planner.zipf import zipf_blocks
from torchrec_oper.table import TableSpec

AMPLE = 10**12
NOBODY = np.empty((1, 0), dtype=np.int64)


@dataclass(frozen=True)
class Case:
    """One planning problem."""

    demands: tuple[TableDemand, ...]
    cluster: Cluster
    objective: Objective = "train"
    space: SearchSpace = SearchSpace()  # noqa: RUF009 (frozen)

    @property
    def world_size(self) -> int:
        return self.cluster.world_size

    def candidates(self) -> list[Candidates]:
        return [
            list_candidates(demand, self.cluster, self.objective, self.space)
            for demand in self.demands
        ]


def table_demand(
    name: str = "t",
    *,
    rows: int = 64,
    dim: int = 16,
    skew: float = 0.0,
    lookups: float = 100.0,
    lengths: dict[float, float] | None = None,
    pooling: Any = "sum",
    listed_rows: int | None = None,
) -> TableDemand:
    """A table of Zipf's law; ``lengths``: share of bags of each length, by default 1 id."""
    lengths = lengths or {1.0: 1.0}
    mean = sum(length * share for length, share in lengths.items())
    counts, chances = zipf_blocks(rows, skew)
    spec = TableSpec(name, rows, dim, ("f",), pooling=pooling, optimizer_bytes_per_row=4)
    return TableDemand(
        table=spec,
        lookups=lookups,
        bags=lookups / mean,
        bag_lengths=np.array(list(lengths)),
        bag_shares=np.array(list(lengths.values())),
        block_rows=counts,
        block_chances=chances,
        listed_rows=min(rows, 4096) if listed_rows is None else listed_rows,
    )


def rates(
    *, overhead_s: float = 1e-6, inter: float = 2e8, latency_s: float = 1e-6, direct: bool = True
) -> Rates:
    """Rates at which no part of the cost is negligible for tables of ``table_demand``."""
    return Rates(
        read=Rate(((16, 5e8), (256, 4e9))),
        update=Rate(((16, 2e8), (256, 1e9))),
        intra_host=Link(latency_s, 1e9),
        inter_host=Link(2 * latency_s, inter),
        shard_overhead_s=overhead_s,
        shares_memory=direct,
    )


def cluster(
    *hosts: int,
    memory_bytes: int | tuple[int, ...] = AMPLE,
    speeds: tuple[float, ...] = (),
    **of_rates: Any,
) -> Cluster:
    """A rank on each of ``hosts``."""
    sizes = memory_bytes if isinstance(memory_bytes, tuple) else (memory_bytes,) * len(hosts)
    ranks = zip(sizes, hosts, speeds or (1.0,) * len(hosts), strict=True)
    return Cluster(tuple(RankSpec(*rank) for rank in ranks), rates(**of_rates))


HOSTS = [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1)]
LENGTHS: list[dict[float, float]] = [{1: 1}, {1: 1}, {4: 1}, {1: 0.5, 2.5: 0.25, 20: 0.25}]


@st.composite
def demands(draw: st.DrawFn, name: str = "t", *, most_rows: int = 10**5) -> TableDemand:
    """Any table, from all rows alike to nearly all lookups of one row."""
    rows = draw(st.sampled_from([1, 2, 9, 40, 300, 5000, 10**5]).filter(lambda n: n <= most_rows))
    lengths = draw(st.sampled_from(LENGTHS))
    return table_demand(
        name,
        rows=rows,
        dim=draw(st.sampled_from([4, 32, 64])),
        skew=draw(st.sampled_from([0.0, 0.7, 1.3, 3.0])),
        lookups=draw(st.sampled_from([0.0, 3.0, 50.0, 1000.0])),
        lengths=lengths,
        pooling=draw(st.sampled_from(["sum", "mean", "none"])),
        listed_rows=draw(st.sampled_from([min(rows, 20), rows])),
    )


@st.composite
def clusters(draw: st.DrawFn, *, needed_bytes: float = 0.0) -> Cluster:
    """Up to 4 ranks, alike or not, on up to 2 hosts; with ``needed_bytes`` memory may be tight."""
    hosts = draw(st.sampled_from(HOSTS))
    count = len(hosts)
    share = draw(st.sampled_from([1e6, 1e6, 1.3, 0.8])) if needed_bytes else 1e6
    base = max(int(max(needed_bytes, 1e6) * share / count), 1)
    unlike = draw(st.sampled_from(["none", "none", "speed", "memory", "both"]))
    slow = st.sampled_from([1.0, 1.0, 0.25, 3.0])
    speeds = tuple(draw(slow) if unlike in ("speed", "both") else 1.0 for _ in hosts)
    large = st.sampled_from([1, 1, 3])
    sizes = tuple(base * draw(large) if unlike in ("memory", "both") else base for _ in hosts)
    return cluster(
        *hosts,
        memory_bytes=sizes,
        speeds=speeds,
        overhead_s=draw(st.sampled_from([0.0, 1e-7, 2e-5])),
        inter=draw(st.sampled_from([2e8, 3e9])),
        latency_s=draw(st.sampled_from([0.0, 1e-6, 1e-3])),
        direct=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, *, most_tables: int = 4, most_rows: int = 10**5) -> Case:
    """Any small planning problem; memory may be too little."""
    count = draw(st.integers(1, most_tables))
    tables = tuple(draw(demands(f"t{number}", most_rows=most_rows)) for number in range(count))
    needed = sum(float(d.table.rows) * d.table.stored_row_bytes for d in tables)
    return Case(
        tables, draw(clusters(needed_bytes=needed)), draw(st.sampled_from(["train", "infer"]))
    )


def random_decision(
    candidates: Candidates, number: int, world_size: int, rng: np.random.Generator
) -> Decision:
    """A candidate on random ranks, its rows dealt unevenly half of the time it may be."""
    columns, parts = int(candidates.columns[number]), int(candidates.parts[number])
    hot_rows = int(candidates.hot_rows[number])
    if not parts:
        return Decision("replicated", hot_rows, NOBODY)
    owners = rng.permutation(world_size)[: columns * parts].reshape(columns, parts)
    weights = None
    if candidates.linear[number] and rng.random() < 0.5:
        weights = rng.dirichlet(np.full(parts, rng.choice([0.1, 1.0, 10.0])))
        weights = np.where(rng.random(parts) < 0.3, 0.0, weights) + 1e-12 * (rng.random() < 0.5)
        weights = weights / weights.sum() if weights.sum() else np.eye(parts)[0]
    return Decision(candidates.exchange[number], hot_rows, owners, weights)


def problem_of(case: Case) -> Problem:
    """The case as the search and the bound see it, without constraints.

    Raises:
        PlanError: a table fits into no rank.
    """
    made = units(case.demands, case.cluster, case.objective, case.space, Constraints())
    return _problem(made, case.demands, case.cluster, case.objective)


class RandomPlans:
    """Random plans for a case, judged by the judge alone."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        self.candidates = case.candidates()

    def decision(self, table: int) -> tuple[Decision, RankLoads]:
        """Any way to place a table, and its loads."""
        candidates = self.candidates[table]
        number = int(self.rng.integers(len(candidates)))
        made = random_decision(candidates, number, self.case.world_size, self.rng)
        return made, decision_loads(
            made, self.case.demands[table], self.case.cluster, self.case.objective
        )

    def verdict(self, plan: list[tuple[Decision, RankLoads]]) -> Verdict:
        loads = RankLoads.total([loads for _, loads in plan], self.case.world_size)
        return verdict(loads, self.case.cluster)

    def costs(self, *, starts: int, tries: int) -> list[float]:
        """The costs of plans that fit: random ones, and better ones next to each."""
        found = []
        for _ in range(starts):
            plan = [self.decision(table) for table in range(len(self.case.demands))]
            now = self.verdict(plan)
            for _ in range(tries):
                if now.feasible:
                    found.append(now.cost_s)
                table = int(self.rng.integers(len(plan)))
                other = [*plan[:table], self.decision(table), *plan[table + 1 :]]
                then = self.verdict(other)
                if (len(then.over_memory), then.cost_s) < (len(now.over_memory), now.cost_s):
                    plan, now = other, then
        return found
