"""Numbers and tables as people read them."""

from __future__ import annotations

import pytest

from torchrec_oper.planner.readable import (
    byte_unit,
    bytes_text,
    count,
    percent,
    seconds_text,
    table_of,
    time_unit,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.000 us"),
        (1.5e-8, "0.015 us"),
        (107.04e-6, "107.0 us"),
        (999.96e-6, "1.000 ms"),
        (1.2041e-3, "1.204 ms"),
        (2.0, "2.000 s"),
        (86400.0, "86,400 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.000 KiB"),
        (64e9, "59.60 GiB"),
        (2**50, "1,024 TiB"),
    ],
)
def test_bytes(size: float, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0 %"), (1e-9, "0.0 %"), (0.00042, "0.042 %"), (0.0075, "0.75 %"), (0.123, "12.3 %")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text


def test_a_column_has_one_unit() -> None:
    unit = time_unit([5e-6, 3.2e-3])
    assert [unit.name, unit.text(5e-6), unit.text(3.2e-3)] == ["ms", "0.005", "3.200"]
    assert byte_unit([]).name == "bytes"


def test_numbers_stand_right_and_words_left() -> None:
    table = table_of(("name", "rows", "gain"), [("a", 1234, "1.0 %"), ("long", 5, "-")])
    assert table.splitlines() == [
        "name   rows   gain",
        "----  -----  -----",
        "a     1,234  1.0 %",
        "long      5      -",
    ]
    assert table_of(("a", "b"), []).splitlines() == ["a  b", "-  -"]


def test_counts() -> None:
    assert [count(1, "row"), count(2000, "row")] == ["1 row", "2,000 rows"]
