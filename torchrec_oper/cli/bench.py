"""``oper bench``: the measurements, each a command of its own."""

from __future__ import annotations

import argparse

from torchrec_oper.bench import planner
from torchrec_oper.cli import bench_profile
from torchrec_oper.cli.subcommands import Command, add_commands

NAME = "bench"
SUMMARY = "measure, on this machine, the numbers that the README shows"
EXAMPLES = "`oper bench COMMAND --help` has examples."

BENCHES: tuple[Command, ...] = (bench_profile, planner)  # a new one is added here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benches and their arguments."""
    add_commands(parser, BENCHES)


def run(arguments: argparse.Namespace) -> None:
    """Never called: the bench that was chosen sets its own ``run``."""
    raise AssertionError("a bench is required")
