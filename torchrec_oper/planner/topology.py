"""What TorchRec's ``Topology`` says of a cluster, read without importing TorchRec."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.rates import Link, Rate, Rates, positive_number

# TorchRec keeps bandwidths in bytes per millisecond (planner/constants.py).
MS_PER_S = 1000.0
# Seconds to start a phase of an exchange between GPUs, which no data sheet says. Near
# NCCL's own model of a ring (src/graph/tuning.cc, `hwLat`, protocol Simple): 3.4e-6 over
# NVLink, 9.6e-6 over the network.
GPU_INTRA_LATENCY_S = 5e-6
GPU_INTER_LATENCY_S = 1e-5
# A piece of a table costs a GPU about the reading of its offsets: those of a global batch
# of 65,536 bags, 4 bytes each, at 1.2e12 bytes per second.
GPU_SHARD_OVERHEAD_S = 2e-7

# Where the tables are on each of TorchRec's devices.
_STORAGE = {"cuda": "hbm", "mtia": "hbm", "cpu": "ddr"}


class Reading(NamedTuple):
    """What a topology says: of each rank its bytes of memory and host, and the rates."""

    memory_bytes: list[int]
    hosts: list[int]
    rates: Rates


def read_topology(
    topology: Any, *, shares_memory: bool | None, memory_share: float, defaults: Rates | None
) -> Reading:
    """See ``Cluster.from_topology``."""
    try:
        return _read(topology, shares_memory, memory_share, defaults)
    except AttributeError as error:
        raise PlanError(
            f"wanted a Topology of TorchRec, found a {type(topology).__name__} ({error})"
        ) from error


def _read(
    topology: Any, shares_memory: bool | None, memory_share: float, defaults: Rates | None
) -> Reading:
    device = topology.compute_device
    if device not in _STORAGE:
        raise PlanError(
            f"a topology of compute device {device!r} isn't supported, only of {sorted(_STORAGE)}"
        )
    local = topology.local_world_size
    if topology.intra_group_size != local:
        raise PlanError(
            f"a topology with pods isn't supported: {topology.intra_group_size} ranks have fast"
            f" links and {local} are on a host; say Cluster.uniform(..., ranks_per_host="
            f"{topology.intra_group_size}, rates=...) to plan a pod as one host"
        )
    share = positive_number(memory_share, "memory_share")
    if share > 1:
        raise PlanError(f"memory_share must be 1 or less, found {memory_share!r}")
    hosts = [rank // local for rank in range(topology.world_size)]
    memory_bytes = [
        int(getattr(hardware.storage, _STORAGE[device]) * share) for hardware in topology.devices
    ]
    for rank, size in enumerate(memory_bytes):
        if size < 1:
            name = _STORAGE[device]
            raise PlanError(f"the topology says that rank {rank} has {size} bytes of {name}")
    shared = hosts[-1] == 0 if shares_memory is None else shares_memory
    return Reading(memory_bytes, hosts, _rates(topology, device, shared, defaults))


def _rates(topology: Any, device: str, shares_memory: bool, defaults: Rates | None) -> Rates:
    if defaults is None:
        defaults = Rates() if device == "cpu" else _gpu_defaults()
    name = f"{_STORAGE[device]}_mem_bw"
    read = _per_s(getattr(topology, name), name)
    factor = positive_number(topology.bwd_compute_multiplier, "bwd_compute_multiplier")
    bandwidths = topology.comms_bandwidths
    return Rates(
        read=Rate(((1, read),)),
        update=Rate(((1, read / factor),)),
        intra_host=Link(
            defaults.intra_host.latency_s, _per_s(bandwidths.intra_host_bw, "intra_host_bw")
        ),
        inter_host=Link(
            defaults.inter_host.latency_s, _per_s(bandwidths.inter_host_bw, "inter_host_bw")
        ),
        shard_overhead_s=defaults.shard_overhead_s,
        shares_memory=shares_memory,
    )


def _gpu_defaults() -> Rates:
    default = Rates()
    return Rates(
        intra_host=Link(GPU_INTRA_LATENCY_S, default.intra_host.bytes_per_s),
        inter_host=Link(GPU_INTER_LATENCY_S, default.inter_host.bytes_per_s),
        shard_overhead_s=GPU_SHARD_OVERHEAD_S,
    )


def _per_s(per_ms: Any, what: str) -> float:
    return positive_number(per_ms, f"the topology's {what}") * MS_PER_S
