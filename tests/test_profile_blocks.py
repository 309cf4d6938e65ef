"""What a profile of one table says of its rows: bins, chances, and expected distinct rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile import AccessProfile, TableAccess
from torchrec_oper.profile.bag_counter import distinct_per_bag
from torchrec_oper.profile.bins import BINS, BinnedSums, bin_of
from torchrec_oper.profile.chances import distinct
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.table import TableSpec


def table_of(counts, rows, *, head_rows=2**62, bags=None):
    """The access of a table whose row ``i`` was looked up ``counts[i]`` times."""
    collector = AccessCollector([TableSpec("t", rows, 4, ("f",))], head_rows=head_rows)
    ids = np.repeat(np.arange(len(counts)), counts)
    lengths = np.ones(ids.size, np.int64) if bags is None else np.array(bags)
    collector.add_samples({"f": (ids, lengths)}, where="here")
    collector.samples += not lengths.size
    return AccessProfile.from_collector(collector).table("t")


counts_of_rows = st.lists(st.integers(0, 200), max_size=40)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1))
def test_bins_never_fall_and_are_narrow(numbers):
    numbers = np.sort(np.array(numbers))
    bins = bin_of(numbers)
    assert (np.diff(bins) >= 0).all() and bins.min() >= 0 and bins.max() < BINS
    small = numbers < 64
    assert np.array_equal(bins[small], numbers[small])
    for each in np.unique(bins):
        mine = numbers[bins == each]
        assert mine.max() - mine.min() <= mine.min() / 32


def test_every_power_of_two_begins_a_bin():
    powers = 2 ** np.arange(63)
    assert (bin_of(powers[1:]) - bin_of(powers[1:] - 1) == 1).all()
    assert bin_of(np.array([2**63 - 1])) == BINS - 1


@given(st.lists(st.integers(1, 10**6), min_size=1), st.lists(st.integers(1, 10**6)))
def test_bins_merge_into_the_bins_of_all(some, others):
    both, first, second = BinnedSums(), BinnedSums(), BinnedSums()
    both.add(np.array(some + others))
    first.add(np.array(some))
    second.add(np.array(others, np.int64))
    first.merge(*second.filled())
    assert np.array_equal(first.members, both.members) and np.array_equal(first.sums, both.sums)
    members, sums = both.filled()
    assert (members.sum(), sums.sum()) == (len(some + others), sum(some + others))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=70), min_size=1, max_size=20),
    st.sampled_from([1, 2**28, 2**60]),
    st.booleans(),
)
def test_distinct_ids_of_bags(bags, spacing, alike):
    if alike:
        bags = [bag[: min(map(len, bags))] for bag in bags]
    ids = np.array([id_ * spacing for bag in bags for id_ in bag], np.int64)
    ids = ids.astype(np.int32) if ids.max() < 2**31 else ids
    found = distinct_per_bag(ids, np.array([len(bag) for bag in bags], np.int32))
    assert found.tolist() == [len(set(bag)) for bag in bags]


def test_distinct_ids_of_many_bags():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 90, 1000)
    ids = rng.integers(0, 50, lengths.sum())
    wanted = [np.unique(bag).size for bag in np.split(ids, np.cumsum(lengths)[:-1])]
    assert distinct_per_bag(ids, lengths).tolist() == wanted


@settings(deadline=None)
@given(counts_of_rows, st.integers(0, 10), st.integers(0, 30))
def test_blocks_hold_every_row_and_all_chances(counts, unseen, head_rows):
    rows = len(counts) + unseen + 1
    table = table_of(counts, rows, head_rows=head_rows)
    block_rows, chance = table.blocks()
    assert block_rows.sum() == rows and (block_rows >= 1).all()
    assert block_rows @ chance == pytest.approx(1)
    assert (np.diff(chance) <= 0).all() and (chance > 0).sum() >= 1
    assert table.lookups == sum(counts)
    assert table.seen_rows == np.count_nonzero(counts)
    # Listed rows stay in front: some blocks hold just them.
    assert table.ids.size in np.cumsum([0, *block_rows])


def test_rows_never_seen_have_the_share_of_good_and_turing():
    table = table_of([6, 2, 1, 1], 104)
    block_rows, chance = table.blocks()
    assert block_rows.tolist() == [1, 1, 2, 100]
    assert chance == pytest.approx([0.8 * 0.6, 0.8 * 0.2, 0.8 * 0.1, 0.2 / 100])
    assert table_of([6, 2, 2], 100).blocks()[1] == pytest.approx([0.6, 0.2, 0])
    assert table_of([6, 2, 1, 1], 4).blocks()[1] == pytest.approx([0.6, 0.2, 0.1])


def test_lookups_that_are_all_distinct_leave_seen_rows_an_equal_share():
    block_rows, chance = table_of([1] * 10, 1000).blocks()
    assert block_rows.tolist() == [10, 990]
    assert chance == pytest.approx([1 / 1000, 1 / 1000])
    # One row never seen is not given more than a row seen once has.
    assert table_of([1] * 9, 10).blocks()[1] == pytest.approx([0.1, 0.1])


def test_no_lookup_tells_no_row_from_another():
    table = table_of([], 50, bags=[0, 0])
    assert [array.tolist() for array in table.blocks()] == [[50], [1 / 50]]
    assert (table.lookups, table.seen_rows, table.cold_rows_per_bag(0)) == (0, 0, 0.0)
    assert table.bag_lengths.size == table.bag_shares.size == 0
    assert table.distinct_rows(50) == pytest.approx(50 * (1 - (49 / 50) ** 50))
    assert table.distinct_rows(0) == 0


def test_a_table_of_one_row():
    table = table_of([7], 1)
    assert [array.tolist() for array in table.blocks()] == [[1], [1]]
    assert [table.distinct_rows(n) for n in (0, 1, 9)] == [0, 1, 1]
    assert table.distinct_rows(9, hot_rows=1) == 0
    assert (table.cold_rows_per_bag(0), table.cold_rows_per_bag(1)) == (1, 0)


def test_a_table_of_ten_billion_rows():
    collector = AccessCollector([TableSpec("t", 10**10, 4, ("f",))], head_rows=2)
    ids = np.array([10**10 - 1, 0, 2**33, 5, 5, 10**10 - 1, 10**10 - 1])
    collector.add_samples({"f": (ids, np.ones(7, int))}, where="here")
    table = AccessProfile.from_collector(collector).table("t")
    assert (table.ids.tolist(), table.counts.tolist()) == ([10**10 - 1, 5], [3, 2])
    assert (table.tail_rows.tolist(), table.tail_counts.tolist()) == ([2], [2])
    block_rows, chance = table.blocks()
    assert block_rows.tolist() == [1, 1, 2, 10**10 - 4]
    assert block_rows @ chance == pytest.approx(1)
    assert table.distinct_rows(1e6, hot_rows=4) == pytest.approx(1e6 * 2 / 7, rel=1e-3)


@settings(deadline=None)
@given(counts_of_rows, st.integers(0, 300), st.integers(0, 45))
def test_distinct_rows_add_up_row_by_row(counts, lookups, hot_rows):
    table = table_of(counts, 50, head_rows=10)
    block_rows, chance = table.blocks()
    each = np.repeat(chance, block_rows.astype(int))
    wanted = (1 - (1 - each[hot_rows:]) ** lookups).sum()
    assert table.distinct_rows(lookups, hot_rows) == pytest.approx(wanted, abs=1e-9)


def test_distinct_rows_of_many_lookups_at_once():
    rows, chance = np.full(2000, 3.0), np.full(2000, 1 / 6000)
    lookups = np.arange(2000.0)
    wanted = 6000 * (1 - (1 - 1 / 6000) ** lookups)
    assert distinct(rows, chance, lookups) == pytest.approx(wanted)


def test_cold_rows_of_bags_match_independent_draws():
    rng = np.random.default_rng(1)
    weights = 1 / np.arange(1, 201)
    bags = rng.choice(200, (4000, 12), p=weights / weights.sum())
    collector = AccessCollector([TableSpec("t", 200, 4, ("f",))])
    collector.add_samples({"f": (bags.ravel(), np.full(4000, 12))}, where="here")
    table = AccessProfile.from_collector(collector).table("t")
    hot = table.ids[:20]
    cold = np.mean([np.unique(bag[~np.isin(bag, hot)]).size for bag in bags])
    assert table.cold_rows_per_bag(20) == pytest.approx(cold, rel=0.05)
    distinct_rows = np.mean([np.unique(bag).size for bag in bags])
    assert table.cold_rows_per_bag(0) == pytest.approx(distinct_rows)
    assert table.cold_rows_per_bag(200) == 0


def test_bags_are_counted_by_their_distinct_rows():
    table = table_of([3, 2, 1], 9, bags=[2, 0, 1, 3])  # 0 0 | | 0 | 1 1 2
    assert (table.bags, table.empty_bags) == (4, 1)
    assert (table.bag_counts.tolist(), table.bag_rows.tolist()) == ([2, 1], [2, 2])
    assert table.bag_lengths.tolist() == [1, 2]
    assert table.bag_shares == pytest.approx([2 / 3, 1 / 3])


def test_long_bags_keep_their_mean():
    lengths = [100, 101, 1000, 64]
    ids = np.concatenate([np.arange(length) for length in lengths])
    collector = AccessCollector([TableSpec("t", 1000, 4, ("f",))])
    collector.add_samples({"f": (ids, np.array(lengths))}, where="here")
    table = AccessProfile.from_collector(collector).table("t")
    assert table.bag_lengths.tolist() == [64, 100.5, 1000]
    assert table.bag_lengths @ table.bag_shares == pytest.approx(np.mean(lengths))


def test_the_share_of_the_hottest_rows_reaches_into_the_tail():
    table = table_of([5, 3, 1, 1], 10, head_rows=1)
    assert table.tail_rows.tolist() == [1, 2]
    shares = [table.share_of_hottest(fraction) for fraction in (0, 0.1, 0.2, 0.3, 0.4, 1)]
    assert shares == pytest.approx([0, 0.5, 0.8, 0.9, 1, 1])


def test_a_profile_without_bins_of_bags_takes_the_mean():
    table = TableAccess("t", 9, ("f",), np.array([1, 2]), np.array([4, 3]), 5, 2)
    assert table.bag_lengths.tolist() == [2, 3]
    assert table.bag_shares == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda t: t.distinct_rows(-1), "lookups must be 0 or more, found -1"),
        (lambda t: t.distinct_rows(float("nan")), "lookups must be 0 or more, found nan"),
        (lambda t: t.distinct_rows(1, hot_rows=-1), "hot_rows must be an integer of 0 or more"),
        (lambda t: t.cold_rows_per_bag(0.5), "hot_rows must be an integer of 0 or more, found 0.5"),
    ],
)
def test_wrong_questions_are_refused(ask, message):
    with pytest.raises(ProfileError) as error:
        ask(table_of([2, 1], 9))
    assert message in str(error.value)
