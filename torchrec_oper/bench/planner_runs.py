"""The rows of ``oper bench planner``: each planner's cost over the certified bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

from torchrec_oper.bench.planner_suites import Suite
from torchrec_oper.errors import OperError
from torchrec_oper.planner.baselines import (
    GREEDY_SIZES,
    OverMemoryError,
    StockPlacement,
    Task,
    TorchRecTimeoutError,
    greedy_table_wise,
    row_wise,
    stock_loads,
    with_our_exchanges,
)
from torchrec_oper.planner.baselines.torchrec_planner import TorchRecPlan
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Objective, TableDemand
from torchrec_oper.planner.judge import Verdict, expected_cost, verdict

Status = Literal["ok", "over-memory", "timeout", "error"]

OPER = "oper"
TORCHREC = "torchrec"
TUNED = "torchrec-tuned"
OUR_EXCHANGE = "torchrec-placement-our-exchange"
ROW_WISE = "row-wise"
PLANNERS = (
    OPER,
    TORCHREC,
    TUNED,
    OUR_EXCHANGE,
    *(f"greedy-{size}" for size in GREEDY_SIZES),
    ROW_WISE,
)
ASK_TORCHREC = (TORCHREC, TUNED, OUR_EXCHANGE)

TUNED_MIN_PARTITION = 32
# The planner's and the judge's sums of many floats differ by less than this, relatively.
AGREEMENT = 1e-6


@dataclass(frozen=True)
class Row:
    """What one planner made of one case.

    Args:
        suite: the suite.
        ranks: its number of ranks.
        skew: of the Zipf law.
        objective: ``train`` or ``infer``.
        planner: one of ``PLANNERS``.
        ratio: cost over the certified bound; None unless ``status`` is ``ok``.
        seconds: that planning took, of all plans that were tried; None where no planner ran.
        status: ``over-memory`` where a rank would hold more than its memory.
        message: why, where it isn't ``ok``, or what else there is to know.
        cost_s: seconds of a step; None where there is no placement.
        bound_s: the certified bound on them; None where it is missing.
    """

    suite: str
    ranks: int
    skew: float
    objective: Objective
    planner: str
    ratio: float | None = None
    seconds: float | None = None
    status: Status = "ok"
    message: str = ""
    cost_s: float | None = None
    bound_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


class Outcome(Protocol):
    """What the bench needs of the planner's outcome."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """One for each table."""

    @property
    def cost_s(self) -> float:
        """What the planner says that they cost."""

    @property
    def bound_s(self) -> float:
        """The certified bound."""


class Optimize(Protocol):
    """``torchrec_oper.planner.optimize.optimize``, as far as the bench calls it."""

    def __call__(
        self,
        demands: Sequence[TableDemand],
        cluster: Cluster,
        *,
        objective: Objective,
        seed: int = 0,
    ) -> Outcome:
        """Plan."""


class StockPlanner(Protocol):
    """``TorchRecPlanner``, or a stand-in."""

    def plan(self, task: Task, *, min_partition: int | None = None) -> TorchRecPlan:
        """Plan, or raise ``OperError``."""


@dataclass(frozen=True)
class Effort:
    """Which cases to run, and by which planners.

    Args:
        suites: the suites.
        skews: of the Zipf law.
        objectives: ``train``, ``infer``.
        planners: some of ``PLANNERS``.
        most_stock_tables: leave TorchRec's planner out of suites of more tables.
    """

    suites: Sequence[Suite]
    skews: Sequence[float]
    objectives: Sequence[Objective]
    planners: Sequence[str] = PLANNERS
    most_stock_tables: float = float("inf")

    def planners_for(self, suite: Suite) -> list[str]:
        """The planners that run on a suite, in the order of ``PLANNERS``."""
        asked = len(suite.tables) <= self.most_stock_tables
        return [
            name
            for name in PLANNERS
            if name in self.planners and (asked or name not in ASK_TORCHREC)
        ]

    @property
    def row_count(self) -> int:
        """How many rows there will be."""
        cases = len(self.skews) * len(self.objectives)
        return cases * sum(len(self.planners_for(suite)) for suite in self.suites)


@dataclass(frozen=True)
class _Found:
    """A placement's verdict; seconds that finding it took, and a remark."""

    verdict: Verdict
    seconds: float | None
    message: str = ""


def bench_rows(effort: Effort, *, optimize: Optimize, stock: StockPlanner) -> Iterator[Row]:
    """The rows, one after the other, as planners finish.

    ``optimize`` runs on every case, asked for or not: the ratios need its bound.

    Args:
        effort: what to run.
        optimize: our planner.
        stock: TorchRec's.
    """
    for suite in effort.suites:
        plans = _StockPlans(suite, stock)
        names = effort.planners_for(suite)
        for skew in effort.skews:
            demands = suite.demands(skew)
            for objective in effort.objectives:
                task = Task(demands, suite.cluster, objective, suite.batch_size)
                blank = Row(suite.name, suite.ranks, skew, objective, OPER)
                ours = _run_oper(blank, task, optimize)
                for name in names:
                    row = replace(blank, planner=name, bound_s=ours.bound_s)
                    yield ours if name == OPER else _row(row, task, plans)


