"""Plain-text tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def rank_table(columns: Mapping[str, Sequence[int]]) -> str:
    """A table with a line for each rank and the given columns."""
    ranks = range(len(next(iter(columns.values()))))
    rows = [(rank, *(values[rank] for values in columns.values())) for rank in ranks]
    return table_of(("rank", *columns), rows)


def load_table(planned: Sequence[int], measured: Sequence[int]) -> str:
    """Planned against measured lookups, a line for each rank.

    Shares are of all ranks' lookups, so they compare even where the measured run
    covered another part of the data than the profile.
    """
    rows = [
        (rank, want, _share(want, sum(planned)), have, _share(have, sum(measured)))
        for rank, (want, have) in enumerate(zip(planned, measured, strict=True))
    ]
    titles = ("rank", "planned lookups", "share", "measured lookups", "share")
    return table_of(titles, rows)


def table_of(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under their titles; numbers with thousands marks, to the right."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [
        max(len(title), *(len(row[column]) for row in cells)) if cells else len(title)
        for column, title in enumerate(titles)
    ]
    right = [all(isinstance(row[c], int | float) for row in rows) for c in range(len(titles))]

    def line(values: Sequence[str]) -> str:
        padded = [
            value.rjust(width) if to_right else value.ljust(width)
            for value, width, to_right in zip(values, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = ["-" * width for width in widths]
    return "\n".join(line(values) for values in [list(titles), rule, *cells])


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"
