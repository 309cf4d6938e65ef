"""Placements to compare with, and what they cost as TorchRec executes them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.baselines import (
    OverMemoryError,
    StockPlacement,
    Task,
    greedy_table_wise,
    row_wise,
    stock_loads,
    with_our_exchanges,
)
from torchrec_oper.planner.cluster import Cluster, Link, Rate, Rates
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.demand import TableDemand
from torchrec_oper.planner.judge import decision_loads, verdict
from torchrec_oper.table import TableSpec

# 1 byte per second, so that seconds are bytes; updates at a third of that.
RATES = Rates(
    read=Rate(((1, 1.0),)),
    update=Rate(((1, 1 / 3),)),
    intra_host=Link(0.0, 4.0),
    inter_host=Link(0.0, 1.0),
    shard_overhead_s=0.0,
    shares_memory=True,
)
BATCH = 8


def demand(name="t", *, rows=4, dim=4, length=1.0, features=1, pooling="sum", chances=None):
    """A table looked up evenly; every bag has ``length`` ids, or that share of them one."""
    table = TableSpec(
        name,
        rows,
        dim,
        tuple(f"{name}{i}" for i in range(features)),
        pooling=pooling,
        optimizer_bytes_per_row=4,
    )
    return TableDemand(
        table=table,
        lookups=BATCH * features * length,
        bags=BATCH * features * min(length, 1.0),
        bag_lengths=np.array([max(length, 1.0)]),
        bag_shares=np.ones(1),
        block_rows=np.ones(rows),
        block_chances=np.full(rows, 1 / rows) if chances is None else np.array(chances),
        listed_rows=rows,
    )


def task(*demands, ranks=2, local=None, memory=10**6, objective="infer"):
    cluster = Cluster.uniform(ranks, memory_bytes=memory, ranks_per_host=local, rates=RATES)
    return Task(demands, cluster, objective, BATCH)


def traffic(value):
    return [
        np.asarray(array).tolist()
        for array in (
            value.sent_intra,
            value.received_intra,
            value.sent_inter,
            value.received_inter,
        )
    ]


@pytest.mark.parametrize(
    ("by", "owners"),
    [
        # bytes 160, 96, 64; dims 2, 4, 16; bytes looked up 8 * (8, 16*4, 64)
        ("rows", {"a": 0, "b": 1, "c": 1}),
        ("dim", {"c": 0, "b": 1, "a": 1}),
        ("lookups", {"b": 0, "c": 1, "a": 1}),
    ],
)
def test_greedy_puts_the_largest_first_on_the_least_loaded(by, owners):
    tables = task(
        demand("a", rows=20, dim=2),
        demand("b", rows=6, dim=4, length=5),
        demand("c", rows=1, dim=16),
    )
    placed = greedy_table_wise(tables, by)
    assert {
        d.table.name: int(p.owners[0, 0]) for d, p in zip(tables.demands, placed, strict=True)
    } == owners


def test_greedy_takes_a_rank_with_room_or_says_that_none_has():
    small, large = demand("small", rows=2, dim=8), demand("large", rows=10, dim=1)
    # By dim, `small` (64 bytes) goes first, and `large` (40 bytes) to the other rank;
    # buffers take 8 bags of 36 bytes on each.
    fits = task(small, large, demand("last", rows=8, dim=1), memory=64 + 8 * 40 + 10)
    assert [int(p.owners[0, 0]) for p in greedy_table_wise(fits, "dim")] == [0, 1, 1]
    tight = task(small, large, demand("last", rows=9, dim=1), memory=64 + 8 * 40)
    with pytest.raises(OverMemoryError, match="no rank has room for table last: it needs 36 bytes"):
        greedy_table_wise(tight, "dim")


def test_table_wise_sends_a_vector_for_every_bag_empty_or_not():
    tables = task(demand(length=0.5))
    loads = stock_loads(tables, [StockPlacement.whole(tables.demands[0], 1)])
    # 8 bags of 16 bytes to the other rank; 4 ids of 8 bytes from it; rank 1 reads 2 * 4 rows.
    assert traffic(loads.forward)[:2] == [[0, 128], [128, 0]]
    assert traffic(loads.ids)[:2] == [[32, 0], [0, 32]]
    assert loads.memory_s.tolist() == [0, 128]
    assert loads.memory_bytes.tolist() == [128, 128 + 4 * 16]
    assert loads.phases == 2


def test_row_wise_on_one_host_sends_every_owners_vector():
    tables = task(demand(rows=8), ranks=4)
    loads = stock_loads(tables, row_wise(tables))
    # 3 others x 8 bags x 16 bytes, whoever owns what.
    assert traffic(loads.forward) == [[384] * 4, [384] * 4, [0] * 4, [0] * 4]
    assert loads.memory_s.tolist() == [4 * 2 * 16] * 4
    assert loads.memory_bytes.tolist() == [2 * 16 + 8 * 16] * 4


def test_a_ring_over_two_hosts_crosses_twice():
    tables = task(demand(rows=8), ranks=4, local=2)
    loads = stock_loads(tables, row_wise(tables))
    # 2 of the ring's 4 links are between hosts, so half of the 384 bytes.
    assert traffic(loads.forward) == [[192] * 4] * 4


def test_table_row_wise_reduces_within_the_host_first():
    tables = task(demand(rows=8), ranks=6, local=2, objective="train")
    placement = StockPlacement("table_row_wise", np.array([[2, 3]]), (4,))
    loads = stock_loads(tables, [placement])
    # Within: 1 other owner x 3 hosts' ranks of its number x 8 bags x 16 bytes. Across: one
    # vector for each bag to the rank of the same number on 2 hosts.
    sent, across = [0, 0, 384, 384, 0, 0], [0, 0, 256, 256, 0, 0]
    received = [128, 128, 0, 0, 128, 128]
    assert traffic(loads.forward) == [sent, sent, across, received]
    assert traffic(loads.backward) == [sent, sent, received, across]
    assert loads.phases == 3


def test_grid_is_table_row_wise_of_each_slice():
    tables = task(demand(rows=8), ranks=4, local=2)
    owners = np.array([[0, 1], [2, 3]])
    grid = stock_loads(tables, [StockPlacement("table_row_wise", owners, (2, 2))])
    # Each slice's vector has 8 bytes: 1 other owner x 2 hosts x 8 bags x 8 bytes.
    assert traffic(grid.forward) == [[128] * 4, [128] * 4, [64] * 4, [64] * 4]


def test_sequences_send_a_row_for_every_lookup():
    tables = task(demand(rows=8, length=3, pooling="none"), ranks=2, objective="train")
    loads = stock_loads(tables, row_wise(tables))
    # 24 lookups, half of them of each owner, of 16 bytes.
    assert traffic(loads.forward)[:2] == [[192] * 2] * 2
    assert traffic(loads.backward)[:2] == [[192] * 2] * 2
    touched = 8 * (1 - (1 - 1 / 8) ** 48) / 2
    np.testing.assert_allclose(loads.memory_s, 2 * (2 * 12 * 16) + touched * 16 * 3)


def test_data_parallel_sums_the_gradients_of_all_rows():
    tables = task(demand(rows=8), ranks=4, local=2, objective="train")
    none = np.empty((1, 0), dtype=np.int64)
    loads = stock_loads(tables, [StockPlacement("data_parallel", none, (4,))])
    # 128 bytes: 2 * 1/2 within hosts at 4 bytes a second, 2 * 1/2 of half across at 1.
    assert loads.allreduce_s.tolist() == [128 / 4 + 64] * 4
    assert loads.memory_bytes.tolist() == [8 * (16 + 4)] * 4
    assert (loads.phases, loads.allreduce_phases) == (0, 2)


def test_a_rank_may_own_two_slices():
    tables = task(demand(dim=8))
    loads = stock_loads(tables, [StockPlacement("column_wise", np.array([[1], [1]]), (4, 4))])
    assert traffic(loads.forward)[0] == [0, 8 * 32]
    assert traffic(loads.ids)[0] == [2 * 64, 0]  # the ids go to each slice


@given(
    rows=st.integers(1, 40),
    dim=st.sampled_from([4, 16]),
    length=st.integers(1, 5),
    ranks=st.integers(1, 6),
    objective=st.sampled_from(["train", "infer"]),
    data=st.data(),
)
def test_whole_tables_cost_what_our_whole_does_when_no_bag_is_empty(
    rows, dim, length, ranks, objective, data
):
    tables = task(
        demand(rows=rows, dim=dim, length=length), ranks=ranks, local=2, objective=objective
    )
    rank = data.draw(st.integers(0, ranks - 1))
    stock = stock_loads(tables, [StockPlacement.whole(tables.demands[0], rank)])
    ours = decision_loads(
        Decision("whole", 0, np.array([[rank]])), tables.demands[0], tables.cluster, objective
    )
    for name in ("memory_s", "shard_s", "memory_bytes"):
        np.testing.assert_allclose(getattr(stock, name), getattr(ours, name))
    for name in ("ids", "forward", "backward"):
        np.testing.assert_allclose(traffic(getattr(stock, name)), traffic(getattr(ours, name)))
    assert stock.phases == ours.phases


@pytest.mark.parametrize("objective", ["train", "infer"])
def test_what_is_sent_is_received(objective):
    tables = task(
        *[demand(f"t{i}", rows=9) for i in range(4)], ranks=4, local=2, objective=objective
    )
    placements = [
        StockPlacement.whole(tables.demands[0], 3),
        row_wise(tables)[1],
        StockPlacement("table_row_wise", np.array([[3, 2]]), (4,)),
        StockPlacement("column_wise", np.array([[1], [2]]), (2, 2)),
    ]
    loads = stock_loads(tables, placements)
    for phase in (loads.ids, loads.forward, loads.backward):
        sums = [sum(values) for values in traffic(phase)]
        assert sums[0] == pytest.approx(sums[1]) and sums[2] == pytest.approx(sums[3])
    assert (sum(traffic(loads.backward)[0]) > 0) == (objective == "train")


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (("column_wise", [[0], [1]], (2, 1)), "slices have 3 elements, the table 4"),
        (("table_wise", [[4]], (4,)), "placed on rank 4, but there are 4 ranks"),
        (("row_wise", [[0, 1]], (4,)), "row_wise takes each of the 4 ranks once"),
        (("table_row_wise", [[1, 2]], (4,)), r"one host once, found \[1, 2\].*\[0, 1\]"),
    ],
)
def test_placements_that_torchrec_cant_make_are_refused(placement, message):
    sharding, owners, widths = placement
    tables = task(demand(), ranks=4, local=2)
    with pytest.raises(PlanError, match=message):
        stock_loads(tables, [StockPlacement(sharding, np.array(owners), widths)])


def test_values_are_checked():
    with pytest.raises(PlanError, match="table_wise can't have owners of shape"):
        StockPlacement("table_wise", np.array([[0, 1]]), (4,))
    with pytest.raises(PlanError, match="sharding must be one of"):
        StockPlacement("grid_shard", np.array([[0]]), (4,))
    with pytest.raises(
        PlanError, match="8.0 bags aren't empty, but 4 samples of 1 features have 4"
    ):
        Task([demand()], task(demand()).cluster, "infer", 4)


def test_our_exchange_is_the_cheapest_that_the_owners_allow():
    # Long bags of few rows: whole vectors beat rows on the way, and rows are never read twice.
    tables = task(demand(rows=4, length=50.0), ranks=2)
    found = with_our_exchanges(tables, [StockPlacement.whole(tables.demands[0], 1)])
    [made] = found.decisions
    assert made.owners.tolist() == [[1]] and made.hot_rows == 0
    costs = {
        name: verdict(
            decision_loads(
                Decision(name, 0, made.owners), tables.demands[0], tables.cluster, "infer"
            ),
            tables.cluster,
        ).cost_s
        for name in ("whole", "rows", "direct")
    }
    assert found.verdict.cost_s == min(costs.values())
    assert costs[made.exchange] == min(costs.values())


def test_our_exchange_keeps_owners_and_splits_what_a_decision_cant_hold():
    tables = task(
        demand("pair", dim=8),
        demand("twice", dim=8),
        demand("few", rows=3),
        demand("copied"),
        demand("ids", pooling="none", dim=8, rows=9),
        ranks=4,
    )
    none = np.empty((1, 0), dtype=np.int64)
    placements = [
        StockPlacement("column_wise", np.array([[2], [0]]), (4, 4)),
        StockPlacement("column_wise", np.array([[1], [1]]), (4, 4)),
        row_wise(tables)[2],
        StockPlacement("data_parallel", none, (4,)),
        StockPlacement("table_wise", np.array([[3]]), (8,)),
    ]
    found = with_our_exchanges(tables, placements)
    names = [piece.table.name for piece in found.demands]
    assert names == ["pair", "twice.0", "twice.1", "few", "copied", "ids"]
    made = dict(zip(names, found.decisions, strict=True))
    assert made["pair"].owners.tolist() == [[2], [0]]
    assert made["twice.0"].owners.tolist() == made["twice.1"].owners.tolist() == [[1]]
    assert sorted(made["few"].owners[0]) == [0, 1, 2]  # a rank without rows owns nothing
    assert made["copied"].exchange == "replicated" and made["copied"].hot_rows == 4
    assert made["ids"].exchange in ("rows", "direct")
