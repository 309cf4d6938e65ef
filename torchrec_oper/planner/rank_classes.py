"""Ranks that are alike, as far as cost and memory go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import Floats

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankClasses:
    """The classes of a cluster's ranks: of one memory, speed and make-up of their host.

    Args:
        of_rank: [W] the class of each rank.
        sizes: [G] ranks of each class.
        memory_bytes: [G] a rank's memory.
        speed: [G] a rank's speed.
        local: [G] ranks on a rank's host.
        neighbours: [G, G] how many ranks of the second class are on a host of the first.
    """

    of_rank: Ints
    sizes: Floats
    memory_bytes: Floats
    speed: Floats
    local: Floats
    neighbours: Floats

    def __len__(self) -> int:
        return len(self.sizes)


def rank_classes(cluster: Cluster) -> RankClasses:
    """The classes of ``cluster``'s ranks, in the order of their first rank."""
    on_host: dict[int, list[tuple[int, float]]] = {}
    for rank in cluster.ranks:
        on_host.setdefault(rank.host, []).append((rank.memory_bytes, rank.speed))
    made_up = {host: tuple(sorted(kinds)) for host, kinds in on_host.items()}
    keys = [(rank.memory_bytes, rank.speed, made_up[rank.host]) for rank in cluster.ranks]
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    of_rank = np.array([order[key] for key in keys], dtype=np.int64)
    neighbours = [
        [made_up_of.count(other[:2]) if other[2] == made_up_of else 0 for other in order]
        for _, _, made_up_of in order
    ]
    return RankClasses(
        of_rank=of_rank,
        sizes=np.bincount(of_rank).astype(np.float64),
        memory_bytes=np.array([float(memory) for memory, _, _ in order]),
        speed=np.array([speed for _, speed, _ in order]),
        local=np.array([float(len(kinds)) for _, _, kinds in order]),
        neighbours=np.array(neighbours, dtype=np.float64),
    )
