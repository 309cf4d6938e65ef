"""The plan: what goes where, and what that is expected to cost."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchrec_oper.archive import content_hash, read_archive, write_archive
from torchrec_oper.errors import ArchiveError, OperError, PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.report import rank_table, table_of
from torchrec_oper.planner.row_map import Ints, RowMap
from torchrec_oper.table import TableSpec

Exchange = Literal["partial"]

FORMAT = 1


@dataclass(frozen=True, eq=False)
class TablePlacement:
    """Where the rows of one table live, and how its values travel.

    Args:
        module: path of the table's module in the model.
        table: the table.
        row_map: owner and slot of every row.
        planned_lookups: [W] int64, lookups of the profiled data that each rank serves.
        exchange: ``partial``: ids go to the owners, one partial sum per bag comes back.
    """

    module: str
    table: TableSpec
    row_map: RowMap
    planned_lookups: Ints
    exchange: Exchange = "partial"

    def __post_init__(self) -> None:
        lookups = np.array(self.planned_lookups, dtype=np.int64)
        lookups.flags.writeable = False
        object.__setattr__(self, "planned_lookups", lookups)
        if self.row_map.rows != self.table.rows:
            raise PlanError(
                f"table {self.table.name} has {self.table.rows} rows, but its row map has"
                f" {self.row_map.rows}"
            )
        if lookups.shape != (self.row_map.world_size,) or np.any(lookups < 0):
            raise PlanError(
                f"table {self.table.name}: planned_lookups must hold a count for each of"
                f" {self.row_map.world_size} ranks, found {lookups.tolist()}"
            )
        if self.exchange != "partial":
            raise PlanError(
                f"table {self.table.name}: exchange must be 'partial', found {self.exchange!r}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # Through __init__, which checks and freezes the arrays again.
        values = (self.module, self.table, self.row_map, self.planned_lookups, self.exchange)
        return TablePlacement, values

    @property
    def key(self) -> str:
        """The table's path in the model."""
        return f"{self.module}.{self.table.name}" if self.module else self.table.name