def _run_oper(row: Row, task: Task, optimize: Optimize) -> Row:
    """Our planner's row, by the judge's cost."""
    begin = time.perf_counter()
    try:
        outcome = optimize(task.demands, task.cluster, objective=task.objective, seed=0)
        seconds = time.perf_counter() - begin
        judged = expected_cost(outcome.decisions, task.demands, task.cluster, task.objective)
    except OperError as error:
        return replace(row, status="error", message=str(error))
    row = replace(row, bound_s=float(outcome.bound_s))
    if abs(judged.cost_s - outcome.cost_s) > AGREEMENT * judged.cost_s:
        said = f"the planner says {outcome.cost_s:g} s, the judge {judged.cost_s:g} s"
        return replace(row, seconds=seconds, status="error", message=said, cost_s=judged.cost_s)
    return _judged(row, _Found(judged, seconds))


def _row(row: Row, task: Task, plans: _StockPlans) -> Row:
    """The row of one planner to compare with."""
    find = _finders(plans)[row.planner]
    try:
        return _judged(row, find(task))
    except OverMemoryError as error:
        return replace(row, status="over-memory", message=str(error))
    except TorchRecTimeoutError as error:
        return replace(row, status="timeout", message=str(error))
    except OperError as error:
        return replace(row, status="error", message=str(error))


def _judged(row: Row, found: _Found) -> Row:
    judged = found.verdict
    row = replace(row, seconds=found.seconds, cost_s=judged.cost_s, message=found.message)
    if not judged.feasible:
        over = f"{len(judged.over_memory)} of {row.ranks} ranks would hold more than they have"
        return replace(
            row, status="over-memory", message="; ".join(filter(None, [over, row.message]))
        )
    if not row.bound_s:
        return replace(row, status="error", message="there is no bound to compare with")
    ratio = judged.cost_s / row.bound_s
    if ratio < 1 - AGREEMENT:
        below = "below the bound, which covers our exchanges only"
        row = replace(row, message="; ".join(filter(None, [below, row.message])))
    return replace(row, ratio=ratio)


def _finders(plans: _StockPlans) -> Mapping[str, Callable[[Task], _Found]]:
    greedy = {
        f"greedy-{size}": partial(_by_rule, partial(greedy_table_wise, by=size))
        for size in GREEDY_SIZES
    }
    return {
        TORCHREC: plans.default,
        TUNED: plans.tuned,
        OUR_EXCHANGE: plans.tuned_with_our_exchange,
        ROW_WISE: partial(_by_rule, row_wise),
        **greedy,
    }


def _by_rule(rule: Callable[[Task], list[StockPlacement]], task: Task) -> _Found:
    begin = time.perf_counter()
    placements = rule(task)
    seconds = time.perf_counter() - begin
    return _Found(_executed(task, placements), seconds)


def _executed(task: Task, placements: Sequence[StockPlacement]) -> Verdict:
    """The verdict on placements as TorchRec executes them."""
    return verdict(stock_loads(task, placements), task.cluster)


class _StockPlans:
    """TorchRec's plans for one suite; they don't depend on the skew, so each is made once."""

    def __init__(self, suite: Suite, stock: StockPlanner) -> None:
        self._suite, self._stock = suite, stock
        self._plans: dict[tuple[str, int | None], TorchRecPlan | OperError] = {}

    def default(self, task: Task) -> _Found:
        """TorchRec's planner with its defaults."""
        plan = self._plan(task, None)
        return _Found(_executed(task, plan.placements), plan.seconds, _remark(plan))

    def tuned(self, task: Task) -> _Found:
        """The best by the judge of what is known to come from TorchRec's planner."""
        return self._tuned(task)[0]

    def tuned_with_our_exchange(self, task: Task) -> _Found:
        """The tuned placement under our exchanges."""
        tuned, placements = self._tuned(task)
        return replace(tuned, verdict=with_our_exchanges(task, placements).verdict)

    def _tuned(self, task: Task) -> tuple[_Found, Sequence[StockPlacement]]:
        """Of the default, narrower column slices, and a documented placement, the best."""
        tried: list[tuple[_Found, Sequence[StockPlacement]]] = []
        failure: OperError | None = None
        seconds = 0.0
        for min_partition in self._variants(task):
            try:
                plan = self._plan(task, min_partition)
            except TorchRecTimeoutError as error:
                failure = failure or error
                break  # narrower slices are more options, which take longer still
            except OperError as error:
                failure = failure or error
                continue
            seconds += plan.seconds
            set_to = "the default" if min_partition is None else f"min_partition={min_partition}"
            remark = "; ".join(filter(None, [set_to, _remark(plan)]))
            tried.append((_Found(_executed(task, plan.placements), None, remark), plan.placements))
        documented = self._suite.documented
        if documented is not None:
            judged = _executed(task, documented)
            tried.append((_Found(judged, None, "the documented placement"), documented))
        if not tried:
            assert failure is not None
            raise failure
        best, placements = min(
            tried, key=lambda one: (not one[0].verdict.feasible, one[0].verdict.cost_s)
        )
        return replace(best, seconds=seconds or None), placements

    def _variants(self, task: Task) -> list[int | None]:
        """Settings of min_partition, but those that leave the options as they are."""
        narrow = all(demand.table.dim <= TUNED_MIN_PARTITION for demand in task.demands)
        return [None] if narrow else [None, TUNED_MIN_PARTITION]

    def _plan(self, task: Task, min_partition: int | None) -> TorchRecPlan:
        key = (task.objective, min_partition)
        if key not in self._plans:
            try:
                self._plans[key] = self._stock.plan(task, min_partition=min_partition)
            except OperError as error:
                self._plans[key] = error
        found = self._plans[key]
        if isinstance(found, OperError):
            raise found
        return found


def _remark(plan: TorchRecPlan) -> str:
    said = {
        "planned by an earlier run": plan.kept,
        "its own time limit ended the search": plan.search_stopped,
    }
    return "; ".join(text for text, holds in said.items() if holds)
