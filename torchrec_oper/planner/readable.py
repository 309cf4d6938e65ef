"""Numbers and tables as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Digits that tell 0.1 % of difference.
DIGITS = 4

_NUMBER = re.compile(r"[-+]?[\d,.]+( ?%)?|-?")


@dataclass(frozen=True)
class Unit:
    """A unit, and how many decimals a column of numbers in it has."""

    name: str
    size: float
    decimals: int

    def text(self, value: float) -> str:
        """The value's number of units, with thousands marks."""
        return f"{value / self.size:,.{self.decimals}f}"


def time_unit(seconds: Iterable[float]) -> Unit:
    """The unit for a column of seconds: us, ms or s, as the largest needs it."""
    return _unit(seconds, (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)))


def byte_unit(sizes: Iterable[float]) -> Unit:
    """The unit for a column of bytes, from bytes to TiB."""
    names = ("bytes", "KiB", "MiB", "GiB", "TiB")
    return _unit(sizes, tuple((name, 1024.0**power) for power, name in enumerate(names)))


def _unit(values: Iterable[float], units: Sequence[tuple[str, float]]) -> Unit:
    most = max((abs(value) for value in values), default=0.0)
    name, size = next(
        (unit for unit in reversed(units) if most >= unit[1] * (1 - 10.0**-DIGITS)), units[0]
    )
    whole = len(f"{most / size:.0f}")
    return Unit(name, size, 0 if name == "bytes" else max(DIGITS - whole, 0))


def seconds_text(seconds: float) -> str:
    """For instance ``107.2 us`` or ``1.204 ms``."""
    unit = time_unit([seconds])
    return f"{unit.text(seconds)} {unit.name}"


def bytes_text(size: float) -> str:
    """For instance ``512 bytes`` or ``1.750 GiB``."""
    unit = byte_unit([size])
    return f"{unit.text(size)} {unit.name}"


def percent(share: float) -> str:
    """For instance ``12.3 %``; small shares keep their digits, as in ``0.042 %``."""
    value = abs(share * 100)
    decimals = 1 if value >= 1 or value < 5e-4 else 2 if value >= 0.1 else 3
    return f"{share * 100:.{decimals}f} %"


def part_name(part: str) -> str:
    """The part of a step as a title; ``memory`` alone would be taken for bytes."""
    return {"memory": "row work", "allreduce": "all-reduce"}.get(part, part)


def count(number: int, noun: str) -> str:
    """The number with its noun, in the plural but for one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def table_of(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns under their titles; numbers with thousands marks, to the right."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    right = [all(_NUMBER.fullmatch(row[at]) for row in cells) for at in range(len(titles))]

    def line(values: Sequence[str]) -> str:
        padded = [
            value.rjust(width) if to_right else value.ljust(width)
            for value, width, to_right in zip(values, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = ["-" * width for width in widths]
    return "\n".join(line(values) for values in [list(titles), rule, *cells])


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)
