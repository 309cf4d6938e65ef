"""Every way to place one table, and what each asks of its owners and of all ranks.

Amounts are kept as vectors of six: seconds of memory work at speed 1 (``WORK``), fixed
seconds (``FIXED``), bytes between an owner and each requester in the three phases of an
exchange (``IDS``, ``FORWARD``, ``BACKWARD``), and bytes of memory (``BYTES``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster
from torchrec_oper.planner.decision import Decision, Exchange
from torchrec_oper.planner.demand import Floats, Objective, TableDemand
from torchrec_oper.planner.space import SearchSpace

WORK, FIXED, IDS, FORWARD, BACKWARD, BYTES = range(6)
PHASES = (IDS, FORWARD, BACKWARD)
ID_BYTES = 8
ROWS_PER_PART = 8
# So much hotter than an even share must a row be to be heavy: rounding must not decide.
ROUNDING = 1e-9
FINE_HOT_ROWS = 2**20

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of one table, [C] of them.

    Args:
        exchange: name of each one's exchange.
        hot_rows: [C] hot rows.
        columns, parts: [C] slices of the columns and parts of the rows; 1 and 0 for
            ``replicated``.
        common: [6, C] what every rank bears.
        piece: [6, C] what the owner of an even part bears besides.
        heavy: for a candidate's number the parts that hold one heavy row each, [6, J];
            they come before the even ones.
        linear: [C] whether its parts may be uneven.
    """

    exchange: tuple[Exchange, ...]
    hot_rows: Ints
    columns: Ints
    parts: Ints
    common: Floats
    piece: Floats
    heavy: dict[int, Floats]
    linear: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.exchange)

    def pieces(self, number: int) -> Floats:
        """[6, owners] what each owner of a candidate bears, slice by slice."""
        parts = int(self.parts[number])
        heavy = self.heavy.get(number)
        row = np.repeat(self.piece[:, number, None], parts, axis=1)
        if heavy is not None:
            row[:, : heavy.shape[1]] = heavy
        return np.tile(row, int(self.columns[number]))

    def totals(self) -> Floats:
        """[6, C] what all owners of each candidate bear together."""
        total: Floats = self.piece * (self.columns * self.parts)
        for number, heavy in self.heavy.items():
            lighter = heavy - self.piece[:, number, None]
            total[:, number] += self.columns[number] * lighter.sum(axis=1)
        return total


