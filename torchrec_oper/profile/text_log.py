"""Reads text logs as chunks of whole lines, unpacking gzip and Zstandard on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from torchrec_oper.errors import LogFormatError, VersionError
from torchrec_oper.profile.progress import Tick

LONGEST_LINE_BYTES = 1 << 16

_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}

_FOREIGN = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"7z\xbc\xaf": "a 7-Zip archive",
    b"PAR1": "a Parquet file",
}
_TAR_AT, _TAR = 257, b"ustar"
_NEWLINE = ord("\n")


def line_chunks(
    path: str | os.PathLike[str],
    *,
    block_bytes: int,
    tick: Tick | None = None,
    longest_line_bytes: int = LONGEST_LINE_BYTES,
) -> Iterator[tuple[int, bytes]]:
    """The lines of the log at ``path``, some at a time.

    Args:
        path: a text file, plain or packed by gzip or zstd; its content tells which.
        block_bytes: bytes of text to read at once. A chunk is this long and one line
            longer at most, so memory stays bounded for a log of any size.
        tick: told how many more bytes of the file are read.
        longest_line_bytes: a longer line is refused.

    Yields:
        The number of the chunk's first line, from 1, and the chunk: whole lines, with
        the newline of each (which the log's last line may lack).

    Raises:
        OSError: the file can't be read.
        LogFormatError: it is empty, not a text file, or its packing is damaged.
        VersionError: it is packed, and pyarrow is missing.
    """
    with open(path, "rb") as file:
        line = 1
        rest = b""
        ticked = 0
        stream = _stream(file)
        while block := _read(stream, block_bytes, path=path, line=line):
            if not rest and line == 1:
                _refuse_foreign(block, path)
            end = block.rfind(b"\n") + 1
            if end:
                chunk = rest + block[:end]
                yield line, chunk
                line += int(np.count_nonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE))
                rest = block[end:]
            else:
                rest += block
            if len(rest) > longest_line_bytes:
                raise LogFormatError(
                    f"{path}, line {line}: longer than {longest_line_bytes} bytes;"
                    " is this a text file?"
                )
            if tick is not None and file.seekable():
                tick(file.tell() - ticked)
                ticked = file.tell()
        if rest:
            yield line, rest
        elif line == 1:
            raise LogFormatError(f"{path} is empty, wanted one sample a line")


def import_pyarrow() -> Any:
    """The ``pyarrow`` module.

    Raises:
        VersionError: it isn't installed; the message says how to.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
    except ImportError as error:
        raise VersionError(
            "reading click logs needs pyarrow, which isn't installed;"
            " install it with: pip install 'torchrec-oper[logs]'"
        ) from error
    return pyarrow


def _stream(file: Any) -> Any:
    """What unpacks ``file``, or ``file`` itself where it isn't packed."""
    head = file.peek(4)
    codec = next((codec for magic, codec in _CODECS.items() if head.startswith(magic)), None)
    if codec is None:
        return file
    pyarrow = import_pyarrow()
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), codec)


def _read(stream: Any, size: int, *, path: str | os.PathLike[str], line: int) -> bytes:
    """The next bytes of text, ``size`` at most; none at the end. ``line`` is for messages."""
    try:
        block: bytes = stream.read(size)
    except OSError as error:
        # The system's own errors have a number; those of the unpacking have none.
        if error.errno is not None:
            raise
        raise LogFormatError(
            f"{path}: its packed data is truncated or damaged, somewhere after"
            f" line {line - 1} ({error}); copy or download it again"
        ) from error
    return block


def _refuse_foreign(head: bytes, path: str | os.PathLike[str]) -> None:
    found = next((kind for magic, kind in _FOREIGN.items() if head.startswith(magic)), None)
    if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
        found = "a tar archive"
    if found:
        raise LogFormatError(f"{path} holds {found}, wanted a text log; unpack or convert it first")
