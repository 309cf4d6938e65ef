"""What differs between two plans."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
from plan_cases import TABLES, assumed_plan, changed, cluster, plan
from test_plan_report import wide_plan

from torchrec_oper.planner import Plan
from torchrec_oper.planner.diff import plan_diff
from torchrec_oper.planner.moves import moves
from torchrec_oper.planner.planning import Request, make_plan


def moved_to(made: Plan, table: str, rank: int) -> Plan:
    """The plan of whole tables with one of them on another rank."""
    placements = tuple(
        replace(p, decision=replace(p.decision, owners=np.array([[rank]])))
        if p.table.name == table
        else p
        for p in made.placements
    )
    return changed(made, placements=placements)


def test_a_plan_is_like_itself() -> None:
    found = plan_diff(plan(), plan())
    assert found.changes == ()
    assert found.moved_bytes == found.moved_rows == 0
    assert found.text() == f"the same plan: {plan().content_hash[:12]}"


def test_a_table_that_moves() -> None:
    before = wide_plan(4, 10)
    found = plan_diff(before, moved_to(before, "t9", 3))
    (change,) = found.changes
    assert (change.key, change.before, change.after) == ("ebc.t9", "whole, 1", "whole, 3")
    # 10 rows of 4 float32 from rank 1 to rank 3.
    assert (found.moved_rows, found.moved_bytes, found.busiest()) == (10, 160, (160, 160))
    assert change.moves.from_ranks.tolist() == [1]
    assert change.moves.to_ranks.tolist() == [3]
    text = found.text()
    assert "1 of 10 tables in both placed otherwise; 10 rows (160 bytes) would move" in text
    assert "both for training" in text
    assert [one.total_bytes for one in moves(before, found.after)] == [0] * 9 + [160]


def test_tables_of_one_plan_only_and_of_another_shape() -> None:
    tables = [("ebc", table) for table in TABLES]
    first = make_plan(tables[:2], Request(cluster()))
    second = make_plan([("ebc", replace(TABLES[0], rows=2999)), tables[2]], Request(cluster()))
    found = plan_diff(first, second)
    assert (found.only_before, found.only_after) == (("ebc.user",), ("ebc.hour",))
    (change,) = found.changes
    assert (change.before, change.after) == ("3,000 x 64 float32", "2,999 x 64 float32")
    assert change.moves is None
    text = found.text()
    assert "1 table only in the first plan: ebc.user" in text
    assert "1 table only in the second plan: ebc.hour" in text
    assert "other shape" in text


def test_other_clusters_workloads_and_spaces_are_told() -> None:
    fewer = plan(hosts=1)
    text = plan_diff(plan(), fewer).text()
    assert "the clusters differ" in text
    assert [line.split()[1:] for line in text.splitlines() if line.startswith("ranks")] == [
        ["4", "2"]
    ]
    text = plan_diff(plan(), assumed_plan()).text()
    assert "first for training, 256 samples a rank, profile" in text
    assert "second for training, 256 samples a rank, no profile" in text
    limited = changed(plan(), space=replace(plan().space, hot_rows=False))
    assert "second chosen from SearchSpace(" in plan_diff(plan(), limited).text()


def test_many_changes_are_summed_up_and_json_has_all() -> None:
    before, after = wide_plan(4, 50), wide_plan(5, 50)
    found = plan_diff(before, after)
    text = found.text(most=3)
    assert f"... and {len(found.changes) - 3} other tables" in text
    told = json.loads(json.dumps(found.to_json()))
    assert len(told["changes"]) == len(found.changes)
    assert sum(sum(c["moves"]["bytes"]) for c in told["changes"]) == told["moved_bytes"]
    assert told["first"]["plan"] == before.content_hash
