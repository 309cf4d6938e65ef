"""The training steps and the evaluation, which every rank runs side by side."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Optimizer
from torchmetrics.functional.classification import binary_auroc
from tqdm import tqdm

from click_batches import Split
from ranks import Ranks, UserError, one_line
from stopping import Stopped, StopRequest
from torchrec_oper.archive import replace_file
from wording import counted

WARM_UP_STEPS = 10  # not timed: the first steps allocate


@dataclass
class LossLog:
    """The mean loss of each global batch, written to a file at the end, however it comes.

    A failure to write it doesn't take the training's results along: ``check`` raises it.

    Args:
        path: a file for one JSON value a line, or None for no file.
        losses: what was noted so far.
    """

    path: Path | None
    losses: list[float] = field(default_factory=list)
    _failure: str | None = None

    def __enter__(self) -> LossLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.path is None:
            return
        try:
            replace_file(self.path, self._write)
        except OSError as failure:
            self._failure = f"--log-losses: the losses are not written: {one_line(failure)}"
            if error is not None:  # which ends the program, and says why
                print(f"error: {self._failure}", file=sys.stderr)

    def check(self) -> None:
        """Raise ``UserError`` if the file could not be written."""
        if self._failure is not None:
            raise UserError(self._failure)

    def _write(self, file: IO[bytes]) -> None:
        for step, loss in enumerate(self.losses):
            file.write(json.dumps({"step": step, "loss": loss}).encode() + b"\n")


def train(
    model: nn.Module,
    optimizer: Optimizer,
    split: Split,
    log: LossLog,
    *,
    steps: int,
    ranks: Ranks,
    stop: StopRequest,
) -> float:
    """Train for ``steps`` steps, over the training samples in file order and again.

    Returns:
        Samples of all ranks in a second, by the median time of a step.

    Raises:
        Stopped: on every rank after the same step, when one of them was told to stop.
        UserError: on every rank, when the mean loss isn't finite.
    """
    model.train()
    seconds: list[float] = []
    bar = tqdm(total=steps, desc="train", unit=" steps", disable=quiet(ranks))
    with bar:
        for step in range(steps):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss, _ = model(split.training_batch(step % split.steps, ranks))
            loss.backward()
            optimizer.step()
            mean_loss, stopping = _agree(loss, stop.noted, ranks)
            seconds.append(time.perf_counter() - started)
            if not math.isfinite(mean_loss):
                raise UserError(
                    f"the training diverged: the mean loss of step {step + 1} of {steps} is"
                    f" {mean_loss}; lower --lr"
                )
            log.losses.append(mean_loss)
            rate = split.global_batch_size / seconds[-1]
            bar.set_postfix_str(f"loss {mean_loss:.4f}, {rate:,.0f} samples/s", refresh=False)
            bar.update()
            if stopping:
                raise Stopped(
                    f"stopped after step {step + 1} of {steps}, loss {mean_loss:.4f};"
                    " the model was not evaluated"
                )
    timed = seconds[WARM_UP_STEPS:] or seconds
    return split.global_batch_size / statistics.median(timed)


def quiet(ranks: Ranks) -> bool | None:
    """The ``disable`` of tqdm: one rank shows bars, and only to a terminal."""
    return None if ranks.first else True


def _agree(loss: torch.Tensor, stop_noted: bool, ranks: Ranks) -> tuple[float, bool]:
    """The mean loss of all ranks, and whether any of them was told to stop."""
    both = torch.tensor([float(loss.detach()) / ranks.world_size, stop_noted], dtype=torch.float64)
    if ranks.world_size > 1:
        dist.all_reduce(both)
    return float(both[0]), bool(both[1])


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, ranks: Ranks) -> str | None:
    """AUC and log-loss on the held-out samples, in words; None without any.

    Every rank has to call it, and has the same answer.
    """
    if not split.held_out:
        return None
    model.eval()
    batches = tqdm(
        split.held_out_batches(ranks),
        total=split.held_out_steps,
        desc="evaluate",
        unit=" batches",
        disable=quiet(ranks),
    )
    logits = []
    for batch in batches:
        _, (_, batch_logits, _) = model(batch)
        logits.append(batch_logits)
    # [steps, world_size, batch] in the order of the log, then without the filling at the end.
    own = torch.stack(logits)
    parts = [torch.empty_like(own) for _ in range(ranks.world_size)]
    dist.all_gather(parts, own)
    predicted = torch.stack(parts, dim=1).flatten()[: split.held_out]
    clicks = split.data.labels[-split.held_out :].astype("int64")
    return scores(predicted, torch.from_numpy(clicks))


def scores(predicted: torch.Tensor, clicks: torch.Tensor) -> str:
    """AUC and log-loss as far as they are defined.

    Args:
        predicted: float [samples], logits.
        clicks: int64 [samples], 0 or 1.
    """
    if not predicted.isfinite().all():
        return "no AUC and no log-loss: the model predicts numbers that aren't finite; lower --lr"
    log_loss = binary_cross_entropy_with_logits(predicted.double(), clicks.double())
    clicked = int(clicks.sum())
    if clicked in (0, len(clicks)):
        return (
            f"log-loss {log_loss:.4f}, no AUC: {clicked:,} of"
            f" {counted(len(clicks), 'sample')} clicked, and it takes both kinds"
        )
    return f"AUC {binary_auroc(predicted.sigmoid(), clicks):.4f}, log-loss {log_loss:.4f}"
