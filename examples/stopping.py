"""Ctrl-C and SIGTERM, and the death of the launcher: how the program is told to stop.

Imports nothing slow: the program uses it before it imports the libraries.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from types import FrameType
from typing import NoReturn

EXIT_STOPPED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# The main thread has this long to tidy up; it can't while it waits in C++ for another rank.
GRACE_S = 1.0
# A launcher passes on a signal that the terminal has sent already: only a later one is a
# second request.
SECOND_REQUEST_S = 1.0
LAUNCHER_CHECK_S = 0.5


class Stopped(BaseException):
    """The user asked the program to stop; the message says how far it came.

    No ``Exception``, so that no library takes it for an error of its own and goes on.
    """

    def __init__(self, message: str = "stopped; nothing is left running") -> None:
        super().__init__(message)


class _Mode(Enum):
    END = auto()
    RAISE = auto()
    NOTE = auto()
    IGNORE = auto()


class StopRequest:
    """SIGINT and SIGTERM, turned into a request to stop, from the moment this is made.

    At first a signal ends the process, with one line and exit code 130. After
    ``raise_from_now`` it raises ``Stopped`` in the main thread. Within
    ``at_step_boundary`` it is only noted, for the ranks to agree on after the step; a
    second one, some time later, ends the process. A thread watches, and ends the process
    where the main thread doesn't get to it. A rank whose launcher is gone gets SIGTERM.
    """

    def __init__(self) -> None:
        self.noted = False
        self._mode = _Mode.END
        self._last_words = threading.RLock()
        self._launcher = os.getppid() if "RANK" in os.environ else None
        # Python's handlers wait until the main thread is back from C++; this pipe doesn't.
        self._signals, sink = os.pipe()
        os.set_blocking(sink, False)
        signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._handle)
        threading.Thread(target=self._watch, name="stop-request", daemon=True).start()

    def raise_from_now(self) -> None:
        """Raise ``Stopped`` for a signal: there is something to tidy up."""
        self._mode = _Mode.RAISE

    def ignore_from_now(self) -> None:
        """Don't let a signal disturb the last words of a process that is ending anyway."""
        self._mode = _Mode.IGNORE
        self._last_words.acquire()

    @contextmanager
    def at_step_boundary(self) -> Iterator[None]:
        """Let the code within ask ``noted`` when it is ready to stop.

        Raises:
            Stopped: at the end, for a signal that came too late for the last step.
        """
        self._mode = _Mode.NOTE
        try:
            yield
        finally:
            self._mode = _Mode.RAISE
        if self.noted:
            raise Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._mode is _Mode.IGNORE:
            return
        if self._mode is _Mode.END:
            self._end()
        self.noted = True
        if self._mode is _Mode.RAISE:
            raise Stopped

    def _watch(self) -> None:
        first_noted: float | None = None
        while True:
            if not select.select([self._signals], [], [], LAUNCHER_CHECK_S)[0]:
                self._look_for_launcher()
                continue
            number = os.read(self._signals, 1)[0]
            if signal.getsignal(number) != self._handle:
                continue  # whoever runs the ranks handles the signals now
            if self._mode is not _Mode.NOTE:
                time.sleep(GRACE_S)
                if self._mode is not _Mode.IGNORE:
                    self._end()
            elif first_noted is None:
                first_noted = time.monotonic()
            elif time.monotonic() - first_noted > SECOND_REQUEST_S:
                self._end()

    def _look_for_launcher(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            self._launcher = None
            os.kill(os.getpid(), signal.SIGTERM)

    def _end(self) -> NoReturn:
        """Say so on rank 0, and end here and now."""
        with self._last_words:
            if os.environ.get("RANK", "0") == "0":
                # Not print: the signal may have come in the middle of one.
                os.write(2, f"\n{Stopped()}\n".encode())
            os._exit(EXIT_STOPPED)
