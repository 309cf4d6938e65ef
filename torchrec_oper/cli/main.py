"""The door of the ``oper`` command: arguments in, exit status out, errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torchrec_oper import __version__
from torchrec_oper.cli import bench, calibrate, diff, explain, plan, profile, verify
from torchrec_oper.cli.subcommands import Command, add_commands
from torchrec_oper.errors import OperError

STATUS_USER_ERROR = 2
STATUS_INTERRUPTED = 130  # what a shell reports for SIGINT
STATUS_PIPE_CLOSED = 141  # and for SIGPIPE


# A new one is added here.
COMMANDS: tuple[Command, ...] = (profile, calibrate, plan, explain, diff, verify, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``oper``.

    Args:
        argv: the arguments, without the program's name; by default the process's own.

    Returns:
        The exit status: 0 or what the command says, 2 for what the user can mend, 130 for
        Ctrl-C, 141 where the reader of the output went away.
    """
    _replace_closed_streams()
    try:
        arguments = _parser().parse_args(argv)
        status: int | None = arguments.run(arguments)
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
    return status or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oper",
        description="Places the rows of TorchRec's embedding tables where they are cheapest.",
        epilog="`oper COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"torchrec-oper {__version__}")
    add_commands(parser, COMMANDS)
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
