"""Deals the listed rows of a placement again, those that bags name together to one part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from torchrec_oper.planner.coaccess.hypergraph import bag_hypergraph, partition
from torchrec_oper.planner.demand import Floats
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.profile import TableAccess
from torchrec_oper.profile.trace import Bags

MOST_WORK = 1 << 48  # of all rows together, in units of no meaning
NO_ROOM = -(1 << 62)  # work that a full part misses: less than any other


@dataclass(frozen=True, eq=False)
class RankRoom:
    """What ranks have left for rows that come to them.

    Args:
        rows: [W] int64, how many more rows of the table they could own.
        busy_s: [W] float64, predicted seconds of a step: the least busy gets the most.
    """

    rows: Ints
    busy_s: Floats


@dataclass(frozen=True, eq=False)
class _Listed:
    """The listed rows that have an owner each; [L] in the order of the profile, hottest first."""

    ids: Ints
    counts: Ints
    work: Ints
    parts: Ints


def _sums(values: Ints, parts: Ints, count: int) -> Ints:
    """[count] the sum of the values [L] of each part; rows of part -1 are nowhere."""
    found = np.zeros(count, dtype=np.int64)
    some = parts >= 0
    np.add.at(found, parts[some], values[some])
    return found


def regrouped(
    placement: TablePlacement,
    access: TableAccess,
    work_s: Floats,
    bags: Mapping[str, Bags],
    room: RankRoom,
    *,
    seed: int,
    imbalance: float,
) -> TablePlacement | None:
    """The placement with its listed rows dealt to the same parts by co-access.

    Every part keeps its rows that aren't listed, hot rows stay hot, and no rank gets more
    rows than it has room for. Parts stay level in work, not in lookups: the rows of one
    group may be hotter than those of another, and as many lookups name fewer rows then.

    Args:
        placement: of exchange ``partial``, with two parts or more.
        access: how the table is used: the counts that the placement was made by.
        work_s: [ids] float64, above 0, what each listed row costs its owner in a step.
        bags: of each of its features, ids and lengths; as many bags of each.
        room: what the owners have left.
        seed: of the partitioner.
        imbalance: how far a part's work may grow, as a share.

    Returns:
        None where no two rows of a bag could be brought together.
    """
    parts = placement.decision.parts
    where, _ = placement.row_map.place(access.ids)
    cold = where < parts
    if not cold.any():
        return None
    # Whole numbers, so that sums don't depend on their order.
    work = np.maximum(work_s * (MOST_WORK / work_s.sum()), 1).astype(np.int64)
    listed = _Listed(access.ids[cold], access.counts[cold], work[cold], where[cold])
    graph = bag_hypergraph(*_vertices(placement, listed, bags), listed_rows=len(listed.ids))
    if len(graph.rows) < 2:
        return None
    dealt = np.full(len(listed.ids), -1)
    dealt[graph.rows] = listed.parts[graph.rows]
    # Rows that stay, and those without co-access, aren't counted: both are level already.
    limits: Floats = np.float64(1 + imbalance) * _sums(listed.work, dealt, parts)
    dealt[graph.rows] = partition(graph, listed.work[graph.rows], limits.tolist(), seed=seed)
    if not len(graph.fixed_parts):
        busy_s = np.asarray(room.busy_s[placement.owners].max(axis=0), dtype=np.float64)
        becomes = _relabelled(_sums(listed.work, dealt, parts), limits, busy_s)
        dealt[graph.rows] = becomes[dealt[graph.rows]]
    now = np.bincount(listed.parts, minlength=parts)
    most_rows = now + np.maximum(room.rows[placement.owners].min(axis=0), 0)
    _release(dealt, most_rows)
    _deal_rest(dealt, listed, most_rows)
    return _moved(placement, access, where, listed, dealt)


def _vertices(
    placement: TablePlacement, listed: _Listed, bags: Mapping[str, Bags]
) -> tuple[Ints, Ints]:
    """The vertices of bags, sample after sample, and how many each bag has."""
    features = [bags[name] for name in placement.table.features]
    samples = len(features[0][1])
    # Bags of all features come in turn, so that a bound on their number treats all alike.
    turn = np.arange(samples) * len(features)
    bag_of = np.concatenate(
        [np.repeat(turn + at, lengths) for at, (_, lengths) in enumerate(features)]
    )
    order = np.argsort(bag_of, kind="stable")
    ids = np.concatenate([named for named, _ in features])[order]
    lengths = np.bincount(bag_of, minlength=samples * len(features))
    parts, _ = placement.row_map.place(ids)
    vertices = np.where(parts < placement.decision.parts, len(listed.ids) + parts, -1)
    by_id = np.argsort(listed.ids)
    at = by_id[np.minimum(np.searchsorted(listed.ids[by_id], ids), len(by_id) - 1)]
    return np.where(listed.ids[at] == ids, at, vertices), lengths


def _relabelled(loads: Ints, limits: Floats, busy_s: Floats) -> Ints:
    """[parts] the part that each group of rows becomes.

    The group with the most work goes first, to the part whose owner is least busy among
    those whose limit it keeps to. If all groups keep to some part's limit each, they all
    will: what suits a group suits all lighter ones.
    """
    becomes = np.full(len(loads), -1)
    left = list(range(len(loads)))
    for group in np.argsort(-loads, kind="stable").tolist():
        allowed = [part for part in left if loads[group] <= limits[part]]
        # Where the partitioner broke a limit, the widest is broken least.
        part = (
            min(allowed, key=lambda part: (busy_s[part], part))
            if allowed
            else max(left, key=lambda part: (limits[part], -part))
        )
        becomes[group] = part
        left.remove(part)
    return becomes


def _release(dealt: Ints, most_rows: Ints) -> None:
    """Take the coldest rows out of parts that have more than they may."""
    for part, most in enumerate(most_rows.tolist()):
        dealt[np.flatnonzero(dealt == part)[most:]] = -1


def _deal_rest(dealt: Ints, listed: _Listed, most_rows: Ints) -> None:
    """Give each row without a part to the one that misses most work, the hottest first."""
    parts = len(most_rows)
    missing = _sums(listed.work, listed.parts, parts) - _sums(listed.work, dealt, parts)
    rows_left = most_rows - np.bincount(dealt[dealt >= 0], minlength=parts)
    missing[rows_left <= 0] = NO_ROOM
    for row in np.flatnonzero(dealt < 0).tolist():
        part = int(missing.argmax())
        dealt[row] = part
        missing[part] -= listed.work[row]
        rows_left[part] -= 1
        if rows_left[part] <= 0:
            missing[part] = NO_ROOM


def _moved(
    placement: TablePlacement, access: TableAccess, where: Ints, listed: _Listed, dealt: Ints
) -> TablePlacement:
    """The placement with listed rows in other parts; what isn't listed stays.

    Args:
        placement: before.
        access: names the listed rows.
        where: [ids] the part of each before, hot ones in the last.
        listed: those that aren't hot.
        dealt: [L] their parts afterwards.
    """
    row_map, parts = placement.row_map, placement.decision.parts
    unlisted = row_map.owned_rows - np.bincount(where, minlength=row_map.world_size)
    owners = where.copy()
    owners[where < parts] = dealt
    lookups = placement.planned_lookups.copy()
    more = _sums(listed.counts, dealt, parts) - _sums(listed.counts, listed.parts, parts)
    lookups[placement.owners] += more
    return replace(
        placement,
        row_map=RowMap.from_owners(
            listed_ids=access.ids, listed_owners=owners, unlisted_counts=unlisted
        ),
        planned_lookups=lookups,
    )
