"""Costs of decisions, worked out on paper.

The rates of ``judge_cases.PAPER``: a row of 16 bytes is read in 0.16 s and updated in
0.32 s, one of 8 bytes in half of that; 10 bytes a second within a host and 2 between
hosts; 1 s and 2 s to start a phase; 0.5 s for a piece in each pass. Rows have 4 bytes of
optimizer state. A rank's batch has 2 lookups unless a test says otherwise.
"""

import numpy as np
import pytest
from judge_cases import PAPER, cluster, decision, demand

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster, RankSpec, Rate, Rates
from torchrec_oper.planner.judge import decision_loads, expected_cost

TWO = cluster(0, 0)
FOUR = cluster(0, 0, 1, 1)

# 4 rows alike, 2 bags of 1 id. Distinct rows of a rank: 4 (1 - (3/4)**2) = 1.75, and of
# 2 ranks 4 (1 - (3/4)**4) = 2.734375.
ALIKE = demand({0.25: 4})
# One hot row and three others, 1 bag of 2 ids. The hot row is in a rank's batch with
# 1 - 0.3**2 = 0.91, in that of 2 ranks with 1 - 0.3**4 = 0.9919; each other row with
# 1 - 0.9**2 = 0.19 and 1 - 0.9**4 = 0.3439.
HOT = demand({0.7: 1, 0.1: 3}, bags=1, lengths={2: 1}, name="hot")


def check(loads, **wanted):
    """Compare loads with numbers by name; link phases by their bytes sent and received."""
    for name, values in wanted.items():
        if name in ("ids", "forward", "backward"):
            traffic = getattr(loads, name)
            found = [traffic.sent_intra, traffic.received_intra]
            if len(values) == 4:
                found += [traffic.sent_inter, traffic.received_inter]
        else:
            found = getattr(loads, name)
        np.testing.assert_allclose(found, values, rtol=1e-12, atol=1e-12, err_msg=name)


def test_whole_in_training():
    loads = decision_loads(decision("whole", [[1]]), ALIKE, TWO, "train")
    check(
        loads,
        # 4 lookups of 2 ranks read: 0.64; 4 gradients: 0.64; 2.734375 rows updated: 0.875
        memory_s=[0, 2.155],
        shard_s=[0, 1.0],
        allreduce_s=[0, 0],
        memory_bytes=[32, 4 * 20 + 32],  # rank 0 and rank 1 receive 2 sums of 16 bytes
        ids=[[16, 0], [0, 16]],  # rank 0 sends 2 ids
        forward=[[0, 32], [32, 0]],  # and gets 2 sums
        backward=[[32, 0], [0, 32]],
    )
    assert (loads.phases, loads.allreduce_phases) == (3, 0)


def test_whole_in_inference():
    loads = decision_loads(decision("whole", [[1]]), ALIKE, TWO, "infer")
    check(
        loads,
        memory_s=[0, 0.64],
        shard_s=[0, 0.5],
        memory_bytes=[32, 4 * 16 + 32],
        ids=[[16, 0], [0, 16]],
        forward=[[0, 32], [32, 0]],
        backward=[[0, 0], [0, 0]],
    )
    assert (loads.phases, loads.allreduce_phases) == (2, 0)


def test_partial_gives_the_hot_row_a_part_of_its_own():
    # 0.7 > 1/2: part 0 is the hot row; the 3 others, of chance 0.3, are part 1. The bag of
    # 2 ids has a row of part 0 with 1 - 0.3**2 = 0.91, of part 1 with 1 - 0.7**2 = 0.51.
    loads = decision_loads(decision("partial", [[1, 0]]), HOT, TWO, "train")
    check(
        loads,
        memory_s=[
            0.16 * (2 * 2 * 0.3 + 2 * 0.51) + 0.32 * 3 * 0.3439,
            0.16 * (2 * 2 * 0.7 + 2 * 0.91) + 0.32 * 0.9919,
        ],
        shard_s=[1.0, 1.0],
        memory_bytes=[3 * 20 + 16 * 1.42, 20 + 16 * 1.42],
        # rank 0 sends ids of the hot row to rank 1, and gets those of the others
        ids=[[8 * 1.4, 8 * 0.6], [8 * 0.6, 8 * 1.4]],
        forward=[[16 * 0.51, 16 * 0.91], [16 * 0.91, 16 * 0.51]],
        backward=[[16 * 0.91, 16 * 0.51], [16 * 0.51, 16 * 0.91]],
    )


