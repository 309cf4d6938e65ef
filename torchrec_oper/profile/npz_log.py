"""Bags in numpy's npz files: ids and offsets of features, or a graph as scipy's CSR matrix."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import LogFormatError
from torchrec_oper.profile.bags import BagBlock, bag_of
from torchrec_oper.profile.edge_list import SOURCE, TARGETS
from torchrec_oper.profile.progress import Tick

BLOCK_SAMPLES = 1 << 14

IDS, OFFSETS = ".ids", ".offsets"

_CSR = ("indices", "indptr", "shape")
_DAMAGE = (EOFError, KeyError, NotImplementedError, ValueError, zipfile.BadZipFile, zlib.error)


class NpzLog:
    """Bags in an npz file, read a piece at a time; packed or not.

    For each feature F it holds two arrays, as FBGEMM and dlrm_datasets keep them:
    ``F.ids``, integers [N], the bags' ids one after another, and ``F.offsets``,
    integers [samples + 1], where each bag starts, from 0, and where the last one ends.

    Or it holds a graph, as ``scipy.sparse.save_npz`` writes a CSR matrix (``indices``,
    ``indptr`` and ``shape``; the values are ignored). A node, which is a row of the matrix,
    is then a sample: its feature ``source`` is the node, and ``targets`` its neighbours.

    Args:
        path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    def features(self) -> tuple[str, ...]:
        """The features whose ids and offsets the file holds, or those of a graph.

        Raises:
            OSError: the file can't be read.
            LogFormatError: it is no npz file, is damaged, or holds neither.
        """
        with self._opened() as archive:
            return self._features(archive)

    def rows(self, feature: str) -> int | None:
        """The nodes of a graph; for bags it isn't known before the file is read.

        Raises:
            OSError, LogFormatError: see ``features``.
        """
        with self._opened() as archive:
            if self._features(archive) != (SOURCE, TARGETS) or not _is_csr(archive):
                return None
            with _Array(self.path, archive, "shape") as shape:
                rows, columns = shape.read(2).tolist()
            return max(1, int(rows if feature == SOURCE else columns))

    def blocks(self, features: Sequence[str], *, tick: Tick | None = None) -> Iterator[BagBlock]:
        """The samples, in order.

        Raises:
            OSError: the file can't be read.
            LogFormatError: it is damaged, lacks a feature, holds anything but integers, or
                offsets that don't fit the ids.
        """
        names = tuple(dict.fromkeys(features))
        with ExitStack() as stack:
            archive = stack.enter_context(self._opened())
            found = self._features(archive)
            for name in names:
                if name not in found:
                    raise LogFormatError(
                        f"{self.path} has no feature {name}; it holds {', '.join(found)}"
                    )
            if _is_csr(archive):
                streams = {TARGETS: self._bags(stack, archive, "indices", "indptr")}
            else:
                streams = {
                    name: self._bags(stack, archive, name + IDS, name + OFFSETS) for name in names
                }
            samples = {name: bags.samples for name, bags in streams.items()}
            if len(set(samples.values())) > 1:
                raise LogFormatError(f"{self.path}: features differ in their samples: {samples}")
            yield from self._blocks(streams, next(iter(samples.values()), 0), tick)

    def _blocks(
        self, streams: dict[str, _Bags], total: int, tick: Tick | None
    ) -> Iterator[BagBlock]:
        size = os.stat(self.path).st_size
        for first in range(0, total, BLOCK_SAMPLES):
            count = min(BLOCK_SAMPLES, total - first)
            bags = {name: stream.read(count) for name, stream in streams.items()}
            if TARGETS in bags:
                nodes = np.arange(first, first + count)
                bags.setdefault(SOURCE, (nodes, np.ones(count, np.int64)))

            def locate(feature: str, at: int, first: int = first, bags: Any = bags) -> str:
                return f"bag {first + bag_of(bags[feature][1], at)} (from 0) of feature {feature}"

            yield BagBlock(count, bags, locate)
            if tick is not None:
                tick(size * (first + count) // total - size * first // total)
        for stream in streams.values():
            stream.check_end()

    def _opened(self) -> zipfile.ZipFile:
        try:
            return zipfile.ZipFile(self.path)
        except zipfile.BadZipFile as error:
            raise LogFormatError(
                f"{self.path} isn't an npz file, or is damaged ({error}); write it again"
            ) from error

    def _features(self, archive: zipfile.ZipFile) -> tuple[str, ...]:
        if _is_csr(archive):
            return SOURCE, TARGETS
        names = {name.removesuffix(".npy") for name in archive.namelist()}
        found = tuple(
            name.removesuffix(OFFSETS)
            for name in sorted(names)
            if name.endswith(OFFSETS) and name.removesuffix(OFFSETS) + IDS in names
        )
        if not found:
            raise LogFormatError(
                f"{self.path} holds {', '.join(sorted(names)) or 'no array'}; wanted FEATURE{IDS}"
                f" and FEATURE{OFFSETS}, or {', '.join(_CSR)} of a CSR matrix"
            )
        return found

    def _bags(self, stack: ExitStack, archive: zipfile.ZipFile, ids: str, offsets: str) -> _Bags:
        return _Bags(
            self.path,
            stack.enter_context(_Array(self.path, archive, ids)),
            stack.enter_context(_Array(self.path, archive, offsets)),
        )


class _Bags:
    """The bags of one feature."""

    def __init__(self, path: str | os.PathLike[str], ids: _Array, offsets: _Array) -> None:
        self._path = path
        self._ids = ids
        self._offsets = offsets
        self.samples = offsets.size - 1
        first = int(offsets.read(1)[0]) if offsets.size else None
        if first != 0:
            raise LogFormatError(
                f"{path}: {offsets.name} starts with {first}, wanted 0, then the end of each bag"
            )
        self._end = 0

    def read(self, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Ids and lengths of the next ``count`` bags."""
        ends = self._offsets.read(count).astype(np.int64)
        lengths = np.diff(ends, prepend=self._end)
        if lengths.min(initial=0) < 0 or ends[-1] > self._ids.size:
            raise LogFormatError(
                f"{self._path}: {self._offsets.name} must go up from 0 to {self._ids.size}, the"
                f" size of {self._ids.name}; found {ends[lengths < 0][:1].tolist() or ends.max()}"
            )
        ids = self._ids.read(int(ends[-1]) - self._end)
        self._end = int(ends[-1])
        return ids, lengths

    def check_end(self) -> None:
        """Check that every id was in a bag."""
        if self._end != self._ids.size:
            raise LogFormatError(
                f"{self._path}: {self._offsets.name} ends with {self._end}, but {self._ids.name}"
                f" has {self._ids.size} ids"
            )


class _Array:
    """A one-dimensional array of integers in an npz file, read from its start to its end."""

    def __init__(self, path: str | os.PathLike[str], archive: zipfile.ZipFile, name: str) -> None:
        self.name = name
        self._path = path
        try:
            self._file: IO[bytes] = archive.open(f"{name}.npy")
            version = np.lib.format.read_magic(self._file)  # type: ignore[no-untyped-call]
            header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
            shape, _, self._dtype = header(self._file)
        except (*_DAMAGE, AttributeError) as error:
            raise self._damaged(error) from error
        if len(shape) != 1 or self._dtype.kind not in "iu":
            raise LogFormatError(
                f"{path}: {name} is {self._dtype} of shape {shape}, wanted one-dimensional integers"
            )
        self.size = int(shape[0])

    def __enter__(self) -> _Array:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, count: int) -> npt.NDArray[Any]:
        """The next ``count`` values."""
        wanted = count * self._dtype.itemsize
        try:
            content = self._file.read(wanted)
        except _DAMAGE as error:
            raise self._damaged(error) from error
        if len(content) < wanted:
            raise self._damaged("too short")
        values = np.frombuffer(content, self._dtype)
        if self._dtype == np.uint64 and values.max(initial=0) >= 2**63:
            raise LogFormatError(
                f"{self._path}: {self.name} holds {values.max()}, outside the 64-bit integers;"
                " hash it to fewer bits"
            )
        return values

    def _damaged(self, reason: object) -> LogFormatError:
        return LogFormatError(
            f"{self._path}: {self.name} is damaged ({reason}); write the file again"
        )


def _is_csr(archive: zipfile.ZipFile) -> bool:
    return {f"{name}.npy" for name in _CSR} <= set(archive.namelist())
