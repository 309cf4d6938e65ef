"""The example program, run as a user runs it: examples/train_dlrm.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
REAL_LOG = ROOT.parent / "shared" / "data" / "criteo_kaggle_head10k_train.tsv"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SAMPLES, HELD_OUT, GLOBAL_BATCH = 4000, 400, 96
STEPS = (SAMPLES - HELD_OUT) // GLOBAL_BATCH
LONGEST_S = 120

pytestmark = pytest.mark.ranks


@dataclass
class Run:
    code: int
    out: str
    err: str
    losses: list[float]

    def auc(self) -> float:
        return float(re.search(r"held out: AUC ([\d.]+), log-loss [\d.]+\n", self.out)[1])

    def lookups(self) -> list[tuple[int, int]]:
        """(planned, measured) of each rank, from the table at the end."""
        table = self.out[self.out.rindex("planned lookups") :].splitlines()[2:]
        columns = [line.replace(",", "").split() for line in table]
        return [(int(planned), int(measured)) for _, planned, _, measured, _ in columns]


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def program(*options, torchrun=False, examples=EXAMPLES) -> list[str]:
    start = TORCHRUN if torchrun else ()
    return [sys.executable, *start, str(examples / "train_dlrm.py"), *map(str, options)]


def run(*options, torchrun=False, losses=None, examples=EXAMPLES) -> Run:
    extra = [] if losses is None else ["--log-losses", losses]
    done = subprocess.run(
        program(*options, *extra, torchrun=torchrun, examples=examples),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    values = [json.loads(line) for line in losses.read_text().splitlines()] if losses else []
    assert [value["step"] for value in values] == list(range(len(values)))
    return Run(done.returncode, done.stdout, done.stderr, [value["loss"] for value in values])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def log(folder):
    path = folder / "clicks.tsv"
    subprocess.run(
        [
            *(sys.executable, str(EXAMPLES / "click_log.py"), "-o", str(path)),
            *("--samples", str(SAMPLES), "--scale", "0.001"),
        ],
        env=environment(),
        check=True,
        capture_output=True,
    )
    return path


def options(log, planner):
    return (
        *("--data", log, "--scale", 0.001, "--global-batch-size", GLOBAL_BATCH),
        *("--planner", planner, "--seed", 5),
    )


@pytest.fixture(scope="module")
def oper(folder, log):
    return run(*options(log, "oper"), torchrun=True, losses=folder / "oper.jsonl")


@pytest.fixture(scope="module")
def unsharded(folder, log):
    return run(*options(log, "none"), losses=folder / "none.jsonl")


def assert_same_losses(found: Run, reference: Run, steps: int) -> None:
    assert found.code == 0, found.err
    assert reference.code == 0, reference.err
    assert len(found.losses) == len(reference.losses) == steps
    np.testing.assert_allclose(found.losses, reference.losses, rtol=1e-5)
    assert len(set(reference.losses)) == steps  # each from another batch and other weights


def test_two_ranks_under_torchrun_train_as_one_unsharded_process(oper, unsharded):
    assert_same_losses(oper, unsharded, STEPS)


def test_torchrecs_planner_trains_the_same_model(folder, log, unsharded):
    stock = run(*options(log, "torchrec"), losses=folder / "torchrec.jsonl")
    assert_same_losses(stock, unsharded, STEPS)
    assert "no number was planned" in stock.out
    assert sum(measured for _, measured in stock.lookups()) == sum(
        measured for _, measured in unsharded.lookups()
    )


def test_every_rank_looks_up_what_was_planned(oper, log):
    lines = log.read_text().splitlines()[: STEPS * GLOBAL_BATCH]
    ids = sum(text != "" for line in lines for text in line.split("\t")[14:])
    lookups = oper.lookups()
    assert len(lookups) == 2
    assert all(planned == measured for planned, measured in lookups)
    assert sum(planned for planned, _ in lookups) == ids
    assert min(lookups)[0] > 0
    assert "planned for the same batches" in oper.out


def test_the_plan_is_near_the_best(oper):
    gap = float(re.search(r"so this one is within ([\d.]+) ?% of the best", oper.out)[1])
    assert 0 <= gap < 10


def test_the_held_out_part_is_scored_alike_on_one_rank_and_on_two(oper, unsharded):
    assert HELD_OUT % GLOBAL_BATCH  # so that the last batch has to be filled up
    assert oper.auc() == pytest.approx(unsharded.auc(), abs=1e-3)
    assert 0.5 < oper.auc() < 1


def test_each_stage_is_told_once_however_many_ranks_there_are(oper):
    told = [
        f"data: {SAMPLES:,} samples, the last {HELD_OUT} held out; {STEPS} steps to an epoch",
        "no plan takes less than",
        f"train: {STEPS} steps, a global batch of {GLOBAL_BATCH} samples over 2 ranks",
        " samples/s (median step)",
        "held out: AUC",
    ]
    places = [oper.out.find(text) for text in told]
    assert -1 not in places
    assert places == sorted(places)
    assert all(oper.out.count(text) == 1 for text in told)
    assert "Warning" not in oper.err


def test_the_real_log_trains_alike_sharded_or_not(folder):
    if not REAL_LOG.exists():
        pytest.skip(f"needs {REAL_LOG}, a head of Criteo's log")
    log = folder / "real.tsv"
    log.write_bytes(b"".join(REAL_LOG.read_bytes().splitlines(keepends=True)[:3000]))
    common = ("--data", log, "--scale", 0.001, "--global-batch-size", 64, "--steps", 20)
    sharded = run(*common, losses=folder / "real_oper.jsonl")
    whole = run(*common, "--planner", "none", losses=folder / "real_none.jsonl")
    assert_same_losses(sharded, whole, 20)
    assert "planned for 1 epoch and measured over 0.4762 epochs: compare the shares" in sharded.out


def test_two_epochs_are_held_to_twice_the_plan(log):
    found = run(*options(log, "oper"), "--epochs", 2, "--ranks", 1)
    assert found.code == 0, found.err
    ((planned, measured),) = found.lookups()
    assert planned == measured > 0
    assert f"train: {2 * STEPS} steps" in found.out


def test_a_log_is_generated_once(folder):
    examples = folder / "examples"
    shutil.copytree(EXAMPLES, examples)
    common = ("--planner", "none", "--samples", 300, "--scale", 0.001)
    common += ("--global-batch-size", 16, "--steps", 2)
    first = run(*common, examples=examples)
    assert first.code == 0, first.err
    (path,) = (folder / "build" / "generated").iterdir()
    assert f"log: generated {path}" in first.out
    written = path.stat().st_mtime_ns
    again = run(*common, examples=examples)
    assert f"log: {path}, generated before" in again.out
    assert path.stat().st_mtime_ns == written


def test_a_malformed_log_ends_all_ranks_with_one_line(folder, log):
    broken = folder / "broken.tsv"
    lines = log.read_text().splitlines(keepends=True)
    lines[1233] = "0\t1\t2\n"
    broken.write_text("".join(lines))
    found = run("--data", broken, "--scale", 0.001)
    assert found.code == 2
    assert found.err.startswith(f"error: {broken}, line 1234: found 3 fields, wanted 40")
    assert found.err.count("\n") == 1


def test_too_short_a_log_says_what_to_do(log):
    found = run("--data", log, "--scale", 0.001, "--global-batch-size", 4000, "--ranks", 1)
    assert found.code == 2
    assert found.err == (
        "error: the log has 4,000 samples, 400 of them held out: too few for one global batch"
        " of 4,000; lower --global-batch-size, or use a longer log\n"
    )


def test_unsharded_training_on_two_ranks_is_refused_once():
    found = run("--planner", "none", torchrun=True)
    assert found.code != 0
    assert found.err.count("error: --planner none trains unsharded in one process") == 1


def ranks_below(launcher: int) -> list[int]:
    """Process ids of the launcher's children, from /proc."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if parent == launcher:
            children.append(int(stat.parent.name))
    return children


