"""A certified lower bound on the cost of every plan of a search space.

The relaxation bounds every plan. Leaving out the candidates that no plan of cost C or
less can use bounds those plans better: the best plan costs at least
``min(C, relaxation(C))``, so the largest C that the relaxation still reaches is a bound,
found by bisection. A candidate can't be used where its busiest owner, with the least
that all other tables put on every rank, costs more than C.

Latency is paid once for each phase that is used at all, so the plans fall into cases:
those without replicas, which spare the all-reduce, those with, and the one plan that
replicates everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchrec_oper.planner.candidates import PHASES, Candidates
from torchrec_oper.planner.certificate import Certificate, Multipliers, Proof
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Objective
from torchrec_oper.planner.rank_classes import RankClasses
from torchrec_oper.planner.relaxation import proven_s, relax
from torchrec_oper.planner.summary import Mask, Summary, all_undominated

ROUNDS = 8
ROUNDING = 1e-12  # of sums: whoever checks the proof may add in another order
STEPS = 8
CLOSE = 1.001


@dataclass(frozen=True, eq=False)
class Problem:
    """The tables' candidates on a cluster.

    Args:
        candidates, summaries: of each table.
        cluster, classes: the ranks.
        objective: ``train`` or ``infer``.
        usable: [C] for each table: the candidates that fit into a rank and that
            constraints allow.
        useful: [C] for each table: those of them that no other one beats everywhere.
    """

    candidates: tuple[Candidates, ...]
    summaries: tuple[Summary, ...]
    cluster: Cluster
    classes: RankClasses
    objective: Objective
    usable: tuple[Mask, ...]
    useful: tuple[Mask, ...]

    def latency_s(self, *, exchanged: bool, replicas: bool) -> float:
        """Seconds to start the phases of a plan's exchanges."""
        return start_s(self.cluster, self.objective, exchanged=exchanged, replicas=replicas)


def start_s(cluster: Cluster, objective: Objective, *, exchanged: bool, replicas: bool) -> float:
    """Seconds to start every phase once.

    Args:
        cluster: the ranks.
        objective: what is planned for.
        exchanged: whether any row isn't on every rank: ids, values and gradients travel.
        replicas: whether any row is on every rank: in training gradients are summed twice
            over, there and back.
    """
    several_hosts = cluster.host_count > 1
    level_s = cluster.rates.inter_host.latency_s * several_hosts
    level_s += cluster.rates.intra_host.latency_s * bool(cluster.local_sizes.max() > 1)
    training = objective == "train"
    return level_s * ((3 if training else 2) * exchanged + 2 * (training and replicas))


def affordable(problem: Problem, target_s: float, among: Sequence[Mask]) -> list[Mask]:
    """Of each table's candidates ``among``, those that a plan of ``target_s`` could use."""
    left = [mask.copy() for mask in among]
    sent = [summary.sent for summary in problem.summaries]
    received = [summary.received for summary in problem.summaries]
    for _ in range(ROUNDS):
        before = left
        for views in (sent, received):
            if not all(mask.any() for mask in left):
                return left
            least = np.array([v.least_s[m].min() for v, m in zip(views, left, strict=True)])
            room = target_s * (1 + ROUNDING) - (least.sum() - least)
            left = [
                mask & (view.busiest_s <= most_s)
                for view, mask, most_s in zip(views, left, room, strict=True)
            ]
        if all((a == b).all() for a, b in zip(before, left, strict=True)):
            break
    return left


def certified_bound(problem: Problem, cost_s: float) -> Certificate:
    """The proof that no plan costs less than so much.

    Args:
        problem: the tables' candidates.
        cost_s: the cost of a plan that is known; infinite where none is.
    """
    cases = [_Case(problem, hot, cost_s) for hot in _cases(problem)]
    for case in sorted(cases, key=lambda case: case.bound_s):
        if case.bound_s < min([cost_s, *(other.bound_s for other in cases if other is not case)]):
            case.refine()
    return Certificate(tuple(case.proof() for case in cases), replicated_cost_s(problem))


def _cases(problem: Problem) -> list[bool]:
    """Whether there are replicas, in each case that differs."""
    if problem.objective == "infer":
        return [True]
    return [False, True] if any((c.hot_rows > 0).any() for c in problem.candidates) else [False]


