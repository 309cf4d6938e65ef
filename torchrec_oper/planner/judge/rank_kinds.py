"""Ranks that nothing tells apart, and how they sit on hosts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.cluster import Cluster

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RankKinds:
    """The kinds of ranks of a cluster, G of them, in the order of their first rank.

    Two ranks are of a kind where memory, speed, and the memories and speeds on their
    host agree.

    Args:
        ranks: [G] ranks of each kind.
        memory_bytes: [G] memory of such a rank.
        speeds: [G] its speed.
        local: [G] ranks on its host.
        on_host: [G, G] ranks of the second kind on the host of one of the first.
    """

    ranks: Floats
    memory_bytes: Floats
    speeds: Floats
    local: Floats
    on_host: Floats


def rank_kinds(cluster: Cluster) -> RankKinds:
    """The kinds of ranks of a cluster."""
    alone = [(rank.memory_bytes, rank.speed) for rank in cluster.ranks]
    hosts: dict[int, list[tuple[int, float]]] = {}
    for rank, what in zip(cluster.ranks, alone, strict=True):
        hosts.setdefault(rank.host, []).append(what)
    with_host = [
        (what, tuple(sorted(hosts[rank.host])))
        for rank, what in zip(cluster.ranks, alone, strict=True)
    ]
    kinds = {key: number for number, key in enumerate(dict.fromkeys(with_host))}
    kind_of = np.array([kinds[key] for key in with_host])
    first = np.array([with_host.index(key) for key in kinds])
    on_host = np.stack(
        [
            np.bincount(kind_of[cluster.hosts == cluster.hosts[rank]], minlength=len(kinds))
            for rank in first
        ]
    )
    return RankKinds(
        ranks=np.bincount(kind_of).astype(np.float64),
        memory_bytes=cluster.memory_bytes[first],
        speeds=cluster.speeds[first],
        local=cluster.local_sizes[first].astype(np.float64),
        on_host=on_host.astype(np.float64),
    )
