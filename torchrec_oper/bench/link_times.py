"""How long a phase of an exchange takes, by the bytes sent, within hosts and between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_oper.bench.group import Group
from torchrec_oper.planner.calibration import LinkFit, fit_link

# A measurement sends about this many bytes to each peer, in so many messages.
BYTES_OF_A_MEASUREMENT = 2**22
LEAST_TIMES, MOST_TIMES = 4, 32


@dataclass(frozen=True)
class Level:
    """Which ranks a rank sends to.

    Args:
        peers: [ranks of ``process_group``] whether this rank sends to each; empty where it
            takes no part.
        process_group: who takes part.
        peer_count: of the rank with most peers.
    """

    peers: tuple[bool, ...]
    process_group: Any
    peer_count: int


def link_fits(
    group: Group,
    hosts: Sequence[int],
    *,
    message_bytes: Sequence[int],
    repeats: int,
    ticks: Callable[[], None],
) -> tuple[LinkFit | None, LinkFit | None]:
    """The fitted links within hosts and between hosts; None where there is no such pair.

    Every rank sends a message to each of its peers with ``all_to_all_single``, all ranks at
    once, size by size, ``repeats`` times over after a first time that doesn't count. The
    slowest rank's time counts, and the median of the repeats.

    Args:
        group: all ranks.
        hosts: [W] the host of each rank.
        message_bytes: what a rank sends to one peer.
        repeats: how often.
        ticks: called after each of ``(repeats + 1) * len(message_bytes)`` measurements of
            every level that exists.

    Raises:
        PlanError: the times make no sense; raised on every rank.
    """
    levels = [_within(group, hosts), _between(group, hosts)]
    seconds = np.zeros((len(levels), repeats + 1, len(message_bytes)))
    for repeat in range(repeats + 1):
        for number, level in enumerate(levels):
            if level is None:
                continue
            for index, size in enumerate(message_bytes):
                seconds[number, repeat, index] = _phase(group, level, size)
                ticks()
    slowest = np.max(group.gather(seconds), axis=0)
    medians = np.median(slowest[:, 1:], axis=1)

    def fits() -> list[LinkFit | None]:
        return [
            None
            if level is None
            else fit_link([level.peer_count * size for size in message_bytes], times.tolist())
            for level, times in zip(levels, medians, strict=True)
        ]

    within, between = group.on_first(fits)
    return within, between


def level_count(hosts: Sequence[int]) -> int:
    """How many of the two levels of links there are."""
    count = len(set(hosts))
    return (len(hosts) > count) + (count > 1)


def _within(group: Group, hosts: Sequence[int]) -> Level | None:
    most = max(hosts.count(host) for host in hosts)
    if most == 1:
        return None
    mine: tuple[tuple[bool, ...], Any] = ((), None)
    for host in sorted(set(hosts)):
        members = [rank for rank, other in enumerate(hosts) if other == host]
        if len(members) == 1:
            continue
        process_group = dist.new_group(members)  # every rank has to call it
        if group.rank in members:
            mine = (tuple(rank != group.rank for rank in members), process_group)
    return Level(*mine, most - 1)


def _between(group: Group, hosts: Sequence[int]) -> Level | None:
    least = min(hosts.count(host) for host in hosts)
    if least == len(hosts):
        return None
    peers = tuple(host != hosts[group.rank] for host in hosts)
    return Level(peers, dist.group.WORLD, len(hosts) - least)


def _phase(group: Group, level: Level, message_bytes: int) -> float:
    """Seconds that this rank takes to send and to receive a message for each peer."""
    splits = [message_bytes * peer for peer in level.peers]
    sent = torch.zeros(sum(splits), dtype=torch.uint8)
    received = torch.zeros_like(sent)
    times = max(LEAST_TIMES, min(MOST_TIMES, BYTES_OF_A_MEASUREMENT // message_bytes))

    def exchange() -> None:
        dist.all_to_all_single(received, sent, splits, splits, group=level.process_group)

    group.barrier()
    if not splits:
        return 0.0
    exchange()  # not timed: it connects the ranks, and brings them in step
    start = time.perf_counter()
    for _ in range(times):
        exchange()
    return (time.perf_counter() - start) / times
