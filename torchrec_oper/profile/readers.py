"""The door to the readers: which one reads a file, and how."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.bags import BagLog
from torchrec_oper.profile.criteo import CriteoBags
from torchrec_oper.profile.csv_log import LIST_SEPARATOR, CsvLog
from torchrec_oper.profile.edge_list import EdgeLog
from torchrec_oper.profile.npz_log import NpzLog
from torchrec_oper.profile.parquet_log import ParquetLog

Format = Literal["criteo", "parquet", "csv", "npz", "edges", "adjacency"]

# Any other suffix, also before .gz and .zst, is a Criteo log's.
SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".npz": "npz",
    ".edges": "edges",
    ".adj": "adjacency",
}


@dataclass(frozen=True)
class Reading:
    """How logs are read.

    Args:
        format: what reads them; by default the suffix of each file tells, see ``SUFFIXES``.
        hashed: take ids modulo the rows of their table. Criteo's logs hold hashes, so
            theirs always are.
        delimiter: between the columns of a CSV file; see ``CsvLog``.
        separator: between the ids of a field of a CSV file.

    Raises:
        ProfileError: there is no such format.
    """

    format: Format | None = None
    hashed: bool = False
    delimiter: str | None = None
    separator: str = LIST_SEPARATOR

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in get_args(Format):
            raise ProfileError(
                f"there is no format {self.format!r}; choose one of {', '.join(get_args(Format))}"
            )

    def format_of(self, path: str | os.PathLike[str]) -> Format:
        """What reads the file at ``path``; only its name is looked at."""
        if self.format is not None:
            return self.format
        name = os.fspath(path).lower().removesuffix(".gz").removesuffix(".zst")
        return SUFFIXES.get(os.path.splitext(name)[1], "criteo")

    def is_hashed(self, path: str | os.PathLike[str]) -> bool:
        """Whether the ids of the file at ``path`` are taken modulo the rows."""
        return self.hashed or self.format_of(path) == "criteo"

    def open(self, path: str | os.PathLike[str]) -> BagLog:
        """The reader of the file at ``path``, which isn't opened yet.

        Raises:
            ProfileError: the delimiter or the separator won't do.
        """
        kind = self.format_of(path)
        if kind == "parquet":
            return ParquetLog(path)
        if kind == "csv":
            return CsvLog(path, delimiter=self.delimiter, separator=self.separator)
        if kind == "npz":
            return NpzLog(path)
        if kind == "criteo":
            return CriteoBags(path)
        return EdgeLog(path, layout=kind)
