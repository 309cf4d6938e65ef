"""What the machine can do: the ranks and their memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchrec_oper.archive import content_hash
from torchrec_oper.errors import PlanError
from torchrec_oper.table import whole_number

# Left for activations, buffers and the rest of the model where memory is detected.
EMBEDDING_SHARE = 0.8
# Where Linux says what the control group may use, "max" for no limit.
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class RankSpec:
    """One rank.

    Args:
        memory_bytes: what its embedding rows and their optimizer state may take.
    """

    memory_bytes: int

    def __post_init__(self) -> None:
        size = whole_number(self.memory_bytes, "a rank's memory_bytes", least=1, error=PlanError)
        object.__setattr__(self, "memory_bytes", size)


@dataclass(frozen=True)
class Cluster:
    """The ranks of a job, in rank order."""

    ranks: tuple[RankSpec, ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise PlanError("a cluster needs at least one rank, found none")

    @classmethod
    def uniform(cls, world_size: int, *, memory_bytes: int) -> Cluster:
        """``world_size`` ranks of ``memory_bytes`` each."""
        count = whole_number(world_size, "world_size", least=1, error=PlanError)
        return cls((RankSpec(memory_bytes),) * count)

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
        return cls.uniform(ranks, memory_bytes=int(_host_bytes() * EMBEDDING_SHARE) // local)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the cluster's values."""
        return content_hash(self.to_json(), {})

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; ``from_json`` reads them back."""
        return {"memory_bytes": [rank.memory_bytes for rank in self.ranks]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Cluster:
        """The cluster that ``to_json`` wrote."""
        return cls(tuple(RankSpec(int(size)) for size in fields["memory_bytes"]))


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
