"""Small plans with the profiles that they were made with."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from torchrec_oper.planner.cluster import Cluster, Link, RankSpec, Rates
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.planning import Request, make_plan
from torchrec_oper.profile import AccessProfile, TableAccess
from torchrec_oper.table import TableSpec

TABLES = (
    TableSpec("item", 3000, 64, ("clicked", "seen"), optimizer_bytes_per_row=4),
    TableSpec("user", 800, 32, ("user",), optimizer_bytes_per_row=4),
    TableSpec("hour", 24, 16, ("hour",), optimizer_bytes_per_row=4),
)
SAMPLES = 2000


@lru_cache
def profile(seed: int = 0) -> AccessProfile:
    """Skewed lookups of items, even ones of users and hours."""
    random = np.random.default_rng(seed)
    drawn = [
        (random.random(4 * SAMPLES) ** 4 * 3000).astype(np.int64),
        random.integers(0, 800, SAMPLES),
        random.integers(0, 24, SAMPLES),
    ]
    return AccessProfile(
        tuple(_access(table, ids) for table, ids in zip(TABLES, drawn, strict=True)), SAMPLES
    )


def _access(table: TableSpec, ids: np.ndarray) -> TableAccess:
    found, counts = np.unique(ids, return_counts=True)
    order = np.lexsort((found, -counts))
    bags = SAMPLES * len(table.features)
    return TableAccess(
        name=table.name,
        rows=table.rows,
        features=table.features,
        ids=found[order],
        counts=counts[order],
        bags=bags,
        empty_bags=0,
        bag_rows=np.array([len(ids)]),
        bag_counts=np.array([bags]),
    )


def cluster(*, memory_bytes: int = 10**6, hosts: int = 2) -> Cluster:
    """Two ranks on each host."""
    rates = Rates(intra_host=Link(1e-6, 2e10), inter_host=Link(2e-6, 4e9), shard_overhead_s=1e-7)
    return Cluster(tuple(RankSpec(memory_bytes, rank // 2) for rank in range(2 * hosts)), rates)


@lru_cache
def plan(*, memory_bytes: int = 10**6, hosts: int = 2, seed: int = 0) -> Plan:
    """The plan for ``profile()``."""
    made = cluster(memory_bytes=memory_bytes, hosts=hosts)
    request = Request(made, profile(), batch_size=256, seed=seed)
    return make_plan([("ebc", table) for table in TABLES], request)


@lru_cache
def assumed_plan() -> Plan:
    """A plan of the same tables without a profile."""
    return make_plan([("ebc", table) for table in TABLES], Request(cluster(), batch_size=256))


def changed(made: Plan, **fields: object) -> Plan:
    """The plan with other values, as a bug or a liar would leave it."""
    return replace(made, **fields)
