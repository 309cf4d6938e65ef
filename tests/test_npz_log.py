"""Bags and graphs in npz files."""

import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_files import read, write_npz

from torchrec_oper.errors import LogFormatError
from torchrec_oper.profile import npz_log
from torchrec_oper.profile.npz_log import NpzLog

bags = st.lists(st.integers(0, 2**31 - 1), max_size=4)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@given(st.lists(st.tuples(bags, bags), max_size=30), st.integers(1, 9))
def test_bags_in_any_block_size(tmp_path_factory, save, rows, block_samples):
    columns = {"a": [a for a, _ in rows], "b/c": [b for _, b in rows]}
    log = NpzLog(write_npz(tmp_path_factory.mktemp("npz") / "a.npz", columns, save=save))
    assert log.features() == ("a", "b/c")
    assert log.rows("a") is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npz_log, "BLOCK_SAMPLES", block_samples)
        assert read(log, ["a", "b/c"]) == columns
        assert read(log, ["b/c"]) == {"b/c": columns["b/c"]}


def test_a_graph_as_scipy_saves_it(tmp_path, monkeypatch):
    sparse = pytest.importorskip("scipy.sparse")
    monkeypatch.setattr(npz_log, "BLOCK_SAMPLES", 2)
    matrix = np.array([[0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 2], [0, 0, 3, 0, 0]])
    sparse.save_npz(tmp_path / "graph.npz", sparse.csr_matrix(matrix))
    log = NpzLog(tmp_path / "graph.npz")
    assert log.features() == ("source", "targets")
    assert (log.rows("source"), log.rows("targets")) == (4, 5)
    assert read(log, ["source", "targets"]) == {
        "source": [[0], [1], [2], [3]],
        "targets": [[1, 2], [], [0, 4], [2]],
    }


def saved(path, **arrays):
    np.savez(path, **{name.replace("_", "."): array for name, array in arrays.items()})
    return path


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a_ids": [1.0], "a_offsets": [0, 1]}, "a.ids is float64 of shape .1,., wanted one-dim"),
        ({"a_ids": [[1]], "a_offsets": [0, 1]}, "a.ids is int64 of shape .1, 1., wanted one-dim"),
        ({"a_ids": [True], "a_offsets": [0, 1]}, "a.ids is bool of shape .1,., wanted one-dimen"),
        ({"a_ids": [1], "a_offsets": [1, 1]}, "a.offsets starts with 1, wanted 0"),
        ({"a_ids": [1], "a_offsets": np.empty(0, int)}, "a.offsets starts with None, wanted 0"),
        ({"a_ids": [1, 2], "a_offsets": [0, 2, 1]}, r"a.offsets must go up from 0 to 2.*found \[1"),
        ({"a_ids": [1, 2], "a_offsets": [0, 3]}, "a.offsets must go up from 0 to 2, .*found 3"),
        ({"a_ids": [1, 2], "a_offsets": [0, 1]}, "a.offsets ends with 1, but a.ids has 2 ids"),
        (
            {"a_ids": np.array([2**63], np.uint64), "a_offsets": [0, 1]},
            "a.ids holds 9223372036854775808, outside the 64-bit integers",
        ),
        ({"b_ids": [1], "b_offsets": [0, 1]}, "has no feature a; it holds b"),
        ({"a_ids": [1]}, "holds a.ids; wanted FEATURE.ids and FEATURE.offsets, or indices"),
        ({}, "holds no array; wanted FEATURE.ids"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, arrays, message):
    path = saved(tmp_path / "a.npz", **arrays)
    with pytest.raises(LogFormatError, match=f"a.npz:? {message}"):
        read(NpzLog(path), ["a"])


def test_features_with_different_samples_are_named(tmp_path):
    path = saved(tmp_path / "a.npz", a_ids=[1], a_offsets=[0, 1], b_ids=[1, 2], b_offsets=[0, 1, 2])
    with pytest.raises(LogFormatError, match="features differ in their samples: {'a': 1, 'b': 2}"):
        read(NpzLog(path), ["a", "b"])


def test_damaged_files_are_named(tmp_path):
    path = write_npz(tmp_path / "a.npz", {"a": [[value] for value in range(5000)]})
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(LogFormatError, match="a.npz isn't an npz file, or is damaged"):
        NpzLog(path).features()
    at = whole.index(b"a.ids.npy") + 3000
    path.write_bytes(whole[:at] + b"oops" + whole[at + 4 :])
    with pytest.raises(LogFormatError, match="a.npz: a.ids is damaged"):
        read(NpzLog(path), ["a"])
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a.ids.npy", "a.offsets.npy"):
            archive.writestr(name, b"no array")
    with pytest.raises(LogFormatError, match="a.npz: a.ids is damaged"):
        read(NpzLog(path), ["a"])


def test_an_id_can_be_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(npz_log, "BLOCK_SAMPLES", 2)
    path = write_npz(tmp_path / "a.npz", {"a": [[1], [], [2, 3], [4]]})
    first, second = NpzLog(path).blocks(["a"])
    assert first.locate("a", 0) == "bag 0 (from 0) of feature a"
    assert second.locate("a", 2) == "bag 3 (from 0) of feature a"


def test_all_bytes_are_ticked(tmp_path, monkeypatch):
    monkeypatch.setattr(npz_log, "BLOCK_SAMPLES", 3)
    path = write_npz(tmp_path / "a.npz", {"a": [[1]] * 10})
    ticks = []
    read(NpzLog(path), ["a"], tick=ticks.append)
    assert len(ticks) == 4
    assert sum(ticks) == path.stat().st_size
