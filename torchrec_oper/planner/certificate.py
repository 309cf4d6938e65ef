"""The proof of a bound: multipliers that anybody can check in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.demand import Floats


@dataclass(frozen=True, eq=False)
class Multipliers:
    """What each mean and cut counts for in the proof; any values of the right signs prove a bound.

    Args:
        cost: [G] weight of each class of ranks' mean cost; with ``owners`` they sum to 1.
        sent_share: [2, 3, G], within hosts and between them, in each phase, how much of a
            class's link time is taken as sent bytes; the rest as received ones. 0 to 1.
        memory: [G] seconds for each byte of a class's mean memory.
        owners: [T] weight of each table's owner cut.

    Raises:
        PlanError: for a value outside what is said above.
    """

    cost: Floats
    sent_share: Floats
    memory: Floats
    owners: Floats

    def __post_init__(self) -> None:
        for field in ("cost", "sent_share", "memory", "owners"):
            array = np.array(getattr(self, field), dtype=np.float64)
            if not np.isfinite(array).all() or (array < 0).any():
                raise PlanError(f"a certificate's {field} must be finite and 0 or more")
            array.flags.writeable = False
            object.__setattr__(self, field, array)
        if (self.sent_share > 1).any() or self.sent_share.shape != (2, 3, len(self.cost)):
            raise PlanError("a certificate's sent_share must be 0 to 1, [2, 3, classes]")
        total = float(self.cost.sum() + self.owners.sum())
        if abs(total - 1) > 1e-9:
            raise PlanError(f"a certificate's cost and owners must sum to 1, found {total}")


@dataclass(frozen=True, eq=False)
class Proof:
    """One case of the bound.

    Args:
        with_hot_rows: whether the case is of plans with hot rows beside other rows of a
            table, or replicated tables; else of plans without.
        target_s: the cost, latency aside, above which candidates were left out.
        multipliers: of the relaxation over the rest.
        bound_s: no plan of the case costs less.
    """

    with_hot_rows: bool
    target_s: float
    multipliers: Multipliers
    bound_s: float


@dataclass(frozen=True, eq=False)
class Certificate:
    """The proofs of all cases; the bound is the least of theirs.

    Args:
        proofs: one or two cases that cover all plans, but the one that replicates every row.
        replicated_s: the cost of that plan; infinite where it doesn't fit.
    """

    proofs: tuple[Proof, ...]
    replicated_s: float

    @property
    def bound_s(self) -> float:
        """Seconds of the slowest rank that no plan stays below."""
        return min([self.replicated_s, *(proof.bound_s for proof in self.proofs)])

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, exact; ``from_json`` reads them back."""
        proofs = [
            {
                "with_hot_rows": proof.with_hot_rows,
                "target_s": proof.target_s,
                "bound_s": proof.bound_s,
                "cost": proof.multipliers.cost.tolist(),
                "sent_share": proof.multipliers.sent_share.tolist(),
                "memory": proof.multipliers.memory.tolist(),
                "owners": proof.multipliers.owners.tolist(),
            }
            for proof in self.proofs
        ]
        replicated = self.replicated_s if np.isfinite(self.replicated_s) else None
        return {"proofs": proofs, "replicated_s": replicated}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Certificate:
        """The certificate that ``to_json`` wrote."""
        proofs = tuple(
            Proof(
                with_hot_rows=proof["with_hot_rows"],
                target_s=proof["target_s"],
                bound_s=proof["bound_s"],
                multipliers=Multipliers(
                    *(np.array(proof[name]) for name in ("cost", "sent_share", "memory", "owners"))
                ),
            )
            for proof in fields["proofs"]
        )
        replicated = fields["replicated_s"]
        return cls(proofs, np.inf if replicated is None else replicated)
