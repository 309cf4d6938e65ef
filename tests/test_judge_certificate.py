"""Certificates are checked against the best of all plans, found by trying every one."""

import math
from dataclasses import replace

import numpy as np
import pytest
from judge_brute_force import AllPlans
from judge_cases import PAPER, cluster, demand

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.certificate import Certificate, Multipliers, Proof
from torchrec_oper.planner.cluster import Cluster, Link, RankSpec, Rate, Rates
from torchrec_oper.planner.decision import Decision
from torchrec_oper.planner.judge import decision_loads, verify_certificate
from torchrec_oper.planner.judge.choices import Choice, choice_loads, choices_of
from torchrec_oper.planner.judge.rank_kinds import rank_kinds
from torchrec_oper.planner.judge.table_costs import table_costs
from torchrec_oper.planner.space import SearchSpace

TWO = cluster(0, 0)
FOUR = cluster(0, 0, 1, 1)
# No hot rows, no part of a table: whole tables only.
WHOLE = SearchSpace(exchanges=("whole",), hot_rows=False)


def multipliers(cost, owners, *, sent_share=1.0, memory=0.0):
    share = np.full((2, 3, len(cost)), sent_share)
    return Multipliers(cost, share, np.full(len(cost), memory), owners)


def certificate(proofs, replicated_s=np.inf):
    """Proofs from (with_hot_rows, target_s, multipliers, bound_s)."""
    return Certificate(tuple(Proof(*fields) for fields in proofs), replicated_s)


def names(found):
    return {(c.exchange, c.hot_rows, c.columns, c.parts) for c in found}


