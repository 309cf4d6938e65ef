"""The command line of the example: examples/train_options.py."""

from __future__ import annotations

import os

import example_modules
import pytest

train_options = example_modules.load("train_options").train_options

WRONG_OPTIONS = {
    "--steps 0": "--steps must be between 1 and 1,000,000,000, found 0",
    "--ranks 0": "--ranks must be between 1 and 1,024, found 0",
    "--ranks 100000": "--ranks must be between 1 and 1,024, found 100000",
    "--dim 4000000000": "--dim must be between 1 and 65,536, found 4000000000",
    f"--epochs {10**20}": f"--epochs must be between 1 and 1,000,000,000, found {10**20}",
    f"--global-batch-size {10**20}": "--global-batch-size must be between 1 and 1,000,000,000",
    f"--samples {10**20}": "--samples must be between 1 and 10,000,000,000, found",
    f"--seed {2**32}": "--seed must be between 0 and 4,294,967,295, found 4294967296",
    "--planner none --ranks 2": "--planner none trains unsharded in one process, found 2 ranks",
    "--global-batch-size 7": "--global-batch-size must be a multiple of the 2 ranks, found 7",
    "--holdout 1": "--holdout must be at least 0 and below 1, found 1.0",
    "--lr nan": "--lr must be a number above 0, found nan",
    "--lr 1e999": "--lr must be a number above 0, found inf",
    "--scale 2": "--scale must be above 0 and at most 1, found 2.0",
    "--scale 1e300": "--scale must be above 0 and at most 1, found 1e+300",
    "--top 64,": "argument --top: wanted widths like 64,32, none above 65,536, found '64,'",
    "--top 100000000000": "argument --top: wanted widths like 64,32, none above 65,536, found",
    "--data nowhere.tsv": "--data: nowhere.tsv is not there, or is not a file",
    "--log-losses /no/where": "--log-losses: /no/where: there is no such folder: /no",
    "--planner best": "argument --planner: invalid choice: 'best'",
}


@pytest.fixture(autouse=True)
def _not_started_by_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def complaint(arguments, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        train_options.parse(arguments)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize("given", WRONG_OPTIONS)
def test_a_wrong_option_is_named_in_one_line(given, capsys):
    assert complaint(given.split(), capsys).startswith(f"error: {WRONG_OPTIONS[given]}")


@pytest.mark.parametrize(
    "given",
    [
        "--steps 1000000000 --dim 65536 --top 65536 --seed 4294967295",
        "--ranks 1024 --samples 10000000000 --epochs 1000000000 --log-losses /dev/null",
    ],
)
def test_the_largest_values_are_taken(given):
    train_options.parse(given.split())


def linked(link, path):
    def make(log, folder):
        (folder / "link").unlink(missing_ok=True)
        link(log, folder / "link")
        return folder / path

    return make


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(lambda log, folder: log, id="itself"),
        pytest.param(lambda log, folder: folder / ".." / folder.name / log.name, id="detour"),
        pytest.param(linked(lambda log, link: link.symlink_to(log), "link"), id="symbolic link"),
        pytest.param(linked(lambda log, link: os.link(log, link), "link"), id="hard link"),
    ],
)
def test_the_losses_never_go_over_the_log(name, tmp_path, capsys):
    log = tmp_path / "clicks.tsv"
    log.write_text("the user's clicks")
    output = name(log, tmp_path)
    message = complaint(["--data", str(log), "--log-losses", str(output)], capsys)
    assert message.startswith(f"error: --log-losses: {output}")
    assert "is the log to train on" in message or "is read as an input" in message
    assert log.read_text() == "the user's clicks"


def test_the_losses_never_go_over_the_log_that_is_generated(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_options, "GENERATED", tmp_path / "generated")
    log = train_options.parse(["--samples", "100"]).log
    assert not log.exists()
    message = complaint(["--samples", "100", "--log-losses", str(log)], capsys)
    assert message.startswith(f"error: --log-losses: {log} is the log to train on")
    train_options.parse(["--samples", "101", "--log-losses", "/dev/null"])


def test_losses_that_can_not_be_written_are_refused_before_any_work(tmp_path, capsys):
    message = complaint(["--log-losses", str(tmp_path)], capsys)
    assert message.startswith(f"error: --log-losses: {tmp_path}: is a folder")


def test_only_rank_0_complains(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        train_options.parse(["--steps", "0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""


def test_ranks_of_torchrun_and_of_the_command_line_have_to_agree(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train_options.parse([]).ranks == 2
    message = complaint(["--ranks", "3"], capsys)
    assert "--ranks 3, but torchrun started 2 ranks" in message