@dataclass(frozen=True, eq=False)
class Plan:
    """The placement of every table for one cluster. Equal content, equal plans.

    Args:
        placements: the tables, in the order of the model.
        cluster: the ranks that the plan was made for.
        profile_hash: content hash of the access profile, or None without one.
        bound_bytes: what the busiest rank reads at least under any placement of rows,
            in bytes over the profiled data.
        seed: the search's seed.

    Raises:
        PlanError: a rank's rows exceed its memory, or a table or rank doesn't fit.
    """

    placements: tuple[TablePlacement, ...]
    cluster: Cluster
    profile_hash: str | None
    bound_bytes: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.placements:
            raise PlanError("a plan needs at least one table, found none")
        keys = [placement.key for placement in self.placements]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated:
            raise PlanError(f"a plan places each table once, found twice: {', '.join(repeated)}")
        for placement in self.placements:
            if placement.row_map.world_size != self.world_size:
                raise PlanError(
                    f"table {placement.table.name}: its row map is for"
                    f" {placement.row_map.world_size} ranks, the cluster has {self.world_size}"
                )
        self._check_memory()

    def _check_memory(self) -> None:
        for rank, need in enumerate(self.memory_bytes):
            cap = self.cluster.ranks[rank].memory_bytes
            if need > cap:
                largest = max(self.placements, key=lambda p: _bytes(p)[rank])
                raise PlanError(
                    f"rank {rank} needs {need} bytes for its rows and their optimizer state, but"
                    f" its cap is {cap} bytes; most of it, {_bytes(largest)[rank]} bytes, is for"
                    f" table {largest.table.name}"
                )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cluster.world_size

    @cached_property
    def planned_lookups(self) -> tuple[int, ...]:
        """Lookups of the profiled data that each rank serves."""
        return _sums(p.planned_lookups.tolist() for p in self.placements)

    @cached_property
    def read_bytes(self) -> tuple[int, ...]:
        """Bytes of rows that each rank reads for the profiled data."""
        return _sums(
            [lookups * p.table.row_bytes for lookups in p.planned_lookups.tolist()]
            for p in self.placements
        )

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank's rows and their optimizer state take."""
        return _sums(_bytes(p) for p in self.placements)

    @property
    def gap(self) -> float:
        """How far the busiest rank is above the bound: 0 is optimal."""
        return max(self.read_bytes) / self.bound_bytes - 1 if self.bound_bytes else 0.0

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the plan's content."""
        return content_hash(self._header(), self._arrays())

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.placements)} tables, {self.world_size} ranks,"
            f" content_hash={self.content_hash[:12]!r})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.content_hash == other.content_hash

    def __hash__(self) -> int:
        return hash(self.content_hash)

    def placement(self, module: str, table: str) -> TablePlacement:
        """The placement of a module's table.

        Raises:
            PlanError: the plan doesn't place it.
        """
        for placement in self.placements:
            if placement.module == module and placement.table.name == table:
                return placement
        raise PlanError(
            f"the plan leaves out table {table} of {f'module {module}' if module else 'the model'};"
            " make a plan for this model"
        )

    def check_fits(self, tables: Sequence[tuple[str, TableSpec]]) -> None:
        """Raise ``PlanError`` unless the plan places exactly these tables.

        Args:
            tables: module path and table of every table of the model.
        """
        for module, table in tables:
            planned = self.placement(module, table.name).table
            if planned != table:
                raise PlanError(
                    f"table {table.name}: the plan was made for {planned}, the model has {table}"
                )
        wanted = {(module, table.name) for module, table in tables}
        extra = [p.key for p in self.placements if (p.module, p.table.name) not in wanted]
        if extra:
            raise PlanError(f"the plan places tables that the model lacks: {', '.join(extra)}")

    def report(self) -> str:
        """A readable summary: load and memory of each rank, the bound, the tables."""
        mean = sum(self.read_bytes) / self.world_size
        balance = max(self.read_bytes) / mean if mean else 1.0
        source = (
            f"profile {self.profile_hash[:12]}"
            if self.profile_hash
            else "no profile: rows were dealt as if all were looked up alike"
        )
        tables = _count(len(self.placements), "table")
        ranks = _count(self.world_size, "rank")
        lines = [
            f"plan {self.content_hash[:12]}: {tables} on {ranks}, {source}",
            rank_table(
                {
                    "lookups": self.planned_lookups,
                    "read bytes": self.read_bytes,
                    "memory bytes": self.memory_bytes,
                    "memory cap": tuple(r.memory_bytes for r in self.cluster.ranks),
                }
            ),
            f"busiest rank / mean: {balance:.4f}, above the least that any plan could reach:"
            f" {self.gap:.2%}",
        ]
        for module in dict.fromkeys(p.module for p in self.placements):
            lines += [f"tables of {module}:"] if module else []
            lines.append(_tables([p for p in self.placements if p.module == module]))
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to one file, all or nothing.

        Raises:
            OSError: the file can't be written; one that was there before is untouched.
        """
        header = {**self._header(), "hash": self.content_hash}
        write_archive(path, "plan", header, self._arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan that ``save`` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ArchiveError: the file is truncated, damaged, or not a plan.
        """
        header, arrays = read_archive(path, "plan")
        if header.get("format") != FORMAT:
            raise ArchiveError(
                f"{path}: plan format {header.get('format')} found, this version reads {FORMAT};"
                " make the plan again"
            )
        try:
            plan = cls._from_parts(header, arrays)
        except (
            OperError,
            ArithmeticError,
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            raise ArchiveError(f"{path} is a damaged plan: {error}") from error
        if plan.content_hash != header.get("hash"):
            raise ArchiveError(
                f"{path} is a damaged plan: its content has hash {plan.content_hash}, the file"
                f" says {header.get('hash')}"
            )
        return plan

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "cluster": self.cluster.to_json(),
            "profile_hash": self.profile_hash,
            "bound_bytes": self.bound_bytes,
            "seed": self.seed,
            "placements": [
                {"module": p.module, "exchange": p.exchange, "table": p.table.to_json()}
                for p in self.placements
            ],
        }

    def _arrays(self) -> dict[str, Ints]:
        arrays = {}
        for index, placement in enumerate(self.placements):
            parts = {
                **placement.row_map.arrays(),
                "planned_lookups": placement.planned_lookups,
            }
            arrays.update({f"{index}.{name}": array for name, array in parts.items()})
        return arrays

    @classmethod
    def _from_parts(cls, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Plan:
        by_table: dict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
        for name, array in arrays.items():
            index, _, part = name.partition(".")
            by_table[index][part] = array
        placements = []
        for number, fields in enumerate(header["placements"]):
            parts = by_table[str(number)]
            placements.append(
                TablePlacement(
                    module=fields["module"],
                    table=TableSpec.from_json(fields["table"]),
                    row_map=RowMap.from_arrays(parts),
                    planned_lookups=parts["planned_lookups"],
                    exchange=fields["exchange"],
                )
            )
        return cls(
            placements=tuple(placements),
            cluster=Cluster.from_json(header["cluster"]),
            profile_hash=header["profile_hash"],
            bound_bytes=header["bound_bytes"],
            seed=header["seed"],
        )


def _tables(placements: Sequence[TablePlacement]) -> str:
    titles = ("table", "rows", "rows of each rank", "lookups of each rank")
    rows = [
        (
            p.table.name,
            p.table.rows,
            _list(p.row_map.owned_rows),
            _list(p.planned_lookups),
        )
        for p in placements
    ]
    return table_of(titles, rows)


def _bytes(placement: TablePlacement) -> list[int]:
    """[W] bytes that the table's rows take on each rank."""
    size = placement.table.stored_row_bytes
    return [rows * size for rows in placement.row_map.owned_rows.tolist()]


def _sums(values: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """[W] sums over tables, in Python's integers, which don't overflow."""
    return tuple(map(sum, zip(*values, strict=True)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _list(counts: Ints, most: int = 8) -> str:
    shown = " ".join(f"{count}" for count in counts[:most])
    return f"{shown} ..." if len(counts) > most else shown
