"""What the tables of a model ask of a rank in a step: from a profile, or from Zipf's law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.plan import Workload
from torchrec_oper.planner.zipf import zipf_blocks
from torchrec_oper.profile import AccessProfile, TableAccess
from torchrec_oper.table import TableSpec

SKEW = 0.9
"""The Zipf exponent that is assumed without a profile: the best single fit to Meta's
published embedding traces (dlrm_datasets, 2021 and 2022)."""


def table_demands(
    specs: Sequence[TableSpec], profile: AccessProfile | None, workload: Workload
) -> list[TableDemand]:
    """What each table asks of a rank in a step, from the profile or from the assumed law."""
    if profile is None:
        size, factors = workload.batch_size, workload.pooling_factors
        return [
            assumed_demand(spec, size, pooling_factor=factors.get(spec.name, 1.0)) for spec in specs
        ]
    share = workload.batch_size / profile.samples
    return [profiled_demand(spec, profile.table(spec.name), share) for spec in specs]


def profiled_demand(spec: TableSpec, access: TableAccess, share: float) -> TableDemand:
    """The demand of a table.

    Args:
        spec: the table.
        access: how it is used.
        share: samples of a rank's batch for each sample of the profile.
    """
    rows, chances = access.blocks()
    filled = access.bags - access.empty_bags
    return TableDemand(
        table=spec,
        lookups=access.lookups * share,
        bags=filled * share,
        bag_lengths=access.bag_lengths,
        bag_shares=access.bag_shares,
        block_rows=rows,
        block_chances=chances,
        listed_rows=len(access.ids),
    )


def assumed_demand(spec: TableSpec, batch_size: int, *, pooling_factor: float) -> TableDemand:
    """The demand of a table that nobody has profiled: Zipf's law, and bags of one length."""
    rows, chances = zipf_blocks(spec.rows, SKEW)
    bags = batch_size * len(spec.features) * min(pooling_factor, 1.0)
    return TableDemand(
        table=spec,
        lookups=batch_size * len(spec.features) * pooling_factor,
        bags=bags,
        bag_lengths=np.array([max(pooling_factor, 1.0)]),
        bag_shares=np.ones(1),
        block_rows=rows,
        block_chances=chances,
        listed_rows=0,
    )
