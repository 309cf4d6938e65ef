"""oper::map_ids against its definition and against RowMap, which shares no code with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import row_maps

from torchrec_oper.errors import BatchError, KernelLoadError
from torchrec_oper.ops import RowMapTensors, map_ids, map_ids_reference
from torchrec_oper.ops.library import load_kernels
from torchrec_oper.planner import RowMap

ID_TYPES = (torch.int32, torch.int64)


def packed(maps: list[RowMap], segments: list[int], shift: int = 2) -> RowMapTensors:
    """The maps as the op takes them, with physical rows without gaps."""
    listed = np.cumsum([0, *(len(m.listed_ids) for m in maps)])
    ranges = np.cumsum([0, *(m.world_size for m in maps)])
    buckets = []
    for m, begin in zip(maps, listed, strict=False):
        edges = range(0, ((m.rows - 1) >> shift) + 2)
        buckets.append([begin + int((m.listed_ids < e << shift).sum()) for e in edges])
    first = np.cumsum([0, *(len(b) for b in buckets)])
    spans = [
        [maps[s].rows, listed[s], listed[s + 1], first[s], shift, ranges[s], ranges[s + 1]]
        for s in segments
    ]
    listed_ids, listed_rows, range_starts, range_rows = (
        torch.from_numpy(np.concatenate([getattr(m, name) for m in maps]))
        for name in ("listed_ids", "listed_rows", "range_starts", "range_rows")
    )
    return RowMapTensors(
        torch.tensor(spans, dtype=torch.int64).reshape(-1, 7),
        listed_ids,
        listed_rows,
        torch.tensor([place for bucket in buckets for place in bucket]),
        range_starts,
        range_rows,
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[RowMap], list[int]]:
    maps = draw(st.lists(row_maps(), min_size=1, max_size=3))
    segments = draw(st.lists(st.integers(0, len(maps) - 1), max_size=5))
    parts = [draw(st.lists(st.integers(0, maps[s].rows - 1), max_size=7)) for s in segments]
    ids = torch.tensor([i for part in parts for i in part], dtype=draw(st.sampled_from(ID_TYPES)))
    return ids, torch.tensor([0, *np.cumsum([len(p) for p in parts])]), maps, segments


@given(calls(), st.integers(0, 7))
def test_equals_the_reference_and_the_row_map(call: tuple, shift: int) -> None:
    ids, offsets, maps, segments = call
    tensors = packed(maps, segments, shift)
    found = map_ids(ids, offsets, tensors)
    assert found.dtype == ids.dtype
    assert torch.equal(found, map_ids_reference(ids, offsets, tensors))
    for s, m in enumerate(segments):
        part = slice(int(offsets[s]), int(offsets[s + 1]))
        assert found[part].tolist() == maps[m].physical_rows(ids[part].numpy()).tolist()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_ids_on_any_number_of_threads(threads: int) -> None:
    generator = np.random.default_rng(0)
    maps = []
    for rows, listed in ((1, 0), (7, 7), (100_003, 5_001), (3_000_000, 9_999)):
        ids = generator.choice(rows, listed, replace=False)
        owners = generator.integers(0, 3, listed)
        cut = (rows - listed) // 3
        counts = np.array([cut, cut, rows - listed - 2 * cut])
        maps.append(
            RowMap.from_owners(listed_ids=ids, listed_owners=owners, unlisted_counts=counts)
        )
    segments = [2, 3, 0, 1, 2]
    parts = [generator.integers(0, maps[s].rows, 20_011) for s in segments]
    ids = torch.from_numpy(np.concatenate(parts))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = map_ids(ids, torch.arange(6) * 20_011, packed(maps, segments, 8))
    finally:
        torch.set_num_threads(before)
    wanted = [maps[s].physical_rows(part) for s, part in zip(segments, parts, strict=True)]
    assert found.tolist() == np.concatenate(wanted).tolist()


@pytest.mark.parametrize("id_type", ID_TYPES)
@pytest.mark.parametrize("position", [0, 4_097, 9_999])
@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
def test_names_the_first_id_outside_its_table(
    id_type: torch.dtype, position: int, bad: int
) -> None:
    row_map = RowMap(np.array([0, 4, 10]), np.array([3]), np.array([0]))
    ids = torch.zeros(10_000, dtype=id_type)
    ids[position:] = bad
    tensors, offsets = packed([row_map], [0, 0]), torch.tensor([0, 4_097, 10_000])
    segment = int(position >= 4_097)
    with pytest.raises(
        RuntimeError,
        match=re.escape(f"ids[{position}] = {bad} is outside tables[{segment}], which has 10 rows"),
    ):
        torch.ops.oper.map_ids(ids, offsets, *tensors)
    name = ("feature x of table t", "feature y of table t")[segment]
    with pytest.raises(
        BatchError, match=f"{name}: id {bad} is outside the table, whose ids run from 0 to 9"
    ):
        map_ids(ids, offsets, tensors, names=["feature x of table t", "feature y of table t"])


def arguments() -> dict[str, torch.Tensor]:
    row_map = RowMap(np.array([0, 4, 10]), np.array([3]), np.array([0]))
    tensors = packed([row_map], [0])
    return {"ids": torch.tensor([3, 9]), "offsets": torch.tensor([0, 2]), **tensors._asdict()}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ids", torch.zeros(2, 1, dtype=torch.int64), "ids must have 1 dimension, found 2"),
        ("ids", torch.zeros(2), "ids must be int32 or int64"),
        ("ids", torch.zeros(4, dtype=torch.int64)[::2], "ids must be contiguous"),
        ("offsets", torch.tensor([0, 2], dtype=torch.int32), "offsets must be int64"),
        ("offsets", torch.tensor([0, 1, 2]), "one entry more than tables, 2, found 3"),
        ("offsets", torch.tensor([1, 2]), r"offsets\[0\] must be 0, found 1"),
        ("offsets", torch.tensor([0, 3]), "the number of ids, 2, found 3"),
        ("tables", torch.zeros(1, 4, dtype=torch.int64), r"tables must be contiguous int64 \[S, 7"),
        ("tables", torch.tensor([[10, 0, 2, 0, 2, 0, 2]]), "lists rows 0 to 2 of 1"),
        ("tables", torch.tensor([[10, 0, 1, 0, 2, 0, 3]]), "ranges 0 to 3 of 2"),
        ("tables", torch.tensor([[10, 0, 1, 1, 2, 0, 2]]), r"buckets of 2\^2 ids from 1 of 4"),
        ("tables", torch.tensor([[10, 0, 1, 0, 1, 0, 2]]), r"buckets of 2\^1 ids from 0 of 4"),
        ("tables", torch.tensor([[10, 0, 1, 0, 64, 0, 2]]), r"buckets of 2\^64 ids"),
        ("tables", torch.tensor([[10, 0, 1, -1, 2, 0, 2]]), "ids from -1 of 4"),
        ("tables", torch.tensor([[10, 0, 1, 0, 2, 1, 1]]), "no range that starts at 0"),
        ("tables", torch.tensor([[10, 0, 1, 0, 2, 1, 2]]), "no range that starts at 0"),
        ("tables", torch.tensor([[-1, 0, 0, 0, 2, 0, 2]]), "has -1 rows"),
        (
            "listed_ids",
            torch.tensor([3, 4]),
            "listed_ids and listed_rows differ in length, 2 and 1",
        ),
        ("range_rows", torch.tensor([1]), "range_starts and range_rows differ in length, 2 and 1"),
        ("range_starts", torch.zeros(2, 1, dtype=torch.int64), "range_starts must have 1 dim"),
    ],
)
def test_refuses_by_name(name: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.oper.map_ids(*{**arguments(), name: value}.values())


@pytest.mark.parametrize("wrong", [-(10**15), 10**15])
def test_wrong_buckets_read_nothing_outside(wrong: int) -> None:
    call = arguments()
    # Listed rows before the map's own, which a position too far back would read.
    call["listed_ids"] = torch.tensor([0, 3])
    call["listed_rows"] = torch.tensor([77_777, 0])
    call["range_starts"] = torch.cat([torch.tensor([-(10**9)]), call["range_starts"]])
    call["range_rows"] = torch.cat([torch.tensor([88_888]), call["range_rows"]])
    call["tables"] = torch.tensor([[10, 1, 2, 0, 2, 1, 3]])
    call["buckets"] = call["buckets"] * 0 + wrong
    call["ids"], call["offsets"] = torch.arange(10), torch.tensor([0, 10])
    assert torch.ops.oper.map_ids(*call.values()).abs().max() < 20


def test_refuses_falling_offsets() -> None:
    call = arguments()
    call["tables"] = call["tables"].repeat(2, 1)
    call["offsets"] = torch.tensor([0, 3, 2])
    with pytest.raises(RuntimeError, match="offsets must not fall, found 3 before 2 at 1"):
        torch.ops.oper.map_ids(*call.values())


def test_refuses_tables_that_int32_ids_cannot_number() -> None:
    call = arguments()
    call["ids"] = call["ids"].int()
    call["tables"][0, 0] = 2**31
    with pytest.raises(RuntimeError, match="2147483648 rows, outside 0 to 2147483647"):
        torch.ops.oper.map_ids(*call.values())


@pytest.mark.parametrize("ids", [[3, 9], []])
@pytest.mark.parametrize("id_type", ID_TYPES)
def test_opcheck(ids: list[int], id_type: torch.dtype) -> None:
    call = arguments()
    call["ids"] = torch.tensor(ids, dtype=id_type)
    call["offsets"] = torch.tensor([0, len(ids)])
    torch.library.opcheck(torch.ops.oper.map_ids.default, tuple(call.values()))


def test_traces_whole() -> None:
    traced = torch.compile(torch.ops.oper.map_ids, backend="aot_eager", fullgraph=True)
    call = arguments()
    assert torch.equal(traced(*call.values()), torch.ops.oper.map_ids(*call.values()))


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(
        KernelLoadError, match=r"_kernels.so is missing; build it with `make build`"
    ):
        load_kernels(tmp_path / "_kernels.so")


def test_a_damaged_library_says_why_and_how_to_rebuild(tmp_path: Path) -> None:
    library = tmp_path / "_kernels.so"
    library.write_bytes(b"not a library")
    script = (
        "from pathlib import Path; from torchrec_oper.ops.library import load_kernels;"
        f"load_kernels(Path({str(library)!r}))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 1
    assert re.search(
        r"KernelLoadError: PyTorch \S+ can't load .*(invalid ELF|file too short).*"
        r"built for another PyTorch or machine; build it with `make build`",
        run.stderr,
    )
