"""Batches replayed lookup by lookup, against counts on paper and by plain loops."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judge_cases import cluster, demand
from strategies import row_maps
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import RowMap
from torchrec_oper.planner.cluster import Cluster, RankSpec
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.judge import HOT, PlacedTable, placed_table, replay_steps
from torchrec_oper.planner.placement import TablePlacement
from torchrec_oper.table import TableSpec

TWO = cluster(0, 0)
FOUR = cluster(0, 0, 1, 1)

# 4 rows of 16 bytes: row 0 in part 0, of rank 1; the others in part 1, of rank 0.
TABLE = demand({0.25: 4}).table


def placed(exchange="partial", owners=((1, 0),), part_of=(0, 1, 1, 1), table=TABLE):
    part_of, owners = np.array(part_of), np.array(owners)
    counts = np.bincount(part_of[part_of >= 0], minlength=owners.shape[1])
    return PlacedTable(table, exchange, owners, counts, lambda ids: part_of[ids])


# Rank 0: bags [0, 0, 1], [], [2]; rank 1: bags [0, 3], [1].
STEP = [
    {"f": ([0, 0, 1, 2], [3, 0, 1])},
    {"f": ([0, 3, 1], [2, 1])},
]


def replayed(table, *, steps=(STEP,), ranks=TWO, objective="train"):
    return replay_steps([table], steps, ranks, objective)


def check(found, phase, sent, received):
    traffic = getattr(found.tables[0].loads, phase)
    np.testing.assert_array_equal(traffic.sent_intra, sent, err_msg=phase)
    np.testing.assert_array_equal(traffic.received_intra, received, err_msg=phase)


def test_partial_sums():
    found = replayed(placed())
    # Part 0: 2 lookups of rank 0 and 1 of rank 1; part 1: 2 of rank 0, 2 of rank 1.
    np.testing.assert_array_equal(found.tables[0].lookups, [4, 3])
    # Without repeats: row 0 once for each rank; rows 1, 2 of rank 0 and 3, 1 of rank 1.
    np.testing.assert_array_equal(found.tables[0].rows, [4, 2])
    np.testing.assert_array_equal(found.tables[0].updated_rows, [3, 1])
    # Rank 0 sends row 0's id twice to rank 1; rank 1 sends ids 3 and 1.
    check(found, "ids", [16, 16], [16, 16])
    # Rank 1 answers rank 0 with the sum of 1 bag; rank 0 answers rank 1 with 2.
    check(found, "forward", [32, 16], [16, 32])
    check(found, "backward", [16, 32], [32, 16])
    # Sums of both ranks, their own too: rank 0 of 2 + 2 bags, rank 1 of 1 + 1.
    np.testing.assert_allclose(
        found.mean.seconds.memory, [0.16 * (4 + 4) + 0.32 * 3, 0.16 * (3 + 2) + 0.32]
    )
    # Rows and state, and buffers: rank 0 gets sums for 1 + 2 bags, rank 1 for 1 + 2.
    np.testing.assert_array_equal(found.peak_memory_bytes, [3 * 20 + 3 * 16, 20 + 3 * 16])
    np.testing.assert_array_equal(found.mean.seconds.shards, [1, 1])
    np.testing.assert_array_equal(found.mean.seconds.latency, [3, 3])


def test_rows():
    found = replayed(placed("rows"))
    check(found, "ids", [8, 16], [16, 8])
    check(found, "forward", [32, 16], [16, 32])
    check(found, "backward", [16, 32], [32, 16])
    # 4 and 2 rows are sent and as many gradients read; 4 and 3 lookups summed.
    np.testing.assert_allclose(
        found.mean.seconds.memory,
        [0.16 * (4 + 4 + 4) + 0.32 * 3, 0.16 * (2 + 2 + 3) + 0.32],
    )


def test_rows_in_inference():
    found = replayed(placed("rows"), objective="infer")
    check(found, "backward", [0, 0], [0, 0])
    np.testing.assert_allclose(found.mean.seconds.memory, [0.16 * 8, 0.16 * 5])
    np.testing.assert_array_equal(found.peak_memory_bytes, [3 * 16 + 3 * 16, 16 + 3 * 16])


def test_direct_and_unpooled():
    pooled = replayed(placed("direct"))
    check(pooled, "ids", [16, 16], [16, 16])
    check(pooled, "forward", [32, 32], [32, 32])
    check(pooled, "backward", [16, 32], [32, 16])
    apart = demand({0.25: 4}, pooling="none").table
    unpooled = replayed(placed("direct", table=apart))
    check(unpooled, "backward", [32, 32], [32, 32])
    infer = replayed(placed("direct"), objective="infer")
    check(infer, "ids", [0, 0], [0, 0])
    check(infer, "forward", [32, 32], [32, 32])


def test_hot_rows_are_served_at_home():
    # Row 0 on both ranks, the others on rank 1.
    found = replayed(placed("rows", owners=((1,),), part_of=(HOT, 0, 0, 0)))
    np.testing.assert_array_equal(found.tables[0].lookups, [2, 4 + 1])
    np.testing.assert_array_equal(found.tables[0].rows, [1, 4 + 1])
    np.testing.assert_array_equal(found.tables[0].updated_rows, [1, 3 + 1])
    check(found, "ids", [16, 0], [0, 16])
    np.testing.assert_allclose(
        found.mean.seconds.memory,
        [0.16 * (2 + 2) + 0.32, 0.16 * (1 + 4 + 4 + 2) + 0.32 * (1 + 3)],
    )
    # Dense: 16 bytes / 10; sparse: (24 + 16) / 20.
    np.testing.assert_allclose(found.mean.seconds.allreduce, [1.6, 1.6])
    np.testing.assert_array_equal(found.mean.seconds.latency, [5, 5])
    np.testing.assert_array_equal(found.mean.seconds.shards, [1, 2])


def test_a_replicated_table_has_no_exchange():
    found = replayed(placed("replicated", owners=np.zeros((1, 0)), part_of=(HOT,) * 4))
    np.testing.assert_array_equal(found.tables[0].lookups, [4, 3])
    np.testing.assert_array_equal(found.tables[0].updated_rows, [4, 4])
    np.testing.assert_array_equal(found.mean.seconds.latency, [2, 2])
    check(found, "forward", [0, 0], [0, 0])


def test_a_part_without_rows_is_no_piece():
    found = replayed(placed(part_of=(0, 0, 0, 0)))
    np.testing.assert_array_equal(found.mean.seconds.shards, [0, 1])


def test_a_grid_on_two_hosts():
    # Columns of 8 bytes; part 0 (row 0) on ranks 0 and 2, part 1 on ranks 1 and 3.
    table = placed(owners=((0, 1), (2, 3)))
    batches = [*STEP, {"f": ([1], [1])}, {"f": ([], [])}]
    found = replayed(table, steps=[batches], ranks=FOUR).tables[0]
    # Part 0 has 2 lookups of rank 0 and 1 of rank 1; part 1 has 2, 2, 1.
    np.testing.assert_array_equal(found.lookups, [3, 5, 3, 5])
    ids, forward = found.loads.ids, found.loads.forward
    np.testing.assert_array_equal(ids.sent_intra, [16, 8, 8, 0])
    np.testing.assert_array_equal(ids.received_intra, [8, 16, 0, 8])
    np.testing.assert_array_equal(ids.sent_inter, [32, 24, 8, 0])
    np.testing.assert_array_equal(ids.received_inter, [0, 8, 24, 32])
    # Sums of bags: part 0 for ranks 0 and 1: 1, 1; part 1 for ranks 0, 1, 2: 2, 2, 1.
    np.testing.assert_array_equal(forward.sent_intra, [8, 16, 0, 8])
    np.testing.assert_array_equal(forward.received_inter, [24, 24, 8, 0])


def test_the_verdict_is_the_mean_of_the_busiest_rank_in_each_step():
    # Step 0 looks up rank 1's row, step 1 rank 0's; each 4 times on either rank.
    steps = [[{"f": ([row] * 4, [4])}] * 2 for row in (0, 1)]
    found = replayed(placed(), steps=steps)
    busy = 0.16 * (8 + 2) + 0.32  # the owner reads 8 rows and 2 gradients, updates 1 row
    links = 3.2 + 1.6 + 1.6  # and gets 4 ids, sends a sum, gets a gradient
    starts = 3
    shards = 1
    idle_s, busy_s = links + starts + shards, busy + links + starts + shards
    np.testing.assert_allclose(found.step_seconds, [[idle_s, busy_s], [busy_s, idle_s]])
    assert found.cost_s == pytest.approx(busy_s)
    # On average each rank does half of the work, and each direction has half of the bytes.
    np.testing.assert_allclose(found.mean.seconds.memory, [busy / 2] * 2)
    assert found.mean.cost_s == pytest.approx((busy + links) / 2 + starts + shards)


def test_memory_is_the_peak_of_all_steps():
    steps = [STEP, [{"f": ([0] * 9, [1] * 9)}, {"f": ([], [])}]]
    found = replayed(placed(), steps=steps, ranks=cluster(0, 0, memory_bytes=200))
    np.testing.assert_array_equal(found.peak_memory_bytes, [60 + 9 * 16, 20 + 3 * 16])
    assert found.over_memory == (0,)


def test_batches_of_any_kind_count_alike():
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["g", "f"],
        values=torch.tensor([9, 0, 0, 1, 2]),
        lengths=torch.tensor([1, 0, 0, 3, 0, 1]),
    )
    for batch in (features, SimpleNamespace(sparse_features=features)):
        found = replayed(placed(), steps=[[batch, STEP[1]]])
        wanted = replayed(placed())
        np.testing.assert_array_equal(found.step_seconds, wanted.step_seconds)


@st.composite
def placed_and_steps(draw):
    """A plan's table with two features, and steps of a batch for each of its ranks."""
    row_map: RowMap = draw(row_maps())
    spec = TableSpec("t", row_map.rows, 4, ("f", "g"), optimizer_bytes_per_row=4)
    hot = int(row_map.owned_rows[-1]) if row_map.world_size > 1 and draw(st.booleans()) else 0
    parts = row_map.world_size - (hot > 0)
    exchange = "replicated" if hot == row_map.rows else "partial"
    if exchange == "replicated":
        row_map, parts = RowMap(np.array([0, hot]), *np.empty((2, 0), dtype=int)), 0
    ranks = parts + draw(st.integers(0 if parts else 1, 2))
    owners = np.array(draw(st.permutations(range(ranks))))[None, :parts]
    made = Decision(exchange, hot, owners)
    bags = st.lists(st.lists(st.integers(0, row_map.rows - 1), max_size=4), max_size=4)
    batch = st.fixed_dictionaries({"f": bags, "g": bags})
    step = st.lists(batch, min_size=ranks, max_size=ranks)
    placement = TablePlacement("", spec, made, row_map, np.zeros(ranks, dtype=np.int64))
    return placement, draw(st.lists(step, min_size=1, max_size=2))


