"""Refines a plan by co-access, as far as the judge finds it better on samples it didn't see."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tqdm.auto import tqdm

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.coaccess.hypergraph import mt_kahypar
from torchrec_oper.planner.coaccess.regroup import RankRoom, regrouped
from torchrec_oper.planner.demand import Floats, Objective
from torchrec_oper.planner.judge import Replay, placed_table, replay_steps
from torchrec_oper.planner.judge.counted import counted_loads
from torchrec_oper.planner.judge.counts import count_step
from torchrec_oper.planner.judge.loads import RankLoads
from torchrec_oper.planner.judge.seconds import rank_seconds, ranks_over_memory
from torchrec_oper.planner.judge.work import TableWork
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.readable import count, percent, seconds_text, table_of
from torchrec_oper.profile import AccessProfile
from torchrec_oper.profile.trace import Bags, SampleSet
from torchrec_oper.table import whole_number

Batch = dict[str, Bags]


@dataclass(frozen=True)
class RefinedTable:
    """What the judge found of one table whose rows were dealt by co-access.

    Args:
        key: the table's path in the model.
        parts: how many parts its rows are in.
        sums_before: partial sums of a step on average: pairs of a bag and a part with rows
            of it.
        sums_after: the same with the rows dealt by co-access.
        before_s: seconds of a step, all tables together, as the tables before left them.
        after_s: the same with this table's rows dealt by co-access.
        kept: whether the plan has them so.
    """

    key: str
    parts: int
    sums_before: float
    sums_after: float
    before_s: float
    after_s: float
    kept: bool


@dataclass(frozen=True)
class Refined:
    """A plan after refinement by co-access, and what the judge found.

    Args:
        plan: the better plan; the one that was given if no table's rows were better dealt
            otherwise. Its predicted seconds are those of before: they expect bags of
            independent rows, so that they are no lower, nor is the gap, for what only
            replay finds.
        tables: the tables that were tried, in the order of the plan.
        before_s: replayed seconds of a step of the plan that was given.
        after_s: of ``plan``. Among tables that gain nothing, some are kept by luck with
            the judging half: gains near 0 may not last.
        steps: how many steps were replayed.
        batch_size: samples of a rank in each: the plan's, or fewer where the judging half
            of the trace is too small for one step of so many.
    """

    plan: Plan
    tables: tuple[RefinedTable, ...]
    before_s: float
    after_s: float
    steps: int
    batch_size: int

    def report(self) -> str:
        """A readable summary."""
        replayed = (
            f"replay of {count(self.steps, 'step')} of {count(self.batch_size, 'sample')} a rank"
            " that the refinement didn't see"
        )
        if not self.tables:
            return "refinement by co-access: no table has partial sums that it could save"
        kept = sum(table.kept for table in self.tables)
        saved = 1 - self.after_s / self.before_s if self.before_s else 0.0
        rows = [
            (
                table.key,
                table.parts,
                f"{table.sums_before:,.0f}",
                f"{table.sums_after:,.0f}",
                seconds_text(table.before_s),
                seconds_text(table.after_s),
                "yes" if table.kept else "no",
            )
            for table in self.tables
        ]
        titles = ("table", "parts", "sums before", "after", "step before", "after", "kept")
        return "\n".join(
            [
                f"refinement by co-access: {count(kept, 'table')} of {len(self.tables):,} kept;"
                f" {replayed} takes {seconds_text(self.after_s)} instead of"
                f" {seconds_text(self.before_s)} a step, {percent(saved)} less",
                table_of(titles, rows),
            ]
        )


def refine(
    plan: Plan,
    profile: AccessProfile,
    *,
    seed: int = 0,
    imbalance: float = 0.03,
    progress: bool = False,
) -> Refined:
    """Bring rows that bags name together to one owner, so that fewer partial sums travel.

    The tables of exchange ``partial`` are tried one after another: a hypergraph of the
    bags of the trace's planning half is partitioned, and the outcome is kept if replay of
    the judging half, which has other samples, takes less on the busiest rank (or as long
    there and less on the mean rank) and no rank's memory more than it has. If all that was
    kept leaves the busiest rank as it was, the plan stays what it was. Which ranks own
    parts, and which rows are hot, stays too. The same plan, profile and seed give the same
    outcome.

    Args:
        plan: made for ``profile``.
        profile: with a trace.
        seed: of the partitioner.
        imbalance: how far the work of a part may grow, as a share; 0 or more.
        progress: show a bar on a terminal's stderr.

    Raises:
        PlanError: Mt-KaHyPar isn't installed; the plan is for another profile; there is no
            trace, or its judging half has no sample for each rank.
    """
    planning, judging = check_refinable(profile)
    whole_number(seed, "seed", error=PlanError)
    if not 0 <= imbalance < math.inf:
        raise PlanError(f"imbalance must be a share of 0 or more, found {imbalance}")
    _check_made_for(plan, profile)
    batch_size, steps = _steps(judging, plan)
    bags = planning.bags()
    bench = _Bench(plan, steps)
    tables, tried = list(plan.placements), []
    hidden = None if progress else True
    for at in tqdm(bench.movable, desc="refine", unit=" tables", disable=hidden):
        before = tables[at]
        room = _room(plan, tables, before)
        access = profile.table(before.table.name)
        work_s = _row_work_s(plan, profile, before)
        after = regrouped(before, access, work_s, bags, room, seed=seed, imbalance=imbalance)
        if after is not None:
            found = bench.tried(at, after)
            tables[at] = after if found.kept else before
            tried.append(found)
    refined = replace(plan, placements=tuple(tables))
    first, last = _replayed(plan, steps), _replayed(refined, steps)
    if not last.cost_s < first.cost_s:
        refined, last = plan, first
        tried = [replace(table, kept=False) for table in tried]
    return Refined(refined, tuple(tried), first.cost_s, last.cost_s, len(steps), batch_size)


def check_refinable(profile: AccessProfile) -> tuple[SampleSet, SampleSet]:
    """The planning and the judging half of the trace; found missing before long work.

    Raises:
        PlanError: Mt-KaHyPar isn't installed, or the profile has no trace.
    """
    mt_kahypar()
    if profile.trace is None:
        raise PlanError(
            "refinement by co-access needs the profile's trace, samples as they are, and it has"
            " none; profile the input again with trace_ids above 0"
        )
    return profile.trace.planning, profile.trace.judging


def _check_made_for(plan: Plan, profile: AccessProfile) -> None:
    made_for = plan.workload.profile_hash
    if made_for != profile.content_hash:
        raise PlanError(
            f"the plan was made {f'for profile {made_for[:12]}' if made_for else 'without one'},"
            f" this is profile {profile.content_hash[:12]}; refine a plan by its own profile"
        )


def _steps(judging: SampleSet, plan: Plan) -> tuple[int, list[list[Batch]]]:
    """Samples of a batch, and for each step the batches of all ranks."""
    ranks = plan.world_size
    size = min(plan.workload.batch_size, judging.samples // ranks)
    if not size:
        raise PlanError(
            f"the judging half of the profile's trace has {count(judging.samples, 'sample')},"
            f" fewer than the {ranks} ranks; profile more samples, or with more trace_ids"
        )
    batches = judging.batches(size)
    return size, [
        list(itertools.islice(batches, ranks)) for _ in range(judging.samples // (size * ranks))
    ]


def _room(plan: Plan, tables: Sequence[TablePlacement], table: TablePlacement) -> RankRoom:
    """What ranks have left for more rows of one table."""
    training = plan.workload.objective == "train"
    held = np.sum([p.rank_bytes(optimizer=training) for p in tables], axis=0)
    caps = np.array([rank.memory_bytes for rank in plan.cluster.ranks], dtype=np.int64)
    spec = table.table
    row_bytes = spec.row_bytes // table.decision.columns
    row_bytes += spec.optimizer_bytes_per_row if training else 0
    return RankRoom(rows=(caps - held) // row_bytes, busy_s=np.array(plan.rank_s))


def _row_work_s(plan: Plan, profile: AccessProfile, table: TablePlacement) -> Floats:
    """[ids] seconds of a step that each listed row costs its owner.

    All ranks' lookups read it, and in training a step that names it updates it once: of
    ``m`` lookups, which name it with chance ``p`` each, with chance ``1 - (1 - p) ** m``.
    """
    access, rates = profile.table(table.table.name), plan.cluster.rates
    samples = plan.world_size * plan.workload.batch_size
    lookups = access.lookups * samples / profile.samples
    row_bytes = table.table.row_bytes / table.decision.columns
    chances = access.counts / access.lookups
    seconds = lookups * chances * (row_bytes / rates.read.bytes_per_s(row_bytes))
    if plan.workload.objective == "train":
        with np.errstate(divide="ignore"):  # a row that all lookups name
            named = -np.expm1(lookups * np.log1p(-chances))
        seconds = seconds + named * (row_bytes / rates.update.bytes_per_s(row_bytes))
    return np.asarray(seconds, dtype=np.float64)


def _replayed(plan: Plan, steps: Sequence[Sequence[Batch]]) -> Replay:
    tables = [placed_table(placement) for placement in plan.placements]
    return replay_steps(tables, steps, plan.cluster, plan.workload.objective)


@dataclass(frozen=True, eq=False)
class _Judged:
    """One table's loads in each step, and its partial sums of a step on average."""

    loads: tuple[RankLoads, ...]
    partial_sums: float


