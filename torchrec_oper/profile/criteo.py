"""Criteo's click logs: the format of ``train.txt`` of its Kaggle display advertising challenge.

A line is a sample: the label, 13 integers and 26 categories of up to 8 hexadecimal
digits, separated by tabs. All but the label may be empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile import criteo_arrow, criteo_plain
from torchrec_oper.profile.access import AccessProfile
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.profile.criteo_format import (
    CATEGORICAL_FEATURES,
    INTEGER_FEATURES,
    CriteoBlock,
)
from torchrec_oper.profile.text_log import line_chunks
from torchrec_oper.table import COUNT_LIMIT, TableSpec, table_specs

__all__ = [
    "BLOCK_BYTES",
    "CATEGORICAL_FEATURES",
    "INTEGER_FEATURES",
    "KAGGLE_ROWS",
    "CriteoBlock",
    "CriteoLog",
    "criteo_tables",
    "profile_log",
]

BLOCK_BYTES = 1 << 23

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
        self, *, block_bytes: int = BLOCK_BYTES, progress: bool = False
    ) -> Iterator[CriteoBlock]:
        """The samples in order, read anew by each call.

        Args:
            block_bytes: bytes of text to parse at once; memory is about ten times that.
            progress: show on a terminal's stderr how many bytes of the file are read.

        Raises:
            OSError: the file can't be read.
            LogFormatError: it breaks the format; names the line, the column, and what
                was found and wanted there. Blocks before that line come first.
            ProfileError: ``block_bytes`` is below 1.
            VersionError: pyarrow is missing.
        """
        if block_bytes < 1:
            raise ProfileError(f"block_bytes must be 1 or more, found {block_bytes}")
        for first_line, chunk in line_chunks(self.path, block_bytes=block_bytes, progress=progress):
            try:
                block = criteo_arrow.parse(chunk, first_line=first_line)
            except ValueError:
                block = criteo_plain.parse(chunk, first_line=first_line, path=self.path)
            yield block


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


def profile_log(
    path: str | os.PathLike[str], tables: Any, *, progress: bool = False
) -> AccessProfile:
    """The access profile of a Criteo log; ids are hashes modulo a table's rows.

    Args:
        path: the log, see ``CriteoLog``.
        tables: an ``EmbeddingBagCollection`` or ``TableSpec`` values, whose features
            are among ``CATEGORICAL_FEATURES``; see ``criteo_tables``.
        progress: show on a terminal's stderr how many bytes of the file are read.

    Raises:
        OSError: the file can't be read.
        LogFormatError: it breaks the format; see ``CriteoLog.blocks``.
        ProfileError: a table has a feature that no column gives.
        VersionError: pyarrow is missing.
    """
    specs = table_specs(tables)
    columns = [
        (table, spec, feature, _column(feature, spec))
        for table, spec in enumerate(specs)
        for feature in spec.features
    ]
    collector = AccessCollector(specs)
    for block in CriteoLog(path).blocks(progress=progress):
        where = f"the block from line {block.first_line}"
        collector.samples += block.labels.size
        for table, spec, feature, column in columns:
            ids, lengths = block.ids(column, spec.rows)
            collector.add(table, feature, ids, lengths, where=where)
    return AccessProfile.from_collector(collector)


def _column(feature: str, spec: TableSpec) -> int:
    if feature not in CATEGORICAL_FEATURES:
        raise ProfileError(
            f"table {spec.name} has feature {feature}, but the categorical columns of a"
            f" Criteo log are {CATEGORICAL_FEATURES[0]} to {CATEGORICAL_FEATURES[-1]}"
        )
    return CATEGORICAL_FEATURES.index(feature)