class Costs:
    """What the candidates of one table are made of; ``candidates`` lists them."""

    def __init__(self, demand: TableDemand, cluster: Cluster, objective: Objective) -> None:
        self.demand, self.cluster = demand, cluster
        self.world_size = cluster.world_size
        self.training = objective == "train"
        self.row_bytes = float(demand.table.row_bytes)
        self.state_bytes = demand.table.optimizer_bytes_per_row if self.training else 0
        self.rows = _running(demand.block_rows)
        self.chance = _running(demand.block_rows * demand.block_chances)
        self.distinct = distinct_rows(demand, demand.lookups)
        self.global_distinct = distinct_rows(demand, demand.lookups * self.world_size)
        self.shard_s = cluster.rates.shard_overhead_s * (2 if self.training else 1)

    def hit(self, chance: Floats) -> Floats:
        """The chance that a bag that isn't empty has a row out of rows of ``chance``."""
        lengths, shares = self.demand.bag_lengths, self.demand.bag_shares
        missed = np.exp(np.log1p(-np.minimum(chance, 1 - 1e-15))[..., None] * lengths)
        return np.asarray((1 - missed) @ shares)

    def read_s(self, row_bytes: Floats | float) -> Floats:
        """Seconds to read rows of these bytes, for each row."""
        return row_bytes / self.cluster.rates.read.bytes_per_s(row_bytes)

    def update_s(self, row_bytes: Floats | float) -> Floats:
        """Seconds to update rows of these bytes, for each row."""
        return row_bytes / self.cluster.rates.update.bytes_per_s(row_bytes)

    def part(
        self, exchange: Exchange, columns: Ints, chance: Floats, counts: tuple[Floats, ...]
    ) -> Floats:
        """[6, C] what the owner of one part bears.

        Args:
            exchange: the exchange.
            columns: [C] slices of the columns.
            chance: [C] the chance of the part's rows.
            counts: its rows, and its distinct rows in the lookups of a rank and of all.
        """
        rows, distinct, global_distinct = counts
        world, demand = self.world_size, self.demand
        width = self.row_bytes / columns
        lookups = demand.lookups * chance
        hits = demand.bags * self.hit(chance)
        sent = {"rows": distinct, "direct": lookups}.get(exchange, hits)
        unpooled = demand.table.pooling == "none"
        returned = {"rows": distinct, "direct": lookups if unpooled else hits}.get(exchange, hits)
        ids = {"rows": distinct, "direct": lookups * self.training}.get(exchange, lookups)
        read = distinct if exchange == "rows" else lookups
        out = np.zeros((6, len(columns)))
        out[WORK] = world * read * self.read_s(width)
        if self.training:
            out[WORK] += world * returned * self.read_s(width)
            out[WORK] += global_distinct * self.update_s(width)
            out[BACKWARD] = returned * width
        out[FIXED] = self.shard_s
        out[IDS] = ID_BYTES * ids
        out[FORWARD] = sent * width
        out[BYTES] = rows * (width + self.state_bytes)
        return out

    def common(self, exchange: Exchange, hot: Ints, received: Floats) -> Floats:
        """[6, C] what every rank bears: replicas, pooling of received rows, buffers.

        Args:
            exchange: the exchange of the rows that aren't hot.
            hot: [C] blocks of hot rows.
            received: [C] bytes that a requester receives in the forward phase.
        """
        hot_rows, hot_chance = self.rows[hot], self.chance[hot]
        lookups, row_bytes = self.demand.lookups, self.row_bytes
        out = np.zeros((6, len(hot)))
        out[WORK] = lookups * hot_chance * self.read_s(row_bytes)
        if exchange == "rows":
            out[WORK] += lookups * (1 - hot_chance) * self.read_s(row_bytes)
        out[FIXED] = np.where(hot > 0, self.shard_s, 0.0)
        if self.training:
            out[WORK] += self.global_distinct[hot] * self.update_s(row_bytes)
            out[FIXED] += self.allreduce_s(hot)
        out[BYTES] = hot_rows * (row_bytes + self.state_bytes) + received
        return out

    def allreduce_s(self, hot: Ints) -> Floats:
        """[C] seconds to sum the hot rows' gradients over ranks, the cheaper of two ways.

        All rows in a hierarchical ring, or each rank's distinct rows to their owners and
        the sums back to all.
        """
        rates, world = self.cluster.rates, self.world_size
        local, hosts = int(self.cluster.local_sizes.min()), self.cluster.host_count
        intra, inter = rates.intra_host.bytes_per_s, rates.inter_host.bytes_per_s
        dense = self.rows[hot] * self.row_bytes
        ring = 2 * (local - 1) / local * dense / intra
        ring = ring + 2 * (hosts - 1) / hosts * dense / local / inter
        mine, everyone = self.distinct[hot], self.global_distinct[hot]
        sparse = mine * (self.row_bytes + ID_BYTES) + everyone * self.row_bytes
        sparse = sparse * ((local - 1) / world / intra + (world - local) / world / inter)
        return np.minimum(ring, sparse)


def list_candidates(
    demand: TableDemand, cluster: Cluster, objective: Objective, space: SearchSpace
) -> Candidates:
    """Every candidate that ``space`` allows for a table."""
    costs = Costs(demand, cluster, objective)
    cuts = _hot_cuts(costs, space)
    families = []
    for exchange, shapes in _shapes(costs, space).items():
        if exchange == "replicated":
            families.append(_replicated(costs))
            continue
        grid = [(c, k, 0) for c, k in shapes.plain]
        grid += [(c, k, h) for h in cuts for c, k in shapes.hot]
        left = costs.rows[-1] - costs.rows
        grid = [(c, k, h) for c, k, h in grid if k == 1 or left[h] >= ROWS_PER_PART * k]
        if grid:
            families.append(_family(costs, exchange, np.array(grid, dtype=np.int64)))
    return _joined(families)


