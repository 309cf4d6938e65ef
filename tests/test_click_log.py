"""The generator of click logs in examples/click_log.py."""

from __future__ import annotations

import gzip
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import example_modules
import numpy as np
import pyarrow as pa
import pytest

from torchrec_oper.profile.criteo import KAGGLE_ROWS, CriteoLog

PROGRAM = Path(__file__).parents[1] / "examples" / "click_log.py"


click_log = example_modules.load("click_log").click_log
SPEC = click_log.ClickLogSpec(samples=20_000, scale=0.001, zipf=1.1, seed=3)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "clicks.tsv"
    click_log.generate(SPEC, path, progress=False)
    return path


@pytest.fixture(scope="module")
def lines(log):
    return [line.split("\t") for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def ids(lines):
    """[samples, 26] ids, -1 where the field is empty; read without the package's reader."""
    return np.array([[int(text, 16) if text else -1 for text in line[14:]] for line in lines])


def test_every_line_has_the_format_of_the_real_log(lines):
    assert len(lines) == SPEC.samples
    for line in lines[:500] + lines[-500:]:
        assert len(line) == 40
        assert line[0] in ("0", "1")
        assert all(re.fullmatch(r"\d*", text) for text in line[1:14])
        assert all(re.fullmatch(r"([0-9a-f]{8})?", text) for text in line[14:])


def test_the_packages_reader_reads_the_same_ids(log, ids):
    blocks = list(CriteoLog(log).blocks())
    for column, rows in enumerate(SPEC.rows):
        read = np.concatenate([block.ids(column, rows)[0] for block in blocks])
        np.testing.assert_array_equal(read, ids[:, column][ids[:, column] >= 0])


@pytest.mark.parametrize("suffix", [".tsv.gz", ".tsv.zst"])
def test_equal_specs_give_equal_files_packed_or_not(suffix, log, tmp_path):
    packed = [tmp_path / f"{name}{suffix}" for name in ("first", "second")]
    for path in packed:
        click_log.generate(SPEC, path, progress=False)
    assert packed[0].read_bytes() == packed[1].read_bytes()
    if suffix == ".tsv.gz":
        text = gzip.decompress(packed[0].read_bytes())
    else:
        text = pa.input_stream(str(packed[0]), compression="zstd").read()
    assert text == log.read_bytes()


def test_another_seed_gives_another_log(log, tmp_path):
    other = click_log.ClickLogSpec(samples=SPEC.samples, scale=SPEC.scale, zipf=1.1, seed=4)
    click_log.generate(other, tmp_path / "other.tsv", progress=False)
    assert (tmp_path / "other.tsv").read_bytes() != log.read_bytes()
    assert other.file_name != SPEC.file_name


def test_blocks_follow_each_other_and_differ(monkeypatch):
    monkeypatch.setattr(click_log, "BLOCK_SAMPLES", 100)
    blocks = list(click_log.blocks(click_log.ClickLogSpec(samples=250, scale=0.001)))
    assert [block.num_rows for block in blocks] == [100, 100, 50]
    assert not blocks[0].equals(blocks[1])


def test_ids_fill_tables_of_the_published_size_times_the_scale(ids):
    assert click_log.ClickLogSpec(samples=1, scale=1.0).rows == KAGGLE_ROWS
    for column, rows in enumerate(SPEC.rows):
        assert rows == max(2, -(-KAGGLE_ROWS[column] // 1000))
        assert ids[:, column].max() < rows
        if rows < 30:
            assert set(ids[:, column]) - {-1} == set(range(rows))


def test_popularity_follows_the_zipf_law_and_popular_ids_are_scattered(ids):
    column = int(np.argmax(SPEC.rows))
    used = ids[:, column][ids[:, column] >= 0]
    popular = Counter(used.tolist()).most_common(6)
    weights = np.arange(1, SPEC.rows[column] + 1) ** -SPEC.zipf
    for place, (_, count) in enumerate(popular):
        expected = used.size * weights[place] / weights.sum()
        assert abs(count - expected) < 5 * expected**0.5
    places = [row for row, _ in popular]
    assert places != sorted(places)
    assert max(places) > SPEC.rows[column] / 4


def test_fields_are_empty_as_often_as_said(lines, ids):
    texts = np.array(lines)
    shares = (texts == "").mean(axis=0)
    wanted = np.array([0, *click_log.DENSE_EMPTY, *click_log.IDS_EMPTY])
    spread = np.sqrt(wanted * (1 - wanted) / SPEC.samples)
    assert np.all(np.abs(shares - wanted) <= 5 * spread)


def _auc(scores, labels):
    """The chance that a click scores above a miss, by counting pairs through ranks."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    clicks = labels.sum()
    return (ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (
        clicks * (len(labels) - clicks)
    )


def _naive_bayes_auc(ids, labels):
    """Learn each id's log-odds on the first half, and score the second half with their sum."""
    half = len(labels) // 2
    scores = np.zeros(len(labels) - half)
    for column in range(ids.shape[1]):
        rows = ids[:, column].max() + 2  # the last one stands for empty, -1
        clicks = np.bincount(ids[:half, column] % rows, labels[:half], rows)
        seen = np.bincount(ids[:half, column] % rows, minlength=rows)
        scores += np.log((clicks + 1) / (seen - clicks + 3))[ids[half:, column] % rows]
    return _auc(scores, labels[half:])


def test_clicks_can_be_learnt_from_the_ids(lines, ids):
    labels = np.array([int(line[0]) for line in lines])
    assert 0.15 < labels.mean() < 0.4
    assert _naive_bayes_auc(ids, labels) > 0.68
    shuffled = np.random.default_rng(0).permutation(labels)
    assert abs(_naive_bayes_auc(ids, shuffled) - 0.5) < 0.03


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("samples", 0, "samples must be between 1 and 10,000,000,000, found 0"),
        ("samples", 10**20, f"samples must be between 1 and 10,000,000,000, found {10**20}"),
        ("scale", 0.0, "scale must be above 0 and at most 1, found 0.0"),
        ("scale", float("nan"), "scale must be above 0 and at most 1, found nan"),
        ("zipf", -1.0, "zipf must be between 0 and 5, found -1.0"),
        ("seed", -1, "seed must be between 0 and 4,294,967,295, found -1"),
        ("seed", 2**32, "seed must be between 0 and 4,294,967,295, found 4294967296"),
    ],
)
def test_a_wrong_spec_says_what_was_wanted(field, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        click_log.ClickLogSpec(**{"samples": 1, field: value})


def _run(*arguments, limit_bytes=None):
    def limit():
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        cwd=PROGRAM.parents[1],
        env={"PYTHONPATH": str(PROGRAM.parents[1]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limit,
    )


def test_the_program_makes_the_folder_and_says_what_it_wrote(tmp_path):
    path = tmp_path / "new" / "clicks.tsv"
    done = _run("--samples", 100, "--scale", 0.001, "--output", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {path}: 100 samples, ")
    assert len(path.read_text().splitlines()) == 100


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz", ".tsv.zst"])
def test_a_full_disk_leaves_nothing_behind(suffix, tmp_path):
    path = tmp_path / f"clicks{suffix}"
    done = _run("--samples", 60_000, "--output", path, limit_bytes=200_000)
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_program_refuses_a_wrong_option(tmp_path):
    done = _run("--scale", 2, "--output", tmp_path / "clicks.tsv")
    assert done.returncode == 2
    assert "scale must be above 0 and at most 1, found 2.0" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_sample_is_told_as_one(tmp_path):
    done = _run("--samples", 1, "--scale", 0.001, "--output", tmp_path / "clicks.tsv")
    assert ": 1 sample, " in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_nothing_behind(number, tmp_path):
    command = [sys.executable, str(PROGRAM), "--samples", str(10**9), "-o", tmp_path / "log.tsv"]
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None and not any(tmp_path.iterdir()):
                time.sleep(0.01)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "\nstopped; nothing was written\n")
    assert list(tmp_path.iterdir()) == []
