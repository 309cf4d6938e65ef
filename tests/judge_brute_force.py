"""All plans of small tables on a few ranks, and the cost of the best of them."""

from __future__ import annotations

import itertools

import numpy as np

from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.judge import RankLoads, decision_loads
from torchrec_oper.planner.judge.choices import choices_of
from torchrec_oper.planner.judge.seconds import phase_latency_s

LEVELS = ("sent_intra", "received_intra", "sent_inter", "received_inter")


def all_decisions(demand, space, cluster):
    """Every owner of every piece of every choice, and some uneven weights."""
    decisions = []
    for choice in choices_of(demand, space, cluster):
        shape = (choice.columns, choice.parts)
        for owners in itertools.permutations(range(cluster.world_size), choice.owners):
            grid = np.array(owners, dtype=np.int64).reshape(shape)
            made = Decision(choice.exchange, choice.hot_rows, grid)
            decisions += [made, *_uneven(made, demand)]
    return decisions


def _uneven(made, demand):
    """The same with weights, where a row has no part of its own."""
    linear = made.exchange == "rows" or demand.bag_lengths.max() == 1
    parts = made.parts
    hottest = demand.block_chances[np.cumsum(demand.block_rows) > made.hot_rows]
    cold = (demand.block_rows @ demand.block_chances) if not made.hot_rows else None
    heavy = made.exchange != "rows" and (cold is None or hottest[0] * parts > cold + 1e-9)
    if made.columns > 1 or parts < 2 or not linear or heavy:
        return []
    weights = [np.eye(parts)[0], np.arange(1, parts + 1) / (parts * (parts + 1) / 2)]
    return [Decision(made.exchange, made.hot_rows, made.owners, one) for one in weights]


class AllPlans:
    """The loads of all decisions of each table, one row for each decision."""

    def __init__(self, demands, space, cluster, objective):
        self.cluster = cluster
        loads = [
            [
                decision_loads(one, demand, cluster, objective)
                for one in all_decisions(demand, space, cluster)
            ]
            for demand in demands
        ]
        self.tables = [_stacked(table) for table in loads]

    def best_cost_s(self) -> float:
        """The least cost of any plan that fits; infinite where none does."""
        total = self.tables[0]
        for table in self.tables[1:]:
            total = {name: _combined(name, total[name], table[name]) for name in total}
        rates = self.cluster.rates
        links = np.zeros_like(total["memory_s"])
        for phase in range(3):
            bytes_ = total["traffic"][:, phase]  # [plans, 4, W], see LEVELS
            links += bytes_[:, :2].max(axis=1) / rates.intra_host.bytes_per_s
            links += bytes_[:, 2:].max(axis=1) / rates.inter_host.bytes_per_s
        seconds = total["memory_s"] / self.cluster.speeds + total["other_s"] + links
        costs = seconds.max(axis=1) + total["phases"].sum(axis=1) * phase_latency_s(self.cluster)
        fits = (total["memory_bytes"] <= self.cluster.memory_bytes).all(axis=1)
        return float(costs[fits].min(initial=np.inf))


def _stacked(loads: list[RankLoads]):
    return {
        "memory_s": np.stack([one.memory_s for one in loads]),
        "other_s": np.stack([one.shard_s + one.allreduce_s for one in loads]),
        "memory_bytes": np.stack([one.memory_bytes for one in loads]),
        "traffic": np.stack(
            [
                [
                    [getattr(phase, level) for level in LEVELS]
                    for phase in (one.ids, one.forward, one.backward)
                ]
                for one in loads
            ]
        ),
        "phases": np.array([(one.phases, one.allreduce_phases) for one in loads]),
    }


def _combined(name, one, other):
    """Every pair of rows: added, or for phases the greater."""
    join = np.maximum if name == "phases" else np.add
    pairs = join(one[:, None], other[None, :])
    return pairs.reshape(-1, *pairs.shape[2:])
