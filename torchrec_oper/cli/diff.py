"""``oper diff``: what differs between two plans."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_oper.cli.interrupt import ended_by_interrupt
from torchrec_oper.cli.plan_file import print_json

NAME = "diff"
SUMMARY = "show what differs between two plans, and what would move"
EXAMPLES = """\
examples:
  oper diff monday.plan tuesday.plan
  oper diff monday.plan tuesday.plan --top 100
  oper diff monday.plan tuesday.plan --json | jq .moved_bytes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("before", metavar="FIRST", type=Path, help="a plan")
    parser.add_argument("after", metavar="SECOND", type=Path, help="the one to take its place")
    parser.add_argument(
        "--top",
        metavar="N",
        type=int,
        default=40,
        help="tables to show, those that move most first (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON instead")


def run(arguments: argparse.Namespace) -> None:
    """Compare the plans.

    Raises:
        OSError: a file can't be read.
        OperError: a file is damaged or no plan.
    """
    with ended_by_interrupt():
        from torchrec_oper.planner.diff import plan_diff
        from torchrec_oper.planner.plan import Plan

    difference = plan_diff(Plan.load(arguments.before), Plan.load(arguments.after))
    if arguments.json:
        print_json(difference.to_json())
    else:
        print(difference.text(most=max(arguments.top, 1)))
