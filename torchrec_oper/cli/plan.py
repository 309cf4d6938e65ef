"""``oper plan``: place the tables on a cluster."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchrec_oper.cli.elapsed import elapsed_shown
from torchrec_oper.cli.interrupt import ended_by_interrupt
from torchrec_oper.cli.table_file import read_tables

if TYPE_CHECKING:  # numpy and what else takes long to import waits until `run`
    from torchrec_oper.planner.cluster import Cluster
    from torchrec_oper.planner.plan import Plan
    from torchrec_oper.planner.space import SearchSpace
    from torchrec_oper.profile import AccessProfile
    from torchrec_oper.table import TableSpec

NAME = "plan"
SUMMARY = "place the tables on a cluster, and prove how near that is to the best"
EXAMPLES = """\
The tables come from a JSON file with a list of objects of name, rows, dim, features and, if
need be, dtype, pooling, optimizer_bytes_per_row; or from the profile, which doesn't know
their dim. Without a profile a Zipf law is assumed for every table.

examples:
  oper plan --profile day0.profile --dim 64 --cluster cluster.json
  oper plan --profile day0.profile --dim 64 --dim user=128 --preset 8xH100 --hosts 4 \\
      --batch-size 4096 --optimizer-bytes 4 -o day0.plan --picture day0.png
  oper plan --tables tables.json --ranks 4 --memory-gib 16 --objective infer
  oper plan --profile day0.profile --dim 64 --cluster cluster.json --refine
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        default=Path("tables.plan"),
        help="where the plan goes (default: %(default)s)",
    )
    parser.add_argument(
        "--picture",
        metavar="OUT",
        type=Path,
        help="draw the seconds of each rank there, too: a .png, .svg or .pdf file",
    )
    _add_tables(parser.add_argument_group("tables"))
    _add_ranks(parser.add_argument_group("ranks (one of --cluster, --preset, --ranks)"))
    _add_search(parser.add_argument_group("what to plan for"))


