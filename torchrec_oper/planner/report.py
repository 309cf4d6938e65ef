"""What a plan's report says, and planned against measured load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torchrec_oper.planner.readable import (
    byte_unit,
    bytes_text,
    count,
    part_name,
    percent,
    seconds_text,
    table_of,
    time_unit,
)

if TYPE_CHECKING:
    from torchrec_oper.planner.certificate import Proof
    from torchrec_oper.planner.placement import TablePlacement
    from torchrec_oper.planner.plan import Plan

# Of more ranks or tables, the ones that matter most are shown.
MOST_RANKS = 32
MOST_TABLES = 60

# A part of the busiest rank's seconds, or of the proof, is worth naming from this share on.
WORTH_NAMING = 0.1


def plan_report(plan: Plan) -> str:
    """A readable summary: the cost and how near it is to the best, what binds, ranks, tables."""
    tables, ranks = count(len(plan.placements), "table"), count(plan.world_size, "rank")
    hosts = plan.cluster.host_count
    lines = [
        f"plan {plan.content_hash[:12]}: {tables} on {ranks}"
        f"{f' of {hosts} hosts' if hosts > 1 else ''}, {plan.workload.told()}",
        *cost_lines(plan),
        *_rank_lines(plan),
        _exchange_line(plan.placements),
    ]
    left = MOST_TABLES
    for module in dict.fromkeys(p.module for p in plan.placements):
        placements = [p for p in plan.placements if p.module == module]
        lines += [f"tables of {module}:"] if module else []
        shown = sorted(placements, key=lambda p: -p.table.rows * p.table.row_bytes)[: max(left, 1)]
        lines.append(_placements([p for p in placements if p in shown]))
        if len(shown) < len(placements):
            lines.append(f"... and {count(len(placements) - len(shown), 'smaller table')}")
        left -= len(shown)
    return "\n".join(lines)


def cost_lines(plan: Plan) -> list[str]:
    """The predicted cost, the gap to the best plan, and what keeps it from being less."""
    mean_s = sum(plan.rank_s) / plan.world_size
    busiest = int(np.argmax(plan.rank_s))
    imbalance = plan.cost_s / mean_s if mean_s else 1.0
    return [
        f"predicted step: {seconds_text(plan.cost_s)} on the slowest rank ({busiest}),"
        f" {imbalance:.3f} x the mean; no plan takes less than {seconds_text(plan.bound_s)},"
        f" so this one is within {percent(plan.gap)} of the best",
        f"what binds: {'; '.join(_binding(plan, busiest))}",
    ]


def _binding(plan: Plan, busiest: int) -> list[str]:
    parts = {name: values[busiest] for name, values in plan.seconds.items()}
    large = sorted(parts, key=lambda name: -parts[name])
    total = plan.cost_s or 1.0
    named = [n for n in large if parts[n] >= WORTH_NAMING * total] or large[:1]
    shares = [f"{part_name(name)} {percent(parts[name] / total)}" for name in named]
    told = [f"{', '.join(shares)} of rank {busiest}"]
    fill = np.array(plan.memory_bytes, dtype=np.float64) / plan.cluster.memory_bytes
    fullest = int(fill.argmax())
    full = f"rank {fullest}, the fullest, uses {percent(float(fill[fullest]))} of its cap"
    proof = binding_proof(plan)
    scarce = proof is not None and bool(proof.multipliers.memory.any())
    told.append(f"memory, of which more would lower the bound: {full}" if scarce else full)
    for name, weight in owner_cuts(plan)[:2]:
        if weight >= WORTH_NAMING:
            told.append(f"the busiest owner of table {name}, {percent(weight)} of the proof")
    return told


def binding_proof(plan: Plan) -> Proof | None:
    """The proof of the case that sets the bound; None where replicating all tables does."""
    certificate = plan.certificate
    if not certificate.proofs:
        return None
    proof = min(certificate.proofs, key=lambda proof: proof.bound_s)
    return proof if proof.bound_s <= certificate.replicated_s else None


def owner_cuts(plan: Plan) -> list[tuple[str, float]]:
    """The tables whose busiest owner has a weight in the bound's proof, heaviest first."""
    proof = binding_proof(plan)
    # Tables that are kept together share a multiplier.
    if proof is None or len(proof.multipliers.owners) != len(plan.placements):
        return []
    pairs = zip(plan.placements, proof.multipliers.owners.tolist(), strict=True)
    cuts = [(placement.key, weight) for placement, weight in pairs if weight > 1e-6]
    return sorted(cuts, key=lambda cut: -cut[1])


