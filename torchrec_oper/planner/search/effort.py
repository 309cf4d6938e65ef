"""How much work the search does, counted in moves, so that it doesn't depend on the clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """One start of the search.

    Args:
        most_alone: how much of the relaxation's free cost a table's busiest owner may cost
            alone; candidates with heavier pieces are left out.
        spread: whether tables are put in one by one on top of an even spread of the rest,
            rather than all at once as rounded.
        replicas: whether hot rows may be replicated; without any, training spares the
            phases in which their gradients are summed.
    """

    most_alone: float
    spread: bool = False
    replicas: bool = True


@dataclass(frozen=True)
class Effort:
    """The amounts of work.

    Args:
        choices: candidates tried for each table.
        starts: the starts; the best of them is improved.
        powers: of the aim, one for each sweep over all tables.
        rounds, moves: rounds of so many moves of each kind after the sweeps; one round for
            each start, and the others for the best.
    """

    choices: int
    starts: tuple[Start, ...]
    powers: tuple[float, ...]
    rounds: int
    moves: int


ANY = float("inf")
FULL = (2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 64.0)


def effort_for(tables: int, world_size: int) -> Effort:
    """An effort that ends in seconds: 1 or 2 for tens of tables, tens for thousands."""
    size = tables * world_size
    starts: tuple[Start, ...]
    if size <= 4_000:
        light = (Start(ANY), Start(0.7), Start(0.4))
        starts = (*light, Start(ANY, spread=True), Start(ANY, replicas=False))
        return Effort(20, starts, FULL, rounds=6, moves=20)
    if size <= 60_000:
        starts = (Start(ANY), Start(0.75), Start(0.6), Start(0.5), Start(ANY, spread=True))
        return Effort(20, starts, FULL, rounds=8, moves=24)
    if size <= 250_000:
        starts = (Start(ANY), Start(0.7), Start(ANY, spread=True))
        return Effort(16, starts, FULL, rounds=6, moves=24)
    return Effort(8, (Start(0.7), Start(ANY, spread=True)), (4.0, 16.0, 48.0), rounds=3, moves=16)
