"""Parts of the example that every rank runs: examples/train_loop.py, ranks.py, click_batches.py."""

from __future__ import annotations

import json
import math
import resource
import warnings
from contextlib import contextmanager
from io import FileIO
from types import SimpleNamespace

import example_modules
import numpy as np
import pytest
import torch
from torch import nn

example = example_modules.load("ranks", "train_loop", "click_batches", "wording")
UserError = example.ranks.UserError
ALONE = example.ranks.Ranks(0, 1)


def test_scores_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    logits, clicks = rng.normal(size=200), rng.integers(0, 2, 200)
    above = np.subtract.outer(logits[clicks == 1], logits[clicks == 0]) > 0
    chance = 1 / (1 + np.exp(-logits))
    loss = -np.mean(np.where(clicks == 1, np.log(chance), np.log(1 - chance)))
    found = example.train_loop.scores(torch.from_numpy(logits).float(), torch.from_numpy(clicks))
    assert found == f"AUC {above.mean():.4f}, log-loss {loss:.4f}"


@pytest.mark.parametrize("clicked", [0, 1])
def test_one_kind_of_sample_has_no_auc(clicked):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = example.train_loop.scores(torch.zeros(5), torch.full((5,), clicked))
    count = 5 * clicked
    assert found == (
        f"log-loss {math.log(2):.4f}, no AUC: {count} of 5 samples clicked, and it takes both kinds"
    )


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_predictions_that_are_no_numbers_have_no_scores(number):
    found = example.train_loop.scores(torch.tensor([0.0, number]), torch.tensor([0, 1]))
    assert found.startswith("no AUC and no log-loss: the model predicts numbers that aren't finite")


class Losing(nn.Module):
    """Gives one loss after another."""

    def __init__(self, losses):
        super().__init__()
        self.losses = iter(losses)
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return self.weight * 0 + next(self.losses), None


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_training(number):
    model, log = Losing([1.0, 0.5, number, 0.25]), example.train_loop.LossLog(None)
    split = SimpleNamespace(steps=4, global_batch_size=8, training_batch=lambda step, ranks: None)
    with pytest.raises(UserError) as caught:
        example.train_loop.train(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            split,
            log,
            steps=4,
            ranks=ALONE,
            stop=SimpleNamespace(noted=False),
        )
    assert str(caught.value) == (
        f"the training diverged: the mean loss of step 3 of 4 is {number}; lower --lr"
    )
    assert log.losses == [1.0, 0.5]


def test_losses_are_written_when_the_training_ends_early(tmp_path):
    path = tmp_path / "losses.jsonl"
    with pytest.raises(KeyError), example.train_loop.LossLog(path) as log:
        log.losses += [0.5, 0.25]
        raise KeyError
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.25}]


def test_losses_that_can_not_be_written_are_told_after_the_results():
    with example.train_loop.LossLog("/dev/full") as log:
        log.losses += [0.5] * 10_000
    with pytest.raises(UserError) as caught:
        log.check()
    assert str(caught.value) == (
        "--log-losses: the losses are not written: /dev/full: No space left on device"
    )


def test_a_failed_write_does_not_hide_why_the_training_ended(capsys):
    with pytest.raises(KeyError), example.train_loop.LossLog("/dev/full") as log:
        log.losses += [0.5] * 10_000
        raise KeyError
    assert "/dev/full: No space left on device" in capsys.readouterr().err


def test_no_memory_is_told_in_one_line():
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(2**50, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpys:
        np.empty(2**50, dtype=np.uint8)
    for error, text in [
        (torchs.value, "not enough memory: wanted 1,048,576.0 GiB in one piece; take less of"),
        (numpys.value, "not enough memory: Unable to allocate 1.00 PiB for an array with"),
        (MemoryError(), "not enough memory; take less of --scale, --dim"),
    ]:
        message = example.ranks.explained(error)
        assert message.startswith(text)
        assert "\n" not in message


def test_an_error_that_nobody_expected_keeps_its_traceback():
    for error in (RuntimeError("[enforce fail] something"), KeyError("x"), AssertionError()):
        assert example.ranks.explained(error) is None
        code, text = example.ranks._last_words(error, stop_noted=False)
        assert code == 1
        assert type(error).__name__ in text


def test_the_cause_is_told_from_its_consequences():
    def cause(**codes):
        failures = {int(rank[1:]): SimpleNamespace(exitcode=code) for rank, code in codes.items()}
        return example.ranks.root_cause(failures)[0]

    assert cause(r0=3, r1=-9) == 1
    assert cause(r0=130, r1=-9) == 1
    assert cause(r0=3, r1=130, r2=2) == 2
    assert cause(r0=-15, r1=1) == 1
    assert cause(r0=3, r1=130) == 1
    assert cause(r0=3, r1=3) == 0


@contextmanager
def small_files():
    """Limits this process's files: for a few lines only, since pytest writes its report to one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_names_the_folder_and_what_to_do(tmp_path):
    folder = tmp_path / "train_dlrm.x"
    folder.mkdir()
    values = np.arange(2_000, dtype=np.float32)
    with FileIO(folder / "dense", "w") as file, small_files():
        example.click_batches._append(file, values)
        with pytest.raises(UserError) as caught:
            example.click_batches._append(file, values)
    assert str(caught.value) == (
        f"the log can't be unpacked to {tmp_path}: File too large; it takes 157 bytes a sample:"
        " free space there, or set TMPDIR to a folder that has it"
    )


def test_values_are_appended_as_they_are(tmp_path):
    parts = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 3), dtype=np.int32)]
    with FileIO(tmp_path / "ids", "w") as file:
        for part in [*parts, parts[0].T]:
            example.click_batches._append(file, part)
    found = np.fromfile(tmp_path / "ids", dtype=np.int32)
    assert found.tolist() == [0, 1, 2, 3, 4, 5, 0, 3, 1, 4, 2, 5]


def test_one_is_no_plural():
    assert example.wording.counted(1, "sample") == "1 sample"
    assert example.wording.counted(4000, "sample") == "4,000 samples"
    assert example.wording.counted(0, "batch", "batches") == "0 batches"
    with pytest.raises(UserError, match="^the log has 1 sample, 0 of them held out: too few"):
        example.click_batches.Split(data=[0], global_batch_size=2, held_out=0)
