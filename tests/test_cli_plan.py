"""``oper plan``, ``explain``, ``diff`` and ``verify`` as a user runs them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from plan_cases import TABLES, changed, profile

from torchrec_oper.cli import main as cli
from torchrec_oper.planner import Cluster, Plan, planning
from torchrec_oper.planner.presets import machine

MACHINE = ("--ranks", "4", "--memory-gib", "0.01", "--ranks-per-host", "2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder but for a profile, tables and a cluster."""
    monkeypatch.chdir(tmp_path)
    profile().save("p.profile")
    Path("tables.json").write_text(json.dumps([table.to_json() for table in TABLES]))
    Cluster.uniform(2, memory_bytes=10**7).save("cluster.json")
    return tmp_path


def oper(*arguments: object) -> None:
    assert cli.main([str(argument) for argument in arguments]) == 0


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a user sees after a mistake."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("oper: ")
    assert printed.err.count("\n") == 1
    return printed.err[len("oper: ") : -1]


def test_a_plan_from_a_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oper(
        *("plan", "--profile", "p.profile", "--dim", 64, "--dim", "user=32", *MACHINE),
        *("--batch-size", 256, "--optimizer-bytes", 4, "--module", "ebc", "-o", "a.plan"),
    )
    plan = Plan.load("a.plan")
    assert [p.table.dim for p in plan.placements] == [64, 32, 64]
    assert [p.table.optimizer_bytes_per_row for p in plan.placements] == [4, 4, 4]
    assert {p.module for p in plan.placements} == {"ebc"}
    assert plan.cluster == Cluster.uniform(4, memory_bytes=int(0.01 * 2**30), ranks_per_host=2)
    assert plan.workload.batch_size == 256
    assert plan.workload.profile_hash == profile().content_hash
    out = capsys.readouterr().out
    assert plan.report() in out
    assert out.endswith("\nwritten to a.plan\nnext: oper explain a.plan --profile p.profile\n")


