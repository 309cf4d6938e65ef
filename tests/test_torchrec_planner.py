"""TorchRec's planner in its own process: plans, time-outs, and a process that fails."""

import os
import sys
import time

import numpy as np
import pytest

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.baselines import (
    Task,
    TorchRecFailedError,
    TorchRecPlanner,
    TorchRecTimeoutError,
)
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.presets import bench
from torchrec_oper.table import TableSpec

# Notes its process, and answers as the worker does: what the `{}` is.
FAKE = """
import json, os, sys, time
open({pids!r}, "a").write(f"{{os.getpid()}}\\n")
print('{{"ready": true}}', flush=True)
for number, line in enumerate(sys.stdin):
    task = json.loads(line)
    {answer}
"""


def demand(name, *, rows, dim=64, pooling="sum"):
    return TableDemand(
        table=TableSpec(name, rows, dim, (name,), pooling=pooling, optimizer_bytes_per_row=4),
        lookups=512.0,
        bags=256.0,
        bag_lengths=np.array([2.0]),
        bag_shares=np.ones(1),
        block_rows=np.array([float(rows)]),
        block_chances=np.array([1 / rows]),
        listed_rows=rows,
    )


@pytest.fixture
def pids(tmp_path):
    return tmp_path / "pids"


@pytest.fixture
def small():
    demands = [demand("a", rows=100), demand("b", rows=1000)]
    return Task(demands, bench(2, memory_bytes=10**9), "train", 256)


def fake(pids, answer):
    return (sys.executable, "-c", FAKE.format(pids=str(pids), answer=answer))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def answer_of(sharding, shards):
    entry = {"sharding": sharding, "shards": shards}
    return f"print(json.dumps({{'seconds': 1.5, 'tables': [{entry}] * 2}}), flush=True)"


def test_answers_become_placements(pids, small):
    # rank, first row, first column, rows, columns: out of order, two slices of two ranges
    shards = [[1, 50, 32, 50, 32], [0, 0, 32, 50, 32], [0, 50, 0, 50, 32], [1, 0, 0, 50, 32]]
    with TorchRecPlanner(timeout_s=20, command=fake(pids, answer_of("grid_shard", shards))) as it:
        plan = it.plan(small)
    assert plan.seconds == 1.5 and not plan.search_stopped
    assert [placement.sharding for placement in plan.placements] == ["table_row_wise"] * 2
    assert plan.placements[0].owners.tolist() == [[1, 0], [0, 1]]
    assert plan.placements[0].widths == (32, 32)


def test_one_process_serves_several_tasks_and_ends_with_the_planner(pids, small):
    command = fake(pids, answer_of("data_parallel", []))
    with TorchRecPlanner(timeout_s=20, command=command) as planner:
        for _ in range(3):
            assert planner.plan(small).placements[0].owners.shape == (1, 0)
    [pid] = map(int, pids.read_text().split())
    assert not is_running(pid)


def test_a_planner_that_takes_too_long_is_stopped_and_the_next_task_served(pids, small):
    answer = f"time.sleep(60) if task['min_partition'] else {answer_of('data_parallel', [])}"
    with TorchRecPlanner(timeout_s=1, command=fake(pids, answer)) as planner:
        with pytest.raises(TorchRecTimeoutError, match="stopped after 1 s of planning"):
            planner.plan(small, min_partition=32)
        [stopped] = map(int, pids.read_text().split())
        assert not is_running(stopped)
        assert planner.plan(small).seconds == 1.5
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())


def test_its_error_and_its_death_are_told(pids, small):
    error = "print(json.dumps({'error': 'PlannerError: no storage'}), flush=True)"
    told = pytest.raises(TorchRecFailedError, match="TorchRec's planner: PlannerError: no stor")
    with TorchRecPlanner(timeout_s=20, command=fake(pids, error)) as planner, told:
        planner.plan(small)
    dies = "sys.exit('out of memory')"
    told = pytest.raises(TorchRecFailedError, match="ended with status 1 .*: out of memory")
    with TorchRecPlanner(timeout_s=20, command=fake(pids, dies)) as planner, told:
        planner.plan(small)


def test_an_answer_is_kept_for_the_next_run_and_asked_again_where_it_differs(pids, small, tmp_path):
    folder = tmp_path / "new" / "plans"
    command = fake(pids, answer_of("data_parallel", []))
    with TorchRecPlanner(timeout_s=20, keep_in=folder, command=command) as planner:
        assert not planner.plan(small).kept
    with TorchRecPlanner(timeout_s=20, keep_in=folder, command=command) as planner:
        again = planner.plan(small)
        assert again.kept and again.seconds == 1.5 and len(again.placements) == 2
        assert len(pids.read_text().split()) == 1
        assert not planner.plan(small, min_partition=32).kept
    assert len(list(folder.iterdir())) == 2
    with TorchRecPlanner(timeout_s=30, keep_in=folder, command=command) as planner:
        assert not planner.plan(small).kept  # more time may find a better plan
    for file in folder.iterdir():
        file.write_text("{")
    with TorchRecPlanner(timeout_s=30, keep_in=folder, command=command) as planner:
        assert not planner.plan(small).kept


def test_an_interrupt_stops_the_process(pids, small, monkeypatch):
    planner = TorchRecPlanner(timeout_s=20, command=fake(pids, answer_of("data_parallel", [])))
    with planner:
        planner.plan(small)

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("select.select", interrupt)
        with pytest.raises(KeyboardInterrupt):
            planner.plan(small)
        [pid] = map(int, pids.read_text().split())
        assert not is_running(pid)


def test_hosts_of_several_sizes_and_a_wrong_limit_are_refused(small):
    uneven = Task(small.demands, Cluster.uniform(3, memory_bytes=9, ranks_per_host=2), "train", 256)
    told = pytest.raises(PlanError, match=r"hosts of one size, found hosts of \[1, 2\] ranks")
    with TorchRecPlanner(timeout_s=1) as planner, told:
        planner.plan(uneven)
    with pytest.raises(PlanError, match="above 0 seconds, found 0"):
        TorchRecPlanner(timeout_s=0)


def test_torchrec_plans_for_the_objective_within_the_memory():
    pytest.importorskip("torchrec")
    demands = [
        demand("small", rows=1000),
        demand("large", rows=4_000_000),
        demand("ids", rows=1000, pooling="none"),
    ]
    large_bytes = 4_000_000 * (64 * 4 + 4)
    found = {}
    begin = time.monotonic()
    with TorchRecPlanner(timeout_s=60) as planner:
        for objective in ("train", "infer"):
            # Room for the large table on each rank, but not with its optimizer state.
            cluster = bench(2, memory_bytes=large_bytes - 4_000_000)
            found[objective] = planner.plan(Task(demands, cluster, objective, 256))
        with pytest.raises(TorchRecFailedError, match="insufficient storage"):
            planner.plan(Task(demands, bench(2, memory_bytes=10**8), "train", 256))
    assert 0 < sum(plan.seconds for plan in found.values()) < time.monotonic() - begin
    for plan in found.values():
        for placement, table in zip(plan.placements, demands, strict=True):
            placement.check_fits(table, cluster)
    assert found["train"].placements[1].owners.size > 1  # cut
    assert found["infer"].placements[1].sharding in ("table_wise", "data_parallel")
