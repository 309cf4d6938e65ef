"""What a user asks of a plan besides a low cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.decision import EXCHANGES, Decision, Exchange
from torchrec_oper.table import whole_number


@dataclass(frozen=True)
class Constraints:
    """Limits on where and how single tables are placed, by the tables' names.

    Args:
        exchanges: the exchanges that a table may use.
        not_on: ranks that may not own rows of a table; then it has no replicas either.
        together: groups of tables whose pieces lie on the same ranks.
        fixed: tables that are placed as given.

    Raises:
        PlanError: for a value of another kind, an unknown exchange, a table in two groups,
            or one that is fixed against another constraint.
    """

    exchanges: Mapping[str, Collection[Exchange]] = field(default_factory=dict)
    not_on: Mapping[str, Collection[int]] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    fixed: Mapping[str, Decision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_kinds()
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

        for name, decision in self.fixed.items():
            allowed = self.exchanges.get(name, EXCHANGES)
            if decision.exchange not in allowed:
                raise PlanError(
                    f"table {name} is fixed with exchange {decision.exchange}, but may use only"
                    f" {', '.join(allowed)}"
                )
            banned = sorted(set(self.not_on.get(name, ())) & set(decision.owners.ravel().tolist()))
            if banned:
                raise PlanError(
                    f"table {name} is fixed on rank {banned[0]}, on which it may not lie"
                )

    def _check_kinds(self) -> None:
        for what, limits in (("exchanges", self.exchanges), ("not_on", self.not_on)):
            for name, values in limits.items():
                if isinstance(values, str) or not isinstance(values, Collection):
                    raise PlanError(
                        f"table {name}: {what} must be a list of values, found {values!r}"
                    )
        for name, ranks in self.not_on.items():
            for rank in ranks:
                whole_number(rank, f"table {name}: a rank of not_on", error=PlanError)
        groups: tuple[object, ...] = self.together
        for group in groups:
            if not isinstance(group, tuple):
                raise PlanError(f"together must hold tuples of table names, found {group!r}")
        for name, decision in self.fixed.items():
            if not isinstance(decision, Decision):
                raise PlanError(f"table {name}: fixed must be a Decision, found {decision!r}")

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
