"""Shows that long work goes on, where nobody can say how much of it is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.5


@contextmanager
def elapsed_shown(task: str) -> Iterator[None]:
    """Show ``task`` and the time since then on a terminal's stderr, and clear it at the end."""
    from tqdm.auto import tqdm

    done = threading.Event()
    # None lets tqdm keep quiet where stderr is not a terminal.
    line = tqdm(bar_format="{desc}: {elapsed}", desc=task, disable=None, leave=False)

    def tick() -> None:
        while not done.wait(TICK_S):
            line.refresh()

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield
    finally:
        done.set()
        ticking.join()
        line.close()