def fixed_candidate(
    demand: TableDemand, cluster: Cluster, objective: Objective, decision: Decision
) -> Candidates:
    """The one candidate that a decision is.

    Raises:
        PlanError: its hot rows end within a block of rows of equal hotness.
    """
    costs = Costs(demand, cluster, objective)
    if decision.parts == 0:
        return _replicated(costs)
    block = int(np.searchsorted(costs.rows, decision.hot_rows))
    if costs.rows[min(block, len(costs.rows) - 1)] != decision.hot_rows:
        raise PlanError(
            f"table {demand.table.name} is fixed with {decision.hot_rows} hot rows, but rows of"
            f" equal hotness can't be told apart; take {costs.rows[block - 1]:.0f}"
        )
    shape = np.array([[decision.columns, decision.parts, block]], dtype=np.int64)
    only = _family(costs, decision.exchange, shape)
    if decision.weights is None:
        return replace(only, linear=np.zeros(1, dtype=np.bool_))
    rows, chance, *distinct = (
        (running[-1] - running[block]) * decision.weights
        for running in (costs.rows, costs.chance, costs.distinct, costs.global_distinct)
    )
    one = np.ones(decision.parts, dtype=np.int64)
    pieces = costs.part(decision.exchange, one, chance, (rows, *distinct))
    return replace(only, heavy={0: pieces}, linear=np.zeros(1, dtype=np.bool_))


@dataclass(frozen=True)
class _Shapes:
    """(columns, parts) of an exchange without and with hot rows."""

    plain: list[tuple[int, int]]
    hot: list[tuple[int, int]]


