"""What a user asks of a plan besides a low cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.decision import EXCHANGES, Decision, Exchange


@dataclass(frozen=True)
class Constraints:
    """Limits on where and how single tables are placed, by the tables' names.

    Args:
        exchanges: the exchanges that a table may use.
        not_on: ranks that may not own rows of a table; then it has no replicas either.
        together: groups of tables whose pieces lie on the same ranks.
        fixed: tables that are placed as given.

    Raises:
        PlanError: for an unknown exchange, or a table in two groups, or fixed and in one.
    """

    exchanges: Mapping[str, Collection[Exchange]] = field(default_factory=dict)
    not_on: Mapping[str, Collection[int]] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    fixed: Mapping[str, Decision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, allowed in self.exchanges.items():
            unknown = [exchange for exchange in allowed if exchange not in EXCHANGES]
            if unknown or not allowed:
                raise PlanError(
                    f"table {name}: exchanges must be some of {', '.join(EXCHANGES)},"
                    f" found {list(allowed)}"
                )
        grouped = [name for group in self.together for name in group]
        for name in grouped:
            if grouped.count(name) > 1:
                raise PlanError(f"table {name} is to be kept together twice")
            if name in self.fixed:
                raise PlanError(f"table {name} is fixed, so it can't be kept together with others")

    def check_names(self, names: Collection[str], world_size: int) -> None:
        """Check that the constraints are about tables of ``names`` and existing ranks.

        Raises:
            PlanError: a table or a rank doesn't exist.
        """
        grouped = [name for group in self.together for name in group]
        for name in [*self.exchanges, *self.not_on, *grouped, *self.fixed]:
            if name not in names:
                raise PlanError(f"a constraint names table {name}, which there isn't")
        for name, ranks in self.not_on.items():
            outside = [rank for rank in ranks if not 0 <= rank < world_size]
            if outside:
                raise PlanError(
                    f"table {name}: there is no rank {outside[0]}, only 0 to {world_size - 1}"
                )
            if len(set(ranks)) == world_size:
                raise PlanError(f"table {name} may lie on no rank at all")
        for name, decision in self.fixed.items():
            if decision.owners.size and decision.owners.max() >= world_size:
                raise PlanError(
                    f"table {name} is fixed on rank {decision.owners.max()}, but the ranks are 0 to"
                    f" {world_size - 1}"
                )
