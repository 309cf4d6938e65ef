"""What differs between two plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrec_oper.planner.moves import TableMoves, table_moves
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.readable import (
    bytes_text,
    count,
    percent,
    seconds_text,
    table_of,
)
from torchrec_oper.planner.report import owners_text


@dataclass(frozen=True, eq=False)
class TableChange:
    """How one table of both plans is placed before and after.

    Args:
        key: the table's path in the model.
        before, after: its exchange, hot rows and owners in words.
        moves: what ranks have to send each other; None where the table's shape differs.
    """

    key: str
    before: str
    after: str
    moves: TableMoves | None

    @property
    def moved_bytes(self) -> int:
        """Bytes that ranks have to send each other."""
        return self.moves.total_bytes if self.moves else 0


@dataclass(frozen=True, eq=False)
class Difference:
    """What differs between two plans.

    Args:
        before, after: the plans.
        only_before, only_after: the tables of one plan only, by their paths in the model.
        changes: the tables of both that are placed otherwise, those that move most first.
    """

    before: Plan
    after: Plan
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    changes: tuple[TableChange, ...]

    @property
    def moved_bytes(self) -> int:
        """Bytes that ranks have to send each other to come from one plan to the other."""
        return sum(change.moved_bytes for change in self.changes)

    @property
    def moved_rows(self) -> int:
        """Rows that they send, counted for each rank that gets them."""
        return sum(change.moves.total_rows for change in self.changes if change.moves)

    def busiest(self) -> tuple[int, int]:
        """The most bytes that one rank sends, and that one receives."""
        sent = np.zeros((2, max(self.before.world_size, self.after.world_size)))
        for change in self.changes:
            if change.moves:
                sizes = change.moves.bytes
                np.add.at(sent[0], change.moves.from_ranks, sizes)
                np.add.at(sent[1], change.moves.to_ranks, sizes)
        return int(sent[0].max()), int(sent[1].max())

    def text(self, *, most: int = 40) -> str:
        """The difference for people, with ``most`` tables."""
        if self.before == self.after:
            return f"the same plan: {self.before.content_hash[:12]}"
        lines = [_side_by_side(self.before, self.after)]
        for keys, which in ((self.only_before, "first"), (self.only_after, "second")):
            if keys:
                named = ", ".join(keys[:10]) + (", ..." if len(keys) > 10 else "")
                lines.append(f"{count(len(keys), 'table')} only in the {which} plan: {named}")
        shared = len(self.after.placements) - len(self.only_after)
        lines.append(f"{len(self.changes):,} of {count(shared, 'table')} in both placed otherwise")
        if self.changes:
            sent, received = self.busiest()
            lines[-1] += (
                f"; {count(self.moved_rows, 'row')} ({bytes_text(self.moved_bytes)}) would move,"
                f" a rank sending {bytes_text(sent)} and receiving {bytes_text(received)} at most"
            )
            lines.append(self._changes(most))
        return "\n".join(lines)

    def _changes(self, most: int) -> str:
        rows = [
            (
                change.key,
                change.before,
                change.after,
                f"{change.moves.total_rows:,}" if change.moves else "other shape",
                bytes_text(change.moved_bytes) if change.moves else "other shape",
            )
            for change in self.changes[:most]
        ]
        table = table_of(("table", "first", "second", "rows moved", "bytes moved"), rows)
        rest = len(self.changes) - most
        return table if rest <= 0 else f"{table}\n... and {count(rest, 'other table')}"

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON values."""
        sent, received = self.busiest()
        return {
            "first": _facts(self.before),
            "second": _facts(self.after),
            "only_in_first": list(self.only_before),
            "only_in_second": list(self.only_after),
            "moved_rows": self.moved_rows,
            "moved_bytes": self.moved_bytes,
            "most_sent_bytes": sent,
            "most_received_bytes": received,
            "changes": [
                {
                    "table": change.key,
                    "first": change.before,
                    "second": change.after,
                    "moves": _moves_json(change.moves),
                }
                for change in self.changes
            ],
        }


