"""Start the ranks, let them agree, and end them together and tidily."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchrec_oper.errors import OperError

T = TypeVar("T")

EXIT_USER_ERROR = 2
EXIT_STOPPED = 130
# A rank waits this long for another one that reads, profiles or plans.
WAIT = timedelta(hours=2)


class UserError(Exception):
    """Something the user can put right; the message says how."""


class Stopped(Exception):  # noqa: N818 (no error, but what the user wants)
    """The user asked the program to stop; the message says how far it came."""

    def __init__(self, message: str = "stopped; nothing is left running") -> None:
        super().__init__(message)


EXPECTED = (UserError, OperError, OSError)


@dataclass(frozen=True)
class Ranks:
    """This process among the others of the run."""

    rank: int
    world_size: int

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which does the talking."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print ``text`` once, however many ranks there are."""
        if self.first:
            print(text, flush=True)

    def meet(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier()

    def first_does(self, work: Callable[[], T], *, share: bool = True) -> T | None:
        """What ``work`` gives on rank 0; the others wait for it.

        Args:
            work: called on rank 0 only.
            share: send the result to the other ranks, rather than None.

        Raises:
            UserError: on every rank, when rank 0 met an expected error.
        """
        outcome: list[tuple[T | None, str | None]] = [(None, None)]
        result: T | None = None
        if self.first:
            try:
                result = work()
                outcome = [(result if share else None, None)]
            except EXPECTED as error:
                outcome = [(None, one_line(error))]
        if self.world_size > 1:
            dist.broadcast_object_list(outcome, src=0)
        sent, failure = outcome[0]
        if failure is not None:
            raise UserError(failure)
        return result if self.first else sent


class StopRequest:
    """SIGINT and SIGTERM, turned into a request that all ranks follow together.

    Within ``at_step_boundary`` a signal is only noted, for the ranks to agree on after
    the step; elsewhere, and the second time, it raises ``Stopped`` at once.
    """

    def __init__(self) -> None:
        self.noted = False
        self._waits_for_step = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    @contextmanager
    def at_step_boundary(self) -> Iterator[None]:
        """Let the code within ask ``noted`` when it is ready to stop."""
        self._waits_for_step = True
        try:
            yield
        finally:
            self._waits_for_step = False

    def ignore_from_now(self) -> None:
        """Don't let a signal disturb the last words of a rank that is ending anyway."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.noted = self.noted, True
        if again or not self._waits_for_step:
            raise Stopped


def run_ranks(work: Callable[[Ranks, StopRequest], None]) -> NoReturn:
    """Join the other ranks, do ``work`` with them, and exit with a code that says how it went.

    Exit codes: 0 done, 2 an error that the user can put right, 130 stopped by the user.
    """
    stop = StopRequest()
    ranks = Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    try:
        _join()
        work(ranks, stop)
    except (Stopped, *EXPECTED) as error:
        _leave(ranks, stop, error)
    except Exception:
        # A rank that stops breaks the others' collectives, perhaps before the signal is here.
        if not stop.noted:
            raise
        _leave(ranks, stop, Stopped())
    dist.destroy_process_group()
    sys.exit(0)


def _join() -> None:
    _quiet_libraries()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", timeout=WAIT)


def _quiet_libraries() -> None:
    """Keep remarks of PyTorch and TorchRec about their own code off the screen."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")
    warnings.filterwarnings("ignore", message="fbgemm::.* an autograd kernel was not registered")
    for name in ("torch.fx._symbolic_trace", "torchrec.distributed.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _leave(ranks: Ranks, stop: StopRequest, error: Exception) -> NoReturn:
    """Say what happened on rank 0, and end without waiting for ranks that may be gone."""
    stop.ignore_from_now()
    stopped = isinstance(error, Stopped)
    if ranks.first:
        print(f"\n{error}" if stopped else f"error: {one_line(error)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STOPPED if stopped else EXIT_USER_ERROR)


def one_line(error: BaseException) -> str:
    """The error's message, as one line."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def started_by_launcher() -> bool:
    """Whether torchrun, or ``launch``, started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(ranks: int, arguments: list[str]) -> int:
    """Run this program on ``ranks`` ranks of this machine, like torchrun without its tracebacks.

    Returns:
        The exit code: that of the rank that failed first, or 130 when the user stopped it.
    """
    logging.disable(logging.ERROR)  # what a rank has to say, it says itself
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"train-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", *arguments)
    except SignalException:
        return EXIT_STOPPED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in (EXIT_USER_ERROR, EXIT_STOPPED):
            return failure.exitcode
        killed = failure.exitcode < 0
        how = f"was ended by {failure.signal_name()}" if killed else "failed; it says why above"
        print(f"error: rank {rank} {how}", file=sys.stderr)
        return 1
    return 0
