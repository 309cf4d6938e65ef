"""Ctrl-C while modules are imported."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once, for imports that take long.

    An import would make an error of its own out of a ``KeyboardInterrupt``.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as in the background of a script, or a caller's affair
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
