"""Several profiles as one, and a profile cut to its hottest rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.bins import BinnedSums
from torchrec_oper.profile.row_sketch import add_by_id
from torchrec_oper.profile.sampler import TraceSampler
from torchrec_oper.profile.table_access import Ints, TableAccess
from torchrec_oper.profile.tail import blocks_of, cut_head
from torchrec_oper.profile.trace import Trace

if TYPE_CHECKING:
    from torchrec_oper.profile.access import AccessProfile


def merge_profiles(profiles: Sequence[AccessProfile]) -> AccessProfile:
    """The profile of all that was profiled: exactly what one pass over all would give.

    Needs profiles that list every row that was looked up: of blocks of rows without ids
    nobody knows which are the same. The result lists every row, too; ``binned`` cuts it.
    There is a trace if all have one, within the smallest of their budgets.

    Args:
        profiles: 1 or more, of the same tables, in any order.

    Raises:
        ProfileError: there is none, they are of different tables, or one has rows in
            blocks.
    """
    if not profiles:
        raise ProfileError("needs at least one profile to merge, found none")
    first = profiles[0]
    for number, profile in enumerate(profiles):
        profile.check_fits(first.tables)
        for table in profile.tables:
            if table.tail_rows.size or table.sketched:
                raise ProfileError(
                    f"profile {number} of {len(profiles)}: table {table.name} has"
                    f" {int(table.tail_rows.sum())} rows that aren't listed by id, so that it"
                    " can't be merged; list them (head_rows=2**62), merge, and cut the result"
                    " with .binned(), or merge the AccessCollectors instead"
                )
    return replace(
        first,
        tables=tuple(
            _merged([profile.table(table.name) for profile in profiles]) for table in first.tables
        ),
        samples=sum(profile.samples for profile in profiles),
        trace=_merged_trace([profile.trace for profile in profiles]),
    )


def binned_table(table: TableAccess, head_rows: int) -> TableAccess:
    """``table`` with ``head_rows`` rows listed at most, and the others in its tail."""
    order = np.argsort(table.ids)
    ids, counts, rest = cut_head(table.ids[order], table.counts[order], head_rows)
    if not rest.size:
        return table
    bins = BinnedSums()
    bins.add(rest)
    bins.merge(table.tail_rows, table.tail_counts)
    tail_rows, tail_counts = blocks_of(bins)
    return replace(table, ids=ids, counts=counts, tail_rows=tail_rows, tail_counts=tail_counts)


def _merged(accesses: Sequence[TableAccess]) -> TableAccess:
    total: tuple[Ints, Ints] = (np.empty(0, np.int64), np.empty(0, np.int64))
    for access in accesses:
        order = np.argsort(access.ids)
        ids, (counts,) = add_by_id(total, (access.ids[order], access.counts[order]))
        total = ids, counts
    ids, counts, _ = cut_head(*total, total[0].size)
    bag_counts, bag_rows = _merged_bags(accesses)
    return replace(
        accesses[0],
        ids=ids,
        counts=counts,
        bags=sum(access.bags for access in accesses),
        empty_bags=sum(access.empty_bags for access in accesses),
        bag_counts=bag_counts,
        bag_rows=bag_rows,
    )


def _merged_bags(accesses: Sequence[TableAccess]) -> tuple[Ints, Ints]:
    bins = BinnedSums()
    for access in accesses:
        if access.bags > access.empty_bags and not access.bag_counts.size:
            # A profile of format 1 doesn't know: nor does the sum.
            return np.empty(0, np.int64), np.empty(0, np.int64)
        bins.merge(access.bag_counts, access.bag_rows)
    return bins.filled()


def _merged_trace(traces: Sequence[Trace | None]) -> Trace | None:
    known = [trace for trace in traces if trace is not None]
    if len(known) < len(traces):
        return None
    sampler = TraceSampler(known[0].features, limit_ids=min(trace.limit_ids for trace in known))
    for trace in known:
        sampler.add_trace(trace)
    return sampler.trace()
