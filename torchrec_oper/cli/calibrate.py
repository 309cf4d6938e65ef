"""``oper calibrate``: measure the ranks and the links among them."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchrec_oper.cli.interrupt import ended_by_interrupt

NAME = "calibrate"
SUMMARY = "measure how fast the ranks read and update rows and talk to each other"
EXAMPLES = """\
Measures random reads and updates of rows by row size, on the CPU with FBGEMM, and
exchanges by message size, over gloo. All ranks work at once, as in training, so run it as
you train: with torchrun's options, on quiet machines. Ranks of one host name are on one
host. Rank 0 writes the file and prints how well the model fits.

examples:
  oper calibrate                              one rank, into cluster.json
  torchrun --nproc-per-node 8 -m torchrec_oper.cli.main calibrate -o cluster.json
  oper calibrate --quick                      fewer sizes and repeats: some seconds
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        default=Path("cluster.json"),
        help="where the cluster goes, a JSON file (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer sizes and repeats, for a first look"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, save the cluster, and print a summary on rank 0.

    Raises:
        OSError: the cluster can't be written; raised on every rank.
        OperError: the ranks can't be joined, or the times make no sense.
    """
    with ended_by_interrupt():
        from torchrec_oper.archive import check_writable
        from torchrec_oper.bench.calibrate import FULL, QUICK, calibrate, report_lines
        from torchrec_oper.bench.group import all_ranks

    output: Path = arguments.output
    with all_ranks() as group:
        group.on_first(lambda: check_writable(output))
        effort = QUICK if arguments.quick else FULL
        calibration = calibrate(group, effort, progress=True)
        group.on_first(lambda: calibration.cluster.save(output))
        if group.rank:
            return
    for line in report_lines(calibration):
        print(line)
    print(f"\nwritten to {output}")
    if output.is_file():
        print(f"next: plan for it, OperPlanner(cluster=Cluster.load({str(output)!r}), ...)")
