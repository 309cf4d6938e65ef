"""Which table costs what on which rank, what binds, and what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Floats, TableDemand
from torchrec_oper.planner.demands import table_demands
from torchrec_oper.planner.judge import RankLoads, Traffic, decision_loads, rank_seconds
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.rates import Link, Rates
from torchrec_oper.planner.readable import (
    bytes_text,
    count,
    part_name,
    percent,
    seconds_text,
    table_of,
    time_unit,
)
from torchrec_oper.planner.report import (
    WORTH_NAMING,
    binding_proof,
    cost_lines,
    owner_cuts,
    owners_text,
)
from torchrec_oper.profile import AccessProfile

# By how much a part of the machine is made better to see what that would help.
BETTER = 0.1

# Gains below this share of a step aren't worth a line.
LEAST_GAIN = 5e-4

# The judge's seconds may differ so much from the plan's by rounding.
ROUNDING = 1e-6


@dataclass(frozen=True)
class TableShare:
    """What one table costs.

    Args:
        key: the table's path in the model.
        placed: its exchange, hot rows and owners in words.
        mean_s: seconds by part of the step, the mean over ranks.
        busiest_s: the same on the plan's slowest rank.
    """

    key: str
    placed: str
    mean_s: Mapping[str, float]
    busiest_s: Mapping[str, float]


@dataclass(frozen=True)
class Remedy:
    """A change of the machine and what it would save.

    Args:
        change: the change in words.
        saves: the share that it saves of what ``of`` names.
        of: ``step``: of the cost of this placement, as it is; ``bound``: of the least that
            any plan costs, at most.
    """

    change: str
    saves: float
    of: Literal["step", "bound"]

    def told(self) -> str:
        """The remedy in words."""
        if self.of == "step":
            return f"{self.change}: the step is {percent(self.saves)} shorter"
        return f"{self.change}: the bound falls by {percent(self.saves)} at most"


@dataclass(frozen=True, eq=False)
class Explanation:
    """Where the seconds of a plan come from.

    The parts of all tables on the slowest rank, with ``latency_s``, add up to its seconds:
    where a rank sends and receives at the same time, the longer of both counts, and tables
    have their share of that.

    Args:
        plan: the plan.
        busiest_rank: its slowest rank.
        latency_s: seconds that start the phases; tables share them.
        tables: the most expensive on the slowest rank first.
        remedies: what would help, most first.
        judged_s: the slowest rank's seconds as the judge has them for these demands.
    """

    plan: Plan
    busiest_rank: int
    latency_s: float
    tables: tuple[TableShare, ...]
    remedies: tuple[Remedy, ...]
    judged_s: float

    @property
    def agrees(self) -> bool:
        """Whether the demands give the seconds that the plan says."""
        return abs(self.judged_s - self.plan.cost_s) <= ROUNDING * self.plan.cost_s

    def text(self, *, most: int = 20) -> str:
        """The explanation for people, with ``most`` tables."""
        lines = [f"plan {self.plan.content_hash[:12]}: {self.plan.workload.told()}"]
        lines += cost_lines(self.plan)
        if not self.agrees:
            lines.append(
                f"note: the tables' demands are not those of the plan: the judge finds"
                f" {seconds_text(self.judged_s)} for them"
            )
        lines += ["", *self._table_lines(most), "", "what would help:"]
        lines += [f"  {remedy.told()}" for remedy in self.remedies] or ["  nothing by itself"]
        lines += [
            f"  table {name} cut finer or with hot rows: its busiest owner has"
            f" {percent(weight)} of the weight in the bound's proof"
            for name, weight in owner_cuts(self.plan)[:5]
            if weight >= WORTH_NAMING
        ]
        lines.append("gains of the step are of this placement as it is; a new plan may gain more")
        return "\n".join(lines)

    def _table_lines(self, most: int) -> list[str]:
        parts = [n for n in self.tables[0].busiest_s if any(t.busiest_s[n] for t in self.tables)]
        unit = time_unit([self.judged_s])
        shown, rest = self.tables[:most], self.tables[most:]
        rows: list[Sequence[object]] = [
            [
                table.key,
                table.placed,
                unit.text(sum(table.busiest_s.values())),
                _share(sum(table.busiest_s.values()) / self.judged_s),
                *(unit.text(table.busiest_s[part]) for part in parts),
                unit.text(sum(table.mean_s.values())),
            ]
            for table in shown
        ]
        if rest:
            rows.append(self._sum_row("... " + count(len(rest), "other table"), rest, parts))
        started = ["" for _ in parts]
        share = _share(self.latency_s / self.judged_s)
        latency = unit.text(self.latency_s)
        rows.append(["(latency)", "shared by all tables", latency, share, *started, latency])
        titles = ["table", "placed", f"rank {self.busiest_rank} {unit.name}", "share"]
        titles += map(part_name, parts)
        return [
            f"where the time of rank {self.busiest_rank}, the slowest, goes, and the mean's:",
            table_of([*titles, f"mean {unit.name}"], rows),
        ]

    def _sum_row(
        self, name: str, tables: Sequence[TableShare], parts: Sequence[str]
    ) -> list[object]:
        unit = time_unit([self.judged_s])
        sums = {part: sum(table.busiest_s[part] for table in tables) for part in parts}
        mean_s = sum(sum(table.mean_s.values()) for table in tables)
        total = sum(sums.values())
        shown = [unit.text(seconds) for seconds in sums.values()]
        return [
            name,
            "",
            unit.text(total),
            _share(total / self.judged_s),
            *shown,
            unit.text(mean_s),
        ]

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON values; seconds and shares."""
        plan = self.plan
        return {
            "plan": plan.content_hash,
            "cost_s": plan.cost_s,
            "bound_s": plan.bound_s,
            "gap": plan.gap,
            "judged_s": self.judged_s,
            "busiest_rank": self.busiest_rank,
            "latency_s": self.latency_s,
            "rank_s": list(plan.rank_s),
            "memory_bytes": list(plan.memory_bytes),
            "tables": [
                {
                    "table": table.key,
                    "placed": table.placed,
                    "mean_s": dict(table.mean_s),
                    "busiest_s": dict(table.busiest_s),
                }
                for table in self.tables
            ],
            "remedies": [
                {"change": one.change, "saves": one.saves, "of": one.of} for one in self.remedies
            ],
            "owner_cuts": [{"table": name, "weight": w} for name, w in owner_cuts(plan)],
        }


