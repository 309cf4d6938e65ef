"""What the machine can do: the ranks, their memory, and how fast they read and talk."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.archive import content_hash
from torchrec_oper.errors import PlanError
from torchrec_oper.table import whole_number

# Left for activations, buffers and the rest of the model where memory is detected.
EMBEDDING_SHARE = 0.8
# Where Linux says what the control group may use, "max" for no limit.
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def _number(value: Any, what: str, *, least: float) -> float:
    good = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not (good and math.isfinite(value) and value >= least):
        raise PlanError(f"{what} must be a finite number of {least} or more, found {value!r}")
    return float(value)


def _positive_number(value: Any, what: str) -> float:
    number = _number(value, what, least=0)
    if not number:
        raise PlanError(f"{what} must be above 0, found {value!r}")
    return number


@dataclass(frozen=True)
class Rate:
    """Bytes per second of random access to rows, by row size.

    Args:
        points: (bytes of a row, bytes per second), row sizes ascending. Between two
            points the rate is linear in the logarithm of the row size; outside them it is
            that of the nearest.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise PlanError("a rate needs at least one (row bytes, bytes per second), found none")
        pairs = []
        for size, rate in self.points:
            row_bytes = whole_number(size, "a rate's row bytes", least=1, error=PlanError)
            pairs.append((row_bytes, _positive_number(rate, "a rate's bytes per second")))
        if any(a >= b for (a, _), (b, _) in itertools.pairwise(pairs)):
            raise PlanError(f"a rate's row sizes must ascend, found {[size for size, _ in pairs]}")
        object.__setattr__(self, "points", tuple(pairs))

    def bytes_per_s(self, row_bytes: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The rate for rows of each of ``row_bytes``, in that array's shape."""
        sizes = np.log([size for size, _ in self.points])
        rates = [rate for _, rate in self.points]
        return np.asarray(np.interp(np.log(row_bytes), sizes, rates))


@dataclass(frozen=True)
class Link:
    """What a rank can send, and at the same time receive, over one level of links.

    Args:
        latency_s: seconds to start a phase of an exchange.
        bytes_per_s: bytes per second in each direction.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        latency = _number(self.latency_s, "a link's latency_s", least=0)
        object.__setattr__(self, "latency_s", latency)
        rate = _positive_number(self.bytes_per_s, "a link's bytes_per_s")
        object.__setattr__(self, "bytes_per_s", rate)


@dataclass(frozen=True)
class Rates:
    """How fast a rank of ``speed`` 1 works. Presets: ``torchrec_oper.planner.presets``.

    The defaults are a guess at a CPU server; ``oper calibrate`` measures.

    Args:
        read: random reads of rows, in bytes of rows read.
        update: random updates of rows by a fused optimizer, in bytes of rows updated.
        intra_host: to and from ranks of the same host.
        inter_host: to and from ranks of other hosts.
        shard_overhead_s: seconds that a piece of a table costs its owner in each pass.
        shares_memory: whether a rank can read every other rank's memory directly.
    """

    read: Rate = Rate(((1, 1e10),))
    update: Rate = Rate(((1, 3e9),))
    intra_host: Link = Link(5e-5, 5e9)
    inter_host: Link = Link(1e-4, 1.25e9)
    shard_overhead_s: float = 5e-6
    shares_memory: bool = False

    def __post_init__(self) -> None:
        overhead = _number(self.shard_overhead_s, "shard_overhead_s", least=0)
        object.__setattr__(self, "shard_overhead_s", overhead)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; ``from_json`` reads them back."""
        fields = asdict(self)
        for name in ("read", "update"):
            fields[name] = [list(point) for point in getattr(self, name).points]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Rates:
        """The rates that ``to_json`` wrote."""
        return cls(
            read=Rate(tuple((size, rate) for size, rate in fields["read"])),
            update=Rate(tuple((size, rate) for size, rate in fields["update"])),
            intra_host=Link(**fields["intra_host"]),
            inter_host=Link(**fields["inter_host"]),
            shard_overhead_s=fields["shard_overhead_s"],
            shares_memory=fields["shares_memory"],
        )


@dataclass(frozen=True)
class RankSpec:
    """One rank.

    Args:
        memory_bytes: what its embedding rows, their optimizer state and the buffers of
            lookups may take.
        host: the number of its host.
        speed: how fast it reads and updates rows, relative to the cluster's rates.
    """

    memory_bytes: int
    host: int = 0
    speed: float = 1.0

    def __post_init__(self) -> None:
        size = whole_number(self.memory_bytes, "a rank's memory_bytes", least=1, error=PlanError)
        object.__setattr__(self, "memory_bytes", size)
        host = whole_number(self.host, "a rank's host", error=PlanError)
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "speed", _positive_number(self.speed, "a rank's speed"))


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job, in rank order, and how fast they work."""

    ranks: tuple[RankSpec, ...]
    rates: Rates = Rates()

    def __post_init__(self) -> None:
        if not self.ranks:
            raise PlanError("a cluster needs at least one rank, found none")

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
        """
        count = whole_number(world_size, "world_size", least=1, error=PlanError)
        local = whole_number(ranks_per_host or count, "ranks_per_host", least=1, error=PlanError)
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
        memory_bytes = int(_host_bytes() * EMBEDDING_SHARE) // local
        return cls.uniform(ranks, memory_bytes=memory_bytes, ranks_per_host=local)

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
    def from_json(cls, fields: Mapping[str, Any]) -> Cluster:
        """The cluster that ``to_json`` wrote."""
        columns = (fields["memory_bytes"], fields["host"], fields["speed"])
        ranks = tuple(RankSpec(*values) for values in zip(*columns, strict=True))
        return cls(ranks, Rates.from_json(fields["rates"]))


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
