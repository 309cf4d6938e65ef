"""Criteo's click logs: the format of ``train.txt`` of its Kaggle display advertising challenge.

A line is a sample: the label, 13 integers and 26 categories of up to 8 hexadecimal
digits, separated by tabs. All but the label may be empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil

import numpy as np

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile import criteo_fast, criteo_plain
from torchrec_oper.profile.bags import BagBlock, Bags
from torchrec_oper.profile.criteo_format import (
    CATEGORICAL_FEATURES,
    INTEGER_FEATURES,
    CriteoBlock,
)
from torchrec_oper.profile.progress import Tick, bytes_bar
from torchrec_oper.profile.text_log import line_chunks
from torchrec_oper.table import COUNT_LIMIT, TableSpec

__all__ = [
    "BLOCK_BYTES",
    "CATEGORICAL_FEATURES",
    "INTEGER_FEATURES",
    "KAGGLE_ROWS",
    "CriteoBags",
    "CriteoBlock",
    "CriteoLog",
    "criteo_tables",
]

BLOCK_BYTES = 1 << 20  # of text at once: what is made of it stays in the cache

# Distinct values of each categorical column of the Kaggle log, as published.
KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


class CriteoLog:
    """A Criteo log on disk, plain or packed by gzip or zstd (its content tells which).

    Args:
        path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    def blocks(
        self, *, block_bytes: int = BLOCK_BYTES, progress: bool = False, tick: Tick | None = None
    ) -> Iterator[CriteoBlock]:
        """The samples in order, read anew by each call.

        Args:
            block_bytes: bytes of text to parse at once; memory is about ten times that.
            progress: show on a terminal's stderr how many bytes of the file are read.
            tick: told the bytes read, in place of ``progress``.

        Raises:
            OSError: the file can't be read.
            LogFormatError: it breaks the format; names the line, the column, and what
                was found and wanted there. Blocks before that line come first.
            ProfileError: ``block_bytes`` is below 1.
            VersionError: the log is packed, and pyarrow is missing.
        """
        if block_bytes < 1:
            raise ProfileError(f"block_bytes must be 1 or more, found {block_bytes}")
        if tick is None:
            with bytes_bar([self.path], shown=progress) as tick:
                yield from self.blocks(block_bytes=block_bytes, tick=tick)
            return
        for first_line, chunk in line_chunks(self.path, block_bytes=block_bytes, tick=tick):
            try:
                block = criteo_fast.parse(chunk, first_line=first_line)
            except ValueError:
                block = criteo_plain.parse(chunk, first_line=first_line, path=self.path)
            yield block


class CriteoBags:
    """The categorical columns of a Criteo log as bags of hashes, to be taken modulo the rows.

    Args:
        path: the file, see ``CriteoLog``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    def features(self) -> tuple[str, ...]:
        """``CATEGORICAL_FEATURES``."""
        return CATEGORICAL_FEATURES

    def rows(self, feature: str) -> int | None:
        """Not known: a hash fits any table."""
        return None

    def blocks(self, features: Sequence[str], *, tick: Tick | None = None) -> Iterator[BagBlock]:
        """The samples in order; see ``CriteoLog.blocks`` for what is raised.

        Raises:
            ProfileError: a feature that no column gives.
        """
        columns = {feature: _column(feature) for feature in features}
        for block in CriteoLog(self.path).blocks(tick=tick or (lambda _: None)):
            bags: dict[str, Bags] = {}
            for feature, column in columns.items():
                present = block.present[column]
                bags[feature] = (block.hashes[column][present], present.astype(np.int32))
            where = partial("the lines from {0} on, column {1}".format, block.first_line)
            yield BagBlock(block.labels.size, bags, where)


def criteo_tables(
    *, scale: float = 1.0, dim: int = 16, rows: Sequence[int] | None = None
) -> tuple[TableSpec, ...]:
    """One table for each categorical column: ``t_cat_0`` with feature ``cat_0``, and so on.

    Args:
        scale: rows as a share of the column's published distinct values, rounded up
            and 2 at least.
        dim: elements of a row.
        rows: rows of the 26 tables, instead of ``scale``.

    Raises:
        ProfileError: ``scale`` isn't above 0, ``rows`` aren't 26 numbers from 1, or a
            table is too large to count; see ``TableSpec``.
    """
    limit = COUNT_LIMIT / max(KAGGLE_ROWS)
    if not 0 < scale < limit:
        raise ProfileError(f"scale must be above 0 and below {limit:.1e}, found {scale}")
    if rows is None:
        rows = [max(2, ceil(distinct * scale)) for distinct in KAGGLE_ROWS]
    if len(rows) != len(CATEGORICAL_FEATURES):
        raise ProfileError(
            f"rows must be {len(CATEGORICAL_FEATURES)} numbers, one for each categorical"
            f" column, found {len(rows)}"
        )
    return tuple(
        TableSpec(name=f"t_{feature}", rows=count, dim=dim, features=(feature,))
        for feature, count in zip(CATEGORICAL_FEATURES, rows, strict=True)
    )


def _column(feature: str) -> int:
    if feature not in CATEGORICAL_FEATURES:
        raise ProfileError(
            f"there is no feature {feature}; the categorical columns of a Criteo log are"
            f" {CATEGORICAL_FEATURES[0]} to {CATEGORICAL_FEATURES[-1]}"
        )
    return CATEGORICAL_FEATURES.index(feature)
