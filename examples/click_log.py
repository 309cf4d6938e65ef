"""Write a click log in Criteo's format that is made up, and has something to learn in it.

The tables are as large as those of the Kaggle display-advertising challenge, times
``scale``. In each column the k-th most popular id occurs in proportion to k**-zipf; a
seeded permutation scatters the popular ids over the table. Every id has a hidden
weight, and so has every dense value: their sum, through a logistic, decides how likely
a click is. Fields are empty about as often as in the real log.

    python examples/click_log.py --samples 100000 --output clicks.tsv
    python examples/click_log.py --scale 1 --samples 5000000 --output clicks.tsv.zst
"""

from __future__ import annotations

import argparse
import gzip
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
from tqdm import tqdm

from torchrec_oper.archive import replace_file
from torchrec_oper.profile.criteo import criteo_tables
from wording import counted

FORMAT_VERSION = 1  # raise it when equal options no longer give an equal file
MOST_SAMPLES = 10**10
MOST_SEED = 2**32 - 1
BLOCK_SAMPLES = 50_000  # each block has a generator of its own, so this is part of the format
CLICK_BIAS = -1.6
WEIGHT_SCALE = 0.35
DENSE_WEIGHT_SCALE = 0.12

# Share of empty fields and median of the values, by column, as in the real log.
DENSE_EMPTY = (0.45, 0, 0.2, 0.2, 0.05, 0.25, 0.05, 0, 0.05, 0.45, 0.05, 0.77, 0.2)
DENSE_MEDIAN = (1, 3, 7, 4, 2480, 40, 3, 7, 41, 1, 1, 1, 5)
IDS_EMPTY = (
    *(0, 0, 0.04, 0.04, 0, 0.13, 0, 0, 0, 0, 0, 0.04, 0),
    *(0, 0, 0.04, 0, 0, 0.45, 0.45, 0.04, 0.82, 0, 0.04, 0.45, 0.45),
)

# The two hex digits of each byte value, as one 16-bit number in memory order.
HEX_PAIRS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), dtype="u2")


@dataclass(frozen=True)
class ClickLogSpec:
    """What a generated log is made of; equal specs give equal files.

    Args:
        samples: lines of the log.
        scale: rows of every table, as a share of the published number.
        zipf: exponent of the ids' popularity; 0 makes all ids alike.
        seed: seed of everything drawn.

    Raises:
        ValueError: for a value outside what makes sense.
    """

    samples: int
    scale: float = 0.01
    zipf: float = 1.05
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ValueError(
                f"samples must be between 1 and {MOST_SAMPLES:,}, found {self.samples}"
            )
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale must be above 0 and at most 1, found {self.scale}")
        if not 0 <= self.zipf <= 5:
            raise ValueError(f"zipf must be between 0 and 5, found {self.zipf}")
        if not 0 <= self.seed <= MOST_SEED:
            raise ValueError(f"seed must be between 0 and {MOST_SEED:,}, found {self.seed}")

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each of the 26 tables."""
        return scaled_rows(self.scale)

    @property
    def file_name(self) -> str:
        """A name that tells logs of different specs apart."""
        return (
            f"clicks-v{FORMAT_VERSION}-{self.samples}-scale{self.scale:g}"
            f"-zipf{self.zipf:g}-seed{self.seed}.tsv"
        )


def scaled_rows(scale: float) -> tuple[int, ...]:
    """The published rows of the 26 tables times ``scale``, as the model has them."""
    return tuple(table.rows for table in criteo_tables(scale=scale))


def generate(spec: ClickLogSpec, path: Path, *, progress: bool = True) -> None:
    """Write the log that ``spec`` describes to ``path``, all or nothing.

    Args:
        spec: what to write.
        path: the file; one that ends in .gz or .zst is compressed.
        progress: show a progress bar, where stderr is a terminal.

    Raises:
        OSError: the folder can't be written, or the disk is full.
    """

    def write(file: IO[bytes]) -> None:
        options = pyarrow.csv.WriteOptions(
            include_header=False, delimiter="\t", quoting_style="none"
        )
        bar = tqdm(
            total=spec.samples,
            desc="generate the log",
            unit=" samples",
            unit_scale=True,
            disable=None if progress else True,
        )
        with bar, _compressed(file, path.suffix) as sink:
            for block in blocks(spec):
                pyarrow.csv.write_csv(block, sink, options)
                bar.update(block.num_rows)

    replace_file(path, write)


def _compressed(file: IO[bytes], suffix: str) -> Any:
    """A file whose content goes to ``file``, compressed as ``suffix`` says.

    Leaving it leaves ``file`` open, which ``replace_file`` asks for.
    """
    if suffix == ".zst":
        # pyarrow closes what it writes to: give it a copy.
        return pa.CompressedOutputStream(os.fdopen(os.dup(file.fileno()), "wb"), "zstd")
    if suffix == ".gz":
        # No name and no time in the header, so that equal specs give equal files.
        return gzip.GzipFile("", "wb", compresslevel=5, fileobj=file, mtime=0)
    return nullcontext(file)


def blocks(spec: ClickLogSpec) -> Iterator[pa.Table]:
    """The lines of the log as tables of at most ``BLOCK_SAMPLES`` rows and 40 columns."""
    columns = [_Column.make(spec, index) for index in range(len(spec.rows))]
    dense_weights = np.random.default_rng([spec.seed, 1]).normal(
        0, DENSE_WEIGHT_SCALE, len(DENSE_MEDIAN)
    )
    for start in range(0, spec.samples, BLOCK_SAMPLES):
        samples = min(BLOCK_SAMPLES, spec.samples - start)
        yield _block(np.random.default_rng([spec.seed, 2, start]), columns, dense_weights, samples)


@dataclass(frozen=True)
class _Column:
    """How the ids of one column are drawn.

    All [rows], most popular id first: ``ids``; ``upto``, the chance to draw this id or a
    more popular one; ``weights``, what it adds to the score of a click, 0 on average.
    """

    empty: float
    ids: npt.NDArray[np.int32] = field(repr=False)
    upto: npt.NDArray[np.float64] = field(repr=False)
    weights: npt.NDArray[np.float32] = field(repr=False)

    @classmethod
    def make(cls, spec: ClickLogSpec, index: int) -> _Column:
        rng = np.random.default_rng([spec.seed, 0, index])
        rows = spec.rows[index]
        popularity = np.arange(1, rows + 1, dtype=np.float64) ** -spec.zipf
        popularity /= popularity.sum()
        weights = rng.normal(0, WEIGHT_SCALE, rows)
        return cls(
            empty=IDS_EMPTY[index],
            ids=rng.permutation(np.arange(rows, dtype=np.int32)),
            upto=np.cumsum(popularity),
            weights=(weights - popularity @ weights).astype(np.float32),
        )

    def draw(
        self, rng: np.random.Generator, samples: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids [samples] and what each adds to the score; -1 and 0 where the field is empty."""
        place = np.searchsorted(self.upto, rng.random(samples), side="right")
        place = np.minimum(place, len(self.upto) - 1)  # the sum of all may round below 1
        present = rng.random(samples) >= self.empty
        return np.where(present, self.ids[place], -1), np.where(present, self.weights[place], 0)


