"""The Criteo reader: fast against plain, every way to be malformed, and the real log."""

import csv
import gzip
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_oper.errors import LogFormatError, ProfileError
from torchrec_oper.profile import criteo_fast, criteo_plain
from torchrec_oper.profile.criteo import (
    CATEGORICAL_FEATURES,
    INTEGER_FEATURES,
    KAGGLE_ROWS,
    CriteoLog,
    criteo_tables,
)
from torchrec_oper.profile.files import profile_files
from torchrec_oper.table import TableSpec

ROOT = Path(__file__).parents[1]
REAL_LOG = ROOT.parent / "shared" / "data" / "criteo_kaggle_head10k_train.tsv"

GOOD = ("1", *(str(at - 3) for at in range(13)), *(f"{at * 40503:08x}" for at in range(26)))


def line(**changes):
    """A good line with other texts in some columns."""
    names = ("label", *INTEGER_FEATURES, *CATEGORICAL_FEATURES)
    return "\t".join(changes.get(name, text) for name, text in zip(names, GOOD, strict=True))


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def written(folder, text, pack=bytes):
    path = folder / "train.txt"
    path.write_bytes(pack(text if isinstance(text, bytes) else text.encode()))
    return path


def read(path, **options):
    """The whole log as one tuple of arrays."""
    blocks = list(CriteoLog(path).blocks(**options))
    return (
        np.concatenate([block.labels for block in blocks]),
        np.concatenate([block.dense for block in blocks]),
        np.concatenate([block.hashes for block in blocks], axis=1),
        np.concatenate([block.present for block in blocks], axis=1),
    )


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def fields_of(block):
    return (block.labels, block.dense, block.hashes, block.present)


hashes = st.one_of(st.just(""), st.text("0123456789abcdefABCDEF", max_size=8), st.just("ffffffff"))
# Numbers of 19 digits are left to the plain parser.
short_integers = st.one_of(st.just(""), st.integers(1 - 10**18, 10**18 - 1).map(str), st.just("-0"))
good_lines = st.tuples(
    st.sampled_from("01"),
    *[short_integers] * len(INTEGER_FEATURES),
    *[hashes] * len(CATEGORICAL_FEATURES),
).map("\t".join)


