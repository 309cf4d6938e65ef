"""Parquet logs."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_files import read

from torchrec_oper.errors import LogFormatError
from torchrec_oper.profile import parquet_log
from torchrec_oper.profile.parquet_log import ParquetLog


def written(path, options=None, **columns):
    pyarrow.parquet.write_table(pa.table(columns), path, **(options or {}))
    return path


INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_and_nulls_of_any_width(tmp_path, kind):
    path = written(tmp_path / "a.parquet", a=pa.array([5, None, 0, 127], kind), b=["x"] * 4)
    log = ParquetLog(path)
    assert log.features() == ("a", "b")
    assert log.rows("a") is None
    assert read(log, ["a"]) == {"a": [[5], [], [0], [127]]}


LISTS = [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint64())]


@pytest.mark.parametrize("kind", LISTS)
@given(
    st.lists(st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=4), max_size=40),
    st.integers(1, 7),
    st.integers(1, 9),
)
def test_lists_in_any_row_groups(tmp_path_factory, kind, bags, block_rows, group_rows):
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    written(path, {"row_group_size": group_rows}, a=pa.array(bags, kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_log, "BLOCK_ROWS", block_rows)
        found = read(ParquetLog(path), ["a"])
    assert found == {"a": [bag or [] for bag in bags]}


def test_lists_of_fixed_size(tmp_path):
    kind = pa.list_(pa.int64(), 2)
    path = written(tmp_path / "a.parquet", a=pa.array([[1, 2], [3, 4]], kind))
    assert read(ParquetLog(path), ["a"]) == {"a": [[1, 2], [3, 4]]}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1.0]), "column a: holds double, wanted integers .* or lists of integers"),
        (pa.array(["1"]), "column a: holds string, wanted integers"),
        (pa.array([[1.0]]), r"column a: holds list<.*double>, wanted integers"),
        (pa.array([True]), "column a: holds bool, wanted integers"),
        (pa.array([[[1]]]), "column a: holds list<.*list<.*>>, wanted integers"),
        (pa.array([[1], [], [2, None]]), r"row 2 \(from 0\), column a: a list holds a null"),
        (pa.array([1, 2**63], pa.uint64()), "column a: 9223372036854775808 is outside the 64-bit"),
        (pa.array([[2**64 - 1]], pa.list_(pa.uint64())), "18446744073709551615 is outside"),
    ],
)
def test_what_is_no_id_is_named(tmp_path, column, message):
    path = written(tmp_path / "a.parquet", a=column)
    with pytest.raises(LogFormatError, match=f"a.parquet, .*{message}"):
        read(ParquetLog(path), ["a"])


def test_a_null_far_down_is_named_right(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_log, "BLOCK_ROWS", 7)
    bags = [[1]] * 50 + [[1, None]] + [[1]] * 50
    path = written(tmp_path / "a.parquet", {"row_group_size": 20}, a=pa.array(bags))
    with pytest.raises(LogFormatError, match="row 50 "):
        read(ParquetLog(path), ["a"])


def test_a_missing_column_is_named(tmp_path):
    path = written(tmp_path / "a.parquet", a=[1], b=[2])
    with pytest.raises(LogFormatError, match="a.parquet has no column c; its columns are a, b"):
        read(ParquetLog(path), ["a", "c"])


@pytest.mark.parametrize("cut", [0, 3, 100, -1])
def test_a_damaged_file_is_named(tmp_path, cut):
    path = written(tmp_path / "a.parquet", a=np.arange(1000))
    path.write_bytes(path.read_bytes()[:cut])
    for use in (ParquetLog(path).features, lambda: read(ParquetLog(path), ["a"])):
        with pytest.raises(LogFormatError, match="a.parquet is no Parquet file, or damaged"):
            use()


def test_damaged_pages_are_named(tmp_path):
    path = written(tmp_path / "a.parquet", a=np.random.default_rng(0).integers(2**40, size=9000))
    content = bytearray(path.read_bytes())
    content[4:3000] = b"\xff" * 2996
    path.write_bytes(content)
    with pytest.raises(LogFormatError, match="a.parquet is no Parquet file, or damaged"):
        read(ParquetLog(path), ["a"])


def test_an_id_can_be_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_log, "BLOCK_ROWS", 2)
    path = written(tmp_path / "a.parquet", a=pa.array([[1], [], [2, 3], [4]]), b=[None, 5, 6, None])
    first, second = ParquetLog(path).blocks(["a", "b"])
    assert first.locate("b", 0) == "row 1 (from 0), column b"
    assert second.locate("a", 1) == "row 2 (from 0), column a"
    assert second.locate("a", 2) == "row 3 (from 0), column a"


def test_all_bytes_are_ticked(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_log, "BLOCK_ROWS", 3)
    path = written(tmp_path / "a.parquet", a=[1] * 10)
    ticks = []
    read(ParquetLog(path), ["a"], tick=ticks.append)
    assert len(ticks) == 4
    assert sum(ticks) == path.stat().st_size
