"""Counts of more rows than are counted one by one, against plain counting."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile import AccessProfile, merge_profiles
from torchrec_oper.profile.bins import BinnedSums
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.profile.row_sketch import TRUSTED, RowSketch, mixed
from torchrec_oper.profile.tail import fit_blocks
from torchrec_oper.table import TableSpec

ROWS = 10**7
LOOKUPS = 400_000
EXACT_ROWS = 16_000
HEAD_ROWS = 500


def zipf(seed, lookups=LOOKUPS, rows=ROWS):
    """Ids of a Zipf law with exponent 1, hot rows anywhere."""
    ranks = np.exp(np.random.default_rng(seed).random(lookups) * np.log(rows)).astype(np.int64)
    return ranks * 7_368_787 % rows


def collected(ids, **limits):
    limits = {"exact_rows": EXACT_ROWS, "head_rows": HEAD_ROWS, "pending_ids": 1 << 12, **limits}
    collector = AccessCollector([TableSpec("t", ROWS, 4, ("f",))], **limits)
    for part in np.array_split(ids, 50):
        collector.add_samples({"f": (part, np.ones(part.size, np.int32))}, where="here")
    return collector


@pytest.fixture(scope="module", params=["one", "merged", "exact part first", "exact part last"])
def sketched(request):
    """The profile of all lookups, from one collector or two."""
    ids = zipf(0)
    if request.param == "one":
        return AccessProfile.from_collector(collected(ids)).table("t")
    middle = {"merged": 200_000, "exact part first": 3_000, "exact part last": LOOKUPS - 3_000}
    first, second = np.split(ids, [middle[request.param]])
    collector = collected(first)
    collector.merge(pickle.loads(pickle.dumps(collected(second))))
    return AccessProfile.from_collector(collector).table("t")


@pytest.fixture(scope="module")
def exact():
    table = AccessProfile.from_collector(collected(zipf(0), exact_rows=1 << 24)).table("t")
    assert not table.sketched and table.seen_rows > 8 * EXACT_ROWS
    return table


def test_lookups_stay_exact_and_rows_are_estimated(sketched, exact):
    assert sketched.sketched
    assert sketched.lookups == exact.lookups == LOOKUPS
    assert sketched.seen_rows == pytest.approx(exact.seen_rows, rel=0.05)


def test_listed_counts_are_exact_or_a_little_low(sketched, exact):
    ids, counts = np.unique(zipf(0), return_counts=True)
    true = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    assert 300 < sketched.ids.size <= HEAD_ROWS
    for id_, count in zip(sketched.ids.tolist(), sketched.counts.tolist(), strict=True):
        assert count <= true[id_] <= count * (1 + 1 / TRUSTED)
    assert set(sketched.ids[:300]) <= set(exact.ids)


def test_the_tail_is_close(sketched, exact):
    for lookups in (1_000, 30_000, 1_000_000):
        for hot_rows in (0, 100, 5_000):
            wanted = exact.distinct_rows(lookups, hot_rows)
            assert sketched.distinct_rows(lookups, hot_rows) == pytest.approx(wanted, rel=0.05)
    once = [int(t.tail_rows[t.tail_rows == t.tail_counts].sum()) for t in (sketched, exact)]
    assert once[0] == pytest.approx(once[1], rel=0.05)
    assert sketched.share_of_hottest(1e-3) == pytest.approx(exact.share_of_hottest(1e-3), rel=0.03)


def test_memory_stays_bounded():
    counter = collected(zipf(1)).counters[0]
    counter.head_and_tail(HEAD_ROWS)
    sketch = counter._sketch
    arrays = [value for value in vars(sketch).values() if isinstance(value, np.ndarray)]
    assert sum(array.size for array in arrays) <= 5 * EXACT_ROWS // 2
    assert counter._pending.size <= EXACT_ROWS and not counter._ids.size
    assert 0 < sketch.error <= LOOKUPS / (EXACT_ROWS // 2)


def test_the_sample_of_rows_does_not_depend_on_the_order():
    def sample(ids):
        sketch = RowSketch(2000)
        for part in np.array_split(ids, 30):
            sketch.add(*np.unique(part, return_counts=True))
        return sketch

    ids = zipf(2, 60_000)
    first, last = sample(ids), sample(ids[::-1])
    halves = [sample(part) for part in np.array_split(ids, 2)]
    halves[0].merge(halves[1])
    distinct, counts = np.unique(ids, return_counts=True)
    for sketch in (first, last, halves[0]):
        kept = mixed(distinct) <= np.uint64(2**64 - 1 >> sketch.halvings)
        assert 1000 < kept.sum() <= 2000
        assert np.array_equal(sketch._sample_ids, distinct[kept])
        assert np.array_equal(sketch._sample_counts, counts[kept])


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=20), min_size=1, max_size=8),
    st.integers(1, 8),
    st.booleans(),
)
def test_the_bounds_of_hot_rows_hold(batches, limit, merged):
    sketches = [RowSketch(limit), RowSketch(limit)]
    for number, batch in enumerate(batches):
        ids, counts = np.unique(np.array(batch), return_counts=True)
        sketches[number % 2 if merged else 0].add(ids, counts)
    sketch = sketches[0]
    sketch.merge(sketches[1])
    ids, counts = np.unique(
        np.concatenate([np.array(batch) for batch in batches]), return_counts=True
    )
    true = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    hot = sketch._hot_ids.tolist()
    assert len(hot) <= limit and sketch.error <= sketch.lookups / limit
    for id_, count, missed in zip(hot, sketch._hot_counts, sketch._hot_missed, strict=True):
        assert count <= true[id_] <= count + missed
    assert all(true[id_] <= sketch.error for id_ in set(true) - set(hot))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 40), st.integers(0, 20), st.integers(1, 4000))
def test_any_input_gives_a_valid_profile(seed, exact_rows, head_rows, lookups):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, lookups) if seed % 2 else zipf(seed, lookups)
    limits = {"exact_rows": exact_rows, "head_rows": head_rows, "pending_ids": 1 + seed % 50}
    table = AccessProfile.from_collector(collected(ids, **limits)).table("t")
    assert table.lookups == lookups
    rows, chance = table.blocks()
    assert rows.sum() == ROWS and rows @ chance == pytest.approx(1)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 500), max_size=30),
    st.integers(0, 5),
    st.integers(0, 20_000),
    st.integers(500, 700),
    st.integers(0, 3000),
)
def test_blocks_are_fitted_to_the_lookups(counts, halvings, lookups, most, spare):
    bins = BinnedSums()
    bins.add(np.array(counts, np.int64))
    room = max(1, -(-lookups // 500)) + spare
    rows, totals = fit_blocks(
        tuple(array[::-1] for array in bins.filled()),
        weight=1 << halvings,
        lookups=lookups,
        room_rows=room,
        most_per_row=most,
    )
    assert totals.sum() == lookups
    assert (rows >= 1).all() and (totals >= rows).all()
    assert (np.diff(totals / rows) <= 0).all()
    assert rows.sum() <= max(room, len(rows))


def test_a_sketched_profile_is_told_and_not_merged(tmp_path):
    profile = AccessProfile.from_collector(collected(zipf(3, 30_000)))
    profile.save(tmp_path / "p")
    assert AccessProfile.load(tmp_path / "p").content_hash == profile.content_hash
    assert AccessProfile.load(tmp_path / "p").table("t").sketched
    with pytest.raises(ProfileError, match="rows that aren't listed by id"):
        merge_profiles([profile, profile])
