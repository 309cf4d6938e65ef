"""``oper bench planner``: our plans, and those of others, over the certified bound."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:  # what takes long to import waits until `run`
    from torchrec_oper.bench.planner_runs import Effort, Row

NAME = "planner"
SUMMARY = "compare plans of published suites with the bound that no plan can beat"
EXAMPLES = """\
Costs are predictions of one cost model, for GPUs of 1.2 TB/s and hosts of 8 ranks, and no
GPU is used. `cost/bound` is 1 for a plan that is proven best. TorchRec's plans are judged
as TorchRec executes them, and once more with our exchanges at the same owners. Where a
suite's tables don't fit, or planning takes too long, the row says so and has no ratio.

The suites' shapes are read from table_configs.json and torchrec_sharding_stats_tables.json
in the folder that --data names.

examples:
  oper bench planner --quick                        8 ranks, skew 0.9: under a minute
  oper bench planner --json planner.json            everything: hours
  oper bench planner --suite criteo_kaggle --skew 0.6 1.1 --objective infer
"""

DATA = Path("../shared/data")
SKEWS = (0.6, 0.9, 1.1)
QUICK_SKEWS = (0.9,)
QUICK_STOCK_TABLES = 30
TIMEOUT_S = 150.0
OBJECTIVES = ("train", "infer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    several: dict[str, Any] = {"nargs": "+", "default": ()}
    parser.add_argument("--suite", metavar="NAME", **several, help="some suites (default: all)")
    parser.add_argument(
        "--skew",
        metavar="S",
        type=_skew,
        **several,
        help=f"of the Zipf law of lookups (default: {' '.join(map(str, SKEWS))})",
    )
    parser.add_argument(
        "--objective", choices=OBJECTIVES, nargs="+", default=OBJECTIVES, help="(default: both)"
    )
    parser.add_argument("--planner", metavar="NAME", **several, help="some planners (default: all)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"the suites for 8 ranks, skew {QUICK_SKEWS[0]}, and TorchRec's planner on suites of"
        f" {QUICK_STOCK_TABLES} tables or fewer",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=_seconds,
        default=TIMEOUT_S,
        help="seconds for each plan of TorchRec's (default: %(default)g)",
    )
    parser.add_argument(
        "--cache",
        metavar="DIR",
        type=Path,
        help="keep TorchRec's plans in DIR, for when the bench is run again (default: nowhere)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the rows to FILE, anew after each"
    )
    parser.add_argument(
        "--data", metavar="DIR", type=Path, default=DATA, help="the folder (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the bench: rows as they come, then a summary.

    Returns:
        0, the exit status.

    Raises:
        OSError: the data can't be read, or the JSON file can't be written.
        OperError: the data aren't suites, or an argument has a wrong value.
    """
    from torchrec_oper.archive import check_writable

    if arguments.json is not None:
        check_writable(arguments.json)
    effort = _effort(arguments)

    from torchrec_oper.bench.planner_runs import bench_rows
    from torchrec_oper.planner.baselines import TorchRecPlanner
    from torchrec_oper.planner.optimize import optimize

    with TorchRecPlanner(timeout_s=arguments.timeout, keep_in=arguments.cache) as stock:
        rows = bench_rows(effort, optimize=optimize, stock=stock)
        report(rows, count=effort.row_count, save=_saver(arguments.json))
    return 0


def report(rows: Any, *, count: int, save: Callable[[Sequence[Row]], None]) -> None:
    """Print rows as they come, save what there is after each, and print the summary.

    Args:
        rows: the rows, an iterable.
        count: how many there will be, for the progress bar.
        save: is given all rows so far.
    """
    from tqdm import tqdm

    from torchrec_oper.bench.planner_report import HEADER, summary_lines, table_line

    done: list[Row] = []
    with tqdm(total=count, unit="row", disable=None) as progress:
        progress.write(HEADER)
        for row in rows:
            done.append(row)
            save(done)
            progress.write(table_line(row))
            progress.update()
    print()
    for line in summary_lines(done):
        print(line)


def _effort(arguments: argparse.Namespace) -> Effort:
    from torchrec_oper.bench.planner_runs import PLANNERS, Effort
    from torchrec_oper.bench.planner_suites import load_suites
    from torchrec_oper.errors import PlanError

    quick: bool = arguments.quick
    unknown = sorted(set(arguments.planner) - set(PLANNERS))
    if unknown:
        raise PlanError(
            f"there is no planner {', '.join(unknown)}; there are {', '.join(PLANNERS)}"
        )
    return Effort(
        suites=load_suites(arguments.data, names=arguments.suite, quick=quick),
        skews=tuple(arguments.skew) or (QUICK_SKEWS if quick else SKEWS),
        objectives=tuple(dict.fromkeys(arguments.objective)),
        planners=tuple(arguments.planner) or PLANNERS,
        most_stock_tables=QUICK_STOCK_TABLES if quick else math.inf,
    )


def _saver(path: Path | None) -> Callable[[Sequence[Row]], None]:
    """What writes all rows so far to ``path``, all or nothing."""
    from torchrec_oper.archive import replace_file

    def save(rows: Sequence[Row]) -> None:
        if path is None:
            return
        text = json.dumps([row.to_json() for row in rows], indent=1, allow_nan=False)

        def write(file: IO[bytes]) -> None:
            file.write(text.encode() + b"\n")

        replace_file(path, write)

    return save


def _skew(text: str) -> float:
    return _number(text, "a skew", least=0)


def _seconds(text: str) -> float:
    return _number(text, "seconds", least=1)


def _number(text: str, what: str, *, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (least <= value < math.inf):
        raise argparse.ArgumentTypeError(f"wanted {what} of {least:g} or more, found {text!r}")
    return value
