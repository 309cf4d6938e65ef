"""The door of the ``oper`` command: arguments in, exit status out, errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from torchrec_oper import __version__
from torchrec_oper.cli import calibrate, profile
from torchrec_oper.errors import OperError

STATUS_USER_ERROR = 2
STATUS_INTERRUPTED = 130  # what a shell reports for SIGINT
STATUS_PIPE_CLOSED = 141  # and for SIGPIPE


class Command(Protocol):
    """What the module of a subcommand offers; a new one is added to ``COMMANDS``.

    It imports what takes long in ``run``, under ``ended_by_interrupt``; ``--help`` is quick.
    """

    NAME: str
    SUMMARY: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the subcommand's arguments."""

    def run(self, arguments: argparse.Namespace) -> None:
        """Do the work; raise ``OperError`` or ``OSError`` for what the user can mend."""


COMMANDS: tuple[Command, ...] = (profile, calibrate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``oper``.

    Args:
        argv: the arguments, without the program's name; by default the process's own.

    Returns:
        The exit status: 0, 2 for what the user can mend, 130 for Ctrl-C, 141 where the
        reader of the output went away.
    """
    _replace_closed_streams()
    try:
        arguments = _parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _complain("interrupted")
        return STATUS_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at its end, which must not fail aloud.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STATUS_PIPE_CLOSED
    except OperError as error:
        _complain(str(error))
        return STATUS_USER_ERROR
    except OSError as error:
        named = f"{error.filename}: " if error.filename is not None else ""
        _complain(f"{named}{error.strerror or error}")
        return STATUS_USER_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oper",
        description="Places the rows of TorchRec's embedding tables where they are cheapest.",
        epilog="`oper COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"torchrec-oper {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.NAME,
            help=command.SUMMARY,
            description=command.SUMMARY[0].upper() + command.SUMMARY[1:] + ".",
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _replace_closed_streams() -> None:
    """Open what the caller closed (``>&-``), or the next file would get its number."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115


def _complain(message: str) -> None:
    print(f"oper: {' '.join(message.split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
