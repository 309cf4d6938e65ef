"""``oper verify``: check what a plan says of itself."""

from __future__ import annotations

import argparse

from torchrec_oper.cli.interrupt import ended_by_interrupt
from torchrec_oper.cli.plan_file import add_plan, print_json, read_plan

NAME = "verify"
SUMMARY = "recompute a plan's cost, memory and bound, and say where it is wrong"
EXAMPLES = """\
Uses the judge, which shares no code with the search. The exit status is 0 where everything
is as the plan says, and 1 where something isn't.

examples:
  oper verify day0.plan --profile day0.profile
  oper verify tables.plan --json
"""

STATUS_WRONG = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_plan(parser)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    """Verify the plan.

    Returns:
        The exit status: 0, or 1 where the plan is wrong.

    Raises:
        OSError: a file can't be read.
        OperError: a file is damaged, or the profile isn't the plan's.
    """
    with ended_by_interrupt():
        from dataclasses import asdict

        from torchrec_oper.planner.verify import verify_plan

    plan, profile, demands = read_plan(arguments)
    checks = verify_plan(plan, demands, profile)
    troubles = sum(len(check.trouble) for check in checks)
    if arguments.json:
        print_json({"correct": not troubles, "checks": [asdict(check) for check in checks]})
        return STATUS_WRONG if troubles else 0
    for check in checks:
        print(f"{check.what:8}{'WRONG' if check.trouble else 'ok':7}{check.found}")
        for line in check.trouble:
            print(f"{'':15}{line}")
    if troubles:
        print(f"\n{arguments.plan}: {troubles} wrong")
        return STATUS_WRONG
    print(f"\n{arguments.plan}: all as the plan says")
    return 0
