"""``oper explain``: which table costs what where."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_oper.cli.interrupt import ended_by_interrupt
from torchrec_oper.cli.plan_file import add_plan, print_json, read_plan

NAME = "explain"
SUMMARY = "show which table of a plan costs what, what binds, and what would help"
EXAMPLES = """\
A plan that was made with a profile needs it here.

examples:
  oper explain day0.plan --profile day0.profile
  oper explain day0.plan --profile day0.profile --top 50 --picture day0.png
  oper explain day0.plan --profile day0.profile --ladder   plans twice more, with less choice
  oper explain tables.plan --json | jq '.tables[0]'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_plan(parser)
    parser.add_argument(
        "--top",
        metavar="N",
        type=int,
        default=20,
        help="tables to show, the most expensive first (default: %(default)s)",
    )
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="show, too, what placement, exchanges and hot rows gain each",
    )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON instead")
    parser.add_argument(
        "--picture",
        metavar="OUT",
        type=Path,
        help="draw the seconds of each rank there: a .png, .svg or .pdf file",
    )


def run(arguments: argparse.Namespace) -> None:
    """Explain the plan.

    Raises:
        OSError: a file can't be read, or the picture can't be written.
        OperError: a file is damaged, or the profile isn't the plan's.
    """
    with ended_by_interrupt():
        from dataclasses import asdict

        from torchrec_oper.archive import check_writable
        from torchrec_oper.planner.explain import explain
        from torchrec_oper.planner.ladder import ladder, ladder_text
        from torchrec_oper.planner.picture import check_picture, save_picture

    picture: Path | None = arguments.picture
    if picture is not None:
        check_picture(picture)
        check_writable(picture, inputs=filter(None, [arguments.plan, arguments.profile]))
    plan, _, demands = read_plan(arguments)
    explanation = explain(plan, demands)
    rungs = ladder(plan, demands, progress=True) if arguments.ladder else ()
    if arguments.json:
        told = explanation.to_json()
        told |= {"ladder": [asdict(rung) for rung in rungs]} if rungs else {}
        print_json(told)
    else:
        print(explanation.text(most=max(arguments.top, 1)))
        if rungs:
            print(f"\nwhat each freedom gains:\n{ladder_text(rungs)}")
    if picture is not None:
        save_picture(plan, picture)
        if not arguments.json:
            print(f"\ndrawn to {picture}")
