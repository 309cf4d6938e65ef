"""Graphs as text."""

import gzip
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_files import counted, read

from torchrec_oper.errors import LogFormatError
from torchrec_oper.profile import edge_list
from torchrec_oper.profile.edge_list import EdgeLog

DATA = Path(__file__).parents[2] / "shared" / "data"
BOTH = ["source", "targets"]

nodes = st.integers(0, 12)


@given(st.lists(st.tuples(nodes, nodes)), st.integers(1, 40), st.sampled_from(" \t"))
def test_edges_in_any_block_size(tmp_path_factory, edges, block_bytes, blank):
    path = tmp_path_factory.mktemp("edges") / "a.edges"
    path.write_text("".join(f"{a}{blank}{b}\n" for a, b in edges) + "\n")
    runs = [(a, [b for _, b in run]) for a, run in groupby(edges, key=lambda edge: edge[0])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_list, "BLOCK_BYTES", block_bytes)
        found = read(EdgeLog(path), BOTH)
    assert found == {"source": [[a] for a, _ in runs], "targets": [bag for _, bag in runs]}


@given(st.lists(st.tuples(nodes, st.lists(nodes, max_size=5)), min_size=1), st.integers(1, 40))
def test_adjacency_in_any_block_size(tmp_path_factory, lists, block_bytes):
    path = tmp_path_factory.mktemp("edges") / "a.adj"
    path.write_text("\n".join(" ".join(map(str, [a, *bag])) for a, bag in lists))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_list, "BLOCK_BYTES", block_bytes)
        found = read(EdgeLog(path, layout="adjacency"), BOTH)
    assert found == {"source": [[a] for a, _ in lists], "targets": [bag for _, bag in lists]}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_comments_and_blank_lines_are_passed_over(tmp_path, pack):
    path = tmp_path / "a.edges"
    path.write_bytes(pack(b"# Nodes: 3 Edges: 3\n%x\n\n 1  2 \r\n\n#\n1\t3\r\n0 1"))
    assert read(EdgeLog(path), BOTH) == {"source": [[1], [0]], "targets": [[2, 3], [1]]}
    first, _ = EdgeLog(path).blocks(BOTH)
    assert first.locate("targets", 1) == "line 7"
    assert first.locate("source", 0) == "line 4"


@pytest.mark.parametrize(
    ("layout", "text", "message"),
    [
        ("edges", "1 2\n3\n", "line 2: found 1 number, wanted source and target; lists of targets"),
        ("edges", "1 2 5\n", "line 1: found 3 numbers, wanted source and target"),
        ("edges", "1 2\n\n3 x\n", "line 3: found 'x', wanted an integer"),
        ("edges", "1,2\n", "line 1: found '1,2', wanted an integer"),
        ("adjacency", "1 2\n1 2 3.0\n", "line 2: found '3.0', wanted an integer"),
        ("adjacency", "1 9999999999999999999\n", "line 1: '9999999999999999999' is outside"),
        ("adjacency", "1 -\n", "line 1: found '-', wanted an integer"),
        ("edges", "", "is empty"),
    ],
)
def test_what_breaks_the_format_is_named(tmp_path, layout, text, message):
    path = tmp_path / "a.txt"
    path.write_text(text)
    with pytest.raises(LogFormatError, match=f"a.txt.* {message}"):
        read(EdgeLog(path, layout=layout), BOTH)


def test_a_wrong_feature_is_named(tmp_path):
    with pytest.raises(LogFormatError, match="has no feature item; a graph has source and targets"):
        read(EdgeLog(tmp_path / "a.edges"), ["item"])


def test_a_line_longer_than_other_logs_allow(tmp_path):
    path = tmp_path / "a.adj"
    path.write_text("7 " + "12345678 " * 20_000 + "\n")
    assert read(EdgeLog(path, layout="adjacency"), BOTH)["targets"] == [[12345678] * 20_000]


def test_all_bytes_are_ticked(tmp_path, monkeypatch):
    monkeypatch.setattr(edge_list, "BLOCK_BYTES", 5)
    path = tmp_path / "a.edges"
    path.write_text("1 2\n" * 10)
    ticks = []
    read(EdgeLog(path), BOTH, tick=ticks.append)
    assert len(ticks) > 2
    assert sum(ticks) == path.stat().st_size


@pytest.mark.parametrize(
    ("name", "layout"),
    [("bert4rec_beauty.txt", "edges"), ("lightgcn_gowalla_test.txt", "adjacency")],
)
def test_real_graphs_equal_a_plain_count(name, layout):
    if not (DATA / name).exists():
        pytest.skip(f"needs {name} in ../shared/data")
    found = read(EdgeLog(DATA / name, layout=layout), BOTH)
    text = (DATA / name).read_text()
    rows = [[int(word) for word in line.split()] for line in text.splitlines()]
    runs = [
        (a, [b for row in run for b in row[1:]]) for a, run in groupby(rows, lambda row: row[0])
    ]
    assert found["source"] == [[a] for a, _ in runs]
    assert counted(found["targets"]) == counted(bag for _, bag in runs)
    assert found["targets"] == [bag for _, bag in runs]
