"""Words that several messages share."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """The number and its noun: ``1 sample``, ``4,000 samples``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