def _shapes(costs: Costs, space: SearchSpace) -> dict[Exchange, _Shapes]:
    world, table = costs.world_size, costs.demand.table
    columns, c = [], 1
    while c <= world and table.dim % c == 0 and (c == 1 or table.dim // c >= space.min_slice_width):
        columns.append(c)
        c *= 2
    grid = [(c, k) for c in columns for k in _parts(world // c, fine=space.fine_parts)]
    shapes: dict[Exchange, _Shapes] = {}
    line = [(c, k) for c, k in grid if c == 1]
    if table.pooling != "none":
        full = [(c, world // c) for c in columns if world // c > 1]
        shapes["partial"] = _Shapes([(c, k) for c, k in grid if k > 1], full)
        shapes["whole"] = _Shapes([(c, 1) for c in columns], [(c, 1) for c in columns])
    shapes["rows"] = _Shapes(line + [(c, 1) for c in columns[1:]], [(1, world)])
    if costs.cluster.rates.shares_memory:
        shapes["direct"] = _Shapes(line, [(1, world)])
    shapes["replicated"] = _Shapes([], [])
    return {name: shapes[name] for name in space.exchanges if name in shapes}


def _parts(most: int, *, fine: bool) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... (without ``fine``: powers of 2) up to ``most``, and ``most``."""
    powers = [1 << i for i in range(most.bit_length())]
    found = {*powers, most}
    if fine:
        found |= {3 * power for power in powers if 3 * power <= most}
    return sorted(found)


def _hot_cuts(costs: Costs, space: SearchSpace) -> list[int]:
    """Blocks of hot rows of each cut between none and all."""
    if not space.hot_rows:
        return []
    most = min(costs.demand.listed_rows, int(costs.rows[-1]) - 1)
    cuts = set()
    for quarter in itertools.count():
        wanted = space.hot_step ** (quarter / 4)
        if wanted > most:
            break
        if quarter % 4 == 0 or wanted > FINE_HOT_ROWS:
            block = int(np.searchsorted(costs.rows, wanted))
            if costs.rows[block] <= most:
                cuts.add(block)
    return sorted(cuts)


def _replicated(costs: Costs) -> Candidates:
    all_blocks = np.array([len(costs.rows) - 1])
    none = np.zeros((6, 1))
    return Candidates(
        exchange=("replicated",),
        hot_rows=np.array([int(costs.rows[-1])]),
        columns=np.array([1]),
        parts=np.array([0]),
        common=costs.common("replicated", all_blocks, np.zeros(1)),
        piece=none,
        heavy={},
        linear=np.array([False]),
    )


def _family(costs: Costs, exchange: Exchange, grid: Ints) -> Candidates:
    """The candidates of one exchange, [C, 3] columns, parts and blocks of hot rows."""
    columns, parts, hot = grid.T
    chance = (1 - costs.chance[hot]) / parts
    counts = tuple(
        (running[-1] - running[hot]) / parts
        for running in (costs.rows, costs.distinct, costs.global_distinct)
    )
    piece = costs.part(exchange, columns, chance, counts)
    heavy = {}
    if exchange != "rows":
        hottest = costs.demand.block_chances[hot]
        for number in np.flatnonzero((parts > 1) & (hottest > chance * (1 + ROUNDING))):
            alone, piece[:, number] = _with_heavy_rows(costs, exchange, grid[number])
            heavy[int(number)] = alone
    received = piece[FORWARD] * columns * parts
    for number, alone in heavy.items():
        received[number] += columns[number] * (alone[FORWARD] - piece[FORWARD, number]).sum()
    linear = (columns == 1) & (parts > 1) & _in_proportion(costs, exchange)
    linear[list(heavy)] = False
    return Candidates(
        exchange=(exchange,) * len(grid),
        hot_rows=costs.rows[hot].astype(np.int64),
        columns=columns,
        parts=parts,
        common=costs.common(exchange, hot, received),
        piece=piece,
        heavy=heavy,
        linear=linear,
    )


def _in_proportion(costs: Costs, exchange: Exchange) -> bool:
    """Whether what a part asks is in proportion to its chance: not so bags of several ids."""
    demand = costs.demand
    one_id = bool((demand.bag_lengths[demand.bag_shares > 0] == 1).all())
    by_row = not costs.training or demand.table.pooling == "none"
    return one_id or exchange == "rows" or (exchange == "direct" and by_row)


def _with_heavy_rows(costs: Costs, exchange: Exchange, shape: Ints) -> tuple[Floats, Floats]:
    """The parts of one heavy row each, [6, J], and the even part of the rest, [6].

    A row gets a part of its own where its chance is above an even share of what is left.
    """
    columns, parts, hot = (int(value) for value in shape)
    demand = costs.demand
    blocks = slice(hot, hot + parts)
    chances = np.repeat(
        demand.block_chances[blocks], demand.block_rows[blocks].astype(np.int64).clip(max=parts)
    )
    chances = chances[: parts - 1]
    before = _running(chances)
    left = 1 - costs.chance[hot] - before[:-1]
    alone = chances > left / (parts - np.arange(len(chances))) * (1 + ROUNDING)
    count = len(chances) if alone.all() else int(np.argmin(alone))
    heavy = chances[:count]
    seen = [
        -np.expm1(n * np.log1p(-np.minimum(heavy, 1 - 1e-15)))
        for n in (demand.lookups, demand.lookups * costs.world_size)
    ]
    pieces = costs.part(exchange, np.full(count, columns), heavy, (np.ones(count), *seen))
    rest = parts - count
    counts = (
        np.array([(costs.rows[-1] - costs.rows[hot] - count) / rest]),
        np.array([(costs.distinct[-1] - costs.distinct[hot] - seen[0].sum()) / rest]),
        np.array([(costs.global_distinct[-1] - costs.global_distinct[hot] - seen[1].sum()) / rest]),
    )
    chance = np.array([max(1 - costs.chance[hot] - before[count], 0.0) / rest])
    even = costs.part(exchange, np.array([columns]), chance, counts)
    return pieces, even[:, 0]


def _joined(families: list[Candidates]) -> Candidates:
    heavy: dict[int, Floats] = {}
    first = 0
    for family in families:
        heavy |= {first + number: alone for number, alone in family.heavy.items()}
        first += len(family)
    return Candidates(
        exchange=tuple(name for family in families for name in family.exchange),
        hot_rows=np.concatenate([family.hot_rows for family in families]),
        columns=np.concatenate([family.columns for family in families]),
        parts=np.concatenate([family.parts for family in families]),
        common=np.concatenate([family.common for family in families], axis=1),
        piece=np.concatenate([family.piece for family in families], axis=1),
        heavy=heavy,
        linear=np.concatenate([family.linear for family in families]),
    )


def distinct_rows(demand: TableDemand, lookups: float) -> Floats:
    """[N + 1] expected distinct rows in ``lookups``, out of the first 0, 1, ... N blocks."""
    chance = np.minimum(demand.block_chances, 1 - 1e-15)
    return _running(demand.block_rows * -np.expm1(lookups * np.log1p(-chance)))


def _running(values: Floats) -> Floats:
    """The sums of the first 0, 1, ... values."""
    return np.concatenate([[0.0], np.cumsum(values)])
