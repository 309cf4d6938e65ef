"""One-file storage for profiles and plans: a JSON header and numpy arrays in an npz.

A file is written under a temporary name in the same folder, flushed to disk and
then renamed, so a reader sees the old file or the whole new one, never a part.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import ArchiveError

Arrays = Mapping[str, npt.NDArray[Any]]

HEADER = "header"

# What zipfile, numpy and json raise when they are given the bytes of something else.
_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


def write_archive(
    path: str | os.PathLike[str], kind: str, header: Mapping[str, Any], arrays: Arrays
) -> None:
    """Write ``header`` and ``arrays`` to ``path`` as a file of ``kind``, all or nothing.

    Raises:
        OSError: the folder is missing or can't be written, or the disk is full; a
            file that was at ``path`` before is untouched.
    """
    assert not {"kind", "arrays"} & set(header) and HEADER not in arrays
    # The arrays' names are told apart from their storage, so that a lost one is noticed.
    told = {"kind": kind, "arrays": sorted(arrays), **header}
    document = json.dumps(told, sort_keys=True).encode()
    members = {HEADER: np.frombuffer(document, dtype=np.uint8), **arrays}

    def write(file: IO[bytes]) -> None:
        # What np.savez does, but without the clock: equal values give equal files.
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in members.items():
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(  # type: ignore[no-untyped-call]
                        member, np.asarray(array), allow_pickle=False
                    )

    replace_file(path, write)


def read_archive(
    path: str | os.PathLike[str], kind: str
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The header and arrays of the file of ``kind`` at ``path``.

    Raises:
        OSError: there is no such file, or it may not be read.
        ArchiveError: the file is truncated, damaged, or of another kind.
    """
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as members:
                arrays = {name: members[name] for name in members.files}
            header = json.loads(arrays.pop(HEADER).tobytes())
            found = header.pop("kind")
            if header.pop("arrays") != sorted(arrays):
                raise ValueError("an array is missing")
        except _DAMAGE as error:
            raise ArchiveError(
                f"{path} is not a {kind} of torchrec-oper, or is truncated or damaged"
                f" ({error}); write it again"
            ) from error
    if found != kind:
        raise ArchiveError(f"{path} holds a {found}, wanted a {kind}")
    return header, arrays


def replace_file(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it to ``path``.

    A link keeps pointing to its target, which is replaced. What isn't a regular file
    (``/dev/null``, a named pipe) can't be replaced, and is written to directly.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as special:
            write(special)
        return
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(target.parent))
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
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            # A full disk names no file, and the temporary one would tell the user little.
            error.filename, error.filename2 = str(path), None
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