def owners_of(placement, ids):
    """The owner of each id, and -1 for hot ones."""
    parts, _ = placement.row_map.place(ids)
    owners = [*np.sort(placement.decision.owners[0]).tolist(), -1]
    return [owners[part] for part in parts]


def flat(bags):
    return [row for bag in bags for row in bag], [len(bag) for bag in bags]


@settings(deadline=None, max_examples=60)
@given(placed_and_steps())
def test_a_plan_counts_as_plain_loops_do(pair):
    placement, steps = pair
    world_size = placement.world_size
    ranks = Cluster.uniform(world_size, memory_bytes=10**6, ranks_per_host=2)
    jagged = [[{f: flat(bags) for f, bags in batch.items()} for batch in step] for step in steps]
    found = replay_steps([placed_table(placement)], jagged, ranks, "train").tables[0]
    lookups, home, updated, sums = np.zeros((4, world_size), dtype=int)
    sent_ids, sent_rows = np.zeros((2, world_size))
    for step in steps:
        for requester, batch in enumerate(step):
            for bag in batch["f"] + batch["g"]:
                owners = owners_of(placement, bag)
                home[requester] += owners.count(-1)
                owners = [owner for owner in owners if owner >= 0]
                for owner in owners:
                    lookups[owner] += 1
                    sent_ids[requester] += 8 * (owner != requester)
                for owner in set(owners):
                    sums[owner] += 1
                    sent_rows[owner] += 16 * (owner != requester)
        asked = {row for batch in step for bags in batch.values() for bag in bags for row in bag}
        asked_of = np.array(owners_of(placement, list(asked)), dtype=int)
        updated += np.bincount(asked_of[asked_of >= 0], minlength=world_size)
        updated += (asked_of < 0).sum()  # replicas of all ranks
    ids, forward = found.loads.ids, found.loads.forward
    np.testing.assert_array_equal(found.lookups, lookups + home)
    np.testing.assert_array_equal(found.updated_rows, updated)
    np.testing.assert_array_equal(ids.sent_intra + ids.sent_inter, sent_ids)
    np.testing.assert_array_equal(forward.sent_intra + forward.sent_inter, sent_rows)
    read = (lookups + home) * 16 / 1e10 + sums * 16 / 1e10 + updated * 16 / 3e9
    np.testing.assert_allclose(found.loads.memory_s, read)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "at least one step, found none"),
        ([STEP[:1]], "step 0 has 1 batches, wanted one for each of 2 ranks"),
        ([[STEP[0], {"g": ([], [])}]], "table t, rank 1: the batch has no feature f, only g"),
        ([[STEP[0], {"f": ([1, 2], [1])}]], "2 ids, but its bags' lengths sum to 1"),
        ([[STEP[0], {"f": ([4], [1])}]], "table t: id 4 is outside its 4 rows"),
        ([[STEP[0], {"f": ([-1], [1])}]], "id -1 is outside"),
        ([[STEP[0], {"f": ([0.5], [1])}]], "wanted integers in one dimension, found float64"),
    ],
)
def test_batches_that_can_not_be_counted_are_refused(steps, message):
    with pytest.raises(PlanError, match=message):
        replayed(placed(), steps=steps)


def test_placements_that_do_not_fit_are_refused():
    with pytest.raises(PlanError, match="a piece is of rank 2, but the cluster's ranks end at 1"):
        replayed(placed(owners=((0, 2),)))
    with pytest.raises(PlanError, match="direct needs ranks that share memory"):
        apart = Cluster((RankSpec(1000), RankSpec(1000)))
        replayed(placed("direct"), ranks=apart)
    with pytest.raises(PlanError, match="part_rows must hold its 4 rows or fewer"):
        PlacedTable(TABLE, "rows", np.array([[0, 1]]), [4, 1], lambda ids: ids)
    with pytest.raises(PlanError, match="4 elements can't be cut into 3 slices"):
        PlacedTable(TABLE, "rows", np.array([[0], [1], [2]]), [4], lambda ids: ids)
    with pytest.raises(PlanError, match="pooling is 'none'"):
        placed(table=demand({0.25: 4}, pooling="none").table)
    with pytest.raises(PlanError, match="parts_of must give a part below 2"):
        wrong = PlacedTable(TABLE, "rows", np.array([[0, 1]]), [2, 2], lambda ids: ids)
        replayed(wrong)
