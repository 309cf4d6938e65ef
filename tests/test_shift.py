"""The last moves of the search: no single piece is better off elsewhere, by the judge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from torchrec_oper.planner import Cluster
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.judge import expected_cost
from torchrec_oper.planner.optimize import optimize
from torchrec_oper.planner.rates import Rates
from torchrec_oper.planner.zipf import zipf_blocks
from torchrec_oper.table import TableSpec


def demand(name: str, rows: int, bag: float) -> TableDemand:
    counts, chances = zipf_blocks(rows, 0.9)
    spec = TableSpec(name, rows, 16, (name,), optimizer_bytes_per_row=4)
    one = np.ones(1)
    return TableDemand(spec, 512 * bag, 512, one * bag, one, counts, chances, rows)


TABLES = [demand(f"t{n}", 3 * 7**n, 1.0 + n % 3) for n in range(7)]


def moved(decision: Decision, piece: int, to: int) -> Decision:
    owners = decision.owners.copy()
    owners.flat[piece] = to
    return replace(decision, owners=owners)


@pytest.mark.parametrize("objective", ["train", "infer"])
@pytest.mark.parametrize("overhead_s", [0.0, 5e-6, 1e-4])
def test_no_piece_of_the_slowest_rank_is_better_off_elsewhere(objective, overhead_s):
    rates = Rates(shard_overhead_s=overhead_s)
    cluster = Cluster.uniform(4, memory_bytes=2**26, rates=rates)
    found = optimize(TABLES, cluster, objective=objective)
    assert found.cost_s == pytest.approx(
        expected_cost(found.decisions, TABLES, cluster, objective).cost_s
    )
    for number, decision in enumerate(found.decisions):
        owners = decision.owners.ravel()
        for piece in range(len(owners)):
            for to in set(range(4)) - set(owners.tolist()):
                other = list(found.decisions)
                other[number] = moved(decision, piece, to)
                cost_s = expected_cost(other, TABLES, cluster, objective).cost_s
                assert cost_s >= found.cost_s * (1 - 1e-6)
