"""Graphs as text: edges, one a line, or adjacency lists, one node a line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import LogFormatError
from torchrec_oper.profile.bags import BagBlock
from torchrec_oper.profile.digits import Text
from torchrec_oper.profile.fields import integers
from torchrec_oper.profile.progress import Tick
from torchrec_oper.profile.text_log import line_chunks

BLOCK_BYTES = 1 << 20
LONGEST_LIST_BYTES = 1 << 26  # of one line of adjacency

SOURCE, TARGETS = "source", "targets"
COMMENTS = (b"#", b"%")  # of SNAP and of the network repository

_ALLOWED_BYTES = b"0123456789- \t\r\n"

Ids = npt.NDArray[np.int64]


class EdgeLog:
    """A text of node numbers from 0 with blanks or tabs between them; plain, gzip or zstd.

    In ``edges`` a line is ``source target``, and consecutive lines of one source make a
    sample. In ``adjacency`` a line is ``source target target ...`` and makes a sample. Its
    feature ``source`` is the source, and its feature ``targets`` the bag of the targets.
    Blank lines, and lines that start with ``#`` or ``%``, are passed over.

    Args:
        path: the file.
        layout: ``edges`` or ``adjacency``.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, layout: Literal["edges", "adjacency"] = "edges"
    ) -> None:
        self.path = path
        self.layout = layout

    def features(self) -> tuple[str, ...]:
        """``source`` and ``targets``."""
        return SOURCE, TARGETS

    def rows(self, feature: str) -> int | None:
        """Not known before the file is read."""
        return None

    def blocks(self, features: Sequence[str], *, tick: Tick | None = None) -> Iterator[BagBlock]:
        """The samples, in order.

        Raises:
            OSError: the file can't be read.
            LogFormatError: a line holds anything but integers, or in ``edges`` not two; a
                feature other than ``source`` and ``targets``.
            VersionError: the file is packed, and pyarrow is missing.
        """
        for feature in features:
            if feature not in (SOURCE, TARGETS):
                raise LogFormatError(
                    f"{self.path} has no feature {feature}; a graph has {SOURCE} and {TARGETS}"
                )
        held = _Lists.none()
        chunks = line_chunks(
            self.path, block_bytes=BLOCK_BYTES, tick=tick, longest_line_bytes=LONGEST_LIST_BYTES
        )
        for line, chunk in chunks:
            lists = self._parse(chunk, line)
            if self.layout == "edges":
                # The last source may go on in the next chunk.
                lists, held = held.followed_by(lists).joined().split_last()
            if lists.sources.size:
                yield lists.block()
        if held.sources.size:
            yield held.block()

    def _parse(self, chunk: bytes, line: int) -> _Lists:
        try:
            numbers, counts = _parse_fast(chunk)
        except ValueError:
            numbers, counts = self._parse_plain(chunk, line)
        lines = line + np.flatnonzero(counts)
        counts = counts[counts > 0]
        if self.layout == "edges" and (counts != 2).any():
            at = int(np.flatnonzero(counts != 2)[0])
            raise LogFormatError(
                f"{self.path}, line {lines[at]}: found {counts[at]} number"
                f"{'s' * int(counts[at] != 1)}, wanted source and target; lists of targets are"
                " read by the format adjacency"
            )
        firsts = np.cumsum(counts) - counts
        is_target = np.ones(numbers.size, bool)
        is_target[firsts] = False
        return _Lists(
            numbers[firsts],
            counts - 1,
            numbers[is_target],
            lines,
            np.repeat(lines, counts - 1),
        )

    def _parse_plain(self, chunk: bytes, line: int) -> tuple[Ids, Ids]:
        words: list[bytes] = []
        lines: list[int] = []
        counts: list[int] = []
        for at, text in enumerate(chunk.split(b"\n")):
            found = [] if text.startswith(COMMENTS) else text.split()
            words += found
            counts.append(len(found))
            lines += [line + at] * len(found)
        numbers = integers(words, lambda at: f"{self.path}, line {lines[at]}")
        return numbers, np.array(counts, np.int64)


def _parse_fast(chunk: bytes) -> tuple[Ids, Ids]:
    """All numbers, and how many each line has.

    Raises:
        ValueError: there is anything but integers and blanks.
    """
    if not chunk.endswith(b"\n"):
        chunk += b"\n"
    text = Text(chunk)
    if chunk.translate(None, _ALLOWED_BYTES):
        raise ValueError("a byte that no line may hold")
    blank = text.bytes <= ord(" ")
    changes = np.flatnonzero(np.diff(blank, prepend=True))
    starts, ends = changes[::2], changes[1::2]
    newlines = np.flatnonzero(text.bytes == ord("\n"))
    counts = np.diff(np.searchsorted(starts, newlines), prepend=0)
    return text.integers(starts, ends), counts


@dataclass(frozen=True, eq=False)
class _Lists:
    """Adjacency lists, n of them, with the lines that they come from.

    ``sources``, ``counts`` and ``lines`` are int64 [n], ``targets`` and ``target_lines``
    are int64 [all counts together].
    """

    sources: Ids
    counts: Ids
    targets: Ids
    lines: Ids
    target_lines: Ids

    @classmethod
    def none(cls) -> _Lists:
        return cls(*[np.empty(0, np.int64)] * 5)

    def followed_by(self, other: _Lists) -> _Lists:
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        return _Lists(*(np.concatenate(pair) for pair in pairs))

    def joined(self) -> _Lists:
        """Neighbours of one source as one."""
        firsts = np.flatnonzero(np.diff(self.sources, prepend=-1 - self.sources[:1]))
        if not firsts.size:
            return self
        counts = np.add.reduceat(self.counts, firsts)
        lines = self.lines[firsts]
        return _Lists(self.sources[firsts], counts, self.targets, lines, self.target_lines)

    def split_last(self) -> tuple[_Lists, _Lists]:
        """All but the last, and the last."""
        if not self.sources.size:
            return self, self
        at = self.targets.size - int(self.counts[-1])
        head = self._cut(slice(None, -1), slice(None, at))
        return head, self._cut(slice(-1, None), slice(at, None))

    def _cut(self, lists: slice, targets: slice) -> _Lists:
        return _Lists(
            self.sources[lists],
            self.counts[lists],
            self.targets[targets],
            self.lines[lists],
            self.target_lines[targets],
        )

    def block(self) -> BagBlock:
        one_each = np.ones(self.sources.size, np.int64)
        lines = {SOURCE: self.lines, TARGETS: self.target_lines}
        return BagBlock(
            self.sources.size,
            {SOURCE: (self.sources, one_each), TARGETS: (self.targets, self.counts)},
            lambda feature, at: f"line {lines[feature][at]}",
        )