def plan_demands(plan: Plan, profile: AccessProfile | None) -> list[TableDemand]:
    """What the plan's tables ask of a rank in a step.

    Args:
        plan: the plan.
        profile: the one that the plan was made with; None where it was made without.

    Raises:
        PlanError: it is another profile.
        ProfileError: it is a profile of other tables.
    """
    specs = [placement.table for placement in plan.placements]
    wanted, found = plan.workload.profile_hash, profile.content_hash if profile else None
    if wanted != found:
        with_one = f"with profile {wanted[:12]}" if wanted else "without a profile"
        given = f"the one given is {found[:12]}" if found else "none is given"
        raise PlanError(f"the plan was made {with_one}, but {given}; use what it was made with")
    if profile is not None:
        profile.check_fits(specs)
    return table_demands(specs, profile, plan.workload)


def explain(plan: Plan, demands: Sequence[TableDemand]) -> Explanation:
    """Where the seconds of a plan come from, by the judge's count.

    Args:
        plan: the plan.
        demands: of its tables, in order, as ``plan_demands`` gives them.

    Raises:
        PlanError: a demand doesn't fit its table's placement.
    """
    cluster, objective = plan.cluster, plan.workload.objective
    loads = [
        decision_loads(placement.decision, demand, cluster, objective)
        for placement, demand in zip(plan.placements, demands, strict=True)
    ]
    total = RankLoads.total(loads, cluster.world_size)
    seconds = rank_seconds(total, cluster)
    busiest = int(np.argmax(plan.rank_s))
    tables = []
    for placement, table_loads in zip(plan.placements, loads, strict=True):
        parts = _parts(table_loads, total, cluster)
        tables.append(
            TableShare(
                key=placement.key,
                placed=_placed(placement.decision.exchange, placement.decision.hot_rows)
                + owners_text(placement, most=4),
                mean_s={name: float(values.mean()) for name, values in parts.items()},
                busiest_s={name: float(values[busiest]) for name, values in parts.items()},
            )
        )
    tables.sort(key=lambda table: -sum(table.busiest_s.values()))
    remedies = [*_faster(plan, demands, loads, total), *_more_memory(plan)]
    return Explanation(
        plan=plan,
        busiest_rank=busiest,
        latency_s=float(seconds.latency[busiest]),
        tables=tuple(tables),
        remedies=tuple(sorted(remedies, key=lambda remedy: -remedy.saves)),
        judged_s=float(seconds.total.max()),
    )


