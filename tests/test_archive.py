"""Archives: what is read is what was written, and a write is all or nothing."""

import os
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from torchrec_oper.archive import content_hash, read_archive, replace_file, write_archive
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


@pytest.mark.parametrize("content", [b"", b"samples,tables\n1,2\n", b"\x93NUMPY", b"PK\x03\x04"])
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "foreign"
    path.write_bytes(content)
    with pytest.raises(
        ArchiveError, match="foreign is not a plan of torchrec-oper.*write it again"
    ):
        read_archive(path, "plan")


def test_other_numpy_and_zip_files_are_refused(tmp_path):
    np.save(tmp_path / "lone.npy", np.arange(3))
    np.savez(tmp_path / "other.npz", header=np.arange(3))
    np.savez(tmp_path / "objects.npz", header=np.array([{}], dtype=object))
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        archive.writestr("header", "not an array")
    for path in list(tmp_path.iterdir()):
        with pytest.raises(ArchiveError, match="is not a profile of torchrec-oper"):
            read_archive(path, "profile")


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
    with pytest.raises(FileNotFoundError, match="there is no such folder.*nowhere"):
        write(tmp_path / "nowhere" / "a")
    with pytest.raises(IsADirectoryError):
        write(tmp_path)


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
