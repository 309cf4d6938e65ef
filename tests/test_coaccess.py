"""Refinement by co-access: what it must save, what it must leave alone, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_oper.cli.main import main
from torchrec_oper.errors import PlanError
from torchrec_oper.planner import (
    Cluster,
    Decision,
    Plan,
    RankSpec,
    Request,
    SearchSpace,
    TablePlacement,
    make_plan,
)
from torchrec_oper.planner.coaccess import Refined, refine
from torchrec_oper.planner.coaccess.hypergraph import bag_hypergraph, partition
from torchrec_oper.planner.coaccess.regroup import RankRoom, regrouped
from torchrec_oper.planner.deal import deal
from torchrec_oper.planner.explain import plan_demands
from torchrec_oper.planner.verify import verify_plan
from torchrec_oper.profile import AccessProfile
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.profile.trace import Bags
from torchrec_oper.table import TableSpec

PARTIAL = SearchSpace(exchanges=("partial",), min_slice_width=16, hot_rows=False)
GROUPS, OF_GROUP, LENGTH, SAMPLES = 8, 12, 6, 256


def spec(name: str = "t", rows: int = GROUPS * OF_GROUP) -> TableSpec:
    return TableSpec(name, rows, 16, (f"{name}_f",), optimizer_bytes_per_row=4)


def communities(seed: int = 0, samples: int = SAMPLES) -> Bags:
    """Bags of rows of one group each; the groups' rows are mixed in id space."""
    rng = np.random.default_rng(seed)
    of_groups = rng.permutation(GROUPS * OF_GROUP).reshape(GROUPS, OF_GROUP)
    bags = [rng.choice(of_groups[rng.integers(GROUPS)], LENGTH) for _ in range(samples)]
    return np.concatenate(bags), np.full(samples, LENGTH)


def independent(seed: int = 0, samples: int = SAMPLES) -> Bags:
    rng = np.random.default_rng(seed)
    return rng.integers(0, GROUPS * OF_GROUP, samples * LENGTH), np.full(samples, LENGTH)


def profile_of(bags: dict[str, Bags], specs: list[TableSpec], **limits: int) -> AccessProfile:
    collector = AccessCollector(specs, **limits)
    collector.add_samples(bags, where="here")
    return AccessProfile.from_collector(collector)


def planned(
    *bags: Bags, space: SearchSpace = PARTIAL, memory_bytes: int = 10**9, **limits: int
) -> tuple[Plan, AccessProfile]:
    """A plan for a table of each of ``bags`` on 4 ranks, and its profile."""
    specs = [spec(f"t{at}") for at in range(len(bags))]
    named = {f"t{at}_f": of_table for at, of_table in enumerate(bags)}
    profile = profile_of(named, specs, **limits)
    cluster = Cluster.uniform(4, memory_bytes=memory_bytes)
    request = Request(cluster, profile, batch_size=16, space=space)
    return make_plan([("", table) for table in specs], request), profile


def test_groups_of_rows_come_together() -> None:
    plan, profile = planned(communities())
    found = refine(plan, profile)
    (table,) = found.tables
    assert (table.parts, table.kept) == (4, True)
    # 64 bags a step; dealt by hotness, nearly every bag meets 3 or 4 of the parts.
    assert table.sums_before > 3 * 64
    assert table.sums_after < 1.3 * 64
    assert found.after_s < found.before_s
    assert (found.steps, found.batch_size) == (2, 16)
    assert found.plan.placements[0].table == plan.placements[0].table
    assert "1 table of 1 kept" in found.report()


def test_what_the_plan_says_of_itself_stays_true() -> None:
    plan, profile = planned(communities())
    refined = refine(plan, profile).plan
    assert refined != plan
    assert (refined.seconds, refined.bound_s) == (plan.seconds, plan.bound_s)
    checks = verify_plan(refined, plan_demands(refined, profile), profile)
    assert [line for check in checks for line in check.trouble] == []
    assert sum(refined.planned_lookups) == sum(plan.planned_lookups)