def _share(share: float) -> str:
    return f"{share:.1%}"


def _placed(exchange: str, hot_rows: int) -> str:
    hot = f" + {hot_rows:,} hot" if hot_rows and exchange != "replicated" else ""
    return f"{exchange}{hot}, "


def _parts(loads: RankLoads, total: RankLoads, cluster: Cluster) -> dict[str, Floats]:
    """[W] seconds of each part that a table's loads bring to every rank, out of all loads."""
    return {
        "memory": loads.memory_s / cluster.speeds,
        "shards": loads.shard_s,
        "ids": _link_s(loads.ids, total.ids, cluster.rates),
        "forward": _link_s(loads.forward, total.forward, cluster.rates),
        "backward": _link_s(loads.backward, total.backward, cluster.rates),
        "allreduce": loads.allreduce_s,
    }


def _link_s(traffic: Traffic, total: Traffic, rates: Rates) -> Floats:
    """[W] a table's seconds in the direction that takes longer over all tables."""
    sends_more = total.sent_intra >= total.received_intra
    intra = np.where(sends_more, traffic.sent_intra, traffic.received_intra)
    sends_more = total.sent_inter >= total.received_inter
    inter = np.where(sends_more, traffic.sent_inter, traffic.received_inter)
    seconds: Floats = intra / rates.intra_host.bytes_per_s + inter / rates.inter_host.bytes_per_s
    return seconds


def _faster(
    plan: Plan, demands: Sequence[TableDemand], loads: Sequence[RankLoads], total: RankLoads
) -> list[Remedy]:
    """What the placement as it is gains from each part of the machine that gets better."""
    cluster, rates = plan.cluster, plan.cluster.rates
    before_s = float(rank_seconds(total, cluster).total.max())
    hot = [n for n, p in enumerate(plan.placements) if p.decision.hot_rows]
    other_s = total.allreduce_s - sum(
        (loads[n].allreduce_s for n in hot), np.zeros(cluster.world_size)
    )

    def with_links(changed: Rates) -> float:
        """The step's seconds with other links; how hot rows are summed depends on them."""
        machine = replace(cluster, rates=changed)
        allreduce_s = other_s + sum(
            (
                decision_loads(
                    plan.placements[n].decision, demands[n], machine, plan.workload.objective
                ).allreduce_s
                for n in hot
            ),
            np.zeros(cluster.world_size),
        )
        changed_loads = replace(total, allreduce_s=np.maximum(allreduce_s, 0.0))
        return float(rank_seconds(changed_loads, machine).total.max())

    def faster(link: Link) -> Link:
        return Link(link.latency_s, link.bytes_per_s * (1 + BETTER))

    def sooner(link: Link) -> Link:
        return Link(link.latency_s * (1 - BETTER), link.bytes_per_s)

    memory = replace(total, memory_s=total.memory_s / (1 + BETTER))
    shards = replace(total, shard_s=total.shard_s * (1 - BETTER))
    by = f"{BETTER:.0%}"
    after_s = {
        f"rows read and updated {by} faster": float(rank_seconds(memory, cluster).total.max()),
        f"{by} less overhead of a piece": float(rank_seconds(shards, cluster).total.max()),
        f"links within a host {by} faster": with_links(
            replace(rates, intra_host=faster(rates.intra_host))
        ),
        f"links between hosts {by} faster": with_links(
            replace(rates, inter_host=faster(rates.inter_host))
        ),
        f"{by} less latency": with_links(
            replace(rates, intra_host=sooner(rates.intra_host), inter_host=sooner(rates.inter_host))
        ),
    }
    remedies = [
        Remedy(change, 1 - seconds / before_s, "step") for change, seconds in after_s.items()
    ]
    return [remedy for remedy in remedies if remedy.saves >= LEAST_GAIN]


def _more_memory(plan: Plan) -> list[Remedy]:
    """What the bound's proof says of memory: how fast the bound falls as caps rise.

    The bound is convex in the caps, so that it falls by no more than its slope says.
    """
    proof = binding_proof(plan)
    if proof is None or not proof.multipliers.memory.any() or not plan.bound_s:
        return []
    caps = plan.cluster.memory_bytes
    more = float(caps.mean()) * BETTER
    fall_s = float(proof.multipliers.memory.sum()) * more
    change = f"{bytes_text(more)} more memory for each rank ({BETTER:.0%})"
    return [Remedy(change, min(fall_s / plan.bound_s, 1.0), "bound")]