def _block(
    rng: np.random.Generator,
    columns: list[_Column],
    dense_weights: npt.NDArray[np.float64],
    samples: int,
) -> pa.Table:
    score = np.full(samples, CLICK_BIAS)
    fields: list[pa.Array] = []
    for median, empty, weight in zip(DENSE_MEDIAN, DENSE_EMPTY, dense_weights, strict=True):
        spread = rng.normal(0, 1.5, samples)
        present = rng.random(samples) >= empty
        score += np.where(present, weight * spread, 0)
        values = np.floor(median * np.exp(spread)).astype(np.int64)
        fields.append(pa.array(values, mask=~present))
    for column in columns:
        ids, weights = column.draw(rng, samples)
        score += weights
        fields.append(_hex_strings(ids))
    labels = (rng.random(samples) < 1 / (1 + np.exp(-score))).astype(np.int8)
    names = [str(index) for index in range(len(fields) + 1)]
    return pa.table([pa.array(labels), *fields], names=names)


def _hex_strings(ids: npt.NDArray[np.int32]) -> pa.Array:
    """The ids as 8 hex digits each; a negative one as null."""
    digits = HEX_PAIRS[ids.astype(">u4").view(np.uint8)]
    offsets = np.arange(len(ids) + 1, dtype=np.int32) * 8
    valid = np.packbits(ids >= 0, bitorder="little")
    buffers = [pa.py_buffer(part) for part in (valid, offsets, digits)]
    return pa.StringArray.from_buffers(len(ids), buffers[1], buffers[2], buffers[0])


def add_log_options(parser: Any) -> None:
    """Add the options that make a ``ClickLogSpec`` to a parser or a group of one."""
    parser.add_argument(
        "--samples", type=int, default=1_500_000, help="lines of the log (default: %(default)s)"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=0.01,
        help="rows of each table, as a share of the published 33.8 million (default: %(default)s)",
    )
    parser.add_argument(
        "--zipf",
        type=float,
        default=1.05,
        help="the k-th most popular id occurs in proportion to k**-ZIPF (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed (default: %(default)s)")


def main(arguments: list[str] | None = None) -> int:
    """Write one log, as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="file to write: .tsv, .tsv.gz, .tsv.zst"
    )
    add_log_options(parser)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidies up, as Ctrl-C does
    try:
        spec = ClickLogSpec(options.samples, options.scale, options.zipf, options.seed)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        generate(spec, options.output)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\nstopped; nothing was written", file=sys.stderr)
        return 130
    print(
        f"wrote {options.output}: {counted(spec.samples, 'sample')},"
        f" {sum(spec.rows):,} rows in 26 tables"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