def is_running(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def until_it_catches(number: int, process: subprocess.Popen) -> None:
    """Wait until the process has a handler for the signal."""
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1:
            return
        time.sleep(0.01)


@contextmanager
def training(log, folder, *, torchrun=False):
    """A long training in its first steps, and its two ranks."""
    losses = folder / "stopped.jsonl"
    command = program(
        *options(log, "oper"), "--epochs", 100_000, "--log-losses", losses, torchrun=torchrun
    )
    with subprocess.Popen(
        command,
        env={**environment(), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            for line in process.stdout:
                if line.startswith("train: "):
                    break
            time.sleep(1)
            ranks = ranks_below(process.pid)
            assert len(ranks) == 2, process.stderr.read() if process.poll() else ranks
            yield process, ranks
            assert not [rank for rank in ranks if is_running(rank)]
        finally:
            process.kill()


def assert_stopped(err, losses) -> None:
    steps, loss = re.fullmatch(
        r"\nstopped after step (\d+) of \d+, loss ([\d.]+); the model was not evaluated\n", err
    ).groups()
    values = [json.loads(line) for line in losses.read_text().splitlines()]
    assert len(values) == int(steps)
    assert f"{values[-1]['loss']:.4f}" == loss


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_both_ranks_after_the_same_step(number, log, tmp_path):
    with training(log, tmp_path) as (process, _):
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=40)
    assert process.returncode == 130, err
    assert_stopped(err, tmp_path / "stopped.jsonl")
    assert not list(tmp_path.glob("torchelastic*")) + list(tmp_path.glob("train_dlrm*"))


def test_a_stop_of_torchrun_ends_both_ranks(log, tmp_path):
    with training(log, tmp_path, torchrun=True) as (process, _):
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=40)
    assert err.count("stopped after step") == 1
    assert "train_dlrm.py" not in err  # no traceback of ours


def test_killing_the_launcher_ends_both_ranks_after_the_same_step(log, tmp_path):
    with training(log, tmp_path) as (process, _):
        process.kill()
        _, err = process.communicate(timeout=40)  # until the ranks close its pipes
    assert_stopped(err, tmp_path / "stopped.jsonl")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_told_in_two_lines(killed, log, tmp_path):
    with training(log, tmp_path) as (process, ranks):
        os.kill(min(ranks) if killed == 0 else max(ranks), signal.SIGKILL)
        _, err = process.communicate(timeout=40)
    assert process.returncode == 1
    assert err == (
        "error: another rank is gone: the connection to it broke\n"
        f"error: rank {killed} was ended by SIGKILL\n"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_while_libraries_are_loaded_says_so(ranks, number, log):
    command = program(*options(log, "oper"), "--ranks", ranks)
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        until_it_catches(signal.SIGTERM, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=40)
    assert (process.returncode, err) == (130, "\nstopped; nothing is left running\n")


def test_a_training_that_diverges_says_so_once(log, tmp_path):
    found = run(*options(log, "oper"), "--lr", "1e30", losses=tmp_path / "losses.jsonl")
    assert found.code == 2
    assert re.fullmatch(
        r"error: the training diverged: the mean loss of step \d+ of \d+ is (nan|inf);"
        r" lower --lr\n",
        found.err,
    )
    assert np.isfinite(found.losses).all()
    assert "AUC" not in found.out


def test_results_outlive_losses_that_can_not_be_written(log):
    found = run(*options(log, "none"), "--steps", 2, "--log-losses", "/dev/full")
    assert found.code == 2
    assert found.auc() > 0
    assert found.err == (
        "error: --log-losses: the losses are not written: /dev/full: No space left on device\n"
    )