def replicated_cost_s(problem: Problem) -> float:
    """The cost of replicating every row; infinite where that isn't allowed or doesn't fit."""
    common = np.zeros(3)
    for summary, candidates, usable in zip(
        problem.summaries, problem.candidates, problem.usable, strict=True
    ):
        everywhere = np.flatnonzero(usable & (candidates.parts == 0))
        if not len(everywhere):
            return np.inf
        common += summary.common[:, everywhere[0]]
    if common[2] > problem.classes.memory_bytes.min():
        return np.inf
    latency_s = problem.latency_s(exchanged=False, replicas=True)
    return float(common[0] / problem.classes.speed.min() + common[1] + latency_s)


class _Case:
    """One case of the bound while its target is searched for."""

    def __init__(self, problem: Problem, with_hot_rows: bool, cost_s: float) -> None:
        self.problem, self.with_hot_rows = problem, with_hot_rows
        self.latency_s = problem.latency_s(exchanged=True, replicas=with_hot_rows)
        self.useful = problem.useful if with_hot_rows else _without_hot_rows(problem)
        self.among = self._covered()
        self.high_s = max(cost_s - self.latency_s, 0.0)
        self.target_s, self.value_s, self.multipliers = self.high_s, np.inf, _even(problem)
        self.low_s = 0.0
        if self.high_s > 0:
            self._try(self.high_s)

    def _covered(self) -> Sequence[Mask]:
        """[C] for each table: the candidates that the proof must be of."""
        problem = self.problem
        if len(problem.classes) == 1:
            return self.useful
        # What one piece asks isn't always in proportion to the rest, so that where ranks
        # aren't alike a candidate may be the best even though another one beats its sums.
        plain = [c.hot_rows == 0 for c in problem.candidates]
        return [
            usable & (self.with_hot_rows | none)
            for usable, none in zip(problem.usable, plain, strict=True)
        ]

    @property
    def bound_s(self) -> float:
        """What is proven so far."""
        return self.latency_s + max(min(self.target_s, self.value_s), 0.0)

    def refine(self) -> None:
        """Look for the largest target that the relaxation still reaches."""
        for _ in range(STEPS):
            if not np.isfinite(self.high_s) or self.high_s <= max(self.low_s, 0.0) * CLOSE:
                return
            self._try(float(np.sqrt(self.low_s * self.high_s)))

    def _try(self, target_s: float) -> None:
        problem = self.problem
        left = affordable(problem, target_s, self.among)
        value_s, multipliers = np.inf, _even(problem)
        if all(mask.any() for mask in left):
            multipliers = self._multipliers(left)
            value_s = proven_s(
                problem.summaries, left, problem.cluster, problem.classes, multipliers
            )
        if min(target_s, value_s) > min(self.target_s, self.value_s) or self.value_s == np.inf:
            self.target_s, self.value_s, self.multipliers = target_s, value_s, multipliers
        if value_s >= target_s:
            self.low_s = max(self.low_s, target_s)
        else:
            self.low_s, self.high_s = max(self.low_s, value_s), min(self.high_s, target_s)

    def _multipliers(self, left: Sequence[Mask]) -> Multipliers:
        problem = self.problem
        useful = [mask & good for mask, good in zip(left, self.useful, strict=True)]
        for lend in (False, True):
            relaxed = relax(problem.summaries, useful, problem.cluster, problem.classes, lend=lend)
            if relaxed is not None:
                return relaxed.multipliers
        return _even(problem)

    def proof(self) -> Proof:
        return Proof(self.with_hot_rows, self.target_s, self.multipliers, self.bound_s)


def _without_hot_rows(problem: Problem) -> tuple[Mask, ...]:
    plain = [m & (c.hot_rows == 0) for m, c in zip(problem.usable, problem.candidates, strict=True)]
    return tuple(all_undominated(problem.summaries, plain, problem.cluster, problem.classes))


def _even(problem: Problem) -> Multipliers:
    """Multipliers that weigh all ranks alike."""
    classes = problem.classes
    return Multipliers(
        cost=classes.sizes / classes.sizes.sum(),
        sent_share=np.ones((2, len(PHASES), len(classes))),
        memory=np.zeros(len(classes)),
        owners=np.zeros(len(problem.summaries)),
    )
