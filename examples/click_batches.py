"""A click log as batches: read once by rank 0, then shared by all ranks of the machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ranks import Ranks, UserError
from torchrec_oper.profile.criteo import CriteoLog
from torchrec_oper.table import TableSpec
from wording import counted

DENSE_FIELDS = 13
EMPTY = -1  # in place of an id
DTYPES = {"labels": np.int8, "dense": np.float32, "ids": np.int32}
BYTES_PER_SAMPLE = 1 + 4 * DENSE_FIELDS + 4 * 26  # of a Criteo log, unpacked


@dataclass(frozen=True)
class ClickData:
    """The samples of a log, in file order; the pages are shared by all ranks.

    Args:
        labels: int8 [samples], 1 where there was a click.
        dense: float32 [samples, 13], as the model takes them.
        ids: int32 [samples, tables], ``EMPTY`` where the field is empty.
        features: the input feature of each table.
    """

    labels: npt.NDArray[np.int8] = field(repr=False)
    dense: npt.NDArray[np.float32] = field(repr=False)
    ids: npt.NDArray[np.int32] = field(repr=False)
    features: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, samples: slice | npt.NDArray[np.int64]) -> Batch:
        """The samples as TorchRec's DLRM takes them; an empty field is an empty bag."""
        ids = torch.from_numpy(self.ids[samples].T.astype(np.int64))  # [tables, batch]
        present = ids != EMPTY
        return Batch(
            dense_features=torch.from_numpy(np.array(self.dense[samples])),
            sparse_features=KeyedJaggedTensor(
                keys=list(self.features),
                values=ids[present],
                lengths=present.flatten().to(torch.int32),
            ),
            labels=torch.from_numpy(self.labels[samples].astype(np.float32)),
        )


@dataclass(frozen=True)
class Split:
    """Which samples are trained on, in which global batches, and which are held out.

    The log's last samples are held out. The others are trained on in file order, in
    global batches of equal size: those that don't fill the last one are left out. Of a
    global batch, rank r takes the r-th of ``world_size`` equal parts.

    Args:
        data: all samples.
        global_batch_size: samples of all ranks together in a step.
        held_out: number of samples at the end of the log to keep for evaluation.

    Raises:
        UserError: too few samples for a step.
    """

    data: ClickData
    global_batch_size: int
    held_out: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(
                f"the log has {counted(len(self.data), 'sample')}, {self.held_out:,} of them held"
                f" out: too few for one global batch of {self.global_batch_size:,}; lower"
                " --global-batch-size, or use a longer log"
            )

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        return (len(self.data) - self.held_out) // self.global_batch_size

    def __len__(self) -> int:
        """Steps of one epoch."""
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        """What all ranks together are trained on in an epoch, a global batch a step."""
        return (self.training_batch(step, Ranks(0, 1)) for step in range(self.steps))

    @property
    def held_out_steps(self) -> int:
        """Batches of each rank that the held-out samples make."""
        return -(-self.held_out // self.global_batch_size)

    def training_batch(self, step: int, ranks: Ranks) -> Batch:
        """This rank's part of step ``step`` of an epoch."""
        size = self.global_batch_size // ranks.world_size
        start = step * self.global_batch_size + ranks.rank * size
        return self.data.batch(slice(start, start + size))

    def held_out_batches(self, ranks: Ranks) -> Iterator[Batch]:
        """This rank's parts of the held-out samples, equally many on every rank.

        The last sample is repeated to fill the last global batch.
        """
        size = self.global_batch_size // ranks.world_size
        for start in range(len(self.data) - self.held_out, len(self.data), self.global_batch_size):
            first = start + ranks.rank * size
            yield self.data.batch(np.minimum(np.arange(first, first + size), len(self.data) - 1))


def read_log(path: Path, tables: Sequence[TableSpec], ranks: Ranks) -> ClickData:
    """The log at ``path``, read by rank 0 and opened by all.

    Args:
        path: a log in Criteo's format; .gz and .zst are unpacked.
        tables: one table for each categorical column; ids are hashes modulo its rows.
        ranks: the ranks, all on this machine.

    Raises:
        UserError: on every rank, for a missing or malformed log, or a full disk.
    """
    folder: Path | None = None
    try:
        folder = ranks.first_does(lambda: _unpack(path, tables))
        assert folder is not None
        shapes = {"labels": (-1,), "dense": (-1, DENSE_FIELDS), "ids": (-1, len(tables))}
        arrays = {
            name: np.memmap(folder / name, dtype=DTYPES[name], mode="r").reshape(shape)
            for name, shape in shapes.items()
        }
        ranks.meet()
        return ClickData(**arrays, features=tuple(table.features[0] for table in tables))
    finally:
        # Every rank has the files open by now, so that nothing stays behind, even after kill -9.
        if folder is not None and ranks.first:
            shutil.rmtree(folder, ignore_errors=True)


def _unpack(path: Path, tables: Sequence[TableSpec]) -> Path:
    """Write the log's samples to files of plain numbers in a new temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="train_dlrm."))
    try:
        with ExitStack() as stack:
            files = {name: stack.enter_context(FileIO(folder / name, "w")) for name in DTYPES}
            for block in CriteoLog(path).blocks(progress=True):
                _append(files["labels"], block.labels)
                _append(files["dense"], model_input(block.dense))
                ids = np.full((len(block.labels), len(tables)), EMPTY, dtype=np.int32)
                for column, table in enumerate(tables):
                    values, lengths = block.ids(column, table.rows)
                    ids[lengths > 0, column] = values
                _append(files["ids"], ids)
        if not (folder / "labels").stat().st_size:
            raise UserError(f"{path} holds no sample")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _append(file: FileIO, values: npt.NDArray[Any]) -> None:
    """Write the values as they are in memory; the error of a full disk says what to do."""
    rest = memoryview(values.tobytes())
    try:
        while len(rest):
            rest = rest[file.write(rest) :]
    except OSError as error:
        folder = Path(os.fsdecode(file.name)).parent.parent
        raise UserError(
            f"the log can't be unpacked to {folder}: {error.strerror}; it takes"
            f" {BYTES_PER_SAMPLE} bytes a sample: free space there, or set TMPDIR to a folder"
            " that has it"
        ) from error


def model_input(dense: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """log(1 + x) of each dense value, 0 for negative and empty ones."""
    values: npt.NDArray[np.float32] = np.log1p(np.nan_to_num(np.maximum(dense, 0)))
    return values