def test_partial_of_rows_alike():
    loads = decision_loads(decision("partial", [[0, 1]]), ALIKE, TWO, "train")
    check(
        loads,
        memory_s=[2.155 / 2, 2.155 / 2],
        memory_bytes=[2 * 20 + 32, 2 * 20 + 32],
        forward=[[16, 16], [16, 16]],
    )


def test_heavy_rows_end_where_the_rest_is_hotter_on_average():
    # 0.5 > 1/3, a part of its own; 0.25 = 0.5/2 of the rest isn't above it: the other
    # two parts share 0.5 and 7 rows evenly.
    table = demand({0.5: 1, 0.25: 1, 0.25 / 6: 6})
    loads = decision_loads(decision("partial", [[2, 0, 3]]), table, FOUR, "infer")
    check(
        loads,
        memory_s=[4 * 2 * 0.25 * 0.16, 0, 4 * 2 * 0.5 * 0.16, 4 * 2 * 0.25 * 0.16],
        memory_bytes=np.array([3.5, 0, 1, 3.5]) * 16 + 32,
    )


def test_rows_of_a_block_may_be_heavy_one_by_one():
    # 2 rows of 0.4 above 1/3 and 0.6/2; the last part has the other 4 rows.
    table = demand({0.4: 2, 0.05: 4})
    loads = decision_loads(decision("direct", [[0, 1, 2]]), table, FOUR, "infer")
    check(
        loads,
        memory_s=4 * 2 * 0.16 * np.array([0.4, 0.4, 0.2, 0]),
        memory_bytes=np.array([1, 1, 4, 0]) * 16 + 32,
        ids=np.zeros((4, 4)),
        # An owner sends V to 1 rank of its host, and to 2 of the other.
        forward=32
        * np.array(
            [[0.4, 0.4, 0.2, 0], [0.4, 0.4, 0, 0.2], [0.8, 0.8, 0.4, 0], [0.2, 0.2, 0.8, 0.8]]
        ),
    )
    assert loads.phases == 2


def test_rows():
    # Distinct rows of a rank 0.91 + 3 * 0.19 = 1.48, of both 0.9919 + 3 * 0.3439 = 2.0236;
    # each part has half of each, and half of the rows.
    loads = decision_loads(decision("rows", [[0, 1]]), HOT, TWO, "train")
    memory_s = 2 * 0.74 * 0.16 * 2 + 1.0118 * 0.32 + 2 * 0.16  # and sums 2 rows for itself
    check(
        loads,
        memory_s=[memory_s, memory_s],
        memory_bytes=[2 * 20 + 16 * 1.48] * 2,
        ids=[[8 * 0.74] * 2] * 2,
        forward=[[16 * 0.74] * 2] * 2,
        backward=[[16 * 0.74] * 2] * 2,
    )


def test_rows_without_pooling():
    # The same: gradients come back for each distinct row.
    apart = demand({0.7: 1, 0.1: 3}, bags=1, lengths={2: 1}, pooling="none")
    loads = decision_loads(decision("rows", [[0]]), apart, TWO, "train")
    check(
        loads,
        memory_s=[2 * 1.48 * 0.16 * 2 + 2.0236 * 0.32 + 2 * 0.16, 2 * 0.16],
        backward=[[0, 16 * 1.48], [16 * 1.48, 0]],
    )


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_direct(pooling):
    # Gradients: one for a bag (1 - 0.3**2 = 0.91 and 0.51), or for every lookup.
    table = demand({0.7: 1, 0.1: 3}, bags=1, lengths={2: 1}, pooling=pooling)
    hot, rest = (0.91, 0.51) if pooling == "sum" else (1.4, 0.6)
    loads = decision_loads(decision("direct", [[0, 1]]), table, TWO, "train")
    check(
        loads,
        memory_s=[
            0.16 * (2 * 1.4 + 2 * hot) + 0.32 * 0.9919,
            0.16 * (2 * 0.6 + 2 * rest) + 0.32 * 3 * 0.3439,
        ],
        memory_bytes=[20 + 32, 60 + 32],
        ids=[[8 * 0.6, 8 * 1.4], [8 * 1.4, 8 * 0.6]],
        forward=[[16 * 1.4, 16 * 0.6], [16 * 0.6, 16 * 1.4]],
        backward=[[16 * rest, 16 * hot], [16 * hot, 16 * rest]],
    )