@dataclass(frozen=True)
class _Verdict:
    """Seconds of a step on its busiest rank and on the mean rank; ranks that lack memory."""

    cost_s: float
    mean_s: float
    over_memory: set[int]

    def better_than(self, other: _Verdict) -> bool:
        """Whether a step takes less; or as long, as other tables keep its busiest rank."""
        costs = (self.cost_s, self.mean_s), (other.cost_s, other.mean_s)
        return costs[0] < costs[1] and self.over_memory <= other.over_memory


class _Bench:
    """Judges changes of one table at a time without replaying the others."""

    def __init__(self, plan: Plan, steps: Sequence[Sequence[Batch]]) -> None:
        self.cluster, self.steps = plan.cluster, steps
        self.objective: Objective = plan.workload.objective
        self.movable = [
            at
            for at, placement in enumerate(plan.placements)
            if placement.decision.exchange == "partial" and placement.decision.parts > 1
        ]
        self.others = [RankLoads.none(plan.world_size)] * len(steps)
        self.tables: dict[int, _Judged] = {}
        for at, placement in enumerate(plan.placements):
            judged = self._judged(placement)
            if at in self.movable:
                self.tables[at] = judged
            else:
                self.others = [a + b for a, b in zip(self.others, judged.loads, strict=True)]

    def tried(self, at: int, after: TablePlacement) -> RefinedTable:
        """The verdict on another placement of one table, which is kept if it is better."""
        old, new = self.tables[at], self._judged(after)
        before = self._verdict()
        self.tables[at] = new
        then = self._verdict()
        kept = then.better_than(before)
        if not kept:
            self.tables[at] = old
        return RefinedTable(
            key=after.key,
            parts=after.decision.parts,
            sums_before=old.partial_sums,
            sums_after=new.partial_sums,
            before_s=before.cost_s,
            after_s=then.cost_s,
            kept=kept,
        )

    def _judged(self, placement: TablePlacement) -> _Judged:
        placed = placed_table(placement)
        work = TableWork(placed.table, self.cluster, self.objective)
        counts = [count_step(placed, batches) for batches in self.steps]
        sums = sum(int(step.bags.sum()) for step in counts)
        return _Judged(
            tuple(counted_loads(placed, step, work) for step in counts), sums / len(counts)
        )

    def _verdict(self) -> _Verdict:
        seconds, over = [], set()
        for step, others in enumerate(self.others):
            movable = (table.loads[step] for table in self.tables.values())
            loads = others + RankLoads.total(movable, self.cluster.world_size)
            seconds.append(rank_seconds(loads, self.cluster).total)
            over |= set(ranks_over_memory(loads.memory_bytes, self.cluster))
        of_ranks = np.array(seconds)
        return _Verdict(float(of_ranks.max(axis=1).mean()), float(of_ranks.mean()), over)
