"""``oper bench planner``: rows, failures, what an interrupted bench keeps, the summary."""

import argparse
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

from torchrec_oper.bench import planner
from torchrec_oper.bench.planner_report import summary_lines
from torchrec_oper.bench.planner_runs import PLANNERS, Effort, Row, bench_rows
from torchrec_oper.bench.planner_suites import Suite, SuiteTable
from torchrec_oper.errors import PlanError
from torchrec_oper.planner.baselines import StockPlacement, TorchRecTimeoutError
from torchrec_oper.planner.baselines.torchrec_planner import TorchRecPlan
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.table import TableSpec


@dataclass(frozen=True)
class StubOutcome:
    decisions: tuple
    cost_s: float
    bound_s: float


class StubOptimize:
    """Every table whole on rank 0; the bound is half of the cost."""

    def __init__(self, *, lie=1.0, error=None):
        self.lie, self.error = lie, error

    def __call__(self, demands, cluster, *, objective, seed=0):
        if self.error:
            raise self.error
        decisions = (Decision("whole", 0, np.array([[0]])),) * len(demands)
        cost = expected_cost(decisions, demands, cluster, objective).cost_s
        return StubOutcome(decisions, cost * self.lie, cost / 2)


class StubStock:
    """TorchRec's planner: whole tables on rank 0, or column slices where they may be narrow."""

    def __init__(self, *, fail_on=(), error=None):
        self.fail_on, self.error, self.calls = fail_on, error, []

    def plan(self, task, *, min_partition=None):
        self.calls.append((task.objective, min_partition))
        if min_partition in self.fail_on:
            raise self.error or TorchRecTimeoutError("stopped after 9 s of planning")
        if min_partition is None:
            placements = [StockPlacement.whole(demand, 0) for demand in task.demands]
        else:
            owners = np.array([[0], [1]])
            placements = [
                StockPlacement("column_wise", owners, (demand.table.dim // 2,) * 2)
                for demand in task.demands
            ]
        return TorchRecPlan(tuple(placements), 2.0, search_stopped=min_partition is None)


def suite(name="tiny", *, dim=64, tables=2, rows=1000, documented=None):
    specs = [
        TableSpec(f"t{i}", rows, dim, (f"f{i}",), optimizer_bytes_per_row=4) for i in range(tables)
    ]
    return Suite(name, 2, 16, tuple(SuiteTable(spec, 2.0) for spec in specs), documented)


def run(*suites, stock=None, optimize=None, skews=(0.9,), objectives=("train",), **options):
    effort = Effort(suites, skews, objectives, **options)
    rows = bench_rows(effort, optimize=optimize or StubOptimize(), stock=stock or StubStock())
    found = list(rows)
    assert len(found) == effort.row_count
    return found


def by_planner(rows):
    return {row.planner: row for row in rows}


def test_every_planner_has_a_row_with_its_cost_over_the_bound():
    rows = run(suite(), skews=(0.6, 0.9), objectives=("train", "infer"))
    assert [row.planner for row in rows] == [*PLANNERS] * 4
    keys = [(row.skew, row.objective) for row in rows[:: len(PLANNERS)]]
    assert keys == [(0.6, "train"), (0.6, "infer"), (0.9, "train"), (0.9, "infer")]
    assert {row.status for row in rows} == {"ok"}
    for row in rows:
        assert row.ratio == pytest.approx(row.cost_s / row.bound_s)
    found = by_planner(rows[: len(PLANNERS)])
    assert found["oper"].ratio == pytest.approx(2)
    # No bag is empty here, so TorchRec's whole tables cost what ours do.
    assert found["torchrec"].ratio == pytest.approx(2)
    assert found["torchrec"].message == "its own time limit ended the search"
    assert found["torchrec-tuned"].ratio < 2
    assert found["torchrec-tuned"].message == "min_partition=32"
    assert found["torchrec-tuned"].seconds == 4
    assert found["torchrec-placement-our-exchange"].ratio <= found["torchrec-tuned"].ratio


def test_torchrec_plans_once_for_all_skews_and_only_where_settings_differ():
    stock = StubStock()
    run(suite(dim=32), stock=stock, skews=(0.6, 0.9, 1.1))
    assert stock.calls == [("train", None)]
    stock = StubStock()
    run(suite(dim=64), stock=stock, skews=(0.6, 0.9), objectives=("train", "infer"))
    assert sorted(stock.calls, key=str) == [(o, m) for o in ("infer", "train") for m in (32, None)]


def test_a_time_out_has_no_ratio_and_ends_the_tuning():
    stock = StubStock(fail_on=(None,))
    found = by_planner(run(suite(), stock=stock))
    for name in ("torchrec", "torchrec-tuned", "torchrec-placement-our-exchange"):
        assert (found[name].status, found[name].ratio) == ("timeout", None)
        assert found[name].message == "stopped after 9 s of planning"
    assert stock.calls == [("train", None)]
    assert found["row-wise"].status == "ok"


def test_tuning_goes_on_after_an_error():
    stock = StubStock(fail_on=(None,), error=PlanError("no plan"))
    found = by_planner(run(suite(), stock=stock))
    assert (found["torchrec"].status, found["torchrec"].message) == ("error", "no plan")
    assert found["torchrec-tuned"].status == "ok"


def test_the_documented_placement_is_among_the_tuned():
    documented = (StockPlacement("column_wise", np.array([[0], [1]]), (32, 32)),) * 2
    stock = StubStock(fail_on=(None,))
    found = by_planner(run(suite(documented=documented), stock=stock))
    assert found["torchrec"].status == "timeout"
    tuned = found["torchrec-tuned"]
    assert (tuned.status, tuned.message) == ("ok", "the documented placement")
    assert tuned.seconds is None


def test_what_doesnt_fit_is_over_memory():
    # Two tables of 104 GB, and as much memory on each rank: one fits, both don't.
    found = by_planner(run(suite(rows=400_000_000)))
    assert found["torchrec"].status == found["oper"].status == "over-memory"
    assert found["torchrec"].ratio is None and found["torchrec"].cost_s > 0
    assert "1 of 2 ranks would hold more than they have" in found["torchrec"].message
    assert found["row-wise"].status == "ok"


def test_greedy_without_room_is_over_memory():
    huge = suite(rows=1_000_000_000, tables=1)
    four = replace(huge, ranks=4)
    found = by_planner(run(four))
    assert (found["greedy-rows"].status, found["greedy-rows"].cost_s) == ("over-memory", None)
    assert "no rank has room for table t0" in found["greedy-rows"].message
    assert found["row-wise"].status == "ok"


def test_a_planner_that_the_judge_contradicts_is_an_error():
    found = by_planner(run(suite(), optimize=StubOptimize(lie=0.9)))
    assert found["oper"].status == "error" and found["oper"].ratio is None
    assert "the planner says" in found["oper"].message


def test_without_a_bound_there_is_no_ratio():
    found = run(suite(), optimize=StubOptimize(error=PlanError("too little memory")))
    assert {row.status for row in found} == {"error"}
    assert found[0].message == "too little memory"
    assert found[-1].message == "there is no bound to compare with"


def test_planners_are_chosen_and_quick_leaves_torchrec_to_small_suites():
    rows = run(
        suite("a"), suite("b", tables=5), planners=("torchrec", "row-wise"), most_stock_tables=2
    )
    assert [(row.suite, row.planner) for row in rows] == [
        ("a", "torchrec"),
        ("a", "row-wise"),
        ("b", "row-wise"),
    ]


def test_json_keeps_what_an_interrupted_bench_had(tmp_path, capsys):
    file = tmp_path / "rows.json"
    rows = run(suite())

    def interrupted():
        yield from rows[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planner.report(interrupted(), count=8, save=planner._saver(file))
    kept = json.loads(file.read_text())
    assert kept == [row.to_json() for row in rows[:3]]
    assert {"suite", "ranks", "skew", "objective", "planner", "ratio", "seconds", "status"} <= set(
        kept[0]
    )
    assert list(tmp_path.iterdir()) == [file]
    assert capsys.readouterr().out.count("tiny") == 3


def row(name, ratio, *, case="a", objective="train"):
    status = "ok" if ratio is not None else "timeout"
    return Row(case, 8, 0.9, objective, name, ratio=ratio, status=status)


def test_the_summary_splits_the_gain():
    ours, tuned, mixed = "oper", "torchrec-tuned", "torchrec-placement-our-exchange"
    rows = [row(ours, 1.0), row(tuned, 4.0), row(mixed, 2.0)]
    rows += [row(ours, 1.0, case="b"), row(tuned, 1.0, case="b"), row(mixed, 2.0, case="b")]
    rows += [row(ours, 1.0, case="c"), row(tuned, None, case="c"), row(mixed, None, case="c")]
    lines = list(summary_lines(rows))
    assert any("torchrec-tuned" in line and "2.000 (4.000)  2 of 3" in line for line in lines)
    # sqrt(4 * 1) = sqrt(2 * 1/2) * sqrt(2 * 2)
    assert (
        "torchrec-tuned / oper: 2.000 = exchange 1.000 x placement 2.000 (geometric means of 2"
        in lines[-1]
    )


def arguments(*argv):
    parser = argparse.ArgumentParser()
    planner.add_arguments(parser)
    return parser.parse_args(argv)


def test_arguments_become_an_effort(tmp_path):
    config = {name: {"rows": [9], "dim": [8], "pooling": [1]} for name in ("criteo_kaggle",)}
    (tmp_path / "table_configs.json").write_text(json.dumps(config))
    given = ("--data", str(tmp_path), "--suite", "criteo_kaggle")
    effort = planner._effort(arguments(*given, "--planner", "oper", "--objective", "infer"))
    assert effort.skews == planner.SKEWS and effort.objectives == ("infer",)
    assert effort.planners == ("oper",) and effort.row_count == 3
    quick = planner._effort(arguments(*given, "--quick"))
    assert quick.skews == (0.9,) and quick.objectives == ("train", "infer")
    with pytest.raises(PlanError, match="no planner best; there are oper, torchrec, "):
        planner._effort(arguments(*given, "--planner", "best"))


@pytest.mark.parametrize("wrong", [("--skew", "-1"), ("--timeout", "0"), ("--skew", "nan")])
def test_wrong_numbers_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        arguments(*wrong)
    assert "or more, found" in capsys.readouterr().err


def test_an_output_that_cant_be_written_is_found_first(tmp_path):
    given = arguments("--data", str(tmp_path), "--json", str(tmp_path / "no" / "rows.json"))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        planner.run(given)