def test_replicated():
    loads = decision_loads(decision("replicated", [[]], hot_rows=4), ALIKE, TWO, "train")
    # Dense: 2 * 1/2 * 64 bytes / 10 = 6.4 s. Sparse: (1.75 * 24 + 2.734375 * 16) bytes
    # = 85.75, half of it to the other rank: 4.2875 s.
    check(
        loads,
        memory_s=[2 * 0.16 + 2.734375 * 0.32] * 2,
        shard_s=[1.0, 1.0],
        allreduce_s=[4.2875] * 2,
        memory_bytes=[80, 80],
        forward=np.zeros((4, 2)),
    )
    assert (loads.phases, loads.allreduce_phases) == (0, 2)


def test_replicated_in_inference():
    loads = decision_loads(decision("replicated", [[]], hot_rows=4), ALIKE, TWO, "infer")
    check(loads, memory_s=[0.32] * 2, shard_s=[0.5] * 2, allreduce_s=[0, 0])
    assert (loads.phases, loads.allreduce_phases) == (0, 0)


def test_the_all_reduce_of_a_small_hot_table_is_dense():
    # 40 lookups see every row: 2 * 1/2 * 64 / 10 = 6.4 s against (4 * 24 + 4 * 16) / 20 = 8.
    busy = demand({0.25: 4}, lookups=400, bags=400)
    loads = decision_loads(decision("replicated", [[]], hot_rows=4), busy, TWO, "train")
    check(loads, allreduce_s=[6.4, 6.4])


def test_the_all_reduce_between_hosts():
    # Dense: 2 * 1/2 * 64 / 10 within, 2 * 1/2 * (64/2) / 2 between: 6.4 + 16 = 22.4 s.
    # Sparse: each row is in some batch, (4 * 24 + 4 * 16) = 160 bytes, a quarter to the
    # other rank of the host and half to the other host: 4 + 40 s.
    busy = demand({0.25: 4}, lookups=400, bags=400)
    loads = decision_loads(decision("replicated", [[]], hot_rows=4), busy, FOUR, "train")
    check(loads, allreduce_s=[22.4] * 4)
    # Hosts of 1 and 2 ranks: R = 1. Dense: 2 * 1/2 * 64 / 2 = 64/2; sparse:
    # 160 * (0 + 2/3 / 2).
    uneven = cluster(0, 1, 0)
    loads = decision_loads(decision("replicated", [[]], hot_rows=4), busy, uneven, "train")
    check(loads, allreduce_s=[32] * 3)


def test_a_hot_row_is_replicated_and_the_rest_dealt():
    # The 3 cold rows of chance 0.1: P = 0.15 for each part, a bag of 2 ids has a row of
    # it with 1 - 0.85**2 = 0.2775.
    loads = decision_loads(decision("partial", [[0, 1]], hot_rows=1), HOT, TWO, "train")
    cold = 0.16 * (2 * 2 * 0.15 + 2 * 0.2775) + 0.32 * 1.5 * 0.3439
    hot = 0.16 * 2 * 0.7 + 0.32 * 0.9919
    check(
        loads,
        memory_s=[cold + hot] * 2,
        shard_s=[2.0, 2.0],
        # Dense 16 / 10; sparse (0.91 * 24 + 0.9919 * 16) / 20 = 1.88552.
        allreduce_s=[1.6] * 2,
        memory_bytes=[1.5 * 20 + 20 + 16 * 2 * 0.2775] * 2,
        ids=[[8 * 2 * 0.15] * 2] * 2,
        forward=[[16 * 0.2775] * 2] * 2,
    )
    assert (loads.phases, loads.allreduce_phases) == (3, 2)


def test_column_slices():
    # 2 slices of 8 bytes, each with all ids and its own optimizer state.
    loads = decision_loads(decision("whole", [[0], [1]]), ALIKE, TWO, "train")
    check(
        loads,
        memory_s=[2.155 / 2] * 2,
        memory_bytes=[4 * (8 + 4) + 32] * 2,
        ids=[[16] * 2] * 2,
        forward=[[16] * 2] * 2,
    )


