"""Archives: what is read is what was written, and a write is all or nothing."""

import json
import os
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from torchrec_oper import archive
from torchrec_oper.archive import (
    check_writable,
    content_hash,
    read_archive,
    replace_file,
    write_archive,
)
from torchrec_oper.errors import ArchiveError

ROOT = Path(__file__).parents[1]
HEADER = {"samples": 3, "tables": ["a", "b"]}
ARRAYS = {"0.ids": np.arange(40), "file": np.arange(9, dtype=np.uint8).reshape(3, 3)}


def write(path, **changes):
    write_archive(path, "profile", {**HEADER, **changes}, ARRAYS)
    return path


def same(found):
    header, arrays = found
    return (
        header == HEADER
        and arrays.keys() == ARRAYS.keys()
        and all(np.array_equal(arrays[name], ARRAYS[name]) for name in ARRAYS)
    )


def python(code, *arguments):
    """A process that runs ``code`` with this package."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def leftovers(folder):
    return [entry for entry in os.listdir(folder) if entry.endswith(".part")]


def test_round_trip_keeps_dtypes(tmp_path):
    header, arrays = read_archive(write(tmp_path / "a"), "profile")
    assert same((header, arrays))
    assert arrays["file"].dtype == np.uint8
    assert leftovers(tmp_path) == []


def test_equal_values_give_equal_files(tmp_path):
    assert write(tmp_path / "a").read_bytes() == write(tmp_path / "b").read_bytes()


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = write(tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut"
    for length in [*range(0, len(whole), 7), *range(len(whole) - 30, len(whole))]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ArchiveError, match="cut is not a profile of torchrec-oper"):
            read_archive(cut, "profile")


def test_a_changed_byte_is_refused_or_does_no_harm(tmp_path):
    whole = write(tmp_path / "whole").read_bytes()
    changed = tmp_path / "changed"
    refused = 0
    tried = range(0, len(whole), 3)
    for at in tried:
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF if at % 2 else 0x01
        changed.write_bytes(damaged)
        try:
            # A zip file has bytes without meaning; the values must be right all the same.
            assert same(read_archive(changed, "profile")), f"byte {at}"
        except ArchiveError:
            refused += 1
    assert refused > len(tried) / 2


def refusal(path, kind):
    """The whole message: of numpy's own words, some advise to unpickle the file."""
    return f"{path} is not a {kind} of torchrec-oper, or is truncated or damaged; write it again"


@pytest.mark.parametrize("content", [b"", b"samples,tables\n1,2\n", b"\x93NUMPY", b"PK\x03\x04"])
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(ArchiveError) as error:
        read_archive(path, "plan")
    assert str(error.value) == refusal(path, "plan")


def test_other_numpy_and_zip_files_are_refused(tmp_path):
    np.save(tmp_path / "lone.npy", np.arange(3))
    np.savez(tmp_path / "other.npz", header=np.arange(3))
    np.savez(tmp_path / "objects.npz", header=np.array([{}], dtype=object))
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        archive.writestr("header", "not an array")
    for path in list(tmp_path.iterdir()):
        with pytest.raises(ArchiveError) as error:
            read_archive(path, "profile")
        assert str(error.value) == refusal(path, "profile")


def test_numpy_is_not_left_to_guess_what_a_file_is(tmp_path, monkeypatch):
    def load(*arguments, **options):
        pytest.fail("numpy would read all of an array, however large")

    np.save(tmp_path / "lone.npy", np.arange(3))
    monkeypatch.setattr(archive.np, "load", load)
    monkeypatch.setattr(archive.np.lib.format, "read_array", load)
    with pytest.raises(ArchiveError):
        read_archive(tmp_path / "lone.npy", "profile")


def test_a_person_can_read_the_header(tmp_path):
    deep = {"many": [{"name": "x" * 90, "b": [1.5, 2]}, [1, [2]]], "long": list(range(99))}
    path = write(tmp_path / "a", deep=deep)
    with zipfile.ZipFile(path) as archive:
        text = archive.read("header.json").decode()
    assert text.splitlines() == [
        "{",
        '  "kind": "profile",',
        '  "samples": 3,',
        '  "tables": ["a", "b"],',
        '  "deep": {',
        '    "many": [',
        "      {",
        f'        "name": "{"x" * 90}",',
        '        "b": [1.5, 2]',
        "      },",
        "      [1, [2]]",
        "    ],",
        f'    "long": {list(range(99))}',
        "  },",
        '  "arrays": ["0.ids", "file"]',
        "}",
    ]
    found = read_archive(path, "profile")[0]["deep"]
    assert found == deep
    assert list(found) == list(deep)


