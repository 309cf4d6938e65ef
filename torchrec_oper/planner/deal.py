"""Deals the rows of a table to its parts one by one, as a decision says."""

from __future__ import annotations

import itertools

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.profile import TableAccess


def deal(access: TableAccess, decision: Decision, *, seed: int = 0) -> RowMap:
    """The map from ids to the decision's parts; hot rows are in one more part, the last.

    Listed rows go hottest first to the part that is furthest below its share, counted in
    lookups, or in rows for the exchange ``rows``, where a row travels once however often
    it is looked up. Rows without an id in the profile go in ranges, sized so that every
    part gets its share of their lookups too.

    Args:
        access: how the table is used.
        decision: its parts.
        seed: shuffles rows of equal count, so that neighbours in id space part.

    Raises:
        PlanError: hot rows aren't known by their ids.
    """
    if decision.parts == 0:
        return _one_part(access.rows)
    if decision.hot_rows > len(access.ids):
        raise PlanError(
            f"table {access.name}: {decision.hot_rows} hot rows can't be told, the profile lists"
            f" {len(access.ids)}; profile with more head_rows"
        )
    parts = decision.parts
    shares = np.full(parts, 1 / parts) if decision.weights is None else decision.weights
    hot, cold = access.ids[: decision.hot_rows], access.ids[decision.hot_rows :]
    counts = access.counts[decision.hot_rows :]
    shuffled = np.random.default_rng(seed).permutation(len(cold))
    order = shuffled[np.argsort(-counts[shuffled], kind="stable")]
    cold, counts = cold[order], counts[order]
    by_rows = decision.exchange == "rows"
    loads = np.ones(len(cold), dtype=np.int64) if by_rows else counts
    owners = _dealt_in_turn(len(cold), shares) if by_rows else _dealt_by_load(loads, shares)
    unlisted = access.rows - len(access.ids)
    tail = unlisted if by_rows else int(access.lookups - access.counts.sum())
    ranges = _ranges(loads, owners, shares, tail, unlisted)
    if len(hot):
        owners = np.concatenate([np.full(len(hot), parts), owners])
        ranges = np.append(ranges, 0)
    return RowMap.from_owners(
        listed_ids=np.concatenate([hot, cold]), listed_owners=owners, unlisted_counts=ranges
    )


def _one_part(rows: int) -> RowMap:
    none = np.empty(0, dtype=np.int64)
    return RowMap(np.array([0, rows]), none, none)


def _ranges(loads: Ints, owners: Ints, shares: Floats, tail: int, unlisted: int) -> Ints:
    """[parts] how many unlisted rows each part gets, so that it has its share of the load.

    Args:
        loads, owners: [L] of the listed rows.
        shares: [parts] of all load.
        tail: the load of the unlisted rows together.
        unlisted: how many these are; alike as far as is known.
    """
    dealt = np.bincount(owners, weights=loads, minlength=len(shares))
    if not tail:
        # Rows that nobody looked up fill the parts up to their share of the rows.
        dealt = np.bincount(owners, minlength=len(shares)).astype(np.float64)
        tail = unlisted
    missing = np.maximum(shares * (dealt.sum() + tail) - dealt, 0.0)
    wanted = missing if missing.sum() else shares
    return apportioned(unlisted, wanted / wanted.sum())


def _dealt_by_load(loads: Ints, shares: Floats) -> Ints:
    """[L] the part of each row, heaviest first; equal rows are dealt together.

    The same as giving every row to the part whose load is least for its share (longest
    processing time first, Graham 1969), up to one row of each run of equal ones.
    """
    owners = np.empty(len(loads), dtype=np.int64)
    if not len(loads):
        return owners
    levels = np.zeros(len(shares))
    edges = [0, *(np.flatnonzero(np.diff(loads)) + 1).tolist(), len(loads)]
    for begin, end in itertools.pairwise(edges):
        load, count = float(loads[begin]), end - begin
        taken = _filled(levels, shares, load * count)
        counts = apportioned(count, taken / taken.sum())
        owners[begin:end] = _in_turn(counts)
        levels += counts * load
    return owners


def _filled(levels: Floats, shares: Floats, amount: float) -> Floats:
    """[parts] how ``amount`` raises the parts that are lowest for their share to one level."""
    some = np.flatnonzero(shares > 0)
    heights = levels[some] / shares[some]
    order = some[np.argsort(heights, kind="stable")]
    weight = np.cumsum(shares[order])
    level = (amount + np.cumsum(levels[order])) / weight
    following = np.append(np.sort(heights)[1:], np.inf)
    at = int(np.argmax(level <= following))
    filled: Floats = np.zeros(len(shares))
    low = order[: at + 1]
    filled[low] = np.maximum(level[at] * shares[low] - levels[low], 0.0)
    return filled


def _dealt_in_turn(rows: int, shares: Floats) -> Ints:
    """[rows] the part of each row, so that every stretch of rows is shared out alike."""
    return _in_turn(apportioned(rows, shares))


def _in_turn(counts: Ints) -> Ints:
    """Each part's number as often as it counts, evenly mixed; the first part begins."""
    owners = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = (within + 0.5) / counts[owners]
    # All parts of one row each would begin at 1/2: they keep their order.
    return owners[np.argsort(places, kind="stable")]


def apportioned(total: int, shares: Floats) -> Ints:
    """Whole numbers near ``total * shares`` that add up to ``total`` (largest remainders)."""
    exact = total * shares
    whole = np.floor(exact).astype(np.int64)
    left = total - int(whole.sum())
    if left > 0:
        whole[np.argsort(whole - exact, kind="stable")[:left]] += 1
    elif left < 0:  # floats of large totals may round up
        whole[np.argsort(exact - whole, kind="stable")[:-left]] -= 1
    return whole
