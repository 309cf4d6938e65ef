"""Commands below a command: one module each."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Protocol


class Command(Protocol):
    """What the module of a subcommand offers.

    It imports what takes long in ``run``, under ``ended_by_interrupt``; ``--help`` is quick.
    """

    NAME: str
    SUMMARY: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the subcommand's arguments."""

    def run(self, arguments: argparse.Namespace) -> int | None:
        """Do the work; raise ``OperError`` or ``OSError`` for what the user can mend.

        Returns:
            The exit status, where it may be another than 0.
        """


def add_commands(parser: argparse.ArgumentParser, commands: Iterable[Command]) -> None:
    """Give ``parser`` subcommands; the chosen one's ``run`` is in what it parses."""
    group = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        subparser = group.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.SUMMARY[0].upper() + command.SUMMARY[1:] + ".",
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # First, so that a command below this one puts its own in its place.
        subparser.set_defaults(run=command.run)
        command.add_arguments(subparser)
