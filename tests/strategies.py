"""Random row maps and profiles for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from torchrec_oper.planner import RowMap
from torchrec_oper.profile import TableAccess
from torchrec_oper.table import TableSpec


@st.composite
def row_maps(draw: st.DrawFn, max_rows: int = 40, max_world: int = 5) -> RowMap:
    """Any row map: listed and unlisted rows on any owner, owners without rows."""
    rows = draw(st.integers(1, max_rows))
    world_size = draw(st.integers(1, max_world))
    order = draw(st.permutations(range(rows)))
    listed = np.array(order[: draw(st.integers(0, rows))], dtype=np.int64)
    owners = st.integers(0, world_size - 1)
    listed_owners = draw(st.lists(owners, min_size=len(listed), max_size=len(listed)))
    rest = rows - len(listed)
    rest_owners = draw(st.lists(owners, min_size=rest, max_size=rest))
    return RowMap.from_owners(
        listed_ids=listed,
        listed_owners=np.array(listed_owners, dtype=np.int64),
        unlisted_counts=np.bincount(np.array(rest_owners, dtype=np.int64), minlength=world_size),
    )


def access(
    table: TableSpec, counts: dict[int, int], *, tail: tuple[int, int] | None = None
) -> TableAccess:
    """A profile of one table from the count of each id, with one id in a bag.

    Args:
        table: the table.
        counts: lookups of each listed id.
        tail: rows that aren't listed, and their lookups together.
    """
    ordered = sorted(counts, key=lambda id_: (-counts[id_], id_))
    tail_rows, tail_lookups = tail or (0, 0)
    lookups = sum(counts.values()) + tail_lookups
    return TableAccess(
        name=table.name,
        rows=table.rows,
        features=table.features,
        ids=np.array(ordered, dtype=np.int64),
        counts=np.array([counts[id_] for id_ in ordered], dtype=np.int64),
        bags=lookups,
        empty_bags=0,
        tail_rows=np.array([tail_rows] if tail else [], dtype=np.int64),
        tail_counts=np.array([tail_lookups] if tail else [], dtype=np.int64),
        bag_rows=np.array([lookups] if lookups else [], dtype=np.int64),
        bag_counts=np.array([lookups] if lookups else [], dtype=np.int64),
    )