def test_column_slices_of_rows_are_summed_by_whole_rows():
    loads = decision_loads(decision("rows", [[0], [1]]), ALIKE, TWO, "infer")
    check(
        loads,
        memory_s=[2 * 1.75 * 0.08 + 2 * 0.16] * 2,
        memory_bytes=[4 * 8 + 1.75 * 16] * 2,
        ids=[[8 * 1.75] * 2] * 2,
    )


def test_a_grid_on_two_hosts():
    # 2 slices of 8 bytes and 2 parts: part 0, the hot row (0.7), on ranks 0 and 2, part 1
    # on ranks 3 and 1. 4 ranks look up 8 times. A bag has a row of part 0 with 0.91, of
    # part 1 with 0.51. In 8 lookups: 1 - 0.3**8 and 1 - 0.9**8.
    loads = decision_loads(decision("partial", [[0, 3], [2, 1]]), HOT, FOUR, "train")
    all_hot, all_rest = 1 - 0.3**8, 3 * (1 - 0.9**8)
    hot_s = 0.08 * (8 * 0.7 + 4 * 0.91) + 0.16 * all_hot
    rest_s = 0.08 * (8 * 0.3 + 4 * 0.51) + 0.16 * all_rest
    hot_v, rest_v = 8 * 0.91, 8 * 0.51
    forward = [
        [hot_v, rest_v, hot_v, rest_v],  # to the one other rank of the host
        [rest_v, hot_v, rest_v, hot_v],  # from it
        [2 * hot_v, 2 * rest_v, 2 * hot_v, 2 * rest_v],  # to two ranks of the other host
        [hot_v + rest_v] * 4,  # from both of them
    ]
    check(
        loads,
        memory_s=[hot_s, rest_s, hot_s, rest_s],
        memory_bytes=np.array([1, 3, 1, 3]) * 12 + 2 * (hot_v + rest_v),
        # 2 lookups of 8 bytes, of part 1 with 0.3 and of part 0 with 0.7
        ids=16 * np.array([[0.3, 0.7] * 2, [0.7, 0.3] * 2, [1.0] * 4, [1.4, 0.6] * 2]),
        forward=forward,
        backward=np.array(forward)[[1, 0, 3, 2]],
    )


def test_weights_of_rows():
    loads = decision_loads(decision("rows", [[1, 0]], weights=[0.25, 0.75]), HOT, TWO, "train")
    share = np.array([0.75, 0.25])  # of ranks 0 and 1
    check(
        loads,
        memory_s=share * (2 * 1.48 * 0.32 + 2.0236 * 0.32) + 0.32,
        shard_s=[1.0, 1.0],
        memory_bytes=share * 4 * 20 + 16 * 1.48,
        ids=8 * 1.48 * np.array([share[::-1], share]),
        forward=16 * 1.48 * np.array([share, share[::-1]]),
    )


def test_a_part_of_weight_0_is_a_piece_all_the_same():
    loads = decision_loads(decision("rows", [[1, 0]], weights=[1, 0]), HOT, TWO, "train")
    check(loads, shard_s=[1.0, 1.0], memory_bytes=[16 * 1.48, 80 + 16 * 1.48])


def test_weights_of_direct_and_of_bags_of_one_id():
    table = demand({0.7: 1, 0.1: 3})
    for exchange in ("direct", "partial"):
        loads = decision_loads(
            decision(exchange, [[0, 1]], weights=[0.25, 0.75]), table, TWO, "train"
        )
        share = np.array([0.25, 0.75])
        check(
            loads,
            memory_s=share * (0.16 * (4 + 4) + 0.32 * 2.0236),
            forward=32 * np.array([share, share[::-1]]),
            backward=32 * np.array([share[::-1], share]),
        )


def test_three_tables_together():
    # Table a whole on rank 1, b (as a) whole on rank 0, c replicated.
    tables = [ALIKE, demand({0.25: 4}, name="b"), demand({0.25: 4}, name="c")]
    decisions = [
        decision("whole", [[1]]),
        decision("whole", [[0]]),
        decision("replicated", [[]], hot_rows=4),
    ]
    found = expected_cost(decisions, tables, TWO, "train")
    # What one rank sends and gets goes at the same time: 32 bytes each way, 3.2 s.
    wanted = {
        "memory": 2.155 + 0.32 + 0.875,
        "shards": 1 + 1,
        "ids": 1.6,
        "forward": 3.2,
        "backward": 3.2,
        "allreduce": 4.2875,
        "latency": 3 + 2,  # each phase is started once for all tables
    }
    for name, seconds in found.seconds.parts.items():
        np.testing.assert_allclose(seconds, [wanted[name]] * 2, err_msg=name)
    assert found.cost_s == pytest.approx(sum(wanted.values()))
    np.testing.assert_allclose(found.memory_bytes, [80 + 2 * 32 + 80] * 2)
    assert found.feasible and found.busiest_rank == 0


