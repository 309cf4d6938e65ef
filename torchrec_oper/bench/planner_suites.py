"""The tables that ``oper bench planner`` plans: published suites, on clusters of a bench.

A suite's shapes are read from ``table_configs.json``; how its rows are looked up is a Zipf
law, whose skew the bench chooses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchrec_oper.errors import ArchiveError, PlanError
from torchrec_oper.planner.baselines.stock_placement import StockPlacement
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.presets import bench
from torchrec_oper.planner.zipf import zipf_blocks
from torchrec_oper.table import TableSpec

TABLES_FILE = "table_configs.json"
DOCUMENTED_FILE = "torchrec_sharding_stats_tables.json"
DOCUMENTED = "torchrec_doc_1935table"
POOLED = "-pooled"

# Name in TABLES_FILE, ranks, samples of a rank's batch: a global batch of 65,536 but where
# the source says otherwise. The first four are `--quick`.
SUITES = (
    ("mlperf_dlrm_dcnv2", 8, 8192),
    ("criteo_kaggle", 8, 4096),
    ("nvidia_de_v3_tiny", 8, 8192),
    ("nvidia_de_v3_small", 8, 8192),
    ("nvidia_de_v3_medium", 32, 2048),
    ("mlperf_dlrm_dcnv2", 64, 1024),
    ("nvidia_de_v3_large", 64, 1024),
    ("hugectr_180table_70B", 64, 1024),
    ("hugectr_200table_100B", 64, 1024),
    ("hugectr_510table_110B", 64, 1024),
    (DOCUMENTED, 96, 2560),
    (DOCUMENTED + POOLED, 96, 2560),
    ("nvidia_de_v3_jumbo", 128, 512),
    ("nvidia_de_v3_colossal", 512, 128),
)
SUITE_NAMES = tuple(dict.fromkeys(name for name, _, _ in SUITES))

STATE_BYTES_PER_ROW = 4  # row-wise Adagrad
EXACT_ROWS = 4096  # that have a block of their own
BLOCK_GROWTH = 1.03  # from one end of a block to the next, past those
LEAST_LOOKUPS = 1e-3  # of a sample: the source rounds some tables' to 0
LEAST_CAP_BYTES = 60e9


@dataclass(frozen=True, eq=False)
class SuiteTable:
    """One table of a suite: its shape, and lookups of a sample, all features together."""

    spec: TableSpec
    lookups: float


@dataclass(frozen=True, eq=False)
class Suite:
    """Tables, and the ranks that they are to be planned for.

    Args:
        name: as in ``table_configs.json``; with ``-pooled``, without the tables whose
            lookups aren't pooled.
        ranks: number of ranks.
        batch_size: samples of a rank's batch.
        tables: the tables.
        documented: where TorchRec's documentation says its planner put them, for the
            suite that it describes.
    """

    name: str
    ranks: int
    batch_size: int
    tables: tuple[SuiteTable, ...]
    documented: tuple[StockPlacement, ...] | None = None

    @cached_property
    def cluster(self) -> Cluster:
        """The ranks, each with memory for twice its share of the tables, 60 GB at least."""
        size = sum(table.spec.rows * table.spec.stored_row_bytes for table in self.tables)
        return bench(self.ranks, memory_bytes=int(max(LEAST_CAP_BYTES, 2 * size / self.ranks)))

    def demands(self, skew: float) -> list[TableDemand]:
        """The tables under a Zipf law: rank r of a table is looked up with chance r**-skew.

        A feature's bags have its mean length where that is 1 or more; otherwise that share
        of them has one id, and the others none.
        """
        found = []
        for table in self.tables:
            rows, chances = zipf_blocks(table.spec.rows, skew)
            features = len(table.spec.features)
            length = table.lookups / features
            found.append(
                TableDemand(
                    table=table.spec,
                    lookups=table.lookups * self.batch_size,
                    bags=features * self.batch_size * min(length, 1.0),
                    bag_lengths=np.array([max(length, 1.0)]),
                    bag_shares=np.ones(1),
                    block_rows=rows,
                    block_chances=chances,
                    listed_rows=table.spec.rows,
                )
            )
        return found


def load_suites(data: Path, *, names: Sequence[str] = (), quick: bool = False) -> list[Suite]:
    """The suites, in the order of ``SUITES``.

    Args:
        data: the folder that holds ``table_configs.json``.
        names: which ones; all by default.
        quick: of those, only the suites for 8 ranks.

    Raises:
        OSError: a file can't be read.
        ArchiveError: a file holds something else than suites.
        PlanError: there is no suite of such a name.
    """
    unknown = sorted(set(names) - set(SUITE_NAMES))
    if unknown:
        raise PlanError(
            f"there is no suite {', '.join(unknown)}; there are {', '.join(SUITE_NAMES)}"
        )
    wanted = [
        (name, ranks, batch_size)
        for name, ranks, batch_size in SUITES
        if (not names or name in names) and (not quick or ranks == 8)
    ]
    if not wanted:
        raise PlanError(f"none of {', '.join(names)} is a suite for 8 ranks; leave --quick out")
    configs = _read_json(data / TABLES_FILE, dict)
    return [
        Suite(name, ranks, batch_size, *_tables(data, configs, name))
        for name, ranks, batch_size in wanted
    ]


def _read_json(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise PlanError(
            f"there is no {path}, from which the suites' tables are read; name the folder that"
            " has it with --data DIR"
        ) from error
    except ValueError as error:
        raise ArchiveError(f"{path} isn't JSON ({error}); fetch it again") from error
    if not isinstance(found, kind):
        raise ArchiveError(f"{path} holds a {type(found).__name__}, wanted a {kind.__name__}")
    return found


def _tables(
    data: Path, configs: Mapping[str, Any], name: str
) -> tuple[tuple[SuiteTable, ...], tuple[StockPlacement, ...] | None]:
    """A suite's tables, and their documented placement."""
    path = data / TABLES_FILE
    try:
        if name.removesuffix(POOLED) == DOCUMENTED:
            path = data / DOCUMENTED_FILE
            entries = _read_json(path, list)
            if name.endswith(POOLED):
                entries = [entry for entry in entries if entry["output"] == "pooled"]
            placements = tuple(_documented_placement(entry) for entry in entries)
            return tuple(_documented_table(entry) for entry in entries), placements
        return tuple(_configured_tables(configs[name])), None
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ArchiveError(f"{path} doesn't describe suite {name} ({problem})") from error


