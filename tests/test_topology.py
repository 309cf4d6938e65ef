"""``Cluster.from_topology`` against TorchRec's own ``Topology``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import (
    BWD_COMPUTE_MULTIPLIER,
    CROSS_NODE_BANDWIDTH,
    DDR_MEM_BW,
    HBM_CAP,
    HBM_MEM_BW,
    INTRA_NODE_BANDWIDTH,
)
from torchrec.distributed.planner.types import BasicCommsBandwidths, CustomTopologyData

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import Cluster, presets
from torchrec_oper.planner.cluster import Link, Rate, Rates


def test_round_numbers() -> None:
    topology = Topology(
        world_size=4,
        compute_device="cuda",
        hbm_cap=1000,
        local_world_size=2,
        hbm_mem_bw=2e9,  # bytes per millisecond
        intra_host_bw=3e8,
        inter_host_bw=4e7,
        bwd_compute_multiplier=4,
    )
    rates = Rates(
        read=Rate(((1, 2e12),)),
        update=Rate(((1, 5e11),)),
        intra_host=Link(5e-6, 3e11),
        inter_host=Link(1e-5, 4e10),
        shard_overhead_s=2e-7,
        shares_memory=False,
    )
    assert Cluster.from_topology(topology) == Cluster.uniform(
        4, memory_bytes=1000, ranks_per_host=2, rates=rates
    )
    assert Cluster.from_topology(topology, shares_memory=True).rates.shares_memory
    assert Cluster.from_topology(topology, memory_share=0.75).ranks[3].memory_bytes == 750


def test_torchrecs_defaults_of_a_gpu() -> None:
    cluster = Cluster.from_topology(Topology(world_size=2, compute_device="cuda"))
    read = HBM_MEM_BW * 1000
    assert [rank.memory_bytes for rank in cluster.ranks] == [HBM_CAP] * 2
    assert cluster.hosts.tolist() == [0, 0]
    assert cluster.rates.read == Rate(((1, read),))
    assert cluster.rates.update == Rate(((1, read / BWD_COMPUTE_MULTIPLIER),))
    assert cluster.rates.intra_host.bytes_per_s == INTRA_NODE_BANDWIDTH * 1000
    assert cluster.rates.inter_host.bytes_per_s == CROSS_NODE_BANDWIDTH * 1000
    assert cluster.rates.shares_memory
    latencies = presets.bench(2, memory_bytes=1).rates
    assert cluster.rates.intra_host.latency_s == latencies.intra_host.latency_s
    assert cluster.rates.inter_host.latency_s == latencies.inter_host.latency_s


def test_a_cpu_has_ddr_and_the_latencies_of_one() -> None:
    data = CustomTopologyData({"ddr_cap": [300, 200]}, world_size=2)
    topology = Topology(world_size=2, compute_device="cpu", custom_topology_data=data)
    cluster = Cluster.from_topology(topology)
    assert [rank.memory_bytes for rank in cluster.ranks] == [300, 200]
    assert cluster.rates.read == Rate(((1, DDR_MEM_BW * 1000),))
    assert cluster.rates.intra_host.latency_s == Rates().intra_host.latency_s
    assert cluster.rates.shard_overhead_s == Rates().shard_overhead_s
    defaults = Rates(intra_host=Link(0.5, 1), shard_overhead_s=0.25)
    mine = Cluster.from_topology(topology, defaults=defaults).rates
    assert (mine.intra_host.latency_s, mine.shard_overhead_s) == (0.5, 0.25)
    assert mine.intra_host.bytes_per_s == INTRA_NODE_BANDWIDTH * 1000


def test_given_bandwidths_of_communication_count() -> None:
    bandwidths = BasicCommsBandwidths(intra_host_bw=7.0, inter_host_bw=5.0)
    topology = Topology(
        world_size=2, compute_device="cuda", generalized_comms_bandwidths=bandwidths
    )
    rates = Cluster.from_topology(topology).rates
    assert (rates.intra_host.bytes_per_s, rates.inter_host.bytes_per_s) == (7e3, 5e3)


def test_the_last_host_may_have_fewer_ranks() -> None:
    topology = Topology(world_size=5, compute_device="cuda", local_world_size=2)
    assert Cluster.from_topology(topology).hosts.tolist() == [0, 0, 1, 1, 2]


def test_what_cannot_be_converted_is_refused() -> None:
    def refusal(topology: Any, **options: Any) -> str:
        with pytest.raises(PlanError) as error:
            Cluster.from_topology(topology, **options)
        return str(error.value)

    message = refusal(5)
    assert message.startswith("wanted a Topology of TorchRec, found a int (")
    pods = Topology(world_size=4, compute_device="cuda", local_world_size=1, pod_size=2)
    assert "a topology with pods isn't supported: 2 ranks have fast links and 1" in refusal(pods)
    strange = SimpleNamespace(compute_device="tpu")
    assert "compute device 'tpu' isn't supported, only of ['cpu', 'cuda', 'mtia']" in refusal(
        strange
    )
    full = Topology(world_size=1, compute_device="cuda", hbm_cap=0)
    assert refusal(full) == "the topology says that rank 0 has 0 bytes of hbm"
    still = Topology(world_size=1, compute_device="cuda", intra_host_bw=0)
    assert refusal(still) == "the topology's intra_host_bw must be above 0, found 0"
    fine = Topology(world_size=1, compute_device="cuda")
    assert refusal(fine, memory_share=2) == "memory_share must be 1 or less, found 2"
    assert refusal(fine, shares_memory=3) == "shares_memory must be true or false, found 3"
