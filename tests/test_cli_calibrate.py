"""``oper calibrate`` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_oper.bench import calibrate as measuring
from torchrec_oper.cli import main as cli
from torchrec_oper.planner import Cluster

ROOT = Path(__file__).parents[1]

TINY = measuring.Effort(
    row_bytes=(32, 64), lookups=64, table_bytes=2**14, message_bytes=(256, 2**18), repeats=1
)
# As `oper calibrate --quick`, but tiny; torchrun starts it.
PROGRAM = f"""
import sys
from torchrec_oper.bench import calibrate
calibrate.QUICK = calibrate.{TINY!r}
from torchrec_oper.cli.main import main
sys.exit(main(["calibrate", "--quick", "-o", sys.argv[1]]))
"""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tiny sizes, in an empty current folder."""
    monkeypatch.setattr(measuring, "QUICK", TINY)
    monkeypatch.setattr(measuring, "FULL", TINY)
    monkeypatch.chdir(tmp_path)


def test_one_rank(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate"]) == 0
    cluster = Cluster.load("cluster.json")
    assert cluster.world_size == 1
    assert [size for size, _ in cluster.rates.read.points] == [32, 64]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "measured 1 rank on 1 host, all at once; medians of 1"
    assert lines[-2] == "written to cluster.json"
    assert "Cluster.load('cluster.json')" in lines[-1]


def test_no_file_has_no_next_step(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--quick", "-o", os.devnull]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {os.devnull}"


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("no/c.json", "oper: no/c.json: there is no such folder: "),
        (".", "oper: .: is a folder, wanted a file to write"),
    ],
)
def test_a_bad_output_is_found_before_the_work(
    tiny: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    message: str,
) -> None:
    monkeypatch.setattr(measuring, "calibrate", lambda *args, **options: pytest.fail("measured"))
    assert cli.main(["calibrate", "-o", output]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert os.listdir() == []


@pytest.mark.ranks
def test_torchrun_writes_one_cluster(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    output = tmp_path / "cluster.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*command, "--nproc-per-node", "2", str(program), str(output)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert Cluster.load(output).world_size == 2
    assert Cluster.load(output).hosts.tolist() == [0, 0]
    lines = result.stdout.splitlines()
    assert lines[0] == "measured 2 ranks on 1 host, all at once; medians of 1"
    assert sum(line.startswith("written to") for line in lines) == 1
    assert any(line.startswith("links within a host (gloo): ") for line in lines)
    assert any(line.startswith("worst error of the model: ") for line in lines)
