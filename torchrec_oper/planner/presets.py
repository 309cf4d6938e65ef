"""Clusters of common machines, for plans made where those machines aren't.

Sizes and peak rates come from data sheets; the shares of them that are reached are
assumptions, stated below. Where it matters, measure.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import EMBEDDING_SHARE, Cluster
from torchrec_oper.planner.rates import Link, Rate, Rates, positive_number
from torchrec_oper.planner.topology import (
    GPU_INTER_LATENCY_S,
    GPU_INTRA_LATENCY_S,
    GPU_SHARD_OVERHEAD_S,
)
from torchrec_oper.table import whole_number

RANKS_PER_HOST = 8

# The share of the memory's peak rate that random reads of rows reach: an assumption, not
# measured, that gives the 1.2e12 bytes per second of `bench` on an A100 of 80 GB.
READ_SHARE = 0.6
# An update reads a row, modifies it and writes it, and does the same to its optimizer
# state, so it is taken for three reads of the row.
READS_PER_UPDATE = 3
# The share of a link's peak rate that an exchange reaches: NCCL's model allows an A100 235
# of NVLink's 300 GB/s (src/graph/tuning.cc, `compCap80`).
LINK_SHARE = 0.8


@dataclass(frozen=True)
class Gpu:
    """The peak values of one GPU of a machine.

    Args:
        memory_bytes: its HBM.
        memory_bytes_per_s: peak rate of the HBM.
        nvlink_bytes_per_s: peak rate of its NVLinks in each direction.
        nic_bytes_per_s: peak rate of its network card in each direction.
    """

    memory_bytes: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    nic_bytes_per_s: float


# Of machines with 8 GPUs on one NVSwitch and a network card for each GPU. Data sheets give
# NVLink for both directions together, so half of it stands here.
MACHINES = {
    # "NVIDIA A100 Tensor Core GPU" data sheet, SXM: 40 GB HBM2 of 1,555 GB/s, NVLink 600 GB/s.
    # "NVIDIA DGX A100" data sheet: 8 ConnectX-6 of 200 Gb/s.
    "8xA100-40GB": Gpu(40e9, 1.555e12, 300e9, 25e9),
    # The same sheets: 80 GB HBM2e of 2,039 GB/s.
    "8xA100-80GB": Gpu(80e9, 2.039e12, 300e9, 25e9),
    # "NVIDIA H100 Tensor Core GPU" data sheet, SXM: 80 GB HBM3 of 3.35 TB/s, NVLink 900 GB/s.
    # "NVIDIA DGX H100" data sheet: 8 ConnectX-7 of 400 Gb/s.
    "8xH100": Gpu(80e9, 3.35e12, 450e9, 50e9),
    # "NVIDIA H200 Tensor Core GPU" data sheet, SXM: 141 GB HBM3e of 4.8 TB/s, NVLink 900 GB/s.
    # "NVIDIA DGX H200" data sheet: 8 ConnectX-7 of 400 Gb/s.
    "8xH200": Gpu(141e9, 4.8e12, 450e9, 50e9),
}


def machine(name: str, *, hosts: int = 1, memory_share: float = EMBEDDING_SHARE) -> Cluster:
    """``hosts`` machines of 8 ranks each.

    Memory is shared where there is one host. Rates are ``READ_SHARE`` and ``LINK_SHARE``
    of the data sheets' peaks, an update costing ``READS_PER_UPDATE`` reads.

    Args:
        name: a key of ``MACHINES``, such as ``8xA100-80GB``.
        hosts: number of machines.
        memory_share: the share of each GPU's memory that embeddings may take; the rest is
            for activations, buffers and the dense model.

    Raises:
        PlanError: the machine isn't known, or a number is out of range.
    """
    if name not in MACHINES:
        raise PlanError(f"machine must be one of {', '.join(MACHINES)}, found {name!r}")
    count = whole_number(hosts, "hosts", least=1, error=PlanError)
    share = positive_number(memory_share, "memory_share")
    if share > 1:
        raise PlanError(f"memory_share must be 1 or less, found {memory_share!r}")
    gpu = MACHINES[name]
    read = gpu.memory_bytes_per_s * READ_SHARE
    return Cluster.uniform(
        count * RANKS_PER_HOST,
        memory_bytes=int(gpu.memory_bytes * share),
        ranks_per_host=RANKS_PER_HOST,
        rates=_gpu_rates(
            read_bytes_per_s=read,
            update_bytes_per_s=read / READS_PER_UPDATE,
            intra_bytes_per_s=gpu.nvlink_bytes_per_s * LINK_SHARE,
            inter_bytes_per_s=gpu.nic_bytes_per_s * LINK_SHARE,
            shares_memory=count == 1,
        ),
    )


def bench(world_size: int, *, memory_bytes: int) -> Cluster:
    """The cluster that the benches plan for: round rates, near those of A100s.

    Args:
        world_size: number of ranks, 8 to a host; memory is shared where there is one host.
        memory_bytes: what the embeddings of a rank may take.

    Raises:
        PlanError: a number isn't a positive whole number.
    """
    count = whole_number(world_size, "world_size", least=1, error=PlanError)
    return Cluster.uniform(
        count,
        memory_bytes=memory_bytes,
        ranks_per_host=RANKS_PER_HOST,
        rates=_gpu_rates(
            read_bytes_per_s=1.2e12,
            update_bytes_per_s=4e11,
            intra_bytes_per_s=3e11,
            inter_bytes_per_s=4e10,
            shares_memory=count <= RANKS_PER_HOST,
        ),
    )


def _gpu_rates(
    *,
    read_bytes_per_s: float,
    update_bytes_per_s: float,
    intra_bytes_per_s: float,
    inter_bytes_per_s: float,
    shares_memory: bool,
) -> Rates:
    return Rates(
        read=Rate(((1, read_bytes_per_s),)),
        update=Rate(((1, update_bytes_per_s),)),
        intra_host=Link(GPU_INTRA_LATENCY_S, intra_bytes_per_s),
        inter_host=Link(GPU_INTER_LATENCY_S, inter_bytes_per_s),
        shard_overhead_s=GPU_SHARD_OVERHEAD_S,
        shares_memory=shares_memory,
    )
