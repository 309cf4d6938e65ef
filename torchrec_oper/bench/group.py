"""The ranks of a measurement: one process, or a process group of ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from torchrec_oper.errors import OperError, PlanError

T = TypeVar("T")


class Group:
    """All ranks of the job; a lone process where no process group is initialised.

    Every rank makes the same calls in the same order.
    """

    def __init__(self) -> None:
        self._many = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self._many else 0
        self.size = dist.get_world_size() if self._many else 1

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self._many:
            dist.barrier()

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank."""
        if not self._many:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def on_first(self, function: Callable[[], T]) -> T:
        """What ``function`` returns on rank 0, on every rank.

        Raises:
            OperError: rank 0 raised it; here likewise ``OSError``.
        """
        if not self._many:
            return function()
        told: list[tuple[T | None, Exception | None]] = [(None, None)]
        if self.rank == 0:
            try:
                told = [(function(), None)]
            except (OperError, OSError) as error:
                told = [(None, error)]
        dist.broadcast_object_list(told, src=0)
        value, failure = told[0]
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]


@contextmanager
def all_ranks() -> Iterator[Group]:
    """The ranks that torchrun started, joined by gloo, or this process alone.

    A process group that is initialised already is used and left as it is.

    Raises:
        PlanError: ``WORLD_SIZE`` says that there are more, but they can't be joined.
    """
    if dist.is_initialized() or os.environ.get("WORLD_SIZE", "1") == "1":
        yield Group()
        return
    try:
        dist.init_process_group("gloo")
    except (ValueError, RuntimeError) as error:
        raise PlanError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}, but the ranks can't be joined ({error});"
            " start them with torchrun, or unset it to measure one rank"
        ) from error
    try:
        yield Group()
    finally:
        dist.destroy_process_group()
