"""``oper bench`` and ``oper bench profile``."""

import json
from pathlib import Path

import numpy as np
import pytest

from torchrec_oper.bench import profile as bench
from torchrec_oper.bench.profile import Effort, Figure, criteo_lines, report_lines, zipf_ids
from torchrec_oper.cli import main as cli
from torchrec_oper.cli.bench import BENCHES
from torchrec_oper.profile.criteo import CriteoLog

TINY = Effort(log_rows=50, batches=2, steps=5, repeats=1)


def test_the_benches_are_listed(capsys):
    for arguments in (["bench", "--help"], ["bench", "profile", "--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
        assert "profile" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench"])
    assert stop.value.code == 2
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err
    assert len({bench.NAME for bench in BENCHES}) == len(BENCHES)


def test_figures_are_printed_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "QUICK", TINY)
    monkeypatch.setattr(bench, "BATCH_SIZE", 8)
    assert cli.main(["bench", "profile", "--quick", "--json", "figures.json"]) == 0
    figures = json.loads(Path("figures.json").read_text())["figures"]
    assert [figure["name"] for figure in figures] == ["Criteo log", "batches", "callback"]
    assert [figure["required"] for figure in figures] == [250_000, 40e6, 0.03]
    assert all(figure["value"] > 0 for figure in figures)
    assert all(
        figure["met"]
        == (figure["value"] <= 0.03 if figure["at_most"] else figure["value"] >= figure["required"])
        for figure in figures
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["measured", "required"]
    assert "250,000 rows/s" in lines[1]
    assert "50 rows, made up" in lines[2]
    assert "40,000,000 ids/s" in lines[3]
    assert "3.00% of a step" in lines[5]
    assert lines[-1] == "written to figures.json"


def test_a_given_log_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "QUICK", TINY)
    log = tmp_path / "train.txt"
    log.write_bytes(b"".join(criteo_lines(np.random.default_rng(0), 30)))
    assert cli.main(["bench", "profile", "--quick", "--data", str(log)]) == 0
    assert "30 rows, train.txt, parsed" in capsys.readouterr().out
    assert cli.main(["bench", "profile", "--data", str(tmp_path / "none")]) == 2
    assert "none: No such file or directory" in capsys.readouterr().err
    assert cli.main(["bench", "profile", "--data", str(log), "--json", str(log)]) == 2
    assert "is read as an input" in capsys.readouterr().err


def test_what_is_made_up_is_a_criteo_log(tmp_path):
    log = tmp_path / "train.txt"
    log.write_bytes(b"".join(criteo_lines(np.random.default_rng(0), 10_007)))
    blocks = list(CriteoLog(log).blocks())
    assert sum(block.labels.size for block in blocks) == 10_007
    present = np.concatenate([block.present for block in blocks], axis=1)
    assert 0.88 < present.mean() < 0.92


@pytest.mark.parametrize("rows", [1, 2, 3, 1000, 10**7])
def test_zipf_ids(rows):
    ids = zipf_ids(np.random.default_rng(0), rows, 20_000)
    assert ids.dtype == np.int64
    assert 0 <= ids.min() <= ids.max() < rows
    counts = np.sort(np.unique(ids, return_counts=True)[1])[::-1]
    if rows > 2:  # the hottest has log(2) / log(rows + 1) of all
        assert counts[0] == pytest.approx(20_000 * np.log(2) / np.log(rows + 1), rel=0.1)


def test_a_missed_figure_says_so():
    figures = (
        Figure("a", 1.0, 2.0, "rows/s", at_most=False, how="one"),
        Figure("b", 0.01, 0.03, "of a step", at_most=True, how="two"),
    )
    assert [figure.met for figure in figures] == [False, True]
    lines = list(report_lines(figures))
    assert lines[1].endswith("2 rows/s, MISSED")
    assert lines[3].endswith("3.00% of a step, met")
