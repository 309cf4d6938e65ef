"""One-file storage for profiles and plans: a JSON header and numpy arrays in a zip file.

``unzip -p FILE header.json`` shows the header; the other members are arrays as in an npz.
A file is written under a temporary name in the same folder, flushed to disk and
then renamed, so a reader sees the old file or the whole new one, never a part.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import ArchiveError

Arrays = Mapping[str, npt.NDArray[Any]]

HEADER = "header.json"
OLD_HEADER = "header.npy"  # in files of before: the same text as an array of bytes

LINE = 100  # characters of what stands in one line of the header

_ARRAY = ".npy"

# A temporary file is called .NAME.oper-RANDOM.part, so that nobody else's is taken for one.
_PART = ".oper-"

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
    assert not {"kind", "arrays"} & set(header)
    # The arrays' names are told apart from their storage, so that a lost one is noticed.
    told = {"kind": kind, **header, "arrays": sorted(arrays)}
    document = f"{readable_json(told)}\n".encode()

    def write(file: IO[bytes]) -> None:
        # What np.savez does, but without the clock: equal values give equal files.
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo(HEADER), document)
            for name, array in arrays.items():
                member_name = f"{name}{_ARRAY}"
                assert member_name != OLD_HEADER
                with archive.open(zipfile.ZipInfo(member_name), "w", force_zip64=True) as member:
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
    refusal = f"{path} is not a {kind} of torchrec-oper, or is truncated or damaged"
    with open(path, "rb") as file:
        try:
            header, arrays = _members(file)
            found, told = header.pop("kind"), header.pop("arrays")
        except _DAMAGE as error:
            raise ArchiveError(f"{refusal}; write it again") from error
    if told != sorted(arrays):
        raise ArchiveError(f"{refusal} (an array is missing); write it again")
    if found != kind:
        raise ArchiveError(f"{path} holds a {found}, wanted a {kind}")
    return header, arrays


def _members(file: IO[bytes]) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The header and the arrays in an archive; raises one of ``_DAMAGE``."""
    documents: list[bytes] = []
    arrays: dict[str, npt.NDArray[Any]] = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                if name == HEADER:
                    documents.append(member.read())
                    continue
                array = np.lib.format.read_array(  # type: ignore[no-untyped-call]
                    member, allow_pickle=False
                )
                # Only at the end of a member is its checksum looked at.
                if member.read(1):
                    raise ValueError(f"{name} goes on after its array")
            if name == OLD_HEADER:
                documents.append(array.tobytes())
            else:
                arrays[name.removesuffix(_ARRAY)] = array
    (document,) = documents
    return dict(json.loads(document)), arrays


def readable_json(value: Any, indent: str = "") -> str:
    """JSON for people: indented, but what is short, or a list of scalars, is one line."""
    line = json.dumps(value)
    nested = (Mapping, list, tuple)
    if not isinstance(value, nested) or len(indent) + len(line) <= LINE:
        return line
    deeper = f"{indent}  "
    if isinstance(value, Mapping):
        pairs = value.items()
        lines = [f"{deeper}{json.dumps(key)}: {readable_json(one, deeper)}" for key, one in pairs]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if not any(isinstance(one, nested) for one in value):
        return line
    lines = [deeper + readable_json(one, deeper) for one in value]
    return "[\n" + ",\n".join(lines) + f"\n{indent}]"


def check_writable(
    path: str | os.PathLike[str], *, inputs: Iterable[str | os.PathLike[str]] = ()
) -> None:
    """Find before long work what would keep ``replace_file`` from writing ``path`` after it.

    What isn't a regular file (``/dev/null``, a named pipe) may be written to.

    Args:
        path: where the output will go; it isn't changed.
        inputs: the files that are read meanwhile; those that don't exist are passed over.

    Raises:
        OSError: ``path`` is a folder, its folder is missing or can't be written, or it is
            one of ``inputs``, by whatever name; ``filename`` says which path.
    """
    target, old = _find(path)
    for source in inputs:
        if old is not None and os.path.exists(source) and os.path.samefile(source, target):
            raise OSError(
                errno.EINVAL, "is read as an input; choose another file to write", str(path)
            )
    if old is not None and not stat.S_ISREG(old.st_mode):
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    # Tried out: what the permissions say isn't all, as in /proc.
    with _errors_name(path):
        descriptor, part = _open_part(target, 0o600)
        os.unlink(part)
        os.close(descriptor)


def replace_file(path: str | os.PathLike[str], write: Callable[[IO[bytes]], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then rename it to ``path``.

    A link keeps pointing to its target, which is replaced and keeps its permissions.
    What isn't a regular file (``/dev/null``, a named pipe) can't be replaced, and is
    written to directly. Temporary files that a killed writer of ``path`` left are removed.

    Raises:
        OSError: the file can't be written; ``filename`` is ``path``, unless ``write``
            failed with another file.
    """
    target, old = _find(path)
    with _errors_name(path):
        if old is not None and not stat.S_ISREG(old.st_mode):
            with open(os.fspath(path), "wb") as special:
                write(special)
            return
        _remove_stale_parts(target)
        descriptor, part = _open_part(target, 0o666 if old is None else 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
                file.flush()
                if old is not None:
                    os.fchmod(descriptor, old.st_mode & 0o777)
                os.fsync(descriptor)
                os.replace(part, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
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


def _find(path: str | os.PathLike[str]) -> tuple[Path, os.stat_result | None]:
    """The file that ``path`` leads to, and what is known of it if it exists.

    Raises:
        OSError: it is a folder, or its folder is missing.
    """
    target = Path(os.path.realpath(path))
    try:
        old = os.stat(os.fspath(path))
    except FileNotFoundError:
        if not os.fspath(path):
            raise
        if not target.parent.is_dir():
            message = f"there is no such folder: {target.parent}"
            raise FileNotFoundError(errno.ENOENT, message, str(path)) from None
        return target, None
    if stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, wanted a file to write", str(path))
    return target, old


@contextlib.contextmanager
def _errors_name(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let an error of the system name ``path`` where it names no file or a temporary one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and _PART not in str(error.filename):
            raise
        number, words = error.errno or errno.EIO, error.strerror or str(error)
        raise OSError(number, words, str(path)) from error


def _open_part(target: Path, mode: int) -> tuple[int, str]:
    """A new temporary file beside ``target``: its descriptor, which holds its lock, and name."""
    while True:
        part = f"{target.parent}/.{target.name[:50]}{_PART}{secrets.token_hex(4)}.part"
        try:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        except OSError as error:
            message = f"can't make a file in {target.parent} ({error.strerror})"
            raise OSError(error.errno, message) from error
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.exists(part):
            return descriptor, part
        os.close(descriptor)  # another writer took it for stale before it was locked


def _remove_stale_parts(target: Path) -> None:
    """Remove temporary files of ``target`` that no living process has locked."""
    for part in target.parent.glob(f".{glob.escape(target.name[:50])}{_PART}????????.part"):
        with contextlib.suppress(OSError):  # somebody else's, or gone already
            descriptor = os.open(part, os.O_RDONLY | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(descriptor)
