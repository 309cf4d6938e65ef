"""The table and the summary of ``oper bench planner``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torchrec_oper.bench.planner_runs import OPER, OUR_EXCHANGE, PLANNERS, TUNED, Row

HEADER = (
    f"{'suite':30}{'ranks':>6}{'skew':>6} {'objective':10}{'planner':33}{'cost/bound':>11}"
    f"{'cost ms':>11}{'plan s':>9}  status"
)


def table_line(row: Row) -> str:
    """One row of the table under ``HEADER``."""
    ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
    cost = "-" if row.cost_s is None else f"{row.cost_s * 1e3:.4f}"
    seconds = "-" if row.seconds is None else f"{row.seconds:.1f}"
    status = row.status if not row.message else f"{row.status}: {row.message[:80]}"
    return (
        f"{row.suite:30}{row.ranks:6}{row.skew:6g} {row.objective:10}{row.planner:33}{ratio:>11}"
        f"{cost:>11}{seconds:>9}  {status}"
    )


def summary_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Geometric means by planner, and what the gain over TorchRec comes from.

    Only rows of status ``ok`` count, so a planner that fails has fewer cases; they are told.
    """
    objectives = list(dict.fromkeys(row.objective for row in rows))
    for objective in objectives:
        some = [row for row in rows if row.objective == objective]
        yield f"{objective}: cost / bound, geometric mean (worst) of the cases that are ok"
        for planner in PLANNERS:
            mine = [row for row in some if row.planner == planner]
            ratios = [row.ratio for row in mine if row.ratio is not None]
            if not mine:
                continue
            mean = f"{geometric_mean(ratios):.3f} ({max(ratios):.3f})" if ratios else "-"
            yield f"  {planner:33}{mean:>18}  {len(ratios)} of {len(mine)} cases"
        yield from _gain_lines(some)


def _gain_lines(rows: Sequence[Row]) -> Iterator[str]:
    """TorchRec's cost over ours, in two factors that multiply to it."""
    ratios: dict[tuple[str, int, float], dict[str, float]] = {}
    for row in rows:
        if row.ratio is not None:
            ratios.setdefault((row.suite, row.ranks, row.skew), {})[row.planner] = row.ratio
    cases = [case for case in ratios.values() if {OPER, TUNED, OUR_EXCHANGE} <= set(case)]
    if not cases:
        return
    total, exchange, placement = (
        geometric_mean([case[above] / case[below] for case in cases])
        for above, below in ((TUNED, OPER), (TUNED, OUR_EXCHANGE), (OUR_EXCHANGE, OPER))
    )
    yield (
        f"  {TUNED} / {OPER}: {total:.3f} = exchange {exchange:.3f} x placement {placement:.3f}"
        f" (geometric means of {len(cases)} cases)"
    )


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers."""
    return math.exp(sum(math.log(value) for value in values) / len(values))
