"""Does the same to several files, each in one of some processes."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.progress import Tick

T = TypeVar("T")
Path = str | os.PathLike[str]
Work = Callable[[Path, Tick], T]

_TICK, _DONE, _FAILED = range(3)
_LEAST_TICK_BYTES = 1 << 20  # fewer bytes aren't worth a message
_AHEAD = 2  # files for each process that may be done before it is their turn


def usable_cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def map_files(work: Work[T], paths: Sequence[Path], *, jobs: int, tick: Tick) -> Iterator[T]:
    """``work`` of each file, in the order of ``paths``.

    With one job it is done in this process. With more, ``work`` and what it returns must
    be picklable; each process is started anew, so a program's main module must keep
    what it does under ``if __name__ == "__main__":``. All processes have ended when the
    iterator is done, closed, or raises.

    Args:
        work: takes a path, and what it tells the bytes that it has read.
        paths: the files.
        jobs: processes, 1 or more; those beyond the number of files aren't started.
        tick: told the bytes read of all files.

    Raises:
        ProfileError: ``jobs`` is below 1, or a process died.
        Exception: what ``work`` raised first.
    """
    if jobs < 1:
        raise ProfileError(f"jobs must be 1 or more, found {jobs}")
    jobs = min(jobs, len(paths))
    if jobs <= 1:
        yield from (work(path, tick) for path in paths)
        return
    with _workers(work, jobs) as workers:
        yield from _Dispatch(workers, paths, tick)


class _Dispatch(Generic[T]):
    """Hands files to idle workers and the results on, in order."""

    def __init__(self, workers: Sequence[_Worker], paths: Sequence[Path], tick: Tick) -> None:
        self._paths = paths
        self._tick = tick
        self._idle = list(workers)
        self._busy: dict[Connection, tuple[_Worker, int]] = {}
        self._most_ahead = _AHEAD * len(workers)
        self._next = 0

    def __iter__(self) -> Iterator[T]:
        results: dict[int, T] = {}
        for at in range(len(self._paths)):
            while at not in results:
                self._hand_out(before=at + self._most_ahead)
                for pipe in wait(list(self._busy)):
                    assert isinstance(pipe, Connection)
                    self._receive(pipe, results)
            yield results.pop(at)

    def _hand_out(self, *, before: int) -> None:
        while self._idle and self._next < min(before, len(self._paths)):
            worker = self._idle.pop()
            worker.start(self._paths[self._next])
            self._busy[worker.pipe] = worker, self._next
            self._next += 1

    def _receive(self, pipe: Connection, results: dict[int, T]) -> None:
        worker, at = self._busy[pipe]
        try:
            kind, value = pipe.recv()
        except (EOFError, ConnectionError):
            raise self._died(worker, at) from None
        if kind == _TICK:
            self._tick(value)
            return
        if kind == _FAILED:
            raise value
        results[at] = value
        del self._busy[pipe]
        self._idle.append(worker)

    def _died(self, worker: _Worker, at: int) -> ProfileError:
        worker.process.join()
        return ProfileError(
            f"the process that read {self._paths[at]} died (exit code {worker.process.exitcode});"
            " if memory ran out, take fewer jobs"
        )


class _Worker:
    """A process and the pipe to it."""

    def __init__(self, work: Work[Any]) -> None:
        context = mp.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(work, far), daemon=True)
        self.process.start()
        far.close()  # so that the end of the process ends the pipe

    def start(self, path: Path) -> None:
        with suppress(BrokenPipeError):  # it died: told when its answer is read
            self.pipe.send(path)


@contextmanager
def _workers(work: Work[Any], jobs: int) -> Iterator[list[_Worker]]:
    workers: list[_Worker] = []
    try:
        with _interrupts_held():
            for _ in range(jobs):
                workers.append(_Worker(work))
        yield workers
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Let what is started meanwhile never see Ctrl-C, which this process gets afterwards.

    A terminal sends it to all processes; this one ends the others.
    """
    resource_tracker.ensure_running()  # or it would be started within, and unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(work: Work[Any], pipe: Connection) -> None:
    """What a process does: work on the files that it is told, until it is ended."""
    unsent = 0

    def tick(more_bytes: int) -> None:
        nonlocal unsent
        unsent += more_bytes
        if unsent >= _LEAST_TICK_BYTES:
            pipe.send((_TICK, unsent))
            unsent = 0

    try:
        while True:
            path = pipe.recv()
            try:
                answer = _DONE, work(path, tick)
            except Exception as error:
                answer = _FAILED, _portable(error)
            pipe.send((_TICK, unsent))
            unsent = 0
            pipe.send(answer)
    except (EOFError, ConnectionError):
        pass  # whoever started this is gone


def _portable(error: Exception) -> Exception:
    """``error``, or what can be sent in its place."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return error
