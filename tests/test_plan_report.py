"""The report of a plan: what it says, and that it stays short."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from plan_cases import assumed_plan, changed, plan

from torchrec_oper.planner import Plan
from torchrec_oper.planner.certificate import Certificate, Proof
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.readable import seconds_text
from torchrec_oper.planner.report import binding_proof, owner_cuts
from torchrec_oper.planner.row_map import RowMap
from torchrec_oper.table import TableSpec


def with_multipliers(made: Plan, **fields: object) -> Plan:
    """The plan with a proof of other multipliers, which is the one that sets the bound."""
    proof = binding_proof(made)
    multipliers = replace(proof.multipliers, **fields)
    proofs = (Proof(proof.with_hot_rows, proof.target_s, multipliers, proof.bound_s),)
    return changed(made, certificate=Certificate(proofs, np.inf))


def wide_plan(ranks: int, tables: int) -> Plan:
    """Many whole tables on many ranks; rank r takes r + 1 us."""
    none = np.empty(0, dtype=np.int64)
    return Plan(
        placements=tuple(
            TablePlacement(
                "ebc",
                TableSpec(f"t{number}", number + 1, 4, ("f",)),
                Decision("whole", 0, np.array([[number % ranks]])),
                RowMap(np.array([0, number + 1]), none, none),
                np.zeros(ranks, dtype=np.int64),
            )
            for number in range(tables)
        ),
        cluster=Cluster.uniform(ranks, memory_bytes=2**20),
        workload=assumed_plan().workload,
        seconds={"memory": tuple((rank + 1) * 1e-6 for rank in range(ranks))},
        certificate=Certificate((), 1e-6),
        space=assumed_plan().space,
    )


def test_cost_gap_and_what_binds_come_first() -> None:
    made = plan()
    lines = made.report().splitlines()
    assert lines[0].startswith(f"plan {made.content_hash[:12]}: 3 tables on 4 ranks of 2 hosts, ")
    assert f"predicted step: {seconds_text(made.cost_s)} on the slowest rank" in lines[1]
    assert f"no plan takes less than {seconds_text(made.bound_s)}" in lines[1]
    assert lines[2].startswith("what binds: row work ")
    assert "of its cap" in lines[2]
    assert lines[3].split()[:4] == ["rank", "step", "us", "row"]
    assert sum(line.split()[:1] == [str(rank)] for rank in range(4) for line in lines[5:9]) == 4
    assert "lookups served" in lines[3]
    assert "lookups served" not in assumed_plan().report()
    assert "Zipf law" in assumed_plan().report()


def test_scarce_memory_and_owner_cuts_bind() -> None:
    made = plan()
    weights = np.zeros(3)
    weights[1] = 0.25
    scarce = with_multipliers(
        made,
        memory=binding_proof(made).multipliers.memory + 1e-12,
        owners=weights,
        cost=binding_proof(made).multipliers.cost * 0 + 0.75,
    )
    binds = scarce.report().splitlines()[2]
    assert "memory, of which more would lower the bound: rank" in binds
    assert "the busiest owner of table ebc.user, 25.0 % of the proof" in binds
    assert owner_cuts(scarce) == [("ebc.user", 0.25)]
    assert binding_proof(changed(made, certificate=Certificate((), 1e-9))) is None


def test_many_ranks_and_tables_are_summed_up() -> None:
    report = wide_plan(512, 200).report()
    lines = report.splitlines()
    assert len(lines) < 100
    assert lines[5].split()[:2] == ["511", "512.0"]
    assert "... and 496 ranks that take 1.000 us to 496.0 us" in lines
    assert "tables by exchange: whole 200" in lines
    assert "... and 140 smaller tables" in lines
    assert sum(line.startswith("t199 ") for line in lines) == 1
    assert not any(line.startswith("t0 ") for line in lines)
