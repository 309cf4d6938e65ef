"""The planner's core: candidates, bound, rounding, placing, pouring, moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.bound import Problem, certified_bound
from torchrec_oper.planner.certificate import Certificate
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Objective, TableDemand
from torchrec_oper.planner.rank_classes import rank_classes
from torchrec_oper.planner.search.effort import effort_for
from torchrec_oper.planner.search.improve import search
from torchrec_oper.planner.space import SearchSpace
from torchrec_oper.planner.summary import all_undominated, summarise
from torchrec_oper.planner.units import Unit, units


@dataclass(frozen=True, eq=False)
class Outcome:
    """What the search found.

    Args:
        decisions: how each table is placed, in the order of the demands.
        cost_s: predicted seconds of the slowest rank in a step.
        certificate: the proof of ``bound_s``, which holds with constraints or without.
        space: what the search could choose from, and the bound is for.
    """

    decisions: tuple[Decision, ...]
    cost_s: float
    certificate: Certificate
    space: SearchSpace

    @property
    def bound_s(self) -> float:
        """Seconds that no plan of the space stays below; not above ``cost_s``."""
        return self.certificate.bound_s

    @property
    def gap(self) -> float:
        """How far the cost may be above the best: ``cost_s / bound_s - 1``."""
        return self.cost_s / self.bound_s - 1 if self.bound_s else 0.0


def optimize(
    demands: Sequence[TableDemand],
    cluster: Cluster,
    *,
    objective: Objective = "train",
    space: SearchSpace | None = None,
    constraints: Constraints | None = None,
    seed: int = 0,
) -> Outcome:
    """Place the tables so that the slowest rank is fast, and prove how near that is to the best.

    Equal input gives an equal outcome: nothing depends on time, threads or hashes.

    Args:
        demands: the tables and what a step asks of them, with unique names.
        cluster: the ranks.
        objective: ``train``: lookups, gradients and updates; ``infer``: lookups alone.
        space: what may be chosen from; by default everything, in steps that suit the
            number of tables.
        constraints: limits on single tables.
        seed: of the search's moves.

    Raises:
        PlanError: the tables don't fit, or the constraints can't be met.
    """
    if not demands:
        raise PlanError("there are no tables to plan")
    space = space or default_space(len(demands))
    constraints = constraints or Constraints()
    made = units(demands, cluster, objective, space, constraints)
    problem = _problem(made, demands, cluster, objective)
    found = search(
        problem,
        [unit.owners for unit in made],
        [unit.banned for unit in made],
        effort_for(len(made), cluster.world_size),
        seed,
    )
    if constraints != Constraints():
        # The bound is of all plans, so that it can be checked without the constraints.
        free = units(demands, cluster, objective, space, Constraints())
        problem = _problem(free, demands, cluster, objective)
    certificate = certified_bound(problem, found.cost_s)
    decisions: dict[int, Decision] = {}
    for unit, decision in zip(made, found.decisions, strict=True):
        for number in unit.tables:
            decisions[number] = unit.fixed or _for_table(decision, demands[number])
    ordered = tuple(decisions[number] for number in range(len(demands)))
    return Outcome(ordered, found.cost_s, certificate, space)


def _for_table(decision: Decision, demand: TableDemand) -> Decision:
    """A unit's decision for one of its tables, which may have other rows to replicate."""
    if decision.exchange != "replicated":
        return decision
    return replace(decision, hot_rows=demand.table.rows)


def default_space(tables: int) -> SearchSpace:
    """The space that suits a number of tables: coarser steps for many."""
    if tables <= 300:
        return SearchSpace()
    return SearchSpace(hot_step=4, fine_parts=tables <= 700)


def _problem(
    made: Sequence[Unit],
    demands: Sequence[TableDemand],
    cluster: Cluster,
    objective: Objective,
) -> Problem:
    """The candidates with what the bound and the search need to know of them.

    Raises:
        PlanError: a table fits into no rank however it is cut.
    """
    classes = rank_classes(cluster)
    # Equal tables share their candidates, and so their summary.
    known = {id(unit.candidates): unit.candidates for unit in made}
    summary_of = {key: summarise(one, cluster, classes) for key, one in known.items()}
    summaries = tuple(summary_of[id(unit.candidates)] for unit in made)
    most = classes.memory_bytes.max()
    usable = tuple(
        unit.allowed & (summary.busiest_bytes <= most)
        for unit, summary in zip(made, summaries, strict=True)
    )
    for unit, summary, mask in zip(made, summaries, usable, strict=True):
        if not mask.any():
            names = ", ".join(demands[number].table.name for number in unit.tables)
            least = float(summary.busiest_bytes[unit.allowed].min())
            raise PlanError(
                f"table {names} needs {least:.0f} bytes on some rank however it is cut, but the"
                f" largest rank has {most:.0f}; give the ranks {least - most:.0f} bytes more, use"
                " more ranks, or shrink the table"
            )
    return Problem(
        candidates=tuple(unit.candidates for unit in made),
        summaries=summaries,
        cluster=cluster,
        classes=classes,
        objective=objective,
        usable=usable,
        useful=tuple(all_undominated(summaries, usable, cluster, classes)),
    )
