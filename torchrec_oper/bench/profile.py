"""How fast profiles are made: from a log, from batches, and beside a training step."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain
from tqdm.auto import tqdm

from torchrec_oper.profile.access import AccessProfile
from torchrec_oper.profile.batches import collect_batch
from torchrec_oper.profile.callback import ProfileCallback
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.profile.criteo import INTEGER_FEATURES, criteo_tables
from torchrec_oper.profile.files import profile_files
from torchrec_oper.profile.readers import Reading
from torchrec_oper.table import TableSpec

DIM = 16
BATCH_SIZE = 4096
STEP_BATCH_SIZE = 512  # of one of the two ranks of examples/train_dlrm.py
STEP_SCALE = 0.01  # of its tables
WARM_UP_STEPS = 3

Sparse = list[KeyedJaggedTensor]


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Args:
        log_rows: samples of the log that is made up.
        batches: batches of ``BATCH_SIZE`` that are counted.
        steps: training steps.
        repeats: measurements of each figure but the step's, of which the median counts.
    """

    log_rows: int = 200_000
    batches: int = 100
    steps: int = 60
    repeats: int = 3


FULL = Effort()
QUICK = Effort(log_rows=20_000, batches=10, steps=20, repeats=1)


@dataclass(frozen=True)
class Figure:
    """One measured number beside the one that is required.

    Args:
        name: what was measured.
        value: what came out.
        required: what it should be at least, or at most where ``at_most``.
        unit: of both.
        at_most: whether less is better.
        how: on what, in words.
    """

    name: str
    value: float
    required: float
    unit: str
    at_most: bool
    how: str

    @property
    def met(self) -> bool:
        """Whether the value is as required."""
        within = self.value <= self.required if self.at_most else self.value >= self.required
        return bool(within)

    def to_json(self) -> dict[str, Any]:
        """The fields, and ``met``, as JSON values."""
        return {**asdict(self), "met": self.met}


def measure(
    effort: Effort = FULL, *, data: Path | None = None, seed: int = 0, progress: bool = False
) -> tuple[Figure, ...]:
    """All figures, each on one core: seconds of the CPU are counted, and torch gets one thread.

    Args:
        effort: how much is measured.
        data: a log in Criteo's format to read; by default one is made up.
        seed: seed of what is made up.
        progress: show a bar where stderr is a terminal.

    Raises:
        OSError: the log can't be read, or one can't be written to the temporary folder.
        LogFormatError: the log breaks its format.
    """
    rng = np.random.default_rng(seed)
    stages: tuple[Callable[[], Figure], ...] = (
        lambda: log_figure(effort, data, rng),
        lambda: batches_figure(effort, rng),
        lambda: callback_figure(effort, rng),
    )
    hidden = None if progress else True
    with one_thread():
        bar = tqdm(stages, desc="bench profile", unit=" figures", disable=hidden)
        return tuple(stage() for stage in bar)


def log_figure(effort: Effort, data: Path | None, rng: np.random.Generator) -> Figure:
    """Samples a second from a Criteo log into a profile, parsing included."""
    with tempfile.TemporaryDirectory(prefix="oper-bench.") as folder:
        path = data
        if path is None:
            path = Path(folder) / "train.txt"
            path.write_bytes(b"".join(criteo_lines(rng, effort.log_rows)))
        tables = criteo_tables()
        reading = Reading("criteo")
        samples = profile_files([path], tables, reading=reading).samples  # once, to warm up
        seconds = [
            _cpu_seconds(lambda: profile_files([path], tables, reading=reading))
            for _ in range(effort.repeats)
        ]
        made_up = "made up" if data is None else os.path.basename(data)
        return Figure(
            name="Criteo log",
            value=samples / statistics.median(seconds),
            required=250_000,
            unit="rows/s",
            at_most=False,
            how=f"{samples:,} rows, {made_up}, parsed and counted in the 26 tables of Kaggle's log",
        )


def batches_figure(effort: Effort, rng: np.random.Generator) -> Figure:
    """Ids a second from batches into a profile."""
    tables = criteo_tables()
    batches = sparse_batches(rng, tables, batch_size=BATCH_SIZE, count=effort.batches)

    def count() -> None:
        collector = AccessCollector(tables)
        for number, batch in enumerate(batches):
            collect_batch(collector, batch, number=number)
        AccessProfile.from_collector(collector)

    seconds = [_cpu_seconds(count) for _ in range(effort.repeats)]
    ids = sum(batch.values().numel() for batch in batches)
    return Figure(
        name="batches",
        value=ids / statistics.median(seconds),
        required=40e6,
        unit="ids/s",
        at_most=False,
        how=f"{effort.batches} KeyedJaggedTensors, 26 features, batch {BATCH_SIZE}, Zipf ids",
    )


