"""TorchRec's own planner for the modules that ``OperSharder`` doesn't take."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.adapter.model import OtherModule
from torchrec_oper.planner.plan import Plan
from torchrec_oper.planner.topology import MS_PER_S

LONGEST_REASON = 600  # characters of what TorchRec says when it finds no plan


def plan_others(
    others: Sequence[OtherModule],
    plan: Plan,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> dict[str, EmbeddingModuleShardingPlan]:
    """TorchRec's plan for modules, in the memory that ``plan`` leaves, by their paths.

    Args:
        others: the modules.
        plan: ours for the other tables; its cluster and batch size count.
        constraints: TorchRec's, by table.

    Raises:
        PlanError: TorchRec finds no plan, leaves a table out, or wants another cluster.
    """
    if not others:
        return {}
    caps = [rank.memory_bytes for rank in plan.cluster.ranks]
    left = [cap - need for cap, need in zip(caps, plan.memory_bytes, strict=True)]
    named = ", ".join(other.path or "the model" for other in others)
    with _nothing_up_to(logging.INFO):
        planner = EmbeddingShardingPlanner(
            topology=_topology(others, plan, left),
            batch_size=plan.workload.batch_size,
            # The caps are for embeddings alone; the rest of the model isn't in them.
            storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
            stats=NoopEmbeddingStats(),
            constraints=dict(constraints) if constraints else None,
            debug=False,
        )
        try:
            found = planner.plan(_Holder(others), [other.sharder for other in others]).plan
        except Exception as error:  # TorchRec raises several kinds
            reason = " ".join(str(error).split())[:LONGEST_REASON]
            raise PlanError(
                f"TorchRec's planner found no plan for {named}, in the"
                f" {', '.join(map(str, left))} bytes that tables of type oper leave on the ranks:"
                f" {reason}"
            ) from error
    entries = {other.path: found.get(_held_name(at), {}) for at, other in enumerate(others)}
    for other in others:
        missing = [table for table in other.tables if table not in entries[other.path]]
        if missing:
            raise PlanError(
                f"TorchRec's planner left out tables {', '.join(missing)} of {other.path}: check"
                " their constraints (it skips those of another device_group)"
            )
    return entries


class _Holder(nn.Module):
    """The modules, and nothing else of the model, where TorchRec's planner finds them."""

    def __init__(self, others: Sequence[OtherModule]) -> None:
        super().__init__()
        for at, other in enumerate(others):
            self.add_module(_held_name(at), other.module)


def _held_name(at: int) -> str:
    """The name of the holder's module number ``at``; paths have dots, which names can't."""
    return f"other{at}"


def _topology(others: Sequence[OtherModule], plan: Plan, left: Sequence[int]) -> Topology:
    """The plan's cluster as TorchRec describes one; ranks' speeds and latencies are lost."""
    cluster, rates = plan.cluster, plan.cluster.rates
    local = int(cluster.local_sizes[0])
    if not np.array_equal(cluster.hosts, np.arange(cluster.world_size) // local) or (
        cluster.world_size % local
    ):
        raise PlanError(
            "TorchRec's planner, which plans"
            f" {', '.join(other.path or 'the model' for other in others)}, wants hosts of one size"
            f" with consecutive ranks, found hosts {cluster.hosts.tolist()} of the ranks"
        )
    sizes = [
        parameter.shape[-1] * parameter.element_size()
        for other in others
        for parameter in other.sharder.shardable_parameters(other.module).values()
    ]
    read = float(rates.read.bytes_per_s(float(np.mean(sizes)))) if sizes else 1.0
    with _nothing_up_to(logging.WARNING):  # it warns of topologies not from Meta's factory
        topology = Topology(
            world_size=cluster.world_size,
            compute_device="cpu",
            local_world_size=local,
            ddr_mem_bw=read / MS_PER_S,
            intra_host_bw=rates.intra_host.bytes_per_s / MS_PER_S,
            inter_host_bw=rates.inter_host.bytes_per_s / MS_PER_S,
        )
    # Set here, as caps in its custom_topology_data make TorchRec cut row-wise shards
    # unevenly, which its training then ignores.
    for device, size in zip(topology.devices, left, strict=True):
        device.storage.ddr = size
        device.storage.ssd = 0
    return topology


@contextmanager
def _nothing_up_to(level: int) -> Iterator[None]:
    """Have nothing logged up to ``level``: TorchRec logs its calls under many names."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)
