"""What the machine can do: the ranks, their memory, and how fast they read and talk."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.archive import content_hash, replace_file
from torchrec_oper.errors import ArchiveError, PlanError
from torchrec_oper.planner.rates import Link, Rate, Rates, json_object, positive_number
from torchrec_oper.planner.topology import read_topology
from torchrec_oper.table import whole_number

__all__ = ["EMBEDDING_SHARE", "Cluster", "Link", "RankSpec", "Rate", "Rates"]

# Left for activations, buffers and the rest of the model where memory is detected.
EMBEDDING_SHARE = 0.8
# Where Linux says what the control group may use, "max" for no limit.
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")

KIND = "cluster"
SCHEMA = 1  # of the file that `Cluster.save` writes


@dataclass(frozen=True)
class RankSpec:
    """One rank.

    Args:
        memory_bytes: what its embedding rows, their optimizer state and the buffers of
            lookups may take.
        host: the number of its host.
        speed: how fast it reads and updates rows, relative to the cluster's rates.

    Raises:
        PlanError: a value isn't a whole number of 1 or more (``memory_bytes``), of 0 or more
            (``host``), or a finite number above 0 (``speed``).
    """

    memory_bytes: int
    host: int = 0
    speed: float = 1.0

    def __post_init__(self) -> None:
        size = whole_number(self.memory_bytes, "a rank's memory_bytes", least=1, error=PlanError)
        object.__setattr__(self, "memory_bytes", size)
        host = whole_number(self.host, "a rank's host", error=PlanError)
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "speed", positive_number(self.speed, "a rank's speed"))


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job, in rank order, and how fast they work.

    Hosts are numbered from 0 without a gap, so that a slip of the pen in a file is found;
    their ranks need not be neighbours in rank order.

    Raises:
        PlanError: there is no rank, a host number is left out, or a value has another type.
    """

    ranks: tuple[RankSpec, ...]
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, list | tuple):
            raise PlanError(f"ranks must be RankSpec values, found {reprlib.repr(self.ranks)}")
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.ranks:
            raise PlanError("a cluster needs at least one rank, found none")
        for rank in self.ranks:
            if not isinstance(rank, RankSpec):
                raise PlanError(f"ranks must be RankSpec values, found {reprlib.repr(rank)}")
        if not isinstance(self.rates, Rates):
            raise PlanError(f"rates must be a Rates, found {reprlib.repr(self.rates)}")
        hosts = sorted({rank.host for rank in self.ranks})
        if hosts[-1] != len(hosts) - 1:
            raise PlanError(
                f"hosts must be numbered from 0 without a gap, found {reprlib.repr(hosts)}"
            )

    @classmethod
    def uniform(
        cls,
        world_size: int,
        *,
        memory_bytes: int,
        ranks_per_host: int | None = None,
        rates: Rates | None = None,
    ) -> Cluster:
        """``world_size`` ranks of ``memory_bytes`` each.

        Args:
            world_size: number of ranks.
            memory_bytes: see ``RankSpec``.
            ranks_per_host: ranks of a host, the last host taking what is left; by default
                all ranks are on one host.
            rates: see ``Rates``, whose defaults apply.

        Raises:
            PlanError: a number isn't a positive whole number.
        """
        count = whole_number(world_size, "world_size", least=1, error=PlanError)
        local = count if ranks_per_host is None else ranks_per_host
        local = whole_number(local, "ranks_per_host", least=1, error=PlanError)
        ranks = tuple(RankSpec(memory_bytes, rank // local) for rank in range(count))
        return cls(ranks, rates or Rates())

    @classmethod
    def detect(cls, world_size: int | None = None) -> Cluster:
        """The ranks of this job, all on hosts like this one.

        A rank gets an equal part of 80 % of the host's memory, or of what the container
        may use of it.

        Args:
            world_size: number of ranks; by default ``WORLD_SIZE`` as torchrun sets it,
                or 1. Ranks of a host: ``LOCAL_WORLD_SIZE``, or all of them.

        Raises:
            PlanError: a variable isn't a positive whole number.
        """
        ranks = world_size if world_size is not None else _positive("WORLD_SIZE", 1)
        ranks = whole_number(ranks, "world_size", least=1, error=PlanError)
        local = min(_positive("LOCAL_WORLD_SIZE", ranks), ranks)
        memory_bytes = available_bytes() // local
        return cls.uniform(ranks, memory_bytes=memory_bytes, ranks_per_host=local)

    @classmethod
    def from_topology(
        cls,
        topology: Any,
        *,
        shares_memory: bool | None = None,
        memory_share: float = 1.0,
        defaults: Rates | None = None,
    ) -> Cluster:
        """The cluster that a ``Topology`` of TorchRec describes.

        Used are, of every device, its HBM (``cuda``, ``mtia``) or DDR (``cpu``);
        ``local_world_size``, the ranks of a host; the bandwidth of that memory, for reads,
        and divided by ``bwd_compute_multiplier``, TorchRec's cost of a backward pass in
        forward passes, for updates; the bandwidths within and between hosts, in each
        direction. As in TorchRec's own estimates, nothing is taken off for random access.

        Not used are SSD, HBM-to-DDR and the other kind of memory's bandwidth, the
        multipliers for weighted features and uneven sharding, and what general
        communication bandwidths say of single collectives.

        Args:
            topology: the topology; one that a storage reservation of TorchRec returned has
                less memory than the device.
            shares_memory: whether a rank can read every other rank's memory directly; by
                default where all are on one host.
            memory_share: the share of each rank's memory that embeddings may take.
            defaults: where the latencies and ``shard_overhead_s`` come from, which a
                topology doesn't say; by default ``Rates()`` for ``cpu``, and those of
                ``torchrec_oper.planner.presets`` for others.

        Raises:
            PlanError: it is no topology, has pods of several hosts, no memory of the kind
                wanted, or bandwidths that aren't above 0.
        """
        reading = read_topology(
            topology, shares_memory=shares_memory, memory_share=memory_share, defaults=defaults
        )
        pairs = zip(reading.memory_bytes, reading.hosts, strict=True)
        return cls(tuple(RankSpec(size, host) for size, host in pairs), reading.rates)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the cluster's values."""
        return content_hash(self.to_json(), {})

    @cached_property
    def hosts(self) -> npt.NDArray[np.int64]:
        """[W] the host of each rank."""
        return np.array([rank.host for rank in self.ranks], dtype=np.int64)

    @cached_property
    def host_count(self) -> int:
        """Number of hosts."""
        return len(np.unique(self.hosts))

    @cached_property
    def local_sizes(self) -> npt.NDArray[np.int64]:
        """[W] how many ranks the host of each rank has."""
        return np.bincount(self.hosts)[self.hosts]

    @cached_property
    def speeds(self) -> npt.NDArray[np.float64]:
        """[W] the speed of each rank."""
        return np.array([rank.speed for rank in self.ranks])

    @cached_property
    def memory_bytes(self) -> npt.NDArray[np.float64]:
        """[W] the memory cap of each rank, as floats, whose sums don't overflow."""
        return np.array([float(rank.memory_bytes) for rank in self.ranks])

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; ``from_json`` reads them back."""
        return {
            "memory_bytes": [rank.memory_bytes for rank in self.ranks],
            "host": [rank.host for rank in self.ranks],
            "speed": [rank.speed for rank in self.ranks],
            "rates": self.rates.to_json(),
        }

    @classmethod
    def from_json(cls, fields: Any) -> Cluster:
        """The cluster that ``to_json`` wrote.

        ``host``, ``speed`` and ``rates``, which the first version didn't write, may be
        missing: then all ranks are on host 0, of speed 1, and the rates ``Rates()``.

        Raises:
            PlanError: a field is missing, unknown, or has a wrong value.
        """
        columns = ("memory_bytes", "host", "speed")
        fields = json_object(
            fields, "a cluster", needed=columns[:1], optional=(*columns[1:], "rates")
        )
        for name in columns:
            if name in fields and not isinstance(fields[name], list):
                found = reprlib.repr(fields[name])
                raise PlanError(f"{name} must be a list, a value for each rank, found {found}")
        ranks = len(fields["memory_bytes"])
        given = [
            fields.get(name, [default] * ranks)
            for name, default in zip(columns, (0, 0, 1.0), strict=True)
        ]
        for name, values in zip(columns, given, strict=True):
            if len(values) != ranks:
                raise PlanError(f"{name} has {len(values)} values, but memory_bytes {ranks}")
        rates = Rates.from_json(fields["rates"]) if "rates" in fields else Rates()
        return cls(tuple(map(RankSpec, *given)), rates)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster to ``path``, all or nothing, as JSON that a person can edit.

        Raises:
            OSError: the folder is missing or can't be written, or the disk is full.
        """
        document = _readable({"kind": KIND, "schema": SCHEMA, **self.to_json()})
        replace_file(path, lambda file: _write(file, document))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """The cluster in the file at ``path``.

        Raises:
            OSError: there is no such file, or it may not be read.
            ArchiveError: it isn't a cluster's file, or one of a newer schema.
            PlanError: a field is missing, unknown, or has a wrong value.
        """
        fields = _read_file(path)
        try:
            return cls.from_json(fields)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None


def _readable(value: Any, indent: str = "") -> str:
    """JSON with a line for every field, but lists of numbers in one line."""
    deeper = f"{indent}  "
    if isinstance(value, Mapping):
        pairs = value.items()
        lines = [f"{deeper}{json.dumps(name)}: {_readable(one, deeper)}" for name, one in pairs]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(one, list) for one in value):
        return "[\n" + ",\n".join(deeper + json.dumps(one) for one in value) + f"\n{indent}]"
    return json.dumps(value)


def _write(file: IO[bytes], document: str) -> None:
    file.write(f"{document}\n".encode())


def _read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields in a cluster's file, without its kind and schema."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{path} is not a {KIND} of torchrec-oper: {error}") from error
    if not isinstance(fields, dict) or fields.pop("kind", None) != KIND:
        raise ArchiveError(
            f'{path} is not a {KIND} of torchrec-oper (no "kind": "{KIND}" in it); write one'
            " with `oper calibrate` or Cluster.save"
        )
    schema = fields.pop("schema", None)
    if schema != SCHEMA or isinstance(schema, bool):
        raise ArchiveError(
            f"{path}: found a {KIND} of schema {reprlib.repr(schema)}, wanted {SCHEMA}; write it"
            " again with this version of torchrec-oper"
        )
    return fields


def available_bytes() -> int:
    """What the embeddings of all ranks of this host may take, as ``Cluster.detect`` has it."""
    return int(_host_bytes() * EMBEDDING_SHARE)


def _host_bytes(limit: Path = CONTAINER_LIMIT) -> int:
    """The memory of this host, or of the container where that has less."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        text = limit.read_text(encoding="ascii").strip()
    except OSError:
        return host
    return min(host, int(text)) if text.isdecimal() else host


def _positive(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(f"{variable} must be a positive whole number, found {text!r}")
    return int(text)