def callback_figure(effort: Effort, rng: np.random.Generator) -> Figure:
    """The share of a training step's time that ``ProfileCallback`` adds."""
    tables = criteo_tables(scale=STEP_SCALE, dim=DIM)
    model = dlrm(tables)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = sparse_batches(rng, tables, batch_size=STEP_BATCH_SIZE, count=effort.steps)
    dense = torch.rand(STEP_BATCH_SIZE, len(INTEGER_FEATURES))
    labels = torch.randint(2, (STEP_BATCH_SIZE,)).float()
    callback = ProfileCallback(tables)
    watched = callback.watch(batches)
    counting: list[float] = []
    stepping: list[float] = []
    for _ in range(effort.steps):
        start = time.process_time()
        batch = next(watched)
        counted = time.process_time()
        optimizer.zero_grad()
        loss, _ = model(_Batch(dense, batch, labels))
        loss.backward()
        optimizer.step()
        counting.append(counted - start)
        stepping.append(time.process_time() - counted)
    count_s = statistics.mean(counting[WARM_UP_STEPS:])
    step_s = statistics.mean(stepping[WARM_UP_STEPS:])
    return Figure(
        name="callback",
        value=count_s / step_s,
        required=0.03,
        unit="of a step",
        at_most=True,
        how=f"{count_s * 1e3:.2f} ms beside a DLRM's step of {step_s * 1e3:.1f} ms in one process,"
        f" batch {STEP_BATCH_SIZE}, every batch counted",
    )


def report_lines(figures: tuple[Figure, ...]) -> Iterator[str]:
    """The figures beside what is required, for people."""
    yield f"{'':12}{'measured':>14}{'required':>14}"
    for figure in figures:
        verdict = "met" if figure.met else "MISSED"
        yield (
            f"{figure.name:12}{_shown(figure.value):>14}{_shown(figure.required):>14}"
            f" {figure.unit}, {verdict}"
        )
        yield f"{'':12}  {figure.how}"


def dlrm(tables: tuple[TableSpec, ...]) -> DLRMTrain:
    """The model of examples/train_dlrm.py, with its default sizes."""
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=list(table.features),
        )
        for table in tables
    ]
    return DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables=configs),
            dense_in_features=len(INTEGER_FEATURES),
            dense_arch_layer_sizes=[64, DIM],
            over_arch_layer_sizes=[64, 32, 1],
        )
    )


def sparse_batches(
    rng: np.random.Generator, tables: tuple[TableSpec, ...], *, batch_size: int, count: int
) -> Sparse:
    """Batches with one id in each bag, Zipf-distributed and scattered over the table."""
    keys = [feature for table in tables for feature in table.features]
    lengths = torch.ones(len(keys) * batch_size, dtype=torch.int32)
    batches = []
    for _ in range(count):
        ids = [zipf_ids(rng, table.rows, batch_size) for table in tables]
        values = torch.from_numpy(np.concatenate(ids))
        batches.append(KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))
    return batches


def zipf_ids(rng: np.random.Generator, rows: int, count: int) -> Any:
    """Ids, int64 [count]: the k-th most popular comes about as often as 1 / k."""
    rank = np.exp(rng.random(count) * np.log(rows + 1)).astype(np.int64) - 1
    return np.minimum(rank, rows - 1) * 2_654_435_761 % rows


def criteo_lines(rng: np.random.Generator, rows: int) -> Iterator[bytes]:
    """A log in Criteo's format, some lines at a time: Zipf ids, a tenth of the fields empty."""
    tables = criteo_tables()
    for start in range(0, rows, 10_000):
        count = min(10_000, rows - start)
        columns: list[Iterator[str]] = [map(str, rng.integers(2, size=count).tolist())]
        for _ in INTEGER_FEATURES:
            values = np.exp(rng.normal(2, 1.5, count)).astype(np.int64)
            columns.append(_texts(rng, values, "d"))
        for table in tables:
            columns.append(_texts(rng, zipf_ids(rng, table.rows, count), "08x"))
        yield ("\n".join(map("\t".join, zip(*columns, strict=True))) + "\n").encode()


def _texts(rng: np.random.Generator, values: Any, form: str) -> Iterator[str]:
    present = rng.random(values.size) >= 0.1
    fields = zip(values.tolist(), present.tolist(), strict=True)
    return (format(value, form) if there else "" for value, there in fields)


@dataclass
class _Batch:
    """What DLRMTrain takes."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _shown(value: float) -> str:
    return f"{value:.2%}" if value < 1 else f"{value:,.0f}"