def plan_diff(before: Plan, after: Plan) -> Difference:
    """What differs between two plans, also of different models or numbers of ranks."""
    old = {placement.key: placement for placement in before.placements}
    new = {placement.key: placement for placement in after.placements}
    state = before.workload.objective == after.workload.objective == "train"
    changes = [
        change
        for key, placement in new.items()
        if key in old
        for change in _change(old[key], placement, optimizer=state)
    ]
    changes.sort(key=lambda change: -change.moved_bytes)
    return Difference(
        before=before,
        after=after,
        only_before=tuple(key for key in old if key not in new),
        only_after=tuple(key for key in new if key not in old),
        changes=tuple(changes),
    )


def _change(
    before: TablePlacement, after: TablePlacement, *, optimizer: bool
) -> Sequence[TableChange]:
    """The change of one table, if there is any."""
    a, b = before.table, after.table
    found = None
    told = _placed(before), _placed(after)
    if (a.rows, a.dim, a.dtype) == (b.rows, b.dim, b.dtype):
        found = table_moves(before, after, optimizer=optimizer)
        if told[0] == told[1] and not found.total_bytes:
            return ()
    else:
        told = (f"{a.rows:,} x {a.dim} {a.dtype}", f"{b.rows:,} x {b.dim} {b.dtype}")
    return (TableChange(after.key, *told, found),)


def _placed(placement: TablePlacement) -> str:
    decision = placement.decision
    hot = decision.hot_rows if decision.exchange != "replicated" else 0
    told = f"{decision.exchange}{f' + {hot:,} hot' if hot else ''}"
    return f"{told}, {owners_text(placement, most=4)}"


def _side_by_side(before: Plan, after: Plan) -> str:
    def share(old: float, new: float) -> str:
        if old == new:
            return "="
        return f"{'+' if new > old else '-'}{percent(abs(new / old - 1))}" if old else "new"

    seconds = [
        ("predicted step", before.cost_s, after.cost_s),
        ("bound", before.bound_s, after.bound_s),
    ]
    sizes = [
        ("fullest rank", max(before.memory_bytes), max(after.memory_bytes)),
        ("all ranks", sum(before.memory_bytes), sum(after.memory_bytes)),
    ]
    rows = [
        ("plan", before.content_hash[:12], after.content_hash[:12], ""),
        ("ranks", f"{before.world_size}", f"{after.world_size}", ""),
        ("tables", f"{len(before.placements):,}", f"{len(after.placements):,}", ""),
        *((name, seconds_text(a), seconds_text(b), share(a, b)) for name, a, b in seconds),
        ("gap", percent(before.gap), percent(after.gap), ""),
        *((name, bytes_text(a), bytes_text(b), share(a, b)) for name, a, b in sizes),
    ]
    lines = [table_of(("", "first", "second", "change"), rows)]
    told = before.workload.told(), after.workload.told()
    if told[0] == told[1]:
        lines.append(f"both for {told[0]}")
    else:
        lines += [f"first for {told[0]}", f"second for {told[1]}"]
    if before.cluster.content_hash != after.cluster.content_hash:
        lines.append("the clusters differ")
    if before.space != after.space:
        lines += [f"first chosen from {before.space}", f"second chosen from {after.space}"]
    return "\n".join(lines)


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "plan": plan.content_hash,
        "workload": plan.workload.told(),
        "ranks": plan.world_size,
        "cost_s": plan.cost_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "memory_bytes": list(plan.memory_bytes),
    }


def _moves_json(moves: TableMoves | None) -> dict[str, list[int]] | None:
    if moves is None:
        return None
    names = ("from_ranks", "to_ranks", "rows", "bytes")
    return {name: getattr(moves, name).tolist() for name in names}