def _rank_lines(plan: Plan) -> list[str]:
    """A line for each rank, of many ranks for the slowest ones."""
    order = list(range(plan.world_size))
    more = []
    if plan.world_size > MOST_RANKS:
        by_cost = sorted(order, key=lambda rank: -plan.rank_s[rank])
        order, rest = by_cost[: MOST_RANKS // 2], by_cost[MOST_RANKS // 2 :]
        costs = [plan.rank_s[rank] for rank in rest]
        more = [
            f"... and {count(len(rest), 'rank')} that take {seconds_text(min(costs))} to"
            f" {seconds_text(max(costs))}"
        ]
    used = {name: values for name, values in plan.seconds.items() if any(values)}
    time = time_unit(plan.rank_s)
    caps = [rank.memory_bytes for rank in plan.cluster.ranks]
    size = byte_unit(caps)
    titles = [f"step {time.name}", *map(part_name, used), f"memory {size.name}", f"cap {size.name}"]
    served = any(plan.planned_lookups)
    titles += ["lookups served"] if served else []
    rows = [
        [
            rank,
            time.text(plan.rank_s[rank]),
            *(time.text(values[rank]) for values in used.values()),
            size.text(plan.memory_bytes[rank]),
            size.text(caps[rank]),
            *([plan.planned_lookups[rank]] if served else []),
        ]
        for rank in order
    ]
    return [table_of(["rank", *titles], rows), *more]


def _exchange_line(placements: Sequence[TablePlacement]) -> str:
    kinds = Counter(p.decision.exchange for p in placements)
    told = ", ".join(f"{name} {number:,}" for name, number in kinds.most_common())
    hot = [p for p in placements if 0 < p.decision.hot_rows < p.table.rows]
    replicas = sum(p.decision.hot_rows for p in hot)
    more = f"; {count(len(hot), 'table')} with {replicas:,} hot rows on every rank" if hot else ""
    return f"tables by exchange: {told}{more}"


def _placements(placements: Sequence[TablePlacement]) -> str:
    titles = ("table", "rows", "size", "exchange", "hot rows", "owners", "rows of owners")
    rows = [
        (
            p.table.name,
            p.table.rows,
            bytes_text(p.table.rows * p.table.row_bytes),
            p.decision.exchange,
            p.decision.hot_rows,
            owners_text(p),
            _spread(p),
        )
        for p in placements
    ]
    return table_of(titles, rows)


def owners_text(placement: TablePlacement, most: int = 8) -> str:
    """The owners in words: their ranks, or how many column slices by row parts."""
    decision = placement.decision
    if not decision.parts or decision.owners.size == placement.world_size:
        ranks = "all"
    else:
        owners = sorted(decision.owners.ravel().tolist())
        ranks = " ".join(map(str, owners[:most]))
        ranks += f" ... ({len(owners)} ranks)" if len(owners) > most else ""
    if decision.columns > 1:
        return f"{decision.columns} slices x {count(decision.parts, 'part')}: {ranks}"
    return ranks


def _spread(placement: TablePlacement) -> str:
    """Rows of an owner's part, from the least to the most."""
    rows = placement.row_map.owned_rows[: placement.decision.parts]
    if not len(rows):
        return "-"
    least, most = int(rows.min()), int(rows.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def load_table(planned: Sequence[int], measured: Sequence[int]) -> str:
    """Planned against measured lookups, a line for each rank.

    Shares are of all ranks' lookups, so they compare even where the measured run
    covered another part of the data than the profile.
    """
    rows = [
        (rank, want, _share(want, sum(planned)), have, _share(have, sum(measured)))
        for rank, (want, have) in enumerate(zip(planned, measured, strict=True))
    ]
    titles = ("rank", "planned lookups", "share", "measured lookups", "share")
    return table_of(titles, rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"
