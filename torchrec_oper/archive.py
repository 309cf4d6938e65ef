"""One-file storage for profiles and plans: a JSON header and numpy arrays in an npz.

A file is written under a temporary name in the same folder, flushed to disk and
then renamed, so a reader sees the old file or the whole new one, never a part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import ArchiveError

Arrays = Mapping[str, npt.NDArray[Any]]

HEADER = "header"


def write_archive(
    path: str | os.PathLike[str], kind: str, header: Mapping[str, Any], arrays: Arrays
) -> None:
    """Write ``header`` and ``arrays`` to ``path`` as a file of ``kind``, all or nothing.

    Raises:
        OSError: the folder can't be written or the disk is full; a file that was
            at ``path`` before is untouched.
    """
    document = json.dumps({"kind": kind, **header}, sort_keys=True).encode()
    members = {HEADER: np.frombuffer(document, dtype=np.uint8), **arrays}

    def write(file: IO[bytes]) -> None:
        np.savez(file, allow_pickle=False, **members)  # type: ignore[arg-type]

    replace_file(path, write)


def read_archive(
    path: str | os.PathLike[str], kind: str
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The header and arrays of the file of ``kind`` at ``path``.

    Raises:
        FileNotFoundError: there is no such file.
        ArchiveError: the file is truncated, damaged, or of another kind.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop(HEADER).tobytes())
        found = header.pop("kind")
    except FileNotFoundError:
        raise
    except (
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        EOFError,
        OSError,
        zipfile.BadZipFile,
    ) as error:
        raise ArchiveError(
            f"{path} is not a {kind} of torchrec-oper, or is truncated or damaged"
            f" ({error}); write it again"
        ) from error
    if found != kind:
        raise ArchiveError(f"{path} holds a {found}, wanted a {kind}")
    return header, arrays


def replace_file(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it to ``path``."""
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}.", suffix=".part"
    )
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def content_hash(header: Mapping[str, Any], arrays: Arrays) -> str:
    """SHA-256 over a header and arrays: equal values give equal hashes on any machine."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{name} {little.dtype.str} {little.shape}".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
