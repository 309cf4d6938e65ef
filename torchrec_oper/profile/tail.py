"""The cold rows of a table as blocks of rows of about equal counts, and the cut before them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from torchrec_oper.profile.bins import BinnedSums

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Blocks = tuple[Ints, Ints]  # rows, and lookups of all of them, of each block, hottest first

_MOST_FACTOR = 4.0  # of the hottest rows of a sample, where it is far off


def cut_head(ids: Ints, counts: Ints, head_rows: int) -> tuple[Ints, Ints, Ints]:
    """The hottest rows, hottest first, of equal ones the smaller id first.

    Args:
        ids: int64 [N], ascending.
        counts: int64 [N].
        head_rows: how many, at most.

    Returns:
        Ids and counts of the hottest, and the counts of the others.
    """
    if ids.size > head_rows:
        at = ids.size - head_rows
        least = int(np.partition(counts, at)[at]) if head_rows else np.iinfo(np.int64).max
        hot = counts > least
        level = np.flatnonzero(counts == least)
        hot[level[: head_rows - np.count_nonzero(hot)]] = True
        ids, counts, rest = ids[hot], counts[hot], counts[~hot]
    else:
        rest = counts[:0]
    order = np.argsort(-counts, kind="stable")
    return ids[order], counts[order], rest


def blocks_of(bins: BinnedSums) -> Blocks:
    """The blocks of rows whose counts fell into ``bins``."""
    rows, counts = bins.filled()
    return rows[::-1], counts[::-1]


def fit_blocks(
    blocks: Blocks, *, weight: int, lookups: int, room_rows: int, most_per_row: int
) -> Blocks:
    """Blocks of a sample of rows, scaled to all rows.

    Args:
        blocks: of the sample.
        weight: how many rows a row of the sample stands for.
        lookups: what the result's lookups are to sum to: its blocks' rows are scaled so
            that they do, and their lookups per row are kept.
        room_rows: rows in the result at most.
        most_per_row: lookups of a row of the hottest block at most.
    """
    rows, counts = blocks[0].tolist(), blocks[1].tolist()
    if not lookups or not rows:
        # No row of the sample: all that is known is how many there are at least.
        least = [(-(-lookups // most_per_row), lookups)] if lookups else []
        found = np.array(least, np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1]
    factors = weight * _calibrated(np.array(rows, float), np.array(counts, float), lookups / weight)
    scaled = [max(1, round(each)) for each in (rows * factors).tolist()]
    # Rounded down, a mean stays in its bin, and the blocks stay in order.
    totals = [
        max(size, size * count // members)
        for size, count, members in zip(scaled, counts, rows, strict=True)
    ]
    _give_lookups(scaled, totals, lookups - sum(totals))
    _take_rows(scaled, sum(scaled) - room_rows)
    _merge_rising(scaled, totals)
    if totals[0] > most_per_row * scaled[0]:
        scaled[0] = min(-(-totals[0] // most_per_row), room_rows - sum(scaled[1:]))
    return np.array(scaled, np.int64), np.array(totals, np.int64)


def _calibrated(rows: Floats, counts: Floats, lookups: float) -> Floats:
    """Factors of the blocks' rows with which their lookups are ``lookups``.

    The generalised regression estimate (Deville and Sarndal, "Calibration estimators in
    survey sampling", JASA 1992): what is lacking, or too much, is mostly so because few of
    the hottest rows, or too many, are in the sample; so ``1 + a * count`` for a row.
    """
    per_row = counts / rows
    slope = (lookups - counts.sum()) / (counts @ per_row)
    factors = np.clip(1 + slope * per_row, 1 / _MOST_FACTOR, _MOST_FACTOR)
    return np.asarray(factors * (lookups / (factors @ counts)))


def _take_rows(rows: list[int], excess: int) -> None:
    """Remove rows, from the coldest blocks first, one row left in each."""
    for at in reversed(range(len(rows))):
        taken = min(max(excess, 0), rows[at] - 1)
        rows[at] -= taken
        excess -= taken


def _give_lookups(rows: list[int], counts: list[int], missing: int) -> None:
    """Let the coldest blocks take up what rounding left, with rows where they are seen once."""
    while counts[-1] + missing < 1:
        missing += counts.pop()
        rows.pop()
    once = rows[-1] == counts[-1]
    counts[-1] += missing
    rows[-1] = counts[-1] if once else min(rows[-1], counts[-1])


def _merge_rising(rows: list[int], counts: list[int]) -> None:
    """Join a block to the one before it where it has more lookups per row."""
    at = len(rows) - 1
    while at > 0:
        if counts[at] * rows[at - 1] > counts[at - 1] * rows[at]:
            rows[at - 1] += rows.pop(at)
            counts[at - 1] += counts.pop(at)
            at = len(rows)
        at -= 1
