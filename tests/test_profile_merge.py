"""Collectors and profiles of parts of the input give the profile of all of it."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile import AccessProfile, merge_profiles
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.profile.row_counter import RowCounter
from torchrec_oper.table import TableSpec

TABLES = (TableSpec("a", 7, 4, ("f", "g")), TableSpec("b", 300, 4, ("g",)))
ALL = 2**62

bag = st.lists(st.integers(0, 6), max_size=4)
parts_of_input = st.lists(
    st.lists(st.tuples(bag, bag), min_size=1, max_size=8), min_size=1, max_size=4
)


def collector_of(*parts, tables=TABLES, **limits):
    """A collector that has seen the samples of each of ``parts``: bags of f and g."""
    collector = AccessCollector(tables, **limits)
    for samples in parts:
        bags = {
            name: (
                np.array([id_ for sample in samples for id_ in sample[at]], np.int64),
                np.array([len(sample[at]) for sample in samples], np.int32),
            )
            for at, name in enumerate("fg")
        }
        collector.add_samples(bags, where="here")
    return collector


def profile_of(*parts, **limits):
    return AccessProfile.from_collector(collector_of(*parts, **limits))


@settings(deadline=None)
@given(parts_of_input, st.integers(0, 5), st.integers(0, 30), st.randoms())
def test_collectors_merge_exactly(parts, head_rows, trace_ids, random):
    limits = {"head_rows": head_rows, "trace_ids": trace_ids, "pending_ids": 3}
    whole = profile_of(*parts, **limits)
    collectors = [collector_of(part, **limits) for part in parts]
    random.shuffle(collectors)
    merged = AccessCollector(TABLES, **limits)
    for collector in collectors:
        before = AccessProfile.from_collector(collector).content_hash
        merged.merge(pickle.loads(pickle.dumps(collector)))
        assert AccessProfile.from_collector(collector).content_hash == before
    assert AccessProfile.from_collector(merged).content_hash == whole.content_hash


@settings(deadline=None)
@given(parts_of_input, st.integers(1, 30), st.randoms(), st.integers(0, 5))
def test_profiles_merge_exactly_while_every_row_is_listed(parts, trace_ids, random, head_rows):
    limits = {"head_rows": ALL, "trace_ids": trace_ids}
    profiles = [profile_of(part, **limits) for part in parts]
    random.shuffle(profiles)
    merged = merge_profiles(profiles)
    assert merged.content_hash == profile_of(*parts, **limits).content_hash
    assert profiles[0].merge(profiles[1:]).content_hash == merged.content_hash
    # Cut afterwards, it is what would have been collected.
    limits["head_rows"] = head_rows
    binned = merged.binned(head_rows)
    assert binned.content_hash == profile_of(*parts, **limits).content_hash
    assert binned.binned(0).content_hash == merged.binned(0).content_hash


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 199), max_size=60), min_size=1, max_size=6),
    st.sampled_from([0, 10**6]),
    st.sampled_from([200, 10**10]),
)
def test_row_counters_of_any_form_merge(parts, dense_rows, rows):
    def counter(*batches):
        made = RowCounter(
            rows, pending_ids=16, exact_rows=1000, dense_rows=dense_rows if rows < 1e6 else 0
        )
        for ids in batches:
            made.add(np.array(ids, np.int64))
        return made

    merged = counter(parts[0])
    for part in parts[1:]:
        merged.merge(pickle.loads(pickle.dumps(counter(part))))
    ids, counts = merged.counted()
    wanted = np.unique(
        np.concatenate([np.array(part, np.int64) for part in parts]), return_counts=True
    )
    assert np.array_equal(ids, wanted[0]) and np.array_equal(counts, wanted[1])


def test_a_sparse_table_becomes_dense_when_that_is_smaller():
    counter = RowCounter(1000, pending_ids=10, dense_rows=0)
    assert counter._dense is None
    counter.add(np.arange(199).repeat(2))
    counter.counted()
    assert counter._dense is None
    counter.add(np.arange(250))
    counter.counted()
    assert counter._dense is not None and counter._ids.size == counter._pending.size == 0
    again = pickle.loads(pickle.dumps(counter))
    again.add(np.array([0, 999]))
    ids, counts = again.counted()
    assert ids.tolist() == [*range(250), 999]
    assert counts.tolist() == [4] + [3] * 198 + [1] * 52


def test_a_pickled_counter_holds_only_rows_that_were_seen():
    counter = RowCounter(10**6)
    counter.add(np.array([5, 7, 5]))
    assert len(pickle.dumps(counter)) < 2000


def test_collectors_that_differ_are_refused():
    mine = collector_of([([1], [2])])
    for other, message in (
        (
            AccessCollector(TABLES[:1]),
            "different tables, and can't be merged: tables a (7 rows), b",
        ),
        (AccessCollector(TABLES, head_rows=3), "different limits, and can't be merged: head_rows"),
    ):
        with pytest.raises(ProfileError) as error:
            mine.merge(other)
        assert message in str(error.value)


def test_profiles_that_cannot_be_merged_are_refused():
    sample = [([1, 2], [3])]
    whole = profile_of(sample, head_rows=ALL)
    for profiles, message in (
        ([], "needs at least one profile to merge, found none"),
        (
            [whole, profile_of(sample, tables=(TableSpec("a", 8, 4, ("f", "g")), TABLES[1]))],
            "table a has 8 rows in the profile, wanted 7",
        ),
        (
            [whole, profile_of(sample, head_rows=1)],
            "profile 1 of 2: table a has 2 rows that aren't listed by id, so that it can't be"
            " merged; list them (head_rows=2**62), merge, and cut the result with .binned()",
        ),
    ):
        with pytest.raises(ProfileError) as error:
            merge_profiles(profiles)
        assert message in str(error.value)


def test_bags_of_a_profile_of_format_1_stay_unknown():
    profile = profile_of([([1, 2], [3])])
    table = profile.table("b")
    none = np.empty(0, int)
    old = type(table)("b", 300, ("g",), table.ids, table.counts, table.bags, 0, bag_counts=none)
    before = AccessProfile((profile.tables[0], old), 1)
    merged = merge_profiles([profile, before])
    assert merged.table("b").bag_counts.size == 0
    assert merged.table("a").bag_counts.tolist() == [2, 2]
    assert merged.trace is None and merged.samples == 2


def test_a_merged_table_may_have_its_features_in_another_order():
    tables = (TABLES[1], TableSpec("a", 7, 4, ("g", "f")))
    parts = [([1], [2, 2])], [([3], [])]
    first, second = profile_of(parts[0]), profile_of(parts[1], tables=tables)
    assert merge_profiles([first, second]).content_hash == profile_of(*parts).content_hash


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"head_rows": -1}, "head_rows must be an integer of 0 or more, found -1"),
        ({"exact_rows": 1}, "exact_rows must be an integer of 2 or more, found 1"),
        ({"trace_ids": 1.5}, "trace_ids must be an integer of 0 or more, found 1.5"),
        ({"pending_ids": 0}, "pending_ids must be an integer of 1 or more, found 0"),
    ],
)
def test_wrong_limits_are_refused(limit, message):
    with pytest.raises(ProfileError) as error:
        AccessCollector(TABLES, **limit)
    assert message in str(error.value)