@settings(deadline=None, max_examples=50)
@given(st.lists(good_lines, min_size=1, max_size=4), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_fast_equals_plain_on_good_lines(lines, newline, ends):
    chunk = (newline.join(lines) + newline * ends).encode()
    fast = criteo_fast.parse(chunk, first_line=7)
    plain = criteo_plain.parse(chunk, first_line=7, path="log")
    assert fast.first_line == plain.first_line == 7
    assert_equal(fields_of(fast), fields_of(plain))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_fast_accepts_nothing_that_plain_refuses(data):
    text = line() + "\n" + line() + "\n"
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        inserted = data.draw(st.text('0179afgx-+. \t\n\r"\\', max_size=2))
        text = text[:start] + inserted + text[start + data.draw(st.integers(0, 2)) :]
    chunk = text.encode() or b"\n"
    try:
        fast = criteo_fast.parse(chunk, first_line=1)
    except ValueError:
        return
    assert_equal(fields_of(fast), fields_of(criteo_plain.parse(chunk, first_line=1, path="log")))


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
@pytest.mark.parametrize("block_bytes", [1, 100, 700, 1 << 20])
def test_values_in_any_packing_and_block_size(tmp_path, pack, block_bytes):
    lines = [
        line(label="0", int_0="", int_1="-12", int_2="23159456", cat_0="", cat_25="FFffFFff"),
        line(int_12="9223372036854775807", cat_1="a", cat_2="00000001"),
        line(),
    ]
    path = written(tmp_path, "\n".join(lines), pack)
    labels, dense, hashes, present = read(path, block_bytes=block_bytes)
    assert labels.tolist() == [0, 1, 1]
    assert labels.dtype == np.int8
    assert dense.dtype == np.float32
    assert np.argwhere(np.isnan(dense)).tolist() == [[0, 0]]
    assert dense[0, 1:3].tolist() == [-12, 23159456]
    assert dense[1, 12] == np.float32(2**63)
    assert dense[2].tolist() == list(range(-3, 10))
    assert hashes.dtype == np.uint32
    assert hashes[:, 2].tolist() == [at * 40503 for at in range(26)]
    assert hashes[[0, 25], 0].tolist() == [0, 0xFFFFFFFF]
    assert hashes[[1, 2], 1].tolist() == [10, 1]
    assert np.argwhere(~present).tolist() == [[0, 0]]


def test_windows_newlines_and_a_last_line_without_one(tmp_path):
    lines = [line(cat_25=""), line(label="0"), line(cat_25="")]
    wanted = read(written(tmp_path, "\n".join(lines) + "\n"))
    for text in ("\n".join(lines), "\r\n".join(lines), "\r\n".join(lines) + "\r\n"):
        for block_bytes in (64, 1 << 20):
            assert_equal(read(written(tmp_path, text), block_bytes=block_bytes), wanted)


def test_gzip_in_several_members(tmp_path):
    part = (line() + "\n").encode() * 3
    path = written(tmp_path, gzip.compress(part) + gzip.compress(b"") + gzip.compress(part))
    assert read(path)[0].size == 6


def test_blocks_say_where_they_start_and_can_be_read_again(tmp_path):
    log = CriteoLog(written(tmp_path, f"{line()}\n" * 10))
    starts = [(block.first_line, block.labels.size) for block in log.blocks(block_bytes=800)]
    assert len(starts) > 2
    assert [first for first, _ in starts] == [
        1 + sum(size for _, size in starts[:at]) for at in range(len(starts))
    ]
    assert starts == [(b.first_line, b.labels.size) for b in log.blocks(block_bytes=800)]
    with pytest.raises(ProfileError, match="block_bytes must be 1 or more, found 0"):
        next(log.blocks(block_bytes=0))


WANTED = "wanted 40 fields separated by tabs (label, 13 integers, 26 categories)"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(label="2"), "label: found '2', wanted 0 or 1"),
        (line(label="-1"), "label: found '-1', wanted 0 or 1"),
        (line(label="300"), "label: found '300', wanted 0 or 1"),
        (line(label=""), "label: found '', wanted 0 or 1"),
        (line(label='"1"'), "label: found '\"1\"', wanted 0 or 1"),
        (line(int_3="1.5"), "int_3: found '1.5', wanted an integer or nothing"),
        (line(int_3=" 1"), "int_3: found ' 1', wanted an integer or nothing"),
        (line(int_3="0x1"), "int_3: found '0x1', wanted an integer or nothing"),
        (line(int_0="1e5"), "int_0: found '1e5', wanted an integer or nothing"),
        (line(int_12="--1"), "int_12: found '--1', wanted an integer or nothing"),
        (line(int_12="-"), "int_12: found '-', wanted an integer or nothing"),
        (line(int_4=str(2**63)), "int_4: '9223372036854775808' is outside the 64-bit integers"),
        (line(int_4="9" * 5000), f"int_4: '{'9' * 40}...' is outside the 64-bit integers"),
        (line(cat_9="xyz"), "cat_9: found 'xyz', wanted up to 8 hexadecimal digits or nothing"),
        (line(cat_0="-1"), "cat_0: found '-1', wanted up to 8 hexadecimal digits or nothing"),
        (line(cat_0="caf\u00e9"), "cat_0: found 'caf\\xe9', wanted up to 8 hexadecimal digits"),
        (line(cat_25="123456789"), "cat_25: found 9 hexadecimal digits, '123456789', wanted 8 at"),
        (line(cat_3="1\r"), "cat_3: found '1\\r', wanted up to 8 hexadecimal digits"),
        (line(cat_2="a\0"), "cat_2: found a NUL byte, wanted text"),
        (line(cat_2="a").encode()[:-9] + b"\xff", "cat_24: byte 0xff isn't UTF-8 text"),
        ("", f"a blank line, {WANTED}"),
        (" ", f"found 1 field, {WANTED}"),
        (line() + "\t", f"found 41 fields, {WANTED}"),
        (line()[2:], f"found 39 fields, {WANTED}; is this a log without labels, like test.txt?"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, pack, bad, message):
    bad = bad if isinstance(bad, bytes) else bad.encode()
    good = line().encode()
    path = written(tmp_path, b"\n".join([*[good] * 6, bad, good, good]) + b"\n", pack)
    for block_bytes in (500, 1 << 20):  # in a later block, and in the only one
        with pytest.raises(LogFormatError) as error:
            read(path, block_bytes=block_bytes)
        assert str(error.value).startswith(f"{path}, line 7: {message}")


