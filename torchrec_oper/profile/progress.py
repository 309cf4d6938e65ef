"""Shows how much of some files is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tqdm.auto import tqdm

Tick = Callable[[int], object]  # told how many more bytes of a file are read


@contextmanager
def bytes_bar(
    paths: Sequence[str | os.PathLike[str]], *, shown: bool, task: str | None = None
) -> Iterator[Tick]:
    """A progress bar over the bytes of some files, for a terminal's stderr.

    Args:
        paths: the files.
        shown: whether there is a bar at all.
        task: what is done to them; by default the bar has the first file's name.

    Raises:
        OSError: there is no such file.
    """
    total = sum(os.stat(path).st_size for path in paths)
    # None lets tqdm keep quiet where stderr is not a terminal.
    hidden = None if shown else True
    name = task or os.path.basename(paths[0])
    # A pipe has no size.
    with tqdm(desc=name, total=total or None, unit="B", unit_scale=True, disable=hidden) as bar:
        yield bar.update