def _configured_tables(config: Mapping[str, Any]) -> Iterator[SuiteTable]:
    features = config.get("features", [1] * len(config["rows"]))
    columns = (config["rows"], config["dim"], config["pooling"], features)
    for number, (rows, dim, lookups, count) in enumerate(zip(*columns, strict=True)):
        yield _table(f"table_{number:04}", (rows, dim), (lookups, count), pooled=True)


def _documented_table(entry: Mapping[str, Any]) -> SuiteTable:
    lookups = max(float(entry["sum_pooling_factor"]), LEAST_LOOKUPS)
    shape = (entry["rows"], entry["dim"])
    pooled = entry["output"] == "pooled"
    name = f"{entry['module']}.{entry['name']}"
    return _table(name, shape, (lookups, entry["features"]), pooled=pooled)


def _table(
    name: str, shape: tuple[int, int], use: tuple[float, int], *, pooled: bool
) -> SuiteTable:
    """A table of (rows, dim), and (lookups of a sample, features)."""
    rows, dim = shape
    lookups, features = use
    spec = TableSpec(
        name=name,
        rows=rows,
        dim=dim,
        features=tuple(f"{name}_{number}" for number in range(features)),
        pooling="sum" if pooled else "none",
        optimizer_bytes_per_row=STATE_BYTES_PER_ROW,
    )
    return SuiteTable(spec, float(lookups))


def _documented_placement(entry: Mapping[str, Any]) -> StockPlacement:
    """The placement of one table as the documentation's log states it."""
    ranks, dim = entry["ranks"], entry["dim"]
    if entry["sharding"] == "RW":
        return StockPlacement("row_wise", np.array([ranks]), (dim,))
    if entry["sharding"] == "CW":
        width = entry["cw_dim"] or dim
        if width * len(ranks) != dim:
            raise ValueError(f"table {entry['name']}: {len(ranks)} slices of {width} for {dim}")
        return StockPlacement("column_wise", np.array(ranks)[:, None], (width,) * len(ranks))
    raise ValueError(f"table {entry['name']}: sharding {entry['sharding']}, known are CW and RW")
