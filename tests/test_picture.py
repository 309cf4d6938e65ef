"""Pictures of plans: that they are made, and what is said where they can't be."""

from __future__ import annotations

import builtins
import os
from pathlib import Path

import pytest
from plan_cases import plan
from test_plan_report import wide_plan

from torchrec_oper.errors import PlanError, VersionError
from torchrec_oper.planner.picture import check_picture, save_picture

HEADS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", HEADS)
def test_each_kind_of_file(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        save_picture(plan(), tmp_path / f"{name}{suffix}")
    content = (tmp_path / f"one{suffix}").read_bytes()
    assert content.startswith(HEADS[suffix])
    assert (tmp_path / f"two{suffix}").read_bytes() == content


def test_it_says_what_it_shows(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        save_picture(plan(), tmp_path / "a.svg")
        save_picture(wide_plan(512, 3), tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    for words in (
        "3 tables on 4 ranks, training",
        "predicted step [us]",
        "memory [KiB]",
        "bound: ",
    ):
        assert words in text
    for words in ("rank<", "values travel", "rows read and updated", "latency", "cap: 976.6 KiB"):
        assert words in text
    wide = (tmp_path / "b.svg").read_text()
    assert "3 tables on 512 ranks" in wide
    assert "cap: 1.000 MiB" in wide
    # Outlines and not 512 bars.
    assert wide.count("<path") < 100


def test_the_suffix_says_the_kind(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"a picture is called \*.png, \*.svg, \*.pdf; found 'a.gif'"
    ):
        save_picture(plan(), "a.gif")
    assert os.listdir(tmp_path) == []


def test_without_matplotlib_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def imports(name: str, *args: object, **options: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", imports)
    with pytest.raises(VersionError, match=r"pip install 'torchrec-oper\[report\]'"):
        check_picture("a.png")


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(OSError) as error:
        save_picture(plan(), tmp_path / "no" / "a.png")
    assert error.value.filename == str(tmp_path / "no" / "a.png")
