"""What the search moves as one: a table, or tables that are kept together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.candidates import Candidates, fixed_candidate, list_candidates
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.decision import Decision, Exchange
from torchrec_oper.planner.demand import Floats, Objective, TableDemand
from torchrec_oper.planner.space import SearchSpace

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Unit:
    """Tables that are placed alike.

    Args:
        tables: their numbers.
        candidates: of all of them together; where the unit is fixed, the only one.
        allowed: [C] which candidates the constraints allow.
        banned: [W] ranks that may own none of it, or None.
        fixed: how it is placed, if that is fixed.
    """

    tables: tuple[int, ...]
    candidates: Candidates
    allowed: Mask
    banned: Mask | None
    fixed: Decision | None = None

    @property
    def owners(self) -> npt.NDArray[np.int64] | None:
        """The owners of a fixed unit's pieces, slice by slice."""
        return None if self.fixed is None else self.fixed.owners.ravel()


def units(
    demands: Sequence[TableDemand],
    cluster: Cluster,
    objective: Objective,
    space: SearchSpace,
    constraints: Constraints,
) -> list[Unit]:
    """The units of all tables, in the order of their first one.

    Raises:
        PlanError: the constraints leave a table nothing, or name what there isn't.
    """
    numbers = {demand.table.name: number for number, demand in enumerate(demands)}
    constraints.check_names(numbers, cluster.world_size)
    group_of = {name: group for group in constraints.together for name in group}
    made: list[Unit] = []
    known: dict[object, Candidates] = {}
    for name, number in numbers.items():
        group = group_of.get(name, (name,))
        if name != min(group, key=numbers.__getitem__):
            continue
        if name in constraints.fixed:
            decision = constraints.fixed[name]
            _check_fixed(demands[number], cluster, decision)
            only = fixed_candidate(demands[number], cluster, objective, decision)
            made.append(Unit((number,), only, np.ones(1, dtype=np.bool_), None, decision))
            continue
        members = sorted(numbers[member] for member in group)
        parts = []
        for member in members:
            key = _likeness(demands[member])
            if key not in known:
                known[key] = list_candidates(demands[member], cluster, objective, space)
            parts.append(known[key])
        candidates = parts[0] if len(parts) == 1 else _together(parts)
        made.append(_constrained(members, candidates, demands, cluster.world_size, constraints))
    return made


def _check_fixed(demand: TableDemand, cluster: Cluster, decision: Decision) -> None:
    """Check that a table can be placed as it is fixed.

    Raises:
        PlanError: it can't.
    """
    table, exchange, columns = demand.table, decision.exchange, decision.columns
    pools = exchange in ("partial", "whole")
    several_ids = bool((demand.bag_lengths[demand.bag_shares > 0] > 1).any())
    wrong = {
        f"with {decision.hot_rows} hot rows, but has {table.rows}, and all of them are hot where"
        " it is replicated and nowhere else": (
            decision.hot_rows > table.rows
            or (decision.hot_rows == table.rows) != (exchange == "replicated")
        ),
        f"with {columns} slices of its columns, but has {table.dim} of them: take a divisor": (
            bool(table.dim % columns)
        ),
        "in slices of its columns, which direct can't have: take rows or partial": (
            exchange == "direct" and columns > 1
        ),
        "as direct, but the ranks share no memory (Rates.shares_memory): take rows": (
            exchange == "direct" and not cluster.rates.shares_memory
        ),
        f"as {exchange}, which sums the rows of a bag, but its pooling is none: take rows": (
            pools and table.pooling == "none"
        ),
        "as partial with weights, which is for bags of one id: leave the weights out": (
            exchange == "partial" and decision.weights is not None and several_ids
        ),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise PlanError(f"table {table.name} is fixed {what}")


def _likeness(demand: TableDemand) -> object:
    """Equal for tables with equal candidates."""
    table = demand.table
    arrays = (demand.bag_lengths, demand.bag_shares, demand.block_rows, demand.block_chances)
    return (
        table.dim,
        table.row_bytes,
        table.optimizer_bytes_per_row,
        table.pooling == "none",
        demand.lookups,
        demand.bags,
        demand.listed_rows,
        *(array.tobytes() for array in arrays),
    )


def _constrained(
    members: Sequence[int],
    candidates: Candidates,
    demands: Sequence[TableDemand],
    world_size: int,
    constraints: Constraints,
) -> Unit:
    names = [demands[member].table.name for member in members]
    allowed = np.ones(len(candidates), dtype=np.bool_)
    for name in names:
        if name in constraints.exchanges:
            allowed &= np.isin(candidates.exchange, list(constraints.exchanges[name]))
    away = sorted({rank for name in names for rank in constraints.not_on.get(name, ())})
    banned = None
    if away:
        banned = np.zeros(world_size, dtype=np.bool_)
        banned[away] = True
        allowed &= candidates.hot_rows == 0
        allowed &= candidates.columns * candidates.parts <= world_size - len(away)
    if not allowed.any():
        raise PlanError(
            f"the constraints leave no way to place table {', '.join(names)}; allow it more"
            " exchanges or ranks, or don't keep it together with others"
        )
    return Unit(tuple(members), candidates, allowed, banned)


def _together(parts: Sequence[Candidates]) -> Candidates:
    """The candidates that several tables share, without hot rows unless all are replicated."""
    shapes = [_by_shape(candidates) for candidates in parts]
    shared = [shape for shape in shapes[0] if all(shape in other for other in shapes)]
    numbers = [[by_shape[shape] for shape in shared] for by_shape in shapes]
    first = numbers[0]
    heavy: dict[int, Floats] = {}
    piece = np.sum([c.piece[:, n] for c, n in zip(parts, numbers, strict=True)], axis=0)
    common = np.sum([c.common[:, n] for c, n in zip(parts, numbers, strict=True)], axis=0)
    for place, shape in enumerate(shared):
        most = max(
            c.heavy[n[place]].shape[1] if n[place] in c.heavy else 0
            for c, n in zip(parts, numbers, strict=True)
        )
        if most:
            members = [c.pieces(n[place]) for c, n in zip(parts, numbers, strict=True)]
            pieces = np.sum(members, axis=0)
            heavy[place] = pieces[:, :most]
            piece[:, place] = pieces[:, shape[2] - 1]
    return replace(
        parts[0],
        exchange=tuple(shape[0] for shape in shared),
        hot_rows=parts[0].hot_rows[first],
        columns=parts[0].columns[first],
        parts=parts[0].parts[first],
        common=common,
        piece=piece,
        heavy=heavy,
        linear=np.zeros(len(shared), dtype=np.bool_),
    )


def _by_shape(candidates: Candidates) -> dict[tuple[Exchange, int, int], int]:
    return {
        (exchange, int(columns), int(parts)): number
        for number, (exchange, columns, parts, hot) in enumerate(
            zip(
                candidates.exchange,
                candidates.columns,
                candidates.parts,
                candidates.hot_rows,
                strict=True,
            )
        )
        if hot == 0 or parts == 0
    }
