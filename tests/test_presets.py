"""Clusters of common machines."""

from __future__ import annotations

from typing import Any

import pytest

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import presets
from torchrec_oper.planner.cluster import Link, Rate, Rates


@pytest.mark.parametrize("name", presets.MACHINES)
def test_every_machine_has_eight_ranks(name: str) -> None:
    one, three = presets.machine(name), presets.machine(name, hosts=3)
    assert one.world_size == 8
    assert one.local_sizes.tolist() == [8] * 8
    assert one.rates.shares_memory
    assert three.world_size == 24
    assert three.local_sizes.tolist() == [8] * 24
    assert not three.rates.shares_memory
    assert three.rates.inter_host.bytes_per_s < three.rates.intra_host.bytes_per_s


def test_what_an_a100_can_do() -> None:
    cluster = presets.machine("8xA100-80GB")
    # 60 % of 2,039 GB/s, a third of that; 80 % of 300 and of 25 GB/s; 80 % of 80 GB.
    (point,), (update,) = cluster.rates.read.points, cluster.rates.update.points
    assert point == (1, pytest.approx(1.2234e12))
    assert update == (1, pytest.approx(4.078e11))
    assert cluster.rates.intra_host == Link(5e-6, 2.4e11)
    assert cluster.rates.inter_host == Link(1e-5, 2e10)
    assert cluster.rates.shard_overhead_s == 2e-7
    assert cluster.ranks[0].memory_bytes == 64 * 10**9
    half = presets.machine("8xA100-80GB", memory_share=0.5)
    assert half.ranks[0].memory_bytes == 40 * 10**9


def test_the_cluster_of_the_benches() -> None:
    cluster = presets.bench(12, memory_bytes=7)
    assert cluster.local_sizes.tolist() == [8] * 8 + [4] * 4
    assert {rank.memory_bytes for rank in cluster.ranks} == {7}
    assert cluster.rates == Rates(
        read=Rate(((1, 1.2e12),)),
        update=Rate(((1, 4e11),)),
        intra_host=Link(5e-6, 3e11),
        inter_host=Link(1e-5, 4e10),
        shard_overhead_s=2e-7,
        shares_memory=False,
    )
    assert presets.bench(8, memory_bytes=7).rates.shares_memory
    assert not presets.bench(9, memory_bytes=7).rates.shares_memory


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("8xA100", {}, "machine must be one of 8xA100-40GB, 8xA100-80GB, 8xH100, 8xH200, found"),
        ("8xH100", {"hosts": 0}, "hosts must be an integer of 1 or more, found 0"),
        ("8xH100", {"memory_share": 0}, "memory_share must be above 0, found 0"),
        ("8xH100", {"memory_share": 1.5}, "memory_share must be 1 or less, found 1.5"),
    ],
)
def test_what_is_not_known_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        presets.machine(name, **options)
    assert message in str(error.value)


def test_the_bench_cluster_refuses_wrong_sizes() -> None:
    with pytest.raises(PlanError, match="world_size must be an integer of 1 or more, found 0"):
        presets.bench(0, memory_bytes=7)
    with pytest.raises(PlanError, match="memory_bytes must be an integer of 1 or more, found 0"):
        presets.bench(1, memory_bytes=0)