def test_two_hosts_have_two_levels_of_links():
    # Owner 1 sends 32 bytes to rank 0 and to each of ranks 2 and 3.
    found = expected_cost([decision("whole", [[1]])], [ALIKE], FOUR, "infer")
    np.testing.assert_allclose(found.seconds.forward, [3.2, 3.2 + 32, 16, 16])
    np.testing.assert_allclose(found.seconds.ids, [1.6, 1.6 + 16, 8, 8])
    np.testing.assert_allclose(found.seconds.latency, [2 * (1 + 2)] * 4)
    assert found.busiest_rank == 1


def test_a_slow_rank_works_longer_but_its_links_do_not():
    unlike = cluster(0, 0, speeds=(0.5, 2))
    found = expected_cost([decision("partial", [[0, 1]])], [ALIKE], unlike, "train")
    np.testing.assert_allclose(found.seconds.memory, [2.155, 2.155 / 4])
    np.testing.assert_allclose(found.seconds.forward, [1.6, 1.6])
    assert found.busiest_rank == 0


def test_a_rank_without_room_is_named():
    tight = cluster(0, 0, memory_bytes=80)
    found = expected_cost([decision("whole", [[1]])], [ALIKE], tight, "train")
    assert found.over_memory == (1,) and not found.feasible
    # 4 rows of 20 bytes and a buffer of 32: exactly full is still room.
    full = cluster(0, 0, memory_bytes=112)
    assert expected_cost([decision("whole", [[1]])], [ALIKE], full, "train").feasible


def test_rates_depend_on_the_bytes_of_a_slice_row():
    # From 50 B/s for rows of 4 bytes to 100 B/s for 16, linear in the logarithm: 75 for 8.
    rates = Rates(read=Rate(((4, 50.0), (16, 100.0))), shard_overhead_s=0)
    ranks = Cluster((RankSpec(1000), RankSpec(1000)), rates)
    loads = decision_loads(decision("whole", [[0], [1]]), ALIKE, ranks, "infer")
    check(loads, memory_s=[4 * 8 / 75] * 2)


@pytest.mark.parametrize(
    ("made", "table", "ranks", "message"),
    [
        (decision("whole", [[2]]), ALIKE, TWO, "below 2, found 2"),
        (decision("rows", [[0]], hot_rows=5), ALIKE, TWO, "0 to its 4 rows, found 5"),
        (decision("rows", [[0]], hot_rows=4), ALIKE, TWO, "found rows with 4"),
        (decision("replicated", [[]], hot_rows=3), ALIKE, TWO, "found replicated with 3"),
        (decision("whole", [[0], [1], [2]]), ALIKE, FOUR, "4 elements can't be cut into 3"),
        (decision("direct", [[0], [1]]), ALIKE, TWO, "direct doesn't cut columns"),
        (
            decision("direct", [[0]]),
            ALIKE,
            Cluster((RankSpec(9),)),
            "needs ranks that share memory",
        ),
        (decision("whole", [[0]]), demand({1: 1}, pooling="none"), TWO, "pooling is 'none'"),
        (decision("partial", [[0, 1]], weights=[0.5, 0.5]), HOT, TWO, "have several ids"),
    ],
)
def test_a_decision_that_does_not_fit_is_refused(made, table, ranks, message):
    with pytest.raises(PlanError, match=message):
        decision_loads(made, table, ranks, "train")


def test_wrong_calls_are_refused():
    with pytest.raises(PlanError, match="objective must be one of"):
        decision_loads(decision("whole", [[0]]), ALIKE, TWO, "tain")
    with pytest.raises(PlanError, match="found 1 decisions for 2 tables"):
        expected_cost([decision("whole", [[0]])], [ALIKE, HOT], TWO, "train")


def test_the_rates_are_those_of_the_comments():
    assert float(PAPER.read.bytes_per_s(16)) == 100 and float(PAPER.update.bytes_per_s(8)) == 50
