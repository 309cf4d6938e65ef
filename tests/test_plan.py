"""Plan: what it refuses, its file, its report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from strategies import access

from torchrec_oper.archive import read_archive, write_archive
from torchrec_oper.errors import ArchiveError, PlanError
from torchrec_oper.planner import Cluster, Plan, RowMap, TablePlacement, load_table
from torchrec_oper.planner.busiest_rank import busiest_rank_bound
from torchrec_oper.planner.deal import deal_rows
from torchrec_oper.profile import AccessProfile
from torchrec_oper.table import TableSpec

CLICKS = TableSpec(name="clicks", rows=6, dim=2, features=("f",), optimizer_bytes_per_row=4)
USERS = TableSpec(name="users", rows=3, dim=4, features=("g", "h"), dtype="float16")


def plan(memory_bytes: int = 1000, seed: int = 0) -> Plan:
    tables = [CLICKS, USERS]
    accesses = [access(CLICKS, {0: 5, 4: 3, 2: 2}), access(USERS, {1: 4})]
    cluster = Cluster.uniform(2, memory_bytes=memory_bytes)
    placements = []
    for table, one, row_map in zip(
        tables, accesses, deal_rows(tables, accesses, cluster, seed=seed), strict=True
    ):
        lookups = np.zeros(2, dtype=np.int64)
        np.add.at(lookups, row_map.place(one.ids)[0], one.counts)
        placements.append(TablePlacement("sparse.ebc", table, row_map, lookups))
    return Plan(
        placements=tuple(placements),
        cluster=cluster,
        profile_hash="ab" * 32,
        bound_bytes=busiest_rank_bound(tables, accesses, 2),
        seed=seed,
    )


def test_sums_by_hand() -> None:
    # Loads in bytes: 40 24 16 of clicks, 32 of users; LPT: 40 + 16 and 32 + 24.
    made = plan()
    assert made.planned_lookups == (7, 7)
    assert made.read_bytes == (56, 56)
    assert made.bound_bytes == 56
    assert made.gap == 0
    assert sum(made.memory_bytes) == 6 * 12 + 3 * 8


def test_file_round_trip(tmp_path: Path) -> None:
    made = plan()
    made.save(tmp_path / "a.plan")
    again = Plan.load(tmp_path / "a.plan")
    assert again == made
    assert again.content_hash == made.content_hash
    assert again.report() == made.report()
    assert hash(again) == hash(made)


def test_every_part_counts_in_the_hash() -> None:
    made = plan()
    first = made.placements[0]
    others = [
        replace(made, seed=1),
        replace(made, profile_hash=None),
        replace(made, cluster=Cluster.uniform(2, memory_bytes=999)),
        replace(made, bound_bytes=55.0),
        replace(made, placements=made.placements[::-1]),
        replace(made, placements=(replace(first, module="other"), made.placements[1])),
        replace(
            made,
            placements=(replace(first, planned_lookups=np.array([0, 1])), made.placements[1]),
        ),
    ]
    assert len({one.content_hash for one in [made, *others]}) == len(others) + 1


def test_any_truncation_is_refused(tmp_path: Path) -> None:
    plan().save(tmp_path / "whole.plan")
    whole = (tmp_path / "whole.plan").read_bytes()
    for size in [0, 1, 4, len(whole) // 2, len(whole) - 1]:
        (tmp_path / "cut.plan").write_bytes(whole[:size])
        with pytest.raises(ArchiveError, match="is not a plan of torchrec-oper, or is truncated"):
            Plan.load(tmp_path / "cut.plan")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    AccessProfile(tables=(access(CLICKS, {1: 1}),), samples=1).save(path)
    with pytest.raises(ArchiveError, match="holds a profile, wanted a plan"):
        Plan.load(path)
    path.write_text("a text")
    with pytest.raises(ArchiveError, match="is not a plan of torchrec-oper"):
        Plan.load(path)
    np.savez(path.open("wb"), x=np.arange(3))
    with pytest.raises(ArchiveError, match="is not a plan of torchrec-oper"):
        Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nowhere")


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "edited.plan"
    plan().save(path)
    header, arrays = read_archive(path, "plan")
    write_archive(path, "plan", {**header, "seed": 5}, arrays)
    with pytest.raises(ArchiveError, match="damaged plan: its content has hash"):
        Plan.load(path)
    write_archive(path, "plan", {**header, "format": 2}, arrays)
    with pytest.raises(ArchiveError, match="plan format 2 found, this version reads 1"):
        Plan.load(path)
    swapped = {**arrays, "0.listed_rows": arrays["0.listed_rows"][::-1] * 0}
    write_archive(path, "plan", header, swapped)
    with pytest.raises(ArchiveError, match="must fill the first slots of their owners"):
        Plan.load(path)
    write_archive(path, "plan", header, {k: a for k, a in arrays.items() if k != "1.bounds"})
    with pytest.raises(ArchiveError, match="needs the array 'bounds', which is missing"):
        Plan.load(path)
    del header["cluster"]
    write_archive(path, "plan", header, arrays)
    with pytest.raises(ArchiveError, match="damaged plan: 'cluster'"):
        Plan.load(path)


def test_over_memory_names_rank_table_need_and_cap() -> None:
    made = plan()
    need = max(made.memory_bytes)
    rank = made.memory_bytes.index(need)
    with pytest.raises(
        PlanError,
        match=f"rank {rank} needs {need} bytes .* its cap is {need - 1} bytes; .*table clicks",
    ):
        replace(made, cluster=Cluster.uniform(2, memory_bytes=need - 1))


def test_sums_do_not_overflow() -> None:
    rows = 2**55
    row_map = RowMap(np.array([0, rows]), [], [])
    table = TableSpec(name="t", rows=rows, dim=16, features=("f",))
    placement = TablePlacement("", table, row_map, np.array([2**62]))
    with pytest.raises(PlanError, match=f"rank 0 needs {rows * 64} bytes .* cap is 1000 bytes"):
        Plan((placement,), Cluster.uniform(1, memory_bytes=1000), None, 0.0)
    plan = Plan((placement,), Cluster.uniform(1, memory_bytes=2**63 - 1), None, 0.0)
    assert plan.read_bytes == (2**62 * 64,)


def test_refuses_what_does_not_belong_together() -> None:
    made = plan()
    first, second = made.placements
    with pytest.raises(PlanError, match="at least one table, found none"):
        replace(made, placements=())
    with pytest.raises(PlanError, match=r"found twice: sparse\.ebc\.clicks"):
        replace(made, placements=(first, first))
    with pytest.raises(PlanError, match="row map is for 2 ranks, the cluster has 3"):
        replace(made, cluster=Cluster.uniform(3, memory_bytes=1000))
    with pytest.raises(PlanError, match="clicks has 6 rows, but its row map has 3"):
        replace(first, row_map=second.row_map)
    with pytest.raises(PlanError, match=r"a count for each of 2 ranks, found \[1\]"):
        replace(first, planned_lookups=np.array([1]))
    with pytest.raises(PlanError, match="exchange must be 'partial', found 'whole'"):
        replace(first, exchange="whole")


def test_check_fits_names_the_table() -> None:
    made = plan()
    tables = [("sparse.ebc", CLICKS), ("sparse.ebc", USERS)]
    made.check_fits(tables)
    new = TableSpec(name="new", rows=1, dim=1, features=("x",))
    with pytest.raises(PlanError, match=r"leaves out table new of module sparse\.ebc"):
        made.check_fits([*tables, ("sparse.ebc", new)])
    with pytest.raises(PlanError, match=r"leaves out table clicks of the model"):
        made.check_fits([("", CLICKS)])
    with pytest.raises(PlanError, match=r"tables that the model lacks: sparse\.ebc\.users"):
        made.check_fits(tables[:1])
    with pytest.raises(PlanError, match="table users: the plan was made for .*rows=3.*rows=4"):
        made.check_fits([tables[0], ("sparse.ebc", replace(USERS, rows=4))])


def test_report_shows_load_memory_bound_and_tables() -> None:
    report = plan().report()
    assert "2 tables on 2 ranks, profile abababababab" in report
    assert "busiest rank / mean: 1.0000, above the least that any plan could reach: 0.00%" in report
    assert "\ntables of sparse.ebc:\ntable " in report
    lines = [line.split() for line in report.splitlines()]
    owned = plan().placements[0].row_map.owned_rows
    assert ["clicks", "6", f"{owned[0]}", f"{owned[1]}", "7", "3"] in lines
    assert ["0", "7", "56", f"{plan().memory_bytes[0]}", "1,000"] in lines
    unknown = replace(plan(), profile_hash=None)
    assert "no profile: rows were dealt as if all were looked up alike" in unknown.report()


def test_load_table_compares_shares() -> None:
    table = load_table([30, 10], [3000, 1000]).splitlines()
    assert table[2].split() == ["0", "30", "75.00%", "3,000", "75.00%"]
    assert table[3].split() == ["1", "10", "25.00%", "1,000", "25.00%"]
    assert load_table([0], [0]).splitlines()[2].split() == ["0", "0", "-", "0", "-"]


def test_row_map_of_one_rank() -> None:
    row_map = RowMap(np.array([0, 6]), np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    TablePlacement("", CLICKS, row_map, np.array([3]))
