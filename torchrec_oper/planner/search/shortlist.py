"""Which candidates of a table are worth trying."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.bound import Problem
from torchrec_oper.planner.candidates import BYTES, FIXED, PHASES, WORK
from torchrec_oper.planner.certificate import Multipliers
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.relaxation import Relaxed
from torchrec_oper.planner.summary import Mask, Summary, undominated

Ints = npt.NDArray[np.int64]


def one_spread(problem: Problem) -> list[Mask]:
    """[C] for each table: its usable candidates, with one for each uneven spread of rows.

    Parts that may be uneven carry the same total, however many they are: the one with
    most parts stands for all.
    """
    masks = []
    for candidates, usable in zip(problem.candidates, problem.usable, strict=True):
        mask = usable.copy()
        widest: dict[tuple[str, int], int] = {}
        for number in np.flatnonzero(candidates.linear & usable).tolist():
            kind = (candidates.exchange[number], int(candidates.hot_rows[number]))
            other = widest.get(kind)
            if other is None or candidates.parts[number] > candidates.parts[other]:
                widest[kind] = number
            loser = other if widest[kind] == number else number
            if loser is not None:
                mask[loser] = False
        # A whole table of such an exchange on one rank is an uneven spread, too.
        for number in np.flatnonzero(usable & (candidates.parts == 1) & (candidates.columns == 1)):
            kind = (candidates.exchange[number], int(candidates.hot_rows[number]))
            if kind in widest:
                mask[number] = False
        masks.append(mask)
    return masks


def reduced_cost_s(summary: Summary, problem: Problem, prices: Multipliers, table: int) -> Floats:
    """[C] what each candidate costs at the relaxation's prices, ranks taken as alike."""
    world = float(problem.cluster.world_size)
    work, fixed, memory = summary.common
    rates, local = problem.cluster.rates, float(problem.cluster.local_sizes.mean())
    byte_s = (local - 1) / world / rates.intra_host.bytes_per_s
    byte_s += (world - local) / world / rates.inter_host.bytes_per_s
    mean = work + fixed + (summary.owned[WORK] + summary.owned[FIXED]) / world
    mean = mean + summary.owned[list(PHASES)].sum(axis=0) * byte_s
    cut = prices.owners[table] * (summary.busiest_s - summary.least_s)
    return np.asarray(
        prices.cost.sum() * mean
        + prices.owners.sum() * summary.least_s
        + cut
        + prices.memory.sum() * (memory + summary.owned[BYTES] / world)
    )


def shortlists(
    problem: Problem, relaxed: Relaxed, among: Sequence[Mask], *, most: int, within_s: float
) -> list[Ints]:
    """For each table the numbers of its most promising candidates, the best first.

    Args:
        problem: the tables' candidates.
        relaxed: an optimum of the relaxation, whose prices say what is promising.
        among: [C] for each table, which may be tried.
        most: how many for each table.
        within_s: how much dearer than the best one may be.
    """
    found = []
    known: dict[tuple[int, bytes], Ints] = {}
    for table, (summary, mask) in enumerate(zip(problem.summaries, among, strict=True)):
        dear = reduced_cost_s(summary, problem, relaxed.multipliers, table)
        key = (id(summary), mask.tobytes())
        if key not in known:
            known[key] = _levelling(problem, table, mask)
        numbers = known[key]
        numbers = numbers[np.argsort(dear[numbers], kind="stable")]
        keep = dear[numbers] - dear[numbers[0]] <= within_s
        keep[:3] = True
        found.append(numbers[keep][:most])
    return found


def _levelling(problem: Problem, table: int, mask: Mask) -> Ints:
    """The candidates that no other one beats; an even spread isn't beaten by a hair.

    It can be levelled later, which fixed pieces can't.
    """
    features = problem.summaries[table].features(problem.cluster, problem.classes)
    features[0] = np.where(problem.candidates[table].linear, features[0] * 0.999, features[0])
    return np.flatnonzero(undominated(features, mask))


def rounded(problem: Problem, relaxed: Relaxed, lists: Sequence[Ints]) -> list[int]:
    """For each table the place in its list of the candidate with the largest fraction."""
    places = []
    for candidates, share, numbers in zip(problem.candidates, relaxed.shares, lists, strict=True):
        number = int(share.argmax())
        alike = [
            place
            for place, other in enumerate(numbers.tolist())
            if candidates.exchange[other] == candidates.exchange[number]
            and candidates.hot_rows[other] == candidates.hot_rows[number]
            and candidates.columns[other] == candidates.columns[number]
        ]
        exact = [place for place in alike if numbers[place] == number]
        places.append((exact or alike or [0])[0])
    return places
