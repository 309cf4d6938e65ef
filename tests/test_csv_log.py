"""Text logs with named columns."""

import csv
import gzip

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_files import read, write_csv

from torchrec_oper.errors import LogFormatError, ProfileError
from torchrec_oper.profile import csv_log
from torchrec_oper.profile.csv_log import CsvLog

COLUMNS = {"user": [[3], [], [12]], "seen": [[1, 2, 3], [7], []], "other": [[0], [0], [0]]}


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_columns_of_ids_and_of_lists(tmp_path, pack):
    log = CsvLog(write_csv(tmp_path / "a.csv", COLUMNS, pack=pack))
    assert log.features() == ("user", "seen", "other")
    assert log.rows("user") is None
    assert read(log, ["seen", "user"]) == {name: COLUMNS[name] for name in ("seen", "user")}


@pytest.mark.parametrize("name", ["a.tsv", "a.TSV.gz", "a.tsv.zst"])
def test_a_tsv_has_tabs(tmp_path, name):
    log = CsvLog(write_csv(tmp_path / name, COLUMNS, delimiter="\t"))
    assert read(log, ["seen"]) == {"seen": COLUMNS["seen"]}


bags = st.lists(st.integers(0, 2**63 - 1), max_size=3)


@given(st.lists(st.tuples(bags, bags), max_size=20), st.integers(1, 60), st.sampled_from(" ;/"))
def test_any_block_size_equals_the_csv_module(tmp_path_factory, rows, block_bytes, separator):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["a", "b"])
        for row in rows:
            writer.writerow([separator.join(map(str, bag)) for bag in row])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_log, "BLOCK_BYTES", block_bytes)
        found = read(CsvLog(path, separator=separator), ["a", "b"])
    assert found == {"a": [a for a, _ in rows], "b": [b for _, b in rows]}


def test_a_byte_order_mark_windows_newlines_and_no_newline_at_the_end(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfid,x\r\n5,a\r\n,b\r\n6,c")
    assert read(CsvLog(path), ["id"]) == {"id": [[5], [], [6]]}


def test_a_header_alone_has_no_sample(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n")
    assert read(CsvLog(path), ["a"]) == {"a": []}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,x\n", "a.csv, line 3, column b: found 'x', wanted an integer"),
        ("a,b\n1,2.0\n", "a.csv, line 2, column b: found '2.0', wanted an integer; write the col"),
        ("a,b\n1,3|\n", "a.csv, line 2, column b: found '', wanted an integer"),
        ("a,b\n1,9223372036854775808\n", "line 2, column b: '9223372036854775808' is outside"),
        ("a,b\n1,2\n\n1,2\n", "a.csv, line 3: found 0 fields, wanted 2 as in the header"),
        ("a,b\n1,2\n1,2,3\n", "a.csv, line 3: found 3 fields, wanted 2 as in the header"),
        ('a,b\n1,"2\n3"\n', "a.csv, "),
        ("a,c\n1,2\n", "a.csv has no column b; its header, split at ',', names 'a, c'"),
        ("a\tb\n1\t2\n", "a.csv has no column a; its header, split at ',', names 'a.tb'"),
        ("b,b\n1,2\n", "a.csv, line 1: a column is named twice: 'b,b'"),
        ("", "a.csv is empty"),
        ("a,\udcff\n", "a.csv, line 1: no header that names the columns"),
        ("PAR1" + "x" * 50, "a.csv holds a Parquet file"),
    ],
)
def test_what_breaks_the_format_is_named(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(LogFormatError, match=message):
        read(CsvLog(path), ["a", "b"])


def test_a_line_far_down_is_named_right(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_log, "BLOCK_BYTES", 50)
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "1\n" * 300 + "oops\n" + "1\n" * 300)
    with pytest.raises(LogFormatError, match="a.csv, line 302, column a: found 'oops'"):
        read(CsvLog(path), ["a"])


def test_an_id_can_be_found_again(tmp_path):
    log = CsvLog(write_csv(tmp_path / "a.csv", COLUMNS))
    (block,) = log.blocks(["user", "seen"])
    assert block.locate("seen", 0) == "line 2, column seen"
    assert block.locate("seen", 3) == "line 3, column seen"
    assert block.locate("user", 1) == "line 4, column user"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delimiter": "||"}, "the delimiter must be one ASCII character.*found '||'"),
        ({"delimiter": "\u00a6"}, "the delimiter must be one ASCII"),
        ({"separator": "1"}, "the list separator must be one ASCII character, no letter, digit"),
        ({"separator": "-"}, "the list separator must be one"),
        ({"separator": ","}, "delimiter and list separator are both ','"),
    ],
)
def test_characters_that_will_not_do(options, message):
    with pytest.raises(ProfileError, match=message):
        CsvLog("a.csv", **options)


def test_all_bytes_are_ticked(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_log, "BLOCK_BYTES", 10)
    path = write_csv(tmp_path / "a.csv", COLUMNS)
    ticks = []
    read(CsvLog(path), ["user"], tick=ticks.append)
    assert len(ticks) > 2
    assert sum(ticks) == path.stat().st_size
