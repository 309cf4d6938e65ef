"""Start the ranks, let them agree, and end them together and tidily."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stopping import EXIT_STOPPED, Stopped, StopRequest
from torchrec_oper.errors import OperError

T = TypeVar("T")

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_ALONE = 3  # another rank is gone, and has the better reason
# A rank waits this long for another one that reads, profiles or plans.
WAIT = timedelta(hours=2)
# What gloo and the store say when the process at the other end of a connection is gone.
LOST_CONNECTION = re.compile(
    r"gloo.*(Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused)",
    re.DOTALL,
)


class UserError(Exception):
    """Something the user can put right; the message says how."""


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

    def has_last_words(self) -> bool:
        """Whether this is the first rank to ask: the one to say why the run ends early."""
        if self.world_size == 1:
            return True
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        wait = timedelta(seconds=2)
        try:
            # The launcher keeps the store: it is there when other ranks are gone. If it is
            # gone itself, a TCPStore would say so in a hundred lines.
            socket.create_connection((host, port), timeout=wait.total_seconds()).close()
            store = dist.TCPStore(host, port, timeout=wait, wait_for_workers=False)
            return int(store.add(f"last words {run}", 1)) == 1
        except (OSError, RuntimeError):
            return self.first

    def first_does(self, work: Callable[[], T], *, share: bool = True) -> T | None:
        """What ``work`` gives on rank 0; the others wait for it.

        Args:
            work: called on rank 0 only.
            share: send the result to the other ranks, rather than None.

        Raises:
            UserError: on every rank, when rank 0 met an error that a line explains.
        """
        outcome: list[tuple[T | None, str | None]] = [(None, None)]
        result: T | None = None
        if self.first:
            try:
                result = work()
                outcome = [(result if share else None, None)]
            except Exception as error:
                message = explained(error)
                if message is None:
                    raise
                outcome = [(None, message)]
        if self.world_size > 1:
            dist.broadcast_object_list(outcome, src=0)
        sent, failure = outcome[0]
        if failure is not None:
            raise UserError(failure)
        return result if self.first else sent


def run_ranks(work: Callable[[Ranks, StopRequest], None], stop: StopRequest) -> NoReturn:
    """Join the other ranks, do ``work`` with them, and exit with a code that says how it went.

    Exit codes: 0 done, 2 an error that the user can put right, 130 stopped by the user,
    3 another rank is gone, 1 an error that nobody expected.
    """
    ranks = Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    try:
        stop.raise_from_now()
        _join()
        work(ranks, stop)
        dist.destroy_process_group()
    except (Exception, Stopped) as error:
        _leave(ranks, stop, error)
    stop.ignore_from_now()
    _exit(0)


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


def _leave(ranks: Ranks, stop: StopRequest, error: Exception | Stopped) -> NoReturn:
    """Say what happened, once, and end without waiting for ranks that may be gone."""
    stop.ignore_from_now()
    code, text = _last_words(error, stop_noted=stop.noted)
    # An error that nobody expected is told in any case.
    if ranks.has_last_words() or code == EXIT_FAILED:
        print(text, file=sys.stderr)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End here: in Python's own end, threads of PyTorch's abort the process now and then."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _last_words(error: Exception | Stopped, *, stop_noted: bool) -> tuple[int, str]:
    """The exit code, and what to print."""
    if isinstance(error, Stopped):
        return EXIT_STOPPED, f"\n{error}"
    message = explained(error)
    if message is not None:
        return EXIT_USER_ERROR, f"error: {message}"
    if stop_noted:
        # A rank that stops breaks the others' collectives.
        return EXIT_STOPPED, f"\n{Stopped()}"
    if isinstance(error, dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and LOST_CONNECTION.search(str(error))
    ):
        return EXIT_ALONE, "error: another rank is gone: the connection to it broke"
    return EXIT_FAILED, "".join(traceback.format_exception(error)).rstrip()


def explained(error: Exception) -> str | None:
    """What went wrong, in one line for the user, or None where only a traceback helps."""
    if isinstance(error, (UserError, OperError, OSError)):
        return one_line(error)
    text = one_line(error)
    allocator = re.search(r"DefaultCPUAllocator.*tried to allocate (\d+) bytes", text)
    if isinstance(error, RuntimeError) and allocator:
        text = f"wanted {int(allocator[1]) / 2**30:,.1f} GiB in one piece"
    elif not isinstance(error, MemoryError):
        return None
    return (
        f"not enough memory{f': {text}' if text else ''}; take less of --scale, --dim, --bottom,"
        " --top or --global-batch-size"
    )


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
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # or else a folder stays in $TMPDIR
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
        rank, failure = root_cause(error.failures)
        if failure.exitcode in (EXIT_USER_ERROR, EXIT_STOPPED):
            return failure.exitcode
        killed = failure.exitcode < 0
        how = f"was ended by {failure.signal_name()}" if killed else "failed; it says why above"
        print(f"error: rank {rank} {how}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The failure, of one rank, that brought the others about.

    The launcher sees them late and in no order: a rank that lost a connection, or was
    then told to stop, isn't the cause while there is another.
    """
    consequences = (EXIT_STOPPED, -signal.SIGTERM, EXIT_ALONE)

    def weight(rank: int) -> tuple[int, int]:
        code = failures[rank].exitcode
        return (consequences.index(code) + 1 if code in consequences else 0, rank)

    rank = min(failures, key=weight)
    return rank, failures[rank]