def test_files_with_the_header_in_an_array_are_read(tmp_path):
    told = {"kind": "profile", "arrays": sorted(ARRAYS), **HEADER}
    header = np.frombuffer(json.dumps(told).encode(), dtype=np.uint8)
    with zipfile.ZipFile(tmp_path / "old", "w") as archive:
        for name, array in {"header": header, **ARRAYS}.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)
    assert same(read_archive(tmp_path / "old", "profile"))
    with zipfile.ZipFile(tmp_path / "old", "a") as archive:
        archive.writestr("header.json", json.dumps(told))
    with pytest.raises(ArchiveError):
        read_archive(tmp_path / "old", "profile")


def test_what_follows_an_array_is_refused(tmp_path):
    path = write(tmp_path / "a")
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "b", "w") as longer:
        for name in whole.namelist():
            longer.writestr(name, whole.read(name) + b" " * (name == "0.ids.npy"))
    with pytest.raises(ArchiveError):
        read_archive(tmp_path / "b", "profile")


def test_a_lost_array_is_noticed(tmp_path):
    path = write(tmp_path / "a")
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "b", "w") as part:
        for name in whole.namelist():
            if name != "0.ids.npy":
                part.writestr(name, whole.read(name))
    with pytest.raises(ArchiveError, match="an array is missing"):
        read_archive(tmp_path / "b", "profile")


def test_another_kind_is_refused_by_name(tmp_path):
    with pytest.raises(ArchiveError, match="a holds a profile, wanted a plan"):
        read_archive(write(tmp_path / "a"), "plan")


def test_errors_of_the_system_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_archive(tmp_path / "missing", "profile")
    with pytest.raises(IsADirectoryError):
        read_archive(tmp_path, "profile")


def unwritable(folder):
    """Paths that can't be written, with the errors that say so."""
    file, long = folder / "file", "a" * 256
    file.touch()
    (folder / "loop").symlink_to("loop")
    (folder / "stray").symlink_to("nowhere/a")
    nowhere = f"[Errno 2] there is no such folder: {folder}/nowhere"
    no_file = "[Errno 2] can't make a file in /proc (No such file or directory)"
    return {
        folder: "[Errno 21] is a folder, wanted a file to write",
        folder / "nowhere" / "a": nowhere,
        folder / "stray": nowhere,
        folder / "loop": "[Errno 40] Too many levels of symbolic links",
        folder / long: "[Errno 36] File name too long",
        file / "a": "[Errno 20] Not a directory",
        "/proc/oper": no_file,
        "/proc/version": no_file,
        "": "[Errno 2] No such file or directory",
    }


def test_what_cannot_be_written_is_named_as_the_user_named_it(tmp_path):
    for path, words in unwritable(tmp_path).items():
        for attempt in (check_writable, lambda path: replace_file(path, lambda file: None)):
            with pytest.raises(OSError) as error:
                attempt(path)
            assert str(error.value) == f"{words}: {str(path)!r}"


def test_errors_of_writing_name_the_file(tmp_path):
    with pytest.raises(OSError) as error:
        replace_file("/dev/full", lambda file: file.write(b"half"))
    assert str(error.value) == "[Errno 28] No space left on device: '/dev/full'"
    with pytest.raises(OSError) as error:
        replace_file(tmp_path / "a", lambda file: (_ for _ in ()).throw(OSError("no number")))
    assert str(error.value) == f"[Errno 5] no number: '{tmp_path}/a'"
    with pytest.raises(FileNotFoundError, match="No such file or directory: 'the input'"):
        replace_file(tmp_path / "a", lambda file: Path("the input").read_text())
    assert os.listdir(tmp_path) == []


def test_a_lost_temporary_file_is_an_error_that_names_the_file(tmp_path):
    def write(file):
        (part,) = leftovers(tmp_path)
        (tmp_path / part).unlink()

    with pytest.raises(FileNotFoundError) as error:
        replace_file(tmp_path / "a", write)
    assert str(error.value) == f"[Errno 2] No such file or directory: '{tmp_path}/a'"


def test_a_check_changes_nothing(tmp_path):
    old = write(tmp_path / "old").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "old", tmp_path / "new", tmp_path / "pipe", os.devnull, "/dev/full"):
        check_writable(path, inputs=[tmp_path / "missing", "/dev/zero"])
    assert sorted(os.listdir(tmp_path)) == ["old", "pipe"]
    assert (tmp_path / "old").read_bytes() == old


