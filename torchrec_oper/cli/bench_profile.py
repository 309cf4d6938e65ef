"""``oper bench profile``: how fast profiles are made."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_oper.cli.interrupt import ended_by_interrupt

NAME = "profile"
SUMMARY = "measure how fast profiles are made"
EXAMPLES = """\
Measures, on one core each and beside the figure that is required: samples a second read
from a Criteo log, ids a second counted in batches, and the share of a training step that
ProfileCallback adds.

examples:
  oper bench profile                        about a minute, with a log that is made up
  oper bench profile --data train.txt --json profile.json
  oper bench profile --quick                some seconds
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--data", metavar="FILE", type=Path, help="a log in Criteo's format")
    parser.add_argument("--quick", action="store_true", help="measure less, for a first look")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of what is made up")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there, too")


def run(arguments: argparse.Namespace) -> None:
    """Measure, and print the figures.

    Raises:
        OSError: a file can't be read or written.
        OperError: the log breaks its format.
    """
    with ended_by_interrupt():
        import json

        from torchrec_oper.archive import check_writable, replace_file
        from torchrec_oper.bench.profile import FULL, QUICK, measure, report_lines

    output: Path | None = arguments.json
    if output is not None:
        check_writable(output, inputs=filter(None, [arguments.data]))
    figures = measure(
        QUICK if arguments.quick else FULL,
        data=arguments.data,
        seed=arguments.seed,
        progress=True,
    )
    for line in report_lines(figures):
        print(line)
    if output is not None:
        document = json.dumps({"figures": [figure.to_json() for figure in figures]}, indent=2)
        replace_file(output, lambda file: file.writelines([document.encode(), b"\n"]))
        print(f"\nwritten to {output}")
