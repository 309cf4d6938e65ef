"""The judge: what a placement costs, by code that shares nothing with the search."""

from torchrec_oper.planner.judge.certificate import Verification, verify_certificate
from torchrec_oper.planner.judge.expected import decision_loads, expected_cost, expected_loads
from torchrec_oper.planner.judge.loads import RankLoads, Traffic
from torchrec_oper.planner.judge.placed import HOT, PlacedTable, placed_table
from torchrec_oper.planner.judge.replay import Replay, TableReplay, replay_steps, served_lookups
from torchrec_oper.planner.judge.seconds import RankSeconds, Verdict, rank_seconds, verdict

__all__ = [
    "HOT",
    "PlacedTable",
    "RankLoads",
    "RankSeconds",
    "Replay",
    "TableReplay",
    "Traffic",
    "Verdict",
    "Verification",
    "decision_loads",
    "expected_cost",
    "expected_loads",
    "placed_table",
    "rank_seconds",
    "replay_steps",
    "served_lookups",
    "verdict",
    "verify_certificate",
]