def test_nine_digits_are_noticed_beside_seven(tmp_path):
    path = written(tmp_path, f"{line(cat_5='123456789')}\n{line(cat_5='1234567')}\n")
    with pytest.raises(LogFormatError, match="line 1: cat_5: found 9 hexadecimal digits"):
        read(path)


def test_a_blank_line_at_the_end_is_malformed(tmp_path):
    path = written(tmp_path, line() + "\n\n")
    with pytest.raises(LogFormatError, match="line 2: a blank line"):
        read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train.txt is empty, wanted one sample a line"),
        (gzip.compress(b""), "train.txt is empty, wanted one sample a line"),
        (b"PAR1" + bytes(100), "train.txt holds a Parquet file, wanted a text log"),
        (b"PK\x03\x04" + bytes(100), "train.txt holds a zip archive, wanted a text log"),
        (b"train".ljust(257, b"\0") + b"ustar", "train.txt holds a tar archive, wanted a text log"),
        (bytes(1000), "train.txt, line 1: label: found a NUL byte, wanted text"),
        (b"\x7fELF\xff\n", "train.txt, line 1: label: byte 0xff isn't UTF-8 text"),
        (b"1" * 70_000, "train.txt, line 1: longer than 65536 bytes; is this a text file?"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path, content, message):
    with pytest.raises(LogFormatError, match="train.txt") as error:
        read(written(tmp_path, content))
    assert message in str(error.value)


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_damaged_packing_is_named(tmp_path, pack):
    lines = [line(cat_0=f"{number * 2654435761 % 2**32:08x}") for number in range(3000)]
    packed = pack("\n".join(lines).encode())
    for content in (packed[:-3], packed[: len(packed) // 2], packed[:7], packed + b"more"):
        with pytest.raises(LogFormatError, match=r"train.txt: its packed data is truncated or dam"):
            read(written(tmp_path, content))
    with pytest.raises(LogFormatError, match=r"somewhere after line [1-9]\d* \("):
        read(written(tmp_path, packed[:-3]), block_bytes=100_000)


def test_a_pipe_is_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = gzip.compress(f"{line()}\n".encode() * 5)
    writer = threading.Thread(target=pipe.write_bytes, args=(text,))
    writer.start()
    assert read(pipe)[0].size == 5
    writer.join()


def test_without_pyarrow_the_extra_is_named(tmp_path):
    path = written(tmp_path, line(), gzip.compress)
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from torchrec_oper.profile.criteo import CriteoLog\n"
        "next(CriteoLog(sys.argv[1]).blocks())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "VersionError: reading click logs needs pyarrow" in found.stderr
    assert "pip install 'torchrec-oper[logs]'" in found.stderr


def test_ids_by_the_hashing_trick(tmp_path):
    path = written(tmp_path, "".join(line(cat_3=text) + "\n" for text in ("ffffffff", "", "a")))
    (block,) = CriteoLog(path).blocks()
    ids, lengths = block.ids(3, 1000)
    assert (ids.dtype, lengths.dtype) == (np.int64, np.int32)
    assert ids.tolist() == [0xFFFFFFFF % 1000, 10]
    assert lengths.tolist() == [1, 0, 1]
    assert block.ids(3, 2**40)[0].tolist() == [0xFFFFFFFF, 10]
    with pytest.raises(ProfileError, match="column must be 0 to 25, found 26"):
        block.ids(26, 10)
    with pytest.raises(ProfileError, match="rows must be 1 or more, found 0"):
        block.ids(0, 0)


def test_tables():
    tables = criteo_tables(dim=8)
    assert tuple(table.rows for table in tables) == KAGGLE_ROWS
    assert tables[2] == TableSpec("t_cat_2", 10131227, 8, ("cat_2",))
    scaled = [table.rows for table in criteo_tables(scale=0.001)]
    assert scaled == [max(2, math.ceil(rows / 1000)) for rows in KAGGLE_ROWS]
    assert [t.rows for t in criteo_tables(rows=range(1, 27))] == list(range(1, 27))
    for options, message in (
        ({"scale": 0.0}, r"scale must be above 0 and below 9.1e\+11, found 0.0"),
        ({"scale": math.nan}, r"scale must be above 0 and below 9.1e\+11, found nan"),
        ({"scale": 1e12}, r"scale must be above 0 and below 9.1e\+11, found 1000000000000.0"),
        ({"scale": 1e308}, r"scale must be above 0 and below 9.1e\+11, found 1e\+308"),
        ({"scale": 1e11}, r"table t_cat_2: 1013122700000000000 rows of 64 bytes.* over the limit"),
        ({"rows": [5]}, "rows must be 26 numbers, one for each categorical column, found 1"),
        ({"rows": [10**20] * 26}, r"table t_cat_0: rows must be below 2\*\*63"),
        ({"rows": [0] * 26}, "table t_cat_0: rows must be an integer of 1 or more, found 0"),
    ):
        with pytest.raises(ProfileError, match=message):
            criteo_tables(**options)


def test_profile_of_tables_that_share_a_column(tmp_path):
    path = written(tmp_path, "\n".join(line(cat_1=text) for text in ("a", "b", "a", "")))
    tables = [TableSpec("u", 100, 4, ("cat_1",)), TableSpec("v", 10, 4, ("cat_1", "cat_0"))]
    profile = profile_files([path], tables)
    profile.check_fits(tables)
    assert profile.samples == 4
    assert profile.table("u").ids.tolist() == [10, 11]
    assert profile.table("u").counts.tolist() == [2, 1]
    assert (profile.table("u").bags, profile.table("u").empty_bags) == (4, 1)
    assert profile.table("v").ids.tolist() == [0, 1]
    assert profile.table("v").counts.tolist() == [6, 1]


@pytest.mark.skipif(not REAL_LOG.exists(), reason=f"needs {REAL_LOG.name} in ../shared/data")
def test_the_real_log_equals_a_count_by_the_csv_module():
    with open(REAL_LOG, newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    labels, dense, _, _ = read(REAL_LOG, block_bytes=100_000)
    assert labels.size == len(rows) == 10_000
    assert labels.sum() == sum(row[0] == "1" for row in rows) == 2_182
    values = [[float(text) if text else math.nan for text in row[1:14]] for row in rows]
    np.testing.assert_array_equal(dense, np.array(values, np.float32))

    tables = criteo_tables(scale=0.01)
    profile = profile_files([REAL_LOG], tables)
    assert profile.samples == 10_000
    for column, spec in enumerate(tables):
        texts = [row[14 + column] for row in rows]
        table = profile.table(spec.name)
        assert dict(zip(table.ids.tolist(), table.counts.tolist(), strict=True)) == Counter(
            int(text, 16) % spec.rows for text in texts if text
        )
        assert (table.bags, table.empty_bags) == (10_000, texts.count(""))
