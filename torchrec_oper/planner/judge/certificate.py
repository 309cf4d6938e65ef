"""Checks the proof of a bound: recomputes what its multipliers prove.

The proof, for alike ranks: the busiest rank takes no less than any mean of ranks, and no
less than the owner of any one piece. Both are at least sums over tables of something that
depends on the table's own choice only, so the least over each table's choices proves a
bound, with any weights of the means and owners (``cost`` and ``owners``, which sum to 1),
and any price of memory (``memory``), which a plan that fits pays back. Choices whose
busiest owner would take longer than ``target_s`` are left out: plans with one of these
cost more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.certificate import Certificate, Multipliers, Proof
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Objective, TableDemand
from torchrec_oper.planner.judge.choices import choice_loads, choices_of
from torchrec_oper.planner.judge.expected import expected_cost
from torchrec_oper.planner.judge.rank_kinds import RankKinds, rank_kinds
from torchrec_oper.planner.judge.seconds import ROUNDING, phase_latency_s
from torchrec_oper.planner.judge.table_costs import TableCosts, table_costs
from torchrec_oper.planner.space import SearchSpace

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ROUNDS = 8  # of leaving out choices; each may bring out more of them
TARGET_ROUNDING = 1e-12


@dataclass(frozen=True)
class Verification:
    """What a certificate really proves.

    Args:
        proven_s: for each of its proofs, the seconds that no plan of the case stays below.
        replicated_s: the cost of the plan that replicates all tables; infinite where the
            space hasn't got it, or it doesn't fit.
    """

    proven_s: tuple[float, ...]
    replicated_s: float

    @property
    def bound_s(self) -> float:
        """Seconds of the busiest rank that no plan stays below."""
        return min(self.replicated_s, *self.proven_s)


def verify_certificate(
    certificate: Certificate,
    demands: Sequence[TableDemand],
    cluster: Cluster,
    objective: Objective,
    space: SearchSpace,
    *,
    progress: bool = False,
) -> Verification:
    """Recompute what a certificate proves, and refuse it if it claims more.

    Args:
        certificate: the proofs; from anywhere.
        demands: how each table is looked up.
        cluster: the ranks.
        objective: as for ``expected_cost``, whose costs the bound is of.
        space: the placements that the bound is said to cover.
        progress: show a bar on a terminal's stderr; 2,000 tables take minutes.

    Raises:
        PlanError: a case is missing, the multipliers are for another number of tables or
            kinds of ranks, or a claim is above what is proven.
    """
    if not demands:
        raise PlanError("a certificate is of at least one table, found none")
    costs = []
    hidden = None if progress else True
    for demand in tqdm(demands, desc="verify", unit=" tables", disable=hidden):
        choices = choices_of(demand, space, cluster)
        if not choices:
            raise PlanError(f"table {demand.table.name}: the search space has no choice for it")
        costs.append(table_costs(choice_loads(demand, choices, cluster, objective), cluster))
    _check_cases(certificate, costs, objective)
    found = Verification(
        proven_s=tuple(proven_s(proof, costs, cluster, objective) for proof in certificate.proofs),
        replicated_s=_replicated_s(demands, cluster, objective, space),
    )
    for proof, proven in zip(certificate.proofs, found.proven_s, strict=True):
        case = "with" if proof.with_hot_rows else "without"
        _check_claim(f"the bound {case} hot rows", proof.bound_s, proven)
    _check_claim("the cost of replicating all tables", certificate.replicated_s, found.replicated_s)
    return found


def _check_cases(
    certificate: Certificate, costs: Sequence[TableCosts], objective: Objective
) -> None:
    """All plans must be of a case: those with hot rows, and those without."""
    cases = {proof.with_hot_rows for proof in certificate.proofs}
    needed = {True} if any(table.hot.any() for table in costs) else set()
    # In inference hot rows start no phase more: the case with them covers all plans.
    needed |= set() if objective == "infer" and True in cases else {False}
    for missing in needed - cases:
        raise PlanError(
            f"the certificate has no proof for plans {'with' if missing else 'without'} hot rows"
        )


def _check_claim(what: str, claimed_s: float, proven_s: float) -> None:
    if not claimed_s <= proven_s * (1 + ROUNDING):
        raise PlanError(
            f"the certificate is wrong: {what} is said to be {claimed_s} s, but no more than"
            f" {proven_s} s holds"
        )


def _replicated_s(
    demands: Sequence[TableDemand], cluster: Cluster, objective: Objective, space: SearchSpace
) -> float:
    if "replicated" not in space.exchanges:
        return np.inf
    nobody = np.zeros((1, 0), dtype=np.int64)
    decisions = [Decision("replicated", demand.table.rows, nobody) for demand in demands]
    found = expected_cost(decisions, demands, cluster, objective)
    return found.cost_s if found.feasible else np.inf


def proven_s(
    proof: Proof, costs: Sequence[TableCosts], cluster: Cluster, objective: Objective
) -> float:
    """The seconds that no plan of the proof's case stays below.

    Raises:
        PlanError: the multipliers are for another number of tables or kinds of ranks.
    """
    kinds, multipliers = rank_kinds(cluster), proof.multipliers
    if multipliers.owners.shape != (len(costs),) or multipliers.memory.shape != kinds.ranks.shape:
        raise PlanError(
            f"the multipliers are for {len(multipliers.owners)} tables and"
            f" {len(multipliers.memory)} kinds of ranks, wanted {len(costs)} and {len(kinds.ranks)}"
        )
    phases = 2 if objective == "infer" else 3 + 2 * proof.with_hot_rows
    latency_s = phases * phase_latency_s(cluster)
    left = _left_below(proof, costs, cluster)
    if not all(one.allowed.any() for one in left):
        return latency_s + proof.target_s
    prices = _piece_prices(multipliers, kinds, cluster)
    least = [
        (
            _values(table, multipliers, kinds, prices)
            + owner * table.sent.busiest_s
            + (multipliers.owners.sum() - owner) * one.sent_s
        )[one.allowed].min()
        for table, one, owner in zip(costs, left, multipliers.owners, strict=True)
    ]
    value = float(sum(least)) - float(multipliers.memory @ kinds.memory_bytes)
    value /= float(multipliers.cost.sum() + multipliers.owners.sum())  # 1, but for rounding
    return latency_s + min(proof.target_s, value)


@dataclass(frozen=True, eq=False)
class _Left:
    """What plans below the target may take of one table's choices.

    Args:
        allowed: [C] whether they may take the choice.
        sent_s: [C] seconds that it puts on every rank at least, by the view of sent bytes.
        received_s: [C] the same by the view of received bytes.
    """

    allowed: Bools
    sent_s: Floats
    received_s: Floats


def _left_below(proof: Proof, costs: Sequence[TableCosts], cluster: Cluster) -> list[_Left]:
    most_bytes = cluster.memory_bytes.max() * (1 + ROUNDING)
    left = [
        _Left(
            (table.busiest_bytes <= most_bytes) & (proof.with_hot_rows | ~table.hot),
            table.sent.least_s,
            table.received.least_s,
        )
        for table in costs
    ]
    for _ in range(ROUNDS):
        if not all(one.allowed.any() for one in left):
            break
        # All tables together put a target on a rank at most; for one, what others leave.
        target_s = proof.target_s * (1 + TARGET_ROUNDING)
        sent = np.array([one.sent_s[one.allowed].min() for one in left])
        received = np.array([one.received_s[one.allowed].min() for one in left])
        rooms = np.stack([target_s - (sent.sum() - sent), target_s - (received.sum() - received)])
        left = [
            _Left(
                one.allowed
                & (table.sent.busiest_s <= room[0])
                & (table.received.busiest_s <= room[1]),
                table.sent.least_below(room[0], cluster.world_size),
                table.received.least_below(room[1], cluster.world_size),
            )
            for table, one, room in zip(costs, left, rooms.T, strict=True)
        ]
    return left


@dataclass(frozen=True, eq=False)
class _Prices:
    """[G] what a kind of ranks pays, in the weighted mean, for what one rank of it owns."""

    memory_s: Floats
    other_s: Floats
    held_byte: Floats
    volume: Floats  # [3, G], for a byte between the owner and each rank


def _piece_prices(multipliers: Multipliers, kinds: RankKinds, cluster: Cluster) -> _Prices:
    cost, rates = multipliers.cost, cluster.rates
    intra, inter = rates.intra_host.bytes_per_s, rates.inter_host.bytes_per_s
    own = np.eye(len(cost))
    # [payer, owner]: mean bytes over the payer's ranks, for a byte of one owner's volume.
    sent = np.stack(
        [own * (kinds.local - 1) / intra, own * (cluster.world_size - kinds.local) / inter]
    )
    received = np.stack([(kinds.on_host - own) / intra, (kinds.ranks - kinds.on_host) / inter])
    share = multipliers.sent_share[:, :, :, None]  # [2, phases, payer, 1]
    seconds = (share * sent[:, None] + (1 - share) * received[:, None]).sum(axis=0)
    return _Prices(
        memory_s=cost / kinds.speeds / kinds.ranks,
        other_s=cost / kinds.ranks,
        held_byte=multipliers.memory / kinds.ranks,
        volume=np.einsum("r,prg->pg", cost, seconds) / kinds.ranks,
    )


def _values(
    table: TableCosts, multipliers: Multipliers, kinds: RankKinds, prices: _Prices
) -> Floats:
    """[C] what each choice adds to the means of ranks at least, whoever owns its pieces."""
    work_s, other_s, held_bytes = table.common.T
    values = work_s * (multipliers.cost @ (1 / kinds.speeds)) + other_s * multipliers.cost.sum()
    values = values + held_bytes * multipliers.memory.sum()
    pieces = np.outer(table.memory_s, prices.memory_s)  # [P, G]
    pieces += table.volumes.T @ prices.volume + np.outer(table.held_bytes, prices.held_byte)
    shard_s, uneven = table.shard_s[table.choice_of], table.uneven[table.choice_of]
    # Each piece may be with another kind of rank. The overhead of uneven pieces may even be
    # with others than their rows: many empty pieces here, and all rows there.
    together = (pieces + np.outer(shard_s, prices.other_s)).min(axis=1)
    apart = pieces.min(axis=1) + shard_s * prices.other_s.min()
    least = table.sums(np.where(uneven, apart, together))
    # Where every rank has a piece, every rank has its overhead.
    everywhere = table.sums(np.ones_like(shard_s)) == kinds.ranks.sum()
    on_all = table.sums(pieces.min(axis=1)) + table.shard_s * multipliers.cost.sum()
    return np.asarray(values + np.where(everywhere, np.maximum(least, on_all), least))