def _add_tables(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--profile", metavar="P", type=Path, help="what `oper profile` wrote")
    group.add_argument("--tables", metavar="JSON", type=Path, help="a file that lists the tables")
    group.add_argument(
        "--dim",
        metavar="[NAME=]D",
        action="append",
        type=_dim,
        default=[],
        help="elements of a row of the profile's tables, or of one of them; repeat for more",
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of the profile's tables (default: float32)",
    )
    group.add_argument(
        "--optimizer-bytes",
        metavar="N",
        type=int,
        help="bytes of optimizer state of a row in training, such as 4 for row-wise Adagrad or"
        " 8 x dim for Adam (default: as in --tables, or 0 as for SGD)",
    )
    group.add_argument(
        "--module",
        metavar="PATH",
        default="",
        help="path of the tables' module in the model, such as sparse.ebc",
    )


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--cluster", metavar="JSON", type=Path, help="what `oper calibrate` wrote")
    group.add_argument("--preset", metavar="NAME", help="hosts such as 8xH100 or 8xA100-80GB")
    group.add_argument("--hosts", metavar="N", type=int, help="of the preset (default: 1)")
    group.add_argument("--ranks", metavar="W", type=int, help="so many, of the default rates")
    group.add_argument(
        "--memory-gib", metavar="G", type=float, help="memory of each rank for its tables, in GiB"
    )
    group.add_argument(
        "--ranks-per-host", metavar="N", type=int, help="of --ranks (default: all on one host)"
    )


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--objective",
        choices=("train", "infer"),
        default="train",
        help="training also has gradients, updates and optimizer state (default: %(default)s)",
    )
    group.add_argument(
        "--batch-size",
        metavar="B",
        type=int,
        default=512,
        help="samples of a rank in a step (default: %(default)s)",
    )
    group.add_argument(
        "--exchanges",
        metavar="NAME[,NAME...]",
        help="those that may be used, of direct, rows, partial, whole, replicated (default: all)",
    )
    group.add_argument(
        "--no-hot-rows",
        action="store_true",
        help="no table has some rows on every rank beside others",
    )
    group.add_argument(
        "--runnable",
        action="store_true",
        help="only what OperSharder runs today: partial and whole tables in one piece",
    )
    group.add_argument(
        "--refine",
        action="store_true",
        help="afterwards bring rows that bags name together to one owner, where replay of samples"
        " of the profile that this didn't see takes less; needs the extra torchrec-oper[graph]",
    )
    group.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of the search (default: 0)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Plan, save the plan, and print its report.

    Raises:
        OSError: a file can't be read, or an output can't be written.
        OperError: the tables don't fit, or an argument has a wrong value.
    """
    with ended_by_interrupt():
        from torchrec_oper.archive import check_writable
        from torchrec_oper.planner.picture import check_picture, save_picture
        from torchrec_oper.planner.planning import Request, make_plan
        from torchrec_oper.profile import AccessProfile

    output: Path = arguments.output
    picture: Path | None = arguments.picture
    inputs = list(filter(None, [arguments.profile, arguments.tables, arguments.cluster]))
    for path in inputs:
        os.stat(path)
    check_writable(output, inputs=inputs)
    if picture is not None:
        check_picture(picture)
        check_writable(picture, inputs=[*inputs, output])
    cluster = _cluster(arguments)
    profile = AccessProfile.load(arguments.profile) if arguments.profile else None
    if arguments.refine:
        _check_refine(profile)
    tables = _tables(arguments, profile)
    request = Request(
        cluster,
        profile,
        objective=arguments.objective,
        batch_size=arguments.batch_size,
        space=_space(arguments, len(tables)),
        seed=arguments.seed,
    )
    with elapsed_shown(f"placing {len(tables):,} tables on {cluster.world_size:,} ranks"):
        plan = make_plan([(arguments.module, table) for table in tables], request)
    report = plan.report()
    if arguments.refine and profile is not None:
        plan, report = _refined(plan, profile, seed=arguments.seed)
    plan.save(output)
    print(report)
    _say_whether_runnable(plan)
    print(f"\nwritten to {output}")
    if picture is not None:
        save_picture(plan, picture)
        print(f"drawn to {picture}")
    if output.is_file():
        with_profile = f" --profile {arguments.profile}" if profile else ""
        print(f"next: oper explain {output}{with_profile}")


def _check_refine(profile: AccessProfile | None) -> None:
    from torchrec_oper.errors import PlanError
    from torchrec_oper.planner.coaccess import check_refinable

    if profile is None:
        raise PlanError("--refine needs --profile, whose trace tells which rows go together")
    check_refinable(profile)


def _refined(plan: Plan, profile: AccessProfile, *, seed: int) -> tuple[Plan, str]:
    """The plan after refinement by co-access, and the report of both."""
    from torchrec_oper.planner.coaccess import refine

    refined = refine(plan, profile, seed=seed, progress=True)
    return refined.plan, f"{refined.plan.report()}\n\n{refined.report()}"


def _tables(arguments: argparse.Namespace, profile: AccessProfile | None) -> list[TableSpec]:
    """The tables of the file, or of the profile with the dims that the arguments give."""
    from dataclasses import replace

    from torchrec_oper.errors import PlanError
    from torchrec_oper.table import TableSpec

    if arguments.tables is not None:
        if arguments.dim or arguments.dtype:
            raise PlanError("--dim and --dtype are for tables of a profile; --tables has its own")
        tables = list(read_tables(arguments.tables))
    elif profile is None:
        raise PlanError("which tables? Give --profile P --dim D, or --tables FILE")
    else:
        dims = dict(arguments.dim)
        unknown = [name for name in dims if name and name not in {t.name for t in profile.tables}]
        if unknown:
            raise PlanError(f"--dim {unknown[0]}=...: the profile has no such table")
        missing = [t.name for t in profile.tables if t.name not in dims and "" not in dims]
        if missing:
            raise PlanError(
                f"how many elements has a row of table {missing[0]}? A profile doesn't know; say"
                f" --dim D for all tables, or --dim {missing[0]}=D"
            )
        tables = [
            TableSpec(
                name=table.name,
                rows=table.rows,
                dim=dims[table.name if table.name in dims else ""],
                features=table.features,
                dtype=arguments.dtype or "float32",
            )
            for table in profile.tables
        ]
    if arguments.optimizer_bytes is None:
        return tables
    return [replace(table, optimizer_bytes_per_row=arguments.optimizer_bytes) for table in tables]


def _cluster(arguments: argparse.Namespace) -> Cluster:
    from torchrec_oper.errors import PlanError
    from torchrec_oper.planner.cluster import Cluster
    from torchrec_oper.planner.presets import machine

    ways = {
        "--cluster": arguments.cluster,
        "--preset": arguments.preset,
        "--ranks": arguments.ranks,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise PlanError(
            f"which ranks? Give one of --cluster FILE, --preset NAME or --ranks W, found {found}"
        )
    for name, owner in (("hosts", "preset"), ("memory_gib", "ranks"), ("ranks_per_host", "ranks")):
        if getattr(arguments, name) is not None and given != [f"--{owner}"]:
            raise PlanError(f"--{name.replace('_', '-')} goes with --{owner}, found {given[0]}")
    if arguments.cluster is not None:
        return Cluster.load(arguments.cluster)
    if arguments.preset is not None:
        return machine(arguments.preset, hosts=1 if arguments.hosts is None else arguments.hosts)
    if arguments.memory_gib is None:
        raise PlanError("how much memory has a rank? Say --memory-gib G")
    if not 0 < arguments.memory_gib < 2**30:
        raise PlanError(
            f"--memory-gib must be above 0 and below 2**30, found {arguments.memory_gib}"
        )
    return Cluster.uniform(
        arguments.ranks,
        memory_bytes=int(arguments.memory_gib * 2**30),
        ranks_per_host=arguments.ranks_per_host,
    )


def _space(arguments: argparse.Namespace, tables: int) -> SearchSpace | None:
    """The search space where the arguments limit it."""
    from dataclasses import replace

    from torchrec_oper.errors import PlanError
    from torchrec_oper.planner.optimize import default_space
    from torchrec_oper.planner.runnable import RUNNABLE

    if arguments.runnable:
        if arguments.exchanges is not None:
            raise PlanError("--runnable says which exchanges may be used; leave out --exchanges")
        return RUNNABLE
    space = default_space(tables)
    if arguments.exchanges is not None:
        names = tuple(name.strip() for name in arguments.exchanges.split(","))
        space = replace(space, exchanges=names)
    return replace(space, hot_rows=False) if arguments.no_hot_rows else space


def _say_whether_runnable(plan: Plan) -> None:
    """Say what keeps the run-time of today from running the plan, if anything does."""
    from torchrec_oper.errors import PlanError
    from torchrec_oper.planner.runnable import check_runnable

    try:
        check_runnable(plan.placements)
    except PlanError as error:
        why = str(error).partition(". It runs")[0]
        print(f"note: {why}; --runnable plans with what it runs")


def _dim(text: str) -> tuple[str, int]:
    """Table (empty for all) and dim in ``D`` or ``NAME=D``."""
    name, _, number = text.rpartition("=")
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"wanted D or NAME=D, found {text!r}")
    return name, int(number)