def test_a_plan_from_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oper("plan", "--tables", "tables.json", "--cluster", "cluster.json", "--objective", "infer")
    plan = Plan.load("tables.plan")
    assert tuple(p.table for p in plan.placements) == TABLES
    assert plan.cluster == Cluster.load("cluster.json")
    assert plan.workload.objective == "infer"
    limits = ("--exchanges", "rows,partial", "--no-hot-rows", "--seed", 3, "-o", "b.plan")
    oper("plan", "--tables", "tables.json", "--preset", "8xH100", "--hosts", 2, *limits)
    plan = Plan.load("b.plan")
    assert plan.cluster == machine("8xH100", hosts=2)
    assert plan.space.exchanges == ("rows", "partial")
    assert not plan.space.hot_rows
    assert plan.seed == 3
    capsys.readouterr()
    oper("plan", "--tables", "tables.json", "--cluster", "cluster.json", "-o", os.devnull)
    assert capsys.readouterr().out.endswith(f"\nwritten to {os.devnull}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--profile no.profile", "no.profile: No such file or directory"),
        ("--profile p.profile --dim 4 -o no/a.plan", "no/a.plan: there is no such folder"),
        ("--profile p.profile --dim 4 -o ./p.profile", "p.profile: is read as an input"),
        ("--tables tables.json --picture a.gif", "a picture is called *.png, *.svg, *.pdf"),
        ("--tables tables.json --picture no/a.png", "no/a.png: there is no such folder"),
        ("", "which tables? Give --profile P --dim D, or --tables FILE"),
        ("--profile p.profile", "how many elements has a row of table item? "),
        ("--profile p.profile --dim item=4", "how many elements has a row of table user? "),
        ("--profile p.profile --dim 4 --dim x=4", "--dim x=...: the profile has no such table"),
        ("--tables tables.json --dim 4", "--dim and --dtype are for tables of a profile"),
        ("--tables p.profile", "p.profile isn't JSON: "),
        ("--tables cluster.json", "cluster.json holds a dict, wanted a list of tables"),
        ("--tables tables.json --batch-size 0", "batch_size must be an integer of 1 or more"),
        ("--tables tables.json --exchanges x", "exchanges must be some of "),
        ("--tables tables.json --optimizer-bytes=-1", "table item: optimizer_bytes_per_row must"),
    ],
)
def test_mistakes_are_one_line_before_the_work(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.setattr(planning, "optimize", lambda *args, **options: pytest.fail("planned"))
    before = sorted(os.listdir())
    assert complaint(capsys, "plan", *arguments.split(), *MACHINE).startswith(message)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "which ranks? Give one of --cluster FILE, --preset NAME or --ranks W, found none"),
        ("--ranks 4 --preset 8xH100", "which ranks? Give one of "),
        ("--ranks 4", "how much memory has a rank? Say --memory-gib G"),
        ("--ranks 4 --memory-gib nan", "--memory-gib must be above 0"),
        ("--ranks 4 --memory-gib 1 --hosts 2", "--hosts goes with --preset, found --ranks"),
        ("--preset 8xH100 --memory-gib 1", "--memory-gib goes with --ranks, found --preset"),
        ("--preset 9xH100", "machine must be one of "),
        ("--ranks 0 --memory-gib 1", "world_size must be an integer of 1 or more"),
        ("--ranks 2 --memory-gib 1e-6", "the tables need "),
    ],
)
def test_ranks_that_make_no_sense(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    found = complaint(capsys, "plan", "--tables", "tables.json", *arguments.split())
    assert found.startswith(message)


@pytest.mark.parametrize("text", ["x", "item=", "item=0", "-3"])
def test_a_dim_is_a_number(folder: Path, text: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", f"--dim={text}"])


def test_explain_diff_and_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ("plan", "--profile", "p.profile", "--dim", 32)
    oper(*source, *MACHINE, "-o", "a.plan")
    oper(*source, "--cluster", "cluster.json", "-o", "b.plan")
    capsys.readouterr()

    oper("explain", "a.plan", "--profile", "p.profile", "--top", 1, "--ladder")
    out = capsys.readouterr().out
    assert "... 2 other tables" in out
    assert "what each freedom gains:" in out
    oper("explain", "a.plan", "--profile", "p.profile", "--json")
    assert json.loads(capsys.readouterr().out)["plan"] == Plan.load("a.plan").content_hash

    oper("diff", "a.plan", "b.plan")
    assert "the clusters differ" in capsys.readouterr().out
    oper("diff", "a.plan", "b.plan", "--json")
    assert json.loads(capsys.readouterr().out)["second"]["ranks"] == 2

    oper("verify", "a.plan", "--profile", "p.profile")
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[:4]] == [
        [what, "ok"] for what in ("cost", "memory", "rows", "bound")
    ]
    assert out.endswith("\na.plan: all as the plan says\n")


def test_a_wrong_plan_has_status_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    oper("plan", "--tables", "tables.json", *MACHINE)
    made = Plan.load("tables.plan")
    seconds = {**made.seconds, "ids": tuple(s / 2 for s in made.seconds["ids"])}
    changed(made, seconds=seconds).save("lie.plan")
    capsys.readouterr()
    assert cli.main(["verify", "lie.plan"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("cost    WRONG  ")
    assert "ids of rank " in out
    assert out.endswith("lie.plan: 1 wrong\n")
    assert cli.main(["verify", "lie.plan", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["correct"]
    assert [bool(check["trouble"]) for check in told["checks"]] == [True, False, False]
    assert cli.main(["verify", "tables.plan", "--json"]) == 0


def test_what_the_plan_was_made_with_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oper("plan", "--profile", "p.profile", "--dim", 32, *MACHINE, "-o", "a.plan")
    profile(1).save("other.profile")
    for command in ("explain", "verify"):
        found = complaint(capsys, command, "a.plan")
        assert found.startswith("a.plan was made with profile ")
        assert found.endswith("give it with --profile")
        assert "but the one given is" in complaint(
            capsys, command, "a.plan", "--profile", "other.profile"
        )
        assert "wanted a plan" in complaint(capsys, command, "p.profile")
    assert "wanted a plan" in complaint(capsys, "diff", "a.plan", "p.profile")
    assert complaint(capsys, "diff", "a.plan", "no") == "no: No such file or directory"


def test_pictures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    oper("plan", "--tables", "tables.json", *MACHINE, "--picture", "a.svg")
    assert "\ndrawn to a.svg\n" in capsys.readouterr().out
    oper("explain", "tables.plan", "--picture", "b.svg")
    assert capsys.readouterr().out.endswith("\ndrawn to b.svg\n")
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()
    assert complaint(capsys, "explain", "tables.plan", "--picture", "tables.plan").startswith(
        "a picture is called"
    )