def test_the_choices_of_a_pooled_table():
    # 40 rows, of which the 7 hottest are listed, and 4 elements that may be cut in two.
    asked = replace(demand({0.1: 3, 0.05: 4, 0.5 / 33: 33}), listed_rows=7)
    found = choices_of(asked, SearchSpace(min_slice_width=2), FOUR)
    # Cuts: 1, 2 lie in the first block of 3 rows; 4 in the second, which ends at 7; 8 in
    # the last. Of rows that aren't listed, only all together can have replicas.
    assert names(found) == {
        ("replicated", 40, 1, 0),
        ("whole", 0, 1, 1),
        ("whole", 0, 2, 1),
        ("partial", 0, 1, 2),
        ("partial", 0, 1, 3),
        ("partial", 0, 1, 4),
        ("partial", 0, 2, 2),
        ("rows", 0, 1, 1),
        ("rows", 0, 2, 1),
        ("rows", 0, 1, 2),
        ("rows", 0, 1, 3),
        ("rows", 0, 1, 4),
        ("direct", 0, 1, 1),
        ("direct", 0, 1, 2),
        ("direct", 0, 1, 3),
        ("direct", 0, 1, 4),
        *(("whole", cut, columns, 1) for cut in (3, 7) for columns in (1, 2)),
        *(("partial", cut, columns, 4 // columns) for cut in (3, 7) for columns in (1, 2)),
        *((exchange, cut, 1, 4) for cut in (3, 7) for exchange in ("rows", "direct")),
    }


def test_hot_cuts_are_closer_together_in_large_tables():
    # Rows one by one up to 2**21: each step is a cut of its own.
    rows = 1 << 21
    asked = replace(
        demand({1.0: 1}, lookups=0, bags=0),
        table=replace(demand({1.0: 1}).table, rows=rows),
        block_rows=np.ones(rows),
        block_chances=np.full(rows, 1 / rows),
        listed_rows=rows,
    )
    space = SearchSpace(exchanges=("whole",), hot_step=4)
    cuts = [choice.hot_rows for choice in choices_of(asked, space, TWO)]
    quarter_steps = [math.ceil(2**20 * 2**0.5)]  # 4 ** (1 / 4) from one to the next
    assert cuts == [0, *(4**power for power in range(11)), *quarter_steps]


def test_spaces_clusters_and_tables_narrow_the_choices():
    asked = demand({0.1: 3, 0.05: 4, 0.5 / 33: 33})
    coarse = SearchSpace(fine_parts=False, hot_rows=False)
    found = names(choices_of(asked, coarse, FOUR))
    assert ("partial", 0, 1, 2) in found and ("partial", 0, 1, 3) not in found
    assert {cut for _, cut, _, _ in found} == {0, 40}
    assert all(columns == 1 for _, _, columns, _ in found)  # 4 elements, 16 at least
    apart = Cluster(FOUR.ranks, replace(PAPER, shares_memory=False))
    assert "direct" not in {c.exchange for c in choices_of(asked, coarse, apart)}
    unpooled = demand({0.1: 3, 0.05: 4, 0.5 / 33: 33}, pooling="none")
    exchanges = {c.exchange for c in choices_of(unpooled, SearchSpace(), FOUR)}
    assert exchanges == {"rows", "direct", "replicated"}
    few = demand({1 / 15: 15})  # no two parts of 8 rows
    assert {c.parts for c in choices_of(few, coarse, FOUR)} == {0, 1}
    assert choices_of(few, WHOLE, FOUR) == [Choice(0, "whole", 1, 1)]


def test_kinds_of_ranks():
    # Hosts 0 and 2 have a slow and two fast ranks each; host 1 a fast one alone.
    ranks = cluster(0, 0, 1, 2, 0, 2, 2, speeds=(1, 2, 2, 2, 2, 1, 2))
    kinds = rank_kinds(ranks)
    np.testing.assert_array_equal(kinds.ranks, [2, 4, 1])
    np.testing.assert_array_equal(kinds.speeds, [1, 2, 2])
    np.testing.assert_array_equal(kinds.local, [3, 3, 1])
    np.testing.assert_array_equal(kinds.on_host, [[1, 2, 0], [1, 2, 0], [0, 0, 1]])


# Two tables of 4 rows alike: see test_whole_in_inference of test_judge_by_hand. The owner
# reads 0.64 s, has an overhead of 0.5 s, and sends 32 bytes in 3.2 s and gets 16 in 1.6 s.
PAIR = [demand({0.25: 4}, name="a"), demand({0.25: 4}, name="b")]
STARTS_S = 2.0


def test_the_mean_of_ranks_on_paper():
    # Both tables' work, sent bytes and overhead, over two ranks.
    mean = 0.64 + 0.5 + 1.6 + 3.2
    proof = (False, 100.0, multipliers([1], [0, 0]), mean + STARTS_S)
    found = verify_certificate(certificate([proof]), PAIR, TWO, "infer", WHOLE)
    assert found.proven_s == (pytest.approx(mean + STARTS_S),)
    assert found.bound_s == found.proven_s[0]
    # One table on each rank costs just that.
    best = AllPlans(PAIR, WHOLE, TWO, "infer").best_cost_s()
    assert best == pytest.approx(mean + STARTS_S)


def test_the_owner_of_a_piece_on_paper():
    # Whoever owns table a: its work, overhead, and sent bytes.
    owner = 0.64 + 0.5 + 1.6 + 3.2
    proof = (False, 100.0, multipliers([0], [1, 0]), 0.0)
    found = verify_certificate(certificate([proof]), PAIR, TWO, "infer", WHOLE)
    assert found.proven_s == (pytest.approx(owner + STARTS_S),)


def test_a_target_below_the_cost_of_any_owner_is_proven_itself():
    proof = (False, 5.0, multipliers([1], [0, 0]), 7.0)
    found = verify_certificate(certificate([proof]), PAIR, TWO, "infer", WHOLE)
    assert found.proven_s == (5.0 + STARTS_S,)


def test_a_price_of_memory_is_paid_back():
    # Two tables of 64 bytes, each with a buffer of 32 on both ranks: 128 of 1,000 bytes.
    mean, memory = 0.64 + 0.5 + 1.6 + 3.2, 2 * 64 / 2 + 64
    proof = (False, 100.0, multipliers([1], [0, 0], memory=1e-3), 0.0)
    found = verify_certificate(certificate([proof]), PAIR, TWO, "infer", WHOLE)
    assert found.proven_s[0] == pytest.approx(mean + STARTS_S + 1e-3 * (memory - 1000))


def test_two_ways_of_the_links_are_not_added():
    # One table on each rank, which sends its own and gets the other at the same time. To
    # add what a's owner sends to what it gets of b would prove twice the links' time.
    slow = replace(PAPER, intra_host=Link(0.0, 1.0), shard_overhead_s=0.0)
    ranks = Cluster(TWO.ranks, slow)
    best = AllPlans(PAIR, WHOLE, ranks, "train").best_cost_s()
    assert best == pytest.approx(16 + 32 + 32 + 2.155)
    # Nor may that leave out choices of plans that meet a target a little above the best.
    for weights, target in (([0, 1, 0], 1000.0), ([1, 0, 0], best * 1.01)):
        proof = (False, target, multipliers(weights[:1], weights[1:]), 0.0)
        found = verify_certificate(certificate([proof]), PAIR, ranks, "train", WHOLE)
        assert found.proven_s[0] == pytest.approx(best)


def test_pieces_of_one_table_may_lie_with_ranks_of_different_kinds():
    # The hot row, nine tenths of the work, on the fast rank, which has no room for the
    # other 20 rows: together they would be on either rank alone, at much higher cost.
    table = demand({0.9: 1, 0.005: 20})
    links = Link(0.0, 1e9)
    rates = replace(PAPER, intra_host=links, inter_host=links, shard_overhead_s=0.0)
    ranks = Cluster((RankSpec(1000, 0, 1.0), RankSpec(88, 0, 12.0)), rates)
    space = SearchSpace(exchanges=("partial",), hot_rows=False)
    best = AllPlans([table], space, ranks, "infer").best_cost_s()
    assert best == pytest.approx(0.064)
    prices = Multipliers([0.5, 0.5], np.ones((2, 3, 2)), [0, 0.46 * 0.64 / 336], [0])
    proof = (False, 100.0, prices, -1.0)
    found = verify_certificate(certificate([proof]), [table], ranks, "infer", space)
    assert found.proven_s[0] <= best


def test_what_a_choice_puts_on_ranks_on_paper():
    # One hot row and three others, 1 bag of 2 ids, on two hosts of two ranks. Two parts:
    # the hot row with 11.2 bytes of ids and 14.56 of sums for each rank, and the others
    # with 4.8 and 8.16. Four even parts of distinct rows: 35.52 bytes together.
    hot = demand({0.7: 1, 0.1: 3}, bags=1, lengths={2: 1})
    choices = [Choice(0, "partial", 1, 2), Choice(0, "rows", 1, 4), Choice(4, "replicated", 1, 0)]
    costs = table_costs(choice_loads(hot, choices, FOUR, "infer"), FOUR)
    # A byte for every rank takes 1/10 s to the own host's and 2/2 s to the other's.
    heavy_s, even_s = 0.16 * 8 * 0.7 + 0.5, 0.16 * 1.48 + 0.5
    pooling_s, replica_s = 2 * 0.16, 2 * 0.16 + 0.5
    np.testing.assert_allclose(
        costs.sent.busiest_s,
        [heavy_s + 25.76 * 1.1, pooling_s + even_s + 35.52 / 4 * 1.1, replica_s],
    )
    # Two ranks own nothing; every rank owns one of four parts, perhaps an empty one.
    np.testing.assert_allclose(costs.sent.least_s, [0, pooling_s + 0.5, replica_s])
    # Each owner gets the other part, perhaps from its own host. Who owns all of the four
    # parts gets nothing.
    others_s = 0.16 * 8 * 0.3 + 0.5 + 25.76 / 10
    np.testing.assert_allclose(
        costs.received.busiest_s, [others_s, pooling_s + 4 * 0.16 * 1.48 + 0.5, replica_s]
    )
    np.testing.assert_allclose(
        costs.received.least_s,
        [heavy_s + 12.96 / 10, pooling_s + 4 * 0.16 * 1.48 + 0.5, replica_s],
    )
    np.testing.assert_allclose(costs.busiest_bytes, [3 * 16 + 22.72, 16 + 23.68, 64])
    # If the busiest owner of even parts has no more than 0.3 of them all, with 4 owners each
    # has 0.1 or more.
    all_s = 4 * 0.16 * 1.48 + 35.52 * 1.1
    limited_s = costs.sent.least_below(pooling_s + 0.5 + 0.3 * all_s, 4)
    np.testing.assert_allclose(limited_s, [0, pooling_s + 0.5 + 0.1 * all_s, replica_s])
    # Who owns nothing gets both parts, one of them, the larger, perhaps from its own host.
    alone = choice_loads(hot, choices[:1], replace_rates(FOUR, read=1e-3), "infer")
    slow = table_costs(alone, replace_rates(FOUR, read=1e-3))
    np.testing.assert_allclose(slow.received.least_s, [25.76 / 10 + 12.96 / 2])


@pytest.mark.parametrize("objective", ["train", "infer"])
def test_choices_have_the_loads_of_their_decisions(objective):
    random = np.random.default_rng(0)
    space = SearchSpace(min_slice_width=2)
    for table in [random_table(random, "t") for _ in range(6)]:
        choices = choices_of(table, space, FOUR)
        for one in choice_loads(table, choices, FOUR, objective):
            choice = one.choice
            owners = np.arange(choice.owners).reshape(choice.columns, choice.parts)
            made = Decision(choice.exchange, choice.hot_rows, owners)
            loads = decision_loads(made, table, FOUR, objective)
            pieces = one.times.sum()
            other_s = (loads.shard_s + loads.allreduce_s).sum()
            np.testing.assert_allclose(
                [loads.memory_s.sum(), other_s, loads.memory_bytes.sum()],
                4 * one.common
                + [one.times @ one.memory_s, pieces * one.shard_s, one.times @ one.held_bytes],
            )
            for phase, volumes in zip(
                (loads.ids, loads.forward, loads.backward), one.volumes, strict=True
            ):
                sent = (phase.sent_intra + phase.sent_inter).sum()
                np.testing.assert_allclose(sent, 3 * (one.times @ volumes))


def replace_rates(ranks, *, read):
    """The same ranks, so slow at reading that owners are never the least busy."""
    return Cluster(ranks.ranks, replace(ranks.rates, read=Rate(((1, read),))))


def random_case(random):
    """A few ranks, alike or not, and one or two tables."""
    hosts, speeds = [
        ((0, 0), (1, 1)),
        ((0, 1), (1, 1)),
        ((0, 0, 1), (1, 1, 1)),
        ((0, 0, 1), (1, 2, 1)),
        ((0, 0), (1, 6)),
    ][random.integers(5)]
    links = [Link(random.uniform(0, 1), 10 ** random.uniform(1, 4)) for _ in range(2)]
    reads = [Rate(((1, 10 ** random.uniform(1, 4)),)) for _ in range(2)]
    rates = Rates(*reads, *links, random.choice([0, 0.01, 1]), bool(random.integers(2)))
    memory = random.choice([10**5, 700, 300], size=len(hosts))
    ranks = zip(memory.tolist(), hosts, speeds, strict=True)
    tables = [random_table(random, f"t{n}") for n in range(random.integers(1, 3))]
    space = SearchSpace(min_slice_width=2, hot_rows=bool(random.integers(2)))
    objective = ["train", "infer"][random.integers(2)]
    return tables, Cluster(tuple(RankSpec(*one) for one in ranks), rates), objective, space


def random_table(random, name):
    rows = np.array([random.integers(1, 4), random.integers(1, 9), random.integers(8, 30)])
    chances = np.sort(10 ** random.uniform(-3, 0, 3))[::-1]
    chances = chances / (chances @ rows)
    lengths = [{1: 1}, {1: 0.5, 3: 0.5}][random.integers(2)]
    mean = sum(length * share for length, share in lengths.items())
    blocks = dict(zip(chances.tolist(), rows.tolist(), strict=True))
    pooling = "none" if random.random() < 0.2 else "sum"
    return demand(blocks, lookups=10 * mean, bags=10, lengths=lengths, pooling=pooling, name=name)


def random_multipliers(random, kinds, tables):
    weights = random.dirichlet(np.full(kinds + tables, 0.4))
    if random.random() < 0.5:
        weights[kinds:] = 0
        weights /= weights.sum()
    share = random.choice([0, 0.5, 1], size=(2, 3, kinds))
    memory = 10 ** random.uniform(-4, 0, kinds) * random.integers(0, 2, kinds)
    return Multipliers(weights[:kinds], share, memory, weights[kinds:])


@pytest.mark.parametrize("seed", range(25))
def test_nothing_is_proven_above_the_best_plan(seed):
    random = np.random.default_rng(seed)
    tables, ranks, objective, space = random_case(random)
    best = AllPlans(tables, space, ranks, objective).best_cost_s()
    near = best if np.isfinite(best) else 1.0
    targets = near * random.choice([0.3, 0.9, 0.99, 1.05, 1.2, 9], size=40)
    kinds = len(rank_kinds(ranks).ranks)
    proofs = [
        (hot, target, random_multipliers(random, kinds, len(tables)), -np.inf)
        for target in targets
        for hot in (False, True)
    ]
    checked = certificate(proofs, -np.inf)
    found = verify_certificate(checked, tables, ranks, objective, space)
    for both in np.reshape(found.proven_s, (-1, 2)):
        assert min(found.replicated_s, *both) <= best * (1 + 1e-9)


def test_claims_above_what_is_proven_are_refused():
    proof = (False, 100.0, multipliers([1], [0, 0]), 8.0)
    with pytest.raises(PlanError, match=r"the bound without hot rows is said to be 8.0 s, but no"):
        verify_certificate(certificate([proof]), PAIR, TWO, "infer", WHOLE)
    honest = (False, 100.0, multipliers([1], [0, 0]), 7.9)
    verify_certificate(certificate([honest]), PAIR, TWO, "infer", WHOLE)
    space = SearchSpace(exchanges=("whole", "replicated"), hot_rows=False)
    both = [honest, (True, 1.0, multipliers([1], [0, 0]), 0.0)]
    # Both tables replicated: 2 * (0.32 + 0.5) s.
    verify_certificate(certificate(both, 1.64), PAIR, TWO, "infer", space)
    with pytest.raises(PlanError, match="replicating all tables is said to be 1.7 s"):
        verify_certificate(certificate(both, 1.7), PAIR, TWO, "infer", space)
    with pytest.raises(PlanError, match="is said to be nan"):
        wrong = [(False, 100.0, multipliers([1], [0, 0]), np.nan)]
        verify_certificate(certificate(wrong), PAIR, TWO, "infer", WHOLE)


def test_a_replicated_plan_that_does_not_fit_costs_any_claim():
    space = SearchSpace(exchanges=("whole", "replicated"), hot_rows=False)
    both = [(hot, 1.0, multipliers([1], [0, 0]), 0.0) for hot in (False, True)]
    tight = cluster(0, 0, memory_bytes=127)  # two tables of 64 bytes
    found = verify_certificate(certificate(both), PAIR, tight, "infer", space)
    assert found.replicated_s == np.inf


def test_every_plan_must_be_of_a_case():
    without, with_hot = ((hot, 1.0, multipliers([1], [0, 0]), 0.0) for hot in (False, True))
    space = SearchSpace(exchanges=("whole", "replicated"))
    for objective, proofs, missing in (
        ("train", [without], "with hot rows"),
        ("train", [with_hot], "without hot rows"),
        ("infer", [without], "with hot rows"),
    ):
        with pytest.raises(PlanError, match=f"no proof for plans {missing}"):
            verify_certificate(certificate(proofs, 0.0), PAIR, TWO, objective, space)
    # In inference, plans with hot rows start no phase more: one case is all.
    verify_certificate(certificate([with_hot], 0.0), PAIR, TWO, "infer", space)
    verify_certificate(certificate([without], 0.0), PAIR, TWO, "train", WHOLE)


def test_certificates_of_something_else_are_refused():
    proof = (False, 1.0, multipliers([1], [0]), 0.0)
    with pytest.raises(PlanError, match="for 1 tables and 1 kinds of ranks, wanted 2 and 1"):
        verify_certificate(certificate([proof]), PAIR, TWO, "infer", WHOLE)
    proof = (False, 1.0, multipliers([0.5, 0.5], [0, 0]), 0.0)
    with pytest.raises(PlanError, match="for 2 tables and 2 kinds of ranks, wanted 2 and 1"):
        verify_certificate(certificate([proof]), PAIR, TWO, "infer", WHOLE)
    with pytest.raises(PlanError, match="at least one table"):
        verify_certificate(certificate([]), [], TWO, "infer", WHOLE)
    unpooled = [demand({0.25: 4}, pooling="none")]
    with pytest.raises(PlanError, match="table t: the search space has no choice for it"):
        verify_certificate(certificate([]), unpooled, TWO, "infer", WHOLE)
