"""One profile of what all ranks of a process group have counted."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from torchrec_oper.errors import OperError, ProfileError
from torchrec_oper.profile.access import AccessProfile
from torchrec_oper.profile.collector import AccessCollector

PIECE_BYTES = 1 << 28  # of a message at once

# What a rank has counted, or what kept it from counting.
Outcome = AccessCollector | Exception


def merge_over_ranks(collector: Outcome, group: dist.ProcessGroup | None = None) -> AccessProfile:
    """The profile of all ranks together, on every rank; every rank has to call it.

    Neighbours merge in rank order, in log2(ranks) rounds, and rank 0 hands the profile
    out. A rank holds two collectors at most, and what it is sent.

    Args:
        collector: what this rank has counted, which is merged into; or an exception that
            kept it from counting, for the other ranks to know.
        group: the ranks, by default all; or this process alone where no process group is
            initialised. Its backend for the CPU must be gloo.

    Raises:
        ProfileError: on every rank: no rank has seen a sample, the tables of two ranks
            differ, or a rank gave an exception or failed otherwise (says which rank).
            On this rank alone, at once: the group isn't gloo's.
    """
    if not dist.is_initialized():
        if isinstance(collector, Exception):
            raise collector
        return AccessProfile.from_collector(collector)
    channel = _Channel(group)
    merged: Outcome = _named(collector, channel.rank)
    step = 1
    while step < channel.size:
        if channel.rank % (2 * step):
            channel.send(merged, channel.rank - step)
            break
        if channel.rank + step < channel.size:
            merged = _merged(merged, channel.receive(channel.rank + step), channel.rank)
        step *= 2
    outcome: Any = None
    if channel.rank == 0:
        outcome = _profile(merged)
    outcome = channel.from_first(outcome)
    if isinstance(outcome, Exception):
        raise outcome
    assert isinstance(outcome, AccessProfile)
    return outcome


def _named(collector: Outcome, rank: int) -> Outcome:
    """A failure as an error that says whose it is and can be sent."""
    if isinstance(collector, Exception):
        kind = "" if isinstance(collector, OperError) else f"{type(collector).__name__}: "
        return ProfileError(f"rank {rank} has no counts to merge: {kind}{collector}")
    return collector


def _merged(mine: Outcome, theirs: Outcome, rank: int) -> Outcome:
    """Both together; a failure of the lower rank comes first."""
    if isinstance(mine, Exception):
        return mine
    if isinstance(theirs, Exception):
        return theirs
    try:
        mine.merge(theirs)
    except Exception as error:  # whatever it is, the others must not wait for this rank
        return _named(error, rank)
    return mine


def _profile(merged: Outcome) -> AccessProfile | Exception:
    if isinstance(merged, Exception):
        return merged
    try:
        return AccessProfile.from_collector(merged)
    except OperError as error:
        return error
    except Exception as error:  # as in _merged
        return _named(error, 0)  # type: ignore[return-value]


class _Channel:
    """Sends objects of any size among the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ProfileError("this rank isn't in the group; call it on the group's ranks only")
        backend = dist.get_backend_config(group)
        if "cpu:gloo" not in backend:
            raise ProfileError(
                f"profiles are merged over gloo, but the group's backend is {backend}; pass"
                " group=dist.new_group(backend='gloo')"
            )
        self.size = dist.get_world_size(group)

    def send(self, value: Any, rank: int) -> None:
        """Send ``value`` to a rank of the group, which must receive it."""
        content = self._pickled(value)
        dist.send(torch.tensor([len(content)]), group=self._group, group_dst=rank)
        for piece in torch.frombuffer(content, dtype=torch.uint8).split(PIECE_BYTES):
            dist.send(piece, group=self._group, group_dst=rank)

    def receive(self, rank: int) -> Any:
        """What a rank of the group sends."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group=self._group, group_src=rank)
        content = torch.empty(int(size), dtype=torch.uint8)
        for piece in content.split(PIECE_BYTES):
            dist.recv(piece, group=self._group, group_src=rank)
        return pickle.loads(content.numpy().data)

    def from_first(self, value: Any) -> Any:
        """The value of the group's rank 0, on every rank."""
        content = self._pickled(value) if self.rank == 0 else bytearray()
        size = torch.tensor([len(content)])
        dist.broadcast(size, group=self._group, group_src=0)
        buffer = (
            torch.frombuffer(content, dtype=torch.uint8)
            if self.rank == 0
            else torch.empty(int(size), dtype=torch.uint8)
        )
        for piece in buffer.split(PIECE_BYTES):
            dist.broadcast(piece, group=self._group, group_src=0)
        return pickle.loads(buffer.numpy().data)

    def _pickled(self, value: Any) -> bytearray:
        try:
            return bytearray(pickle.dumps(value, protocol=5))
        except Exception as error:  # for which the others must not wait
            return bytearray(pickle.dumps(_named(error, self.rank)))
