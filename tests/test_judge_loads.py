"""Traffic, sums of loads, and seconds from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judge_cases import PAPER, cluster

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster, RankSpec
from torchrec_oper.planner.judge import RankLoads, Traffic, rank_seconds, verdict

DIRECTIONS = ("sent_intra", "received_intra", "sent_inter", "received_inter")


@st.composite
def clusters(draw, most=6):
    """Any ranks on any hosts."""
    hosts = draw(st.lists(st.integers(0, 2), min_size=1, max_size=most))
    _, numbered = np.unique(hosts, return_inverse=True)
    return cluster(*numbered.tolist())


@given(clusters(), st.data())
def test_traffic_of_pairs_is_what_crosses(ranks, data):
    world_size = ranks.world_size
    values = st.lists(st.integers(0, 99), min_size=world_size, max_size=world_size)
    pairs = np.array([data.draw(values) for _ in range(world_size)], dtype=float)
    wanted = np.zeros((4, world_size))
    for a in range(world_size):
        for b in range(world_size):
            if a != b:
                level = 0 if ranks.ranks[a].host == ranks.ranks[b].host else 2
                wanted[level, a] += pairs[a, b]
                wanted[level + 1, b] += pairs[a, b]
    traffic = Traffic.from_pairs(pairs, ranks)
    for name, values in zip(DIRECTIONS, wanted, strict=True):
        np.testing.assert_array_equal(getattr(traffic, name), values, err_msg=name)


@given(clusters(), st.data())
def test_an_owner_sends_every_rank_the_same(ranks, data):
    world_size = ranks.world_size
    owned = np.array(
        data.draw(st.lists(st.integers(0, 99), min_size=world_size, max_size=world_size)),
        dtype=float,
    )
    pairs = Traffic.from_pairs(np.repeat(owned[:, None], world_size, axis=1), ranks)
    found = Traffic.from_owners(owned, ranks)
    for name in DIRECTIONS:
        np.testing.assert_array_equal(getattr(found, name), getattr(pairs, name), err_msg=name)
    # All that is sent is received.
    assert found.sent_intra.sum() == found.received_intra.sum()
    assert found.sent_inter.sum() == found.received_inter.sum()


def loads(memory_s=(0, 0), *, sent=(0, 0), phases=0, allreduce_phases=0, memory_bytes=(0, 0)):
    none = Traffic.none(2)
    forward = Traffic(sent, sent[::-1], (0, 0), (0, 0))
    return RankLoads(
        memory_s, (1, 0), (0, 2), memory_bytes, none, forward, none, phases, allreduce_phases
    )


def test_loads_add_up_and_phases_are_shared():
    total = loads((1, 2), sent=(10, 0), phases=3) + loads((3, 0), sent=(0, 20), phases=2)
    np.testing.assert_array_equal(total.memory_s, [4, 2])
    np.testing.assert_array_equal(total.shard_s, [2, 0])
    np.testing.assert_array_equal(total.forward.sent_intra, [10, 20])
    assert (total.phases, total.allreduce_phases) == (3, 0)
    # 20 bytes one way and 10 the other go at the same time: 2 s, not 1 + 2.
    seconds = rank_seconds(total, cluster(0, 0))
    np.testing.assert_array_equal(seconds.forward, [2, 2])
    np.testing.assert_array_equal(seconds.latency, [3, 3])
    np.testing.assert_array_equal(seconds.total, [4 + 2 + 2 + 3, 2 + 4 + 2 + 3])


def test_half_of_the_loads_of_two_steps():
    half = (loads((1, 2), sent=(10, 0), phases=3) + loads((3, 0), phases=3)).scaled(0.5)
    np.testing.assert_array_equal(half.memory_s, [2, 1])
    np.testing.assert_array_equal(half.forward.sent_intra, [5, 0])
    assert half.phases == 3


def test_a_phase_starts_on_every_level_that_there_is():
    one, two = loads(phases=2), loads(phases=2, allreduce_phases=2)
    assert rank_seconds(one, cluster(0, 0)).latency[0] == 2 * 1
    assert rank_seconds(one, cluster(0, 1)).latency[0] == 2 * 2
    three_ranks = RankLoads.none(3) + RankLoads.none(3)
    assert rank_seconds(three_ranks, cluster(0, 0, 1)).latency[0] == 0
    assert rank_seconds(two, cluster(0, 0)).latency[0] == 4 * 1


def test_the_verdict_names_the_busiest_rank_and_those_over_memory():
    found = verdict(loads((1, 5), memory_bytes=(999, 1001)), cluster(0, 0))
    assert (found.cost_s, found.busiest_rank, found.over_memory) == (5 + 2, 1, (1,))
    assert not found.feasible
    np.testing.assert_array_equal(found.memory_bytes, [999, 1001])
    assert verdict(loads(memory_bytes=(1000, 1000)), cluster(0, 0)).feasible


def test_loads_can_not_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        loads().memory_s[0] = 1


def test_wrong_loads_are_refused():
    with pytest.raises(PlanError, match="finite numbers of 0 or more"):
        loads((0, -1))
    with pytest.raises(PlanError, match="finite numbers of 0 or more"):
        loads((0, np.nan))
    with pytest.raises(PlanError, match="a number for each rank, found shape"):
        Traffic([1, 2], [1], [1, 2], [1, 2])
    with pytest.raises(PlanError, match="loads of 3 ranks can't have traffic of 2"):
        none = Traffic.none(2)
        RankLoads(*np.zeros((4, 3)), none, none, none, 0, 0)
    with pytest.raises(PlanError, match="phases must be 0 or more"):
        loads(phases=-1)
    with pytest.raises(PlanError, match="of 2 ranks, the cluster has 1"):
        rank_seconds(loads(), Cluster((RankSpec(1),), PAPER))
