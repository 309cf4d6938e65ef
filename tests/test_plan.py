"""Plan: what it refuses, its file, and what the planner promises of the plans it makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made_plans import placement_of, plan_of
from strategies import access

from torchrec_oper.archive import read_archive, write_archive
from torchrec_oper.errors import ArchiveError, PlanError
from torchrec_oper.planner import (
    RUNNABLE,
    Cluster,
    Constraints,
    Decision,
    Plan,
    RankSpec,
    Request,
    RowMap,
    SearchSpace,
    TablePlacement,
    Workload,
    load_table,
    make_plan,
)
from torchrec_oper.planner.certificate import Certificate, Multipliers, Proof
from torchrec_oper.planner.demands import table_demands
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.profile import AccessProfile
from torchrec_oper.table import TableSpec

CLICKS = TableSpec(name="clicks", rows=6, dim=2, features=("f",), optimizer_bytes_per_row=4)
USERS = TableSpec(name="users", rows=3, dim=4, features=("g", "h"), dtype="float16")
NONE = np.empty(0, dtype=np.int64)


def row_map(*owned: int) -> RowMap:
    """Rows in ranges, the last id first."""
    rows = sum(owned)
    owners = np.repeat(np.arange(len(owned)), owned)
    return RowMap.from_owners(
        listed_ids=np.arange(rows)[::-1],
        listed_owners=owners,
        unlisted_counts=np.zeros(len(owned), dtype=np.int64),
    )


def clicks(**fields: Any) -> TablePlacement:
    """4 rows in a part of rank 0, 2 in one of rank 1, which the decision names first."""
    values = {
        "module": "sparse.ebc",
        "table": CLICKS,
        "decision": Decision("partial", 0, np.array([[1, 0]]), np.array([0.25, 0.75])),
        "row_map": row_map(4, 2),
        "planned_lookups": np.array([7, 3]),
        **fields,
    }
    return TablePlacement(**values)


def users(**fields: Any) -> TablePlacement:
    """2 slices of 2 columns: the hottest row on both ranks, the others on each by a slice."""
    values = {
        "module": "sparse.ebc",
        "table": USERS,
        "decision": Decision("partial", 1, np.array([[1], [0]])),
        "row_map": row_map(2, 1),
        "planned_lookups": np.array([4, 4]),
        **fields,
    }
    return TablePlacement(**values)


def proof(bound_s: float = 0.5) -> Certificate:
    multipliers = Multipliers(
        np.array([0.75]), np.full((2, 3, 1), 0.5), np.array([0.1]), np.array([0.25, 0.0])
    )
    return Certificate((Proof(False, 2.0, multipliers, bound_s),), np.inf)


def plan(**fields: Any) -> Plan:
    values = {
        "memory_bytes": 1000,
        "seconds": {"memory": (0.25, 0.5), "forward": (0.5, 0.125)},
        "certificate": proof(),
        "space": SearchSpace(hot_step=4),
        **fields,
    }
    return plan_of(clicks(), users(), **values)


def test_sums_by_hand() -> None:
    made = plan()
    assert made.planned_lookups == (11, 7)
    # Rows of 12 bytes with state; of users a slice of 4 bytes for 2 rows, and a replica of 8.
    assert made.memory_bytes == (4 * 12 + 2 * 4 + 8, 2 * 12 + 2 * 4 + 8)
    assert made.rank_s == (0.75, 0.625)
    assert (made.cost_s, made.bound_s, made.gap) == (0.75, 0.5, 0.5)
    serving = replace(made, workload=replace(made.workload, objective="infer"))
    assert serving.memory_bytes == (4 * 8 + 16, 2 * 8 + 16)


def test_a_placement_counts_pieces_by_rank() -> None:
    assert clicks().owned_rows.tolist() == [4, 2]
    assert clicks().owners.tolist() == [[0, 1]]
    assert users().owned_rows.tolist() == [2, 2]
    three = placement_of("", USERS, row_map(2, 1), owners=[2, 0], world_size=4)
    assert three.owned_rows.tolist() == [2, 0, 1, 0]
    assert three.rank_bytes(optimizer=True) == [16, 0, 8, 0]
    assert three.key == "users"


def test_the_map_over_ranks_leaves_rows_where_they_are() -> None:
    three = placement_of("", CLICKS, row_map(4, 2), owners=[2, 0], world_size=4)
    ranks = three.rank_map
    assert ranks.owned_rows.tolist() == [4, 0, 2, 0]
    owners, slots = ranks.place(np.arange(6))
    assert owners.tolist() == [2, 2, 0, 0, 0, 0]
    assert slots.tolist() == three.row_map.place(np.arange(6))[1].tolist()
    with pytest.raises(PlanError, match="table users: its rows don't have one owner each"):
        _ = users().rank_map


def test_file_round_trip(tmp_path: Path) -> None:
    made = plan()
    made.save(tmp_path / "a.plan")
    again = Plan.load(tmp_path / "a.plan")
    assert again == made
    assert hash(again) == hash(made)
    assert again.report() == made.report()
    assert again.certificate.to_json() == made.certificate.to_json()
    assert (again.space, again.workload) == (made.space, made.workload)
    first = again.placements[0]
    assert first.decision.weights.tolist() == [0.25, 0.75]
    assert again.placements[1].decision.owners.tolist() == [[1], [0]]


def test_every_part_counts_in_the_hash() -> None:
    made = plan()
    first, second = made.placements
    others = [
        replace(made, seed=1),
        replace(made, workload=replace(made.workload, profile_hash=None, skew=0.9)),
        replace(made, workload=replace(made.workload, batch_size=9)),
        replace(made, cluster=Cluster.uniform(2, memory_bytes=999)),
        replace(made, certificate=proof(0.25)),
        replace(made, seconds={**made.seconds, "forward": (0.5, 0.25)}),
        replace(made, space=SearchSpace()),
        replace(made, placements=made.placements[::-1]),
        replace(made, placements=(clicks(module="other"), second)),
        replace(made, placements=(clicks(planned_lookups=np.array([0, 1])), second)),
        replace(made, placements=(clicks(row_map=row_map(3, 3)), second)),
        replace(
            made, placements=(clicks(decision=Decision("partial", 0, np.array([[1, 0]]))), second)
        ),
        replace(made, placements=(first, users(decision=Decision("rows", 1, [[1], [0]])))),
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

    def refused(message: str, fields: dict | None = None, **edited: Any) -> None:
        changed = {**arrays, **{k.replace("_", ".", 1): v for k, v in edited.items()}}
        kept = {name: array for name, array in changed.items() if array is not None}
        write_archive(path, "plan", {**header, **(fields or {})}, kept)
        with pytest.raises(ArchiveError, match=message):
            Plan.load(path)

    refused("damaged plan: its content has hash", {"seed": 5})
    refused("plan format 1 found, this version reads 2; make the plan again", {"format": 1})
    refused("plan format 3 found, this version reads 2", {"format": 3})
    refused("must fill the first slots of their owners", **{"0_listed_rows": np.zeros(6, int)})
    refused("needs the array 'bounds', which is missing", **{"1_bounds": None})
    refused("damaged plan: 'owners'", **{"1_owners": None})
    refused("damaged plan: weights must sum to 1", **{"0_weights": np.array([0.5, 0.75])})
    refused("damaged plan: objective must be", {"workload": {**header["workload"], "objective": 1}})
    refused("damaged plan: a certificate", {"certificate": _wrong_proof(header["certificate"])})
    refused("damaged plan: exchanges must be", {"space": {**header["space"], "exchanges": ["x"]}})
    del header["cluster"]
    refused("damaged plan: 'cluster'")


def _wrong_proof(fields: dict) -> dict:
    return {**fields, "proofs": [{**fields["proofs"][0], "cost": [9.0]}]}


def test_over_memory_names_rank_table_need_and_cap() -> None:
    made = plan()
    need = max(made.memory_bytes)
    with pytest.raises(
        PlanError,
        match=f"rank 0 needs {need} bytes .* its cap is {need - 1} bytes; most of it, 48 bytes, is"
        " for table clicks",
    ):
        replace(made, cluster=Cluster.uniform(2, memory_bytes=need - 1))


def test_sums_do_not_overflow() -> None:
    rows = 2**55
    table = TableSpec(name="t", rows=rows, dim=16, features=("f",))
    one = placement_of("", table, RowMap([0, rows], NONE, NONE), owners=[0], world_size=1)
    with pytest.raises(PlanError, match=f"rank 0 needs {rows * 64} bytes .* cap is 1000 bytes"):
        plan_of(one, memory_bytes=1000)
    large = replace(one, planned_lookups=np.array([2**62]))
    both = (large, replace(large, module="other"), replace(large, module="third"))
    made = plan_of(*both, cluster=Cluster((RankSpec(2**63 - 1),)))
    assert made.planned_lookups == (3 * 2**62,)
    assert made.memory_bytes == (3 * rows * 64,)


def test_refuses_what_does_not_belong_together() -> None:
    made = plan()
    first = made.placements[0]
    for message, fields in (
        ("at least one table, found none", {"placements": ()}),
        (r"found twice: sparse\.ebc\.clicks", {"placements": (first, first)}),
        (
            "clicks: its placement is for 2 ranks, the cluster has 3",
            {"cluster": Cluster.uniform(3, memory_bytes=1000)},
        ),
        (r"seconds of ids for each rank, found \(1.0,\)", {"seconds": {"ids": (1.0,)}}),
        ("seconds of ids for each rank, found", {"seconds": {"ids": (1.0, np.nan)}}),
    ):
        with pytest.raises(PlanError, match=message):
            replace(made, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"row_map": row_map(2, 1)}, "table clicks: it has 6 rows, its row map 3"),
        ({"row_map": row_map(3, 2, 1)}, "it has 2 parts, its row map 3"),
        ({"planned_lookups": np.array([1, -1])}, r"planned_lookups must be counts, found \[1, -1"),
        ({"planned_lookups": np.array([1])}, "rank 1 owns rows, but the ranks are 0 to 0"),
        (
            {"decision": Decision("rows", 1, [[0, 1]]), "row_map": row_map(3, 1, 2)},
            "it has 1 hot rows, its row map 2",
        ),
        (
            {
                "decision": Decision("partial", 0, [[0], [1], [2]]),
                "row_map": row_map(6),
                "planned_lookups": np.zeros(3, int),
            },
            "2 elements can't be cut in 3",
        ),
    ],
)
def test_a_placement_refuses_what_does_not_fit(fields: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        clicks(**fields)


def test_a_workload_refuses_other_values() -> None:
    with pytest.raises(PlanError, match="objective must be train or infer, found 'serve'"):
        Workload("serve", 8, None)
    with pytest.raises(PlanError, match="batch_size must be an integer of 1 or more, found 0"):
        Workload("train", 0, None)


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


def test_load_table_compares_shares() -> None:
    table = load_table([30, 10], [3000, 1000]).splitlines()
    assert table[2].split() == ["0", "30", "75.00%", "3,000", "75.00%"]
    assert table[3].split() == ["1", "10", "25.00%", "1,000", "25.00%"]
    assert load_table([0], [0]).splitlines()[2].split() == ["0", "0", "-", "0", "-"]


@pytest.fixture(scope="module")
def made() -> tuple[list[TableSpec], Request, Plan]:
    """A plan of skewed tables: one too large for a rank, one with hot rows."""
    draw = np.random.default_rng(3)
    specs = [
        TableSpec(name, rows, 32, (f"{name}_f",), optimizer_bytes_per_row=4)
        for name, rows in (("large", 30_000), ("middle", 3000), ("small", 9))
    ]
    tables = []
    for spec in specs:
        counts = np.bincount((draw.random(5000) ** 3 * spec.rows).astype(int))
        tables.append(access(spec, {i: int(n) for i, n in enumerate(counts) if n}))
    profile = AccessProfile(tables=tuple(tables), samples=5000)
    cluster = Cluster((RankSpec(3_000_000), RankSpec(2_000_000), RankSpec(2_500_000)))
    fixed = {"middle": Decision("rows", 15, np.array([[2, 0, 1]]))}
    request = Request(cluster, profile, batch_size=128, constraints=Constraints(fixed=fixed))
    return specs, request, make_plan([("ebc", spec) for spec in specs], request)


def test_the_judge_finds_what_the_plan_says_it_costs(made: tuple) -> None:
    specs, request, plan = made
    decisions = [placement.decision for placement in plan.placements]
    verdict = expected_cost(
        decisions, table_demands(specs, request.profile, request.workload), request.cluster, "train"
    )
    assert plan.cost_s == pytest.approx(verdict.cost_s)
    assert 0 < plan.bound_s <= plan.cost_s
    assert plan.rank_s == pytest.approx(verdict.seconds.total.tolist())
    assert verdict.feasible


def test_the_rows_dealt_are_those_decided(made: tuple) -> None:
    _, request, plan = made
    for placement in plan.placements:
        one = request.profile.table(placement.table.name)
        decision, parts = placement.decision, placement.decision.parts
        assert placement.row_map.rows == placement.table.rows
        owners, _ = placement.row_map.place(one.ids)
        hot = decision.hot_rows
        assert (owners[hot:] < max(parts, 1)).all()
        if hot:
            assert owners[:hot].tolist() == [parts] * hot
        served = np.bincount(owners[hot:], weights=one.counts[hot:], minlength=parts)[:parts]
        wanted = np.zeros(plan.world_size, dtype=np.int64)
        wanted[placement.owners] = served.astype(np.int64)
        assert placement.planned_lookups.tolist() == wanted.tolist()


def test_equal_requests_give_equal_plans(made: tuple) -> None:
    specs, request, plan = made
    assert make_plan([("ebc", spec) for spec in specs], request) == plan


def test_a_profile_that_did_not_count_rows_of_bags_will_do() -> None:
    one = replace(access(CLICKS, {0: 5, 4: 3, 2: 2}), bag_rows=NONE, bag_counts=NONE)
    profile = AccessProfile(tables=(one,), samples=5)
    request = Request(Cluster.uniform(2, memory_bytes=10**6), profile, batch_size=5, space=RUNNABLE)
    (demand,) = table_demands([CLICKS], request.profile, request.workload)
    assert (demand.lookups, demand.bags) == (10, 10)
    assert demand.bag_lengths.tolist() == [1]
    assert sum(make_plan([("", CLICKS)], request).planned_lookups) == 10
