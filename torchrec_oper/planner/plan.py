"""The plan: what goes where, and what that is expected to cost."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from torchrec_oper.archive import content_hash, read_archive, write_archive
from torchrec_oper.errors import ArchiveError, OperError, PlanError
from torchrec_oper.planner.certificate import Certificate
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import Objective
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.planner.report import plan_report
from torchrec_oper.planner.row_map import RowMap
from torchrec_oper.planner.space import SearchSpace
from torchrec_oper.table import TableSpec, whole_number

FORMAT = 2


@dataclass(frozen=True)
class Workload:
    """What a plan was made for.

    Args:
        objective: ``train`` or ``infer``.
        batch_size: samples of a rank in a step.
        profile_hash: content hash of the access profile, or None without one.
        skew: the Zipf exponent that was assumed without a profile.
        pooling_factors: ids of a bag that were assumed without a profile, by table; 1 for
            the others.

    Raises:
        PlanError: for an unknown objective, or a batch size below 1.
    """

    objective: Objective
    batch_size: int
    profile_hash: str | None
    skew: float | None = None
    pooling_factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            raise PlanError(f"objective must be train or infer, found {self.objective!r}")
        size = whole_number(self.batch_size, "batch_size", least=1, error=PlanError)
        object.__setattr__(self, "batch_size", size)

    def told(self) -> str:
        """The workload in words."""
        doing = "training" if self.objective == "train" else "inference"
        source = (
            f"profile {self.profile_hash[:12]}"
            if self.profile_hash
            else f"no profile: a Zipf law with exponent {self.skew} is assumed for every table"
        )
        return f"{doing}, {self.batch_size} samples a rank, {source}"


@dataclass(frozen=True, eq=False)
class Plan:
    """The placement of every table for one cluster. Equal content, equal plans.

    Args:
        placements: the tables, in the order of the model.
        cluster: the ranks that the plan was made for.
        workload: what it was made for.
        seconds: predicted seconds of a step on each rank, [W], by what they go to.
        certificate: proves a lower bound on the cost of every plan of ``space``.
        space: what the search could choose from.
        seed: the search's seed.

    Raises:
        PlanError: a rank's rows exceed its memory, or a table or rank doesn't fit.
    """

    placements: tuple[TablePlacement, ...]
    cluster: Cluster
    workload: Workload
    seconds: Mapping[str, tuple[float, ...]]
    certificate: Certificate
    space: SearchSpace
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.placements:
            raise PlanError("a plan needs at least one table, found none")
        keys = [placement.key for placement in self.placements]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated:
            raise PlanError(f"a plan places each table once, found twice: {', '.join(repeated)}")
        for placement in self.placements:
            if placement.world_size != self.world_size:
                raise PlanError(
                    f"table {placement.table.name}: its placement is for"
                    f" {placement.world_size} ranks, the cluster has {self.world_size}"
                )
        for name, values in self.seconds.items():
            if len(values) != self.world_size or not np.isfinite(values).all():
                raise PlanError(f"a plan needs seconds of {name} for each rank, found {values}")
        self._check_memory()

    def _check_memory(self) -> None:
        for rank, need in enumerate(self.memory_bytes):
            cap = self.cluster.ranks[rank].memory_bytes
            if need > cap:
                largest = max(self.placements, key=lambda p: self._bytes(p)[rank])
                raise PlanError(
                    f"rank {rank} needs {need} bytes for its rows and their optimizer state, but"
                    f" its cap is {cap} bytes; most of it, {self._bytes(largest)[rank]} bytes, is"
                    f" for table {largest.table.name}"
                )

    def _bytes(self, placement: TablePlacement) -> list[int]:
        return placement.rank_bytes(optimizer=self.workload.objective == "train")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cluster.world_size

    @cached_property
    def planned_lookups(self) -> tuple[int, ...]:
        """Lookups of the profiled data that each rank serves as an owner."""
        return _sums(p.planned_lookups.tolist() for p in self.placements)

    @cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """Bytes that each rank's rows and replicas take, when training with optimizer state."""
        return _sums(self._bytes(p) for p in self.placements)

    @cached_property
    def rank_s(self) -> tuple[float, ...]:
        """[W] predicted seconds of a step on each rank."""
        columns = zip(*self.seconds.values(), strict=True)
        return tuple(float(sum(parts)) for parts in columns)

    @property
    def cost_s(self) -> float:
        """Predicted seconds of a step on the slowest rank."""
        return max(self.rank_s)

    @property
    def bound_s(self) -> float:
        """Seconds that no plan of ``space`` stays below."""
        return self.certificate.bound_s

    @property
    def gap(self) -> float:
        """How far the cost may be above the best plan's: 0 is optimal."""
        return self.cost_s / self.bound_s - 1 if self.bound_s else 0.0

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
        """A readable summary: seconds and memory of each rank, the bound, the tables."""
        return plan_report(self)

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
                " make the plan again (formats 1 and 2 place rows by different measures)"
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
            "workload": asdict(self.workload),
            "seconds": {name: list(values) for name, values in self.seconds.items()},
            "certificate": self.certificate.to_json(),
            "space": self.space.to_json(),
            "seed": self.seed,
            "placements": [
                {
                    "module": p.module,
                    "table": p.table.to_json(),
                    "exchange": p.decision.exchange,
                    "hot_rows": p.decision.hot_rows,
                    "uneven": p.decision.weights is not None,
                }
                for p in self.placements
            ],
        }

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for index, placement in enumerate(self.placements):
            parts: dict[str, npt.NDArray[Any]] = {
                **placement.row_map.arrays(),
                "owners": placement.decision.owners,
                "planned_lookups": placement.planned_lookups,
            }
            if placement.decision.weights is not None:
                parts["weights"] = placement.decision.weights
            arrays.update({f"{index}.{name}": array for name, array in parts.items()})
        return arrays

    @classmethod
    def _from_parts(cls, header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Plan:
        by_table: dict[str, dict[str, npt.NDArray[Any]]] = defaultdict(dict)
        for name, array in arrays.items():
            index, _, part = name.partition(".")
            by_table[index][part] = array
        placements = tuple(
            _placement(fields, by_table[str(number)])
            for number, fields in enumerate(header["placements"])
        )
        return cls(
            placements=placements,
            cluster=Cluster.from_json(header["cluster"]),
            workload=Workload(**header["workload"]),
            seconds={name: tuple(values) for name, values in header["seconds"].items()},
            certificate=Certificate.from_json(header["certificate"]),
            space=SearchSpace.from_json(header["space"]),
            seed=header["seed"],
        )


def _placement(fields: Mapping[str, Any], parts: Mapping[str, npt.NDArray[Any]]) -> TablePlacement:
    decision = Decision(
        exchange=fields["exchange"],
        hot_rows=fields["hot_rows"],
        owners=parts["owners"],
        weights=parts["weights"] if fields["uneven"] else None,
    )
    return TablePlacement(
        module=fields["module"],
        table=TableSpec.from_json(fields["table"]),
        decision=decision,
        row_map=RowMap.from_arrays(parts),
        planned_lookups=parts["planned_lookups"],
    )


def _sums(values: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """[W] sums over tables, in Python's integers, which don't overflow."""
    return tuple(map(sum, zip(*values, strict=True)))