def test_an_input_is_no_output_by_whatever_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = Path("log")
    log.touch()
    Path("other").touch()
    Path("soft").symlink_to("log")
    Path("hard").hardlink_to("log")
    for output in ("log", "./log", tmp_path / "log", "soft", "hard"):
        for source in ("log", "soft", Path("hard")):
            with pytest.raises(OSError) as error:
                check_writable(output, inputs=["other", source])
            assert error.value.strerror == "is read as an input; choose another file to write"
            assert error.value.filename == str(output)
    check_writable("other", inputs=["log"])


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path):
    for name in ("a" * 255, "\u00e9" * 127):
        assert same(read_archive(write(tmp_path / name), "profile"))


def test_killed_in_the_middle_of_a_write(tmp_path):
    path = write(tmp_path / "a")
    writer = python(
        "import sys, time\n"
        "from torchrec_oper.archive import replace_file\n"
        "def write(file):\n"
        "    file.write(b'half of it'); file.flush()\n"
        "    print('half', flush=True); time.sleep(60)\n"
        "replace_file(sys.argv[1], write)\n",
        path,
    )
    with writer:
        assert writer.stdout.readline() == "half\n"
        assert len(leftovers(tmp_path)) == 1
        writer.kill()
    assert writer.returncode == -signal.SIGKILL
    assert same(read_archive(path, "profile"))
    (left,) = leftovers(tmp_path)
    others = {f".b{left[2:]}", ".a.part", ".a.oper-.part", ".a.oper-notes.part"}
    for name in others:
        (tmp_path / name).touch()
    write(path)
    assert set(leftovers(tmp_path)) == others


def test_what_a_living_writer_fills_is_left_alone(tmp_path):
    def fill(file):
        file.write(b"the slower writer")
        write(tmp_path / "a")

    replace_file(tmp_path / "a", fill)
    assert (tmp_path / "a").read_bytes() == b"the slower writer"
    assert leftovers(tmp_path) == []


def test_a_temporary_file_that_is_taken_for_stale_is_made_anew(tmp_path, monkeypatch):
    lock = archive.fcntl.flock
    taken = []

    def flock(descriptor, operation):
        if not taken:
            taken.extend(leftovers(tmp_path))
            (tmp_path / taken[0]).unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(archive.fcntl, "flock", flock)
    assert same(read_archive(write(tmp_path / "a"), "profile"))
    assert len(taken) == 1
    assert leftovers(tmp_path) == []


def test_without_locks_nothing_is_taken_for_stale(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(archive.fcntl, "flock", flock)
    (tmp_path / ".a.oper-01234567.part").touch()
    assert same(read_archive(write(tmp_path / "a"), "profile"))
    assert leftovers(tmp_path) == [".a.oper-01234567.part"]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = write(tmp_path / "a")
    writer = python(
        "import resource, signal, sys\n"
        "import numpy as np\n"
        "from torchrec_oper.archive import write_archive\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n"
        "    write_archive(sys.argv[1], 'profile', {}, {'x': np.arange(100_000)})\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n",
        path,
    )
    assert writer.communicate() == ("File too large\n", "")
    assert same(read_archive(path, "profile"))
    assert leftovers(tmp_path) == []


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    path = write(tmp_path / "a")

    def fail(file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, fail)
    assert same(read_archive(path, "profile"))
    assert leftovers(tmp_path) == []


def test_who_reads_the_old_file_keeps_reading_it(tmp_path):
    path = write(tmp_path / "a")
    content = path.read_bytes()
    with open(path, "rb") as reader:
        write(path, samples=4)
        assert reader.read() == content
    assert read_archive(path, "profile")[0]["samples"] == 4


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        mode = stat.S_IMODE(write(tmp_path / "a").stat().st_mode)
    finally:
        os.umask(before)
    assert mode == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666])
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path, mode):
    path = write(tmp_path / "a")
    path.chmod(mode)
    meanwhile = []
    replace_file(path, lambda file: meanwhile.append(os.fstat(file.fileno()).st_mode & 0o777))
    assert meanwhile == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b""


def test_a_link_keeps_pointing_to_what_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    target = tmp_path / "folder" / "target"
    target.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(target)
    write(link)
    assert link.is_symlink()
    assert same(read_archive(target, "profile"))


def test_a_device_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write(pipe)
        content = os.read(reader, 1 << 16)
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "copy").write_bytes(content)
    assert same(read_archive(tmp_path / "copy", "profile"))


def test_content_hash_sees_values_and_not_byte_order():
    ids = np.arange(5)
    hashes = {
        content_hash(header, {name: array})
        for header in ({"a": 1}, {"a": 2})
        for name in ("x", "y")
        for array in (ids, ids[::-1], ids.astype(np.int32), ids.reshape(5, 1))
    }
    assert len(hashes) == 16
    assert content_hash({}, {"x": ids}) == content_hash({}, {"x": ids.astype(">i8")})
    assert content_hash({"a": 1, "b": 2}, {}) == content_hash({"b": 2, "a": 1}, {})