def test_independent_bags_leave_the_plan_alone_unless_it_is_better() -> None:
    for seed in range(3):
        plan, profile = planned(independent(seed))
        found = refine(plan, profile)
        assert len(found.tables) == 1
        assert found.after_s <= found.before_s
        assert found.after_s > 0.97 * found.before_s
        if not found.tables[0].kept:
            assert found.plan is plan


def over_all_ranks(plan: Plan, profile: AccessProfile) -> Plan:
    """The plan with the rows of all tables on all ranks, dealt by hotness."""
    decision = Decision("partial", 0, np.arange(4)[None])
    made = [
        replace(
            placement,
            decision=decision,
            row_map=deal(profile.table(placement.table.name), decision),
            planned_lookups=np.full(4, SAMPLES * LENGTH // 4),
        )
        for placement in plan.placements
    ]
    return replace(plan, placements=tuple(made))


def test_each_table_is_kept_for_itself() -> None:
    plan, profile = planned(communities(1), independent(2), communities(3))
    plan = over_all_ranks(plan, profile)
    found = refine(plan, profile)
    assert [table.key for table in found.tables] == ["t0", "t1", "t2"]
    kept = [table.kept for table in found.tables]
    assert kept[0] and kept[2]  # of the other, chance decides
    moved = [a is not b for a, b in zip(plan.placements, found.plan.placements, strict=True)]
    assert moved == kept
    saved = [1 - table.sums_after / table.sums_before for table in found.tables]
    assert min(saved[0], saved[2]) > 0.5
    assert abs(saved[1]) < 0.05
    assert found.after_s < found.before_s


def test_tables_on_other_ranks_win_together_or_not_at_all() -> None:
    # On two ranks each: while one table's ranks are busiest, the other's saving is hidden.
    plan, profile = planned(communities(1), communities(2))
    assert refine(plan, profile).after_s < refine(plan, profile).before_s
    plan, profile = planned(communities(1), independent(2))
    found = refine(plan, profile)
    assert found.after_s <= found.before_s
    assert (found.plan is plan) == (not any(table.kept for table in found.tables))


def test_other_exchanges_and_short_bags_are_left_out() -> None:
    rows = SearchSpace(exchanges=("rows",), hot_rows=False)
    plan, profile = planned(communities(), space=rows)
    found = refine(plan, profile)
    assert (found.plan, found.tables) == (plan, ())
    assert "no table" in found.report()
    ids, _ = independent()
    plan, profile = planned((ids, np.ones(len(ids), dtype=np.int64)))
    assert refine(plan, profile).tables == ()


def test_a_small_trace_gives_one_step_of_fewer_samples() -> None:
    plan, profile = planned(communities(samples=60))
    found = refine(plan, profile)
    assert (found.steps, found.batch_size) == (1, 7)  # 30 samples for 4 ranks


def refined_elsewhere(tmp_path: Path, plan: Plan, profile: AccessProfile) -> Plan:
    plan.save(tmp_path / "a.plan")
    profile.save(tmp_path / "a.profile")
    code = (
        "import sys; from torchrec_oper import AccessProfile, Plan;"
        "from torchrec_oper.planner.coaccess import refine; a, b, c = sys.argv[1:];"
        "refine(Plan.load(a), AccessProfile.load(b), seed=3).plan.save(c)"
    )
    names = [str(tmp_path / name) for name in ("a.plan", "a.profile", "b.plan")]
    subprocess.run([sys.executable, "-c", code, *names], check=True, timeout=60)
    return Plan.load(tmp_path / "b.plan")


def test_it_is_deterministic_across_processes(tmp_path: Path) -> None:
    plan, profile = planned(communities(4))
    here = refine(plan, profile, seed=3).plan
    assert here == refine(plan, profile, seed=3).plan
    assert here == refined_elsewhere(tmp_path, plan, profile)
    here.save(tmp_path / "here.plan")
    assert (tmp_path / "here.plan").read_bytes() == (tmp_path / "b.plan").read_bytes()


@st.composite
def placements(draw: st.DrawFn) -> tuple[TablePlacement, AccessProfile]:
    """A partial table: of 1 or 2 column slices, with and without hot and unlisted rows."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    features = ("a", "b")[: draw(st.integers(1, 2))]
    table = TableSpec("t", draw(st.sampled_from([30, 200])), 16, features)
    bags = {}
    for feature in features:
        lengths = rng.integers(0, 8, 40)
        lengths[0] = 3
        bags[feature] = (rng.integers(0, table.rows, lengths.sum()), lengths)
    listed = draw(st.sampled_from([12, 1000]))
    profile = profile_of(bags, [table], head_rows=listed)
    access = profile.table("t")
    columns, parts = draw(st.sampled_from([(1, 2), (1, 3), (2, 2)]))
    hot_rows = draw(st.sampled_from([0, 5]))
    owners = rng.permutation(4)[: columns * parts].reshape(columns, parts)
    # A placement's parts are in the order of the first slice's owners.
    owners = owners[:, np.argsort(owners[0])]
    decision = Decision("partial", hot_rows, owners)
    row_map = deal(access, decision)
    lookups = np.zeros(4, dtype=np.int64)
    lookups[owners] = access.lookups
    return TablePlacement("", table, decision, row_map, lookups), profile


@settings(max_examples=25, deadline=None)
@given(placements(), st.integers(0, 3), st.integers(0, 20))
def test_rows_keep_what_they_must(
    case: tuple[TablePlacement, AccessProfile], seed: int, room: int
) -> None:
    before, profile = case
    access = profile.table("t")
    assert profile.trace is not None
    after = regrouped(
        before,
        access,
        access.counts.astype(np.float64),
        profile.trace.planning.bags(),
        RankRoom(np.full(4, room), np.zeros(4)),
        seed=seed,
        imbalance=0.1,
    )
    if after is None:
        return
    ids, parts = np.arange(before.table.rows), before.decision.parts
    (was, was_slot), (now, now_slot) = before.row_map.place(ids), after.row_map.place(ids)
    hot = was == parts
    np.testing.assert_array_equal(now == parts, hot)
    np.testing.assert_array_equal(now_slot[hot], was_slot[hot])
    unlisted = ~np.isin(ids, access.ids)
    np.testing.assert_array_equal(now[unlisted], was[unlisted])
    # No part gets more rows than its owners have room for, and each row one slot.
    assert (after.row_map.owned_rows <= before.row_map.owned_rows + room * (parts > 0)).all()
    assert len(np.unique(np.stack([now, now_slot]), axis=1).T) == len(ids)
    # What owners are said to serve follows the rows that came and went.
    gained = np.zeros(4, dtype=np.int64)
    at = np.searchsorted(ids, access.ids)
    for id_, count in zip(at, access.counts, strict=True):
        if not hot[id_]:
            gained[before.owners[:, now[id_]]] += count
            gained[before.owners[:, was[id_]]] -= count
    np.testing.assert_array_equal(after.planned_lookups - before.planned_lookups, gained)


def test_full_ranks_get_no_more_rows() -> None:
    plan, profile = planned(communities(5))
    needs = plan.memory_bytes
    full = Cluster(tuple(RankSpec(need) for need in needs), plan.cluster.rates)
    tight = replace(plan, cluster=full)
    found = refine(tight, profile)
    assert len(found.tables) == 1
    assert all(a <= b for a, b in zip(found.plan.memory_bytes, needs, strict=True))


def graph_of(bags: list[list[int]], listed_rows: int, **limits: int) -> Any:
    flat = np.array([vertex for bag in bags for vertex in bag], dtype=np.int64)
    return bag_hypergraph(
        flat,
        np.array([len(bag) for bag in bags], dtype=np.int64),
        listed_rows=listed_rows,
        **limits,
    )


def test_the_hypergraph_of_bags() -> None:
    # Rows 0 to 9; 10 and 11 are parts 0 and 1, -1 a hot row.
    found = graph_of([[7, 3, 3], [3, 7], [5], [], [11, 10], [-1, 4], [11, 7, 11], [8, 8]], 10)
    np.testing.assert_array_equal(found.rows, [3, 7])
    np.testing.assert_array_equal(found.fixed_parts, [1])
    assert dict(zip(found.nets, found.net_weights, strict=True)) == {(0, 1): 2, (1, 2): 1}


def test_the_hypergraph_is_bounded() -> None:
    bags = [[0, 1], [2, 3], [4, 5, 6], [7, 8]]
    assert len(graph_of(bags, 10, most_pins=4).nets) == 2
    assert len(graph_of(bags, 10, most_pins=6).nets) == 2
    assert len(graph_of(bags, 10, most_pins=7).nets) == 3
    assert graph_of([], 10).nets == ()


def test_the_partition_keeps_rows_with_the_part_that_stays() -> None:
    pairs = [[0, 1], [1, 2], [2, 0], [3, 4], [4, 5], [5, 3], [0, 7], [3, 6]]
    found = partition(graph_of(pairs, 6), np.full(6, 10**12), [3e12, 3e12], seed=0)
    np.testing.assert_array_equal(found, [1, 1, 1, 0, 0, 0])


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, profile = planned(communities())
    with pytest.raises(PlanError, match="imbalance must be a share of 0 or more, found -0.1"):
        refine(plan, profile, imbalance=-0.1)
    with pytest.raises(PlanError, match="seed must be an integer of 0 or more"):
        refine(plan, profile, seed=-1)
    _, other = planned(communities(9))
    with pytest.raises(PlanError, match="refine a plan by its own profile"):
        refine(plan, other)
    bare, untraced = planned(communities(), trace_ids=0)
    with pytest.raises(PlanError, match="has none; profile the input again with trace_ids above"):
        refine(bare, untraced)
    few, small = planned(communities(samples=7))
    with pytest.raises(PlanError, match="3 samples, fewer than the 4 ranks"):
        refine(few, small)
    monkeypatch.setitem(sys.modules, "mtkahypar", None)
    with pytest.raises(PlanError, match=r'pip install "torchrec-oper\[graph\]"'):
        refine(plan, profile)


def test_the_command_refines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, profile = planned(communities())
    profile.save(tmp_path / "a.profile")
    replace(profile, trace=None).save(tmp_path / "untraced.profile")
    ranks = ["--ranks", "4", "--memory-gib", "1", "--dim", "16", "--optimizer-bytes", "4"]
    ranks += ["--batch-size", "16", "--exchanges", "partial", "--no-hot-rows"]

    def oper(name: str, *more: str) -> int:
        output = str(tmp_path / "a.plan")
        return main(["plan", "--profile", str(tmp_path / name), *ranks, "-o", output, *more])

    assert oper("a.profile", "--refine") == 0
    assert "refinement by co-access: 1 table of 1 kept" in capsys.readouterr().out
    refined = Plan.load(tmp_path / "a.plan")
    assert oper("a.profile") == 0
    assert Plan.load(tmp_path / "a.plan") != refined
    assert oper("untraced.profile", "--refine") == 2
    assert "needs the profile's trace" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mtkahypar", None)
    assert oper("a.profile", "--refine") == 2
    assert "torchrec-oper[graph]" in capsys.readouterr().err
    assert main(["plan", "--refine", "--preset", "8xH100", "-o", str(tmp_path / "b")]) == 2
    assert "--refine needs --profile" in capsys.readouterr().err


def test_the_report_reads_without_a_saving() -> None:
    plan, _ = planned(communities())
    assert "no table has partial sums" in Refined(plan, (), 1.0, 1.0, 1, 1).report()
