"""The trace: which samples are kept, and what they hold."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile import AccessProfile
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.profile.sampler import TraceSampler
from torchrec_oper.profile.trace import SampleSet, Trace
from torchrec_oper.table import TableSpec

FEATURES = ("f", "g", "h")
TABLES = (TableSpec("a", 100, 4, ("f", "g")), TableSpec("b", 100, 4, ("g", "h")))

bag = st.lists(st.integers(0, 99), max_size=3)
sample = st.tuples(bag, bag, bag)


def arrays(samples):
    """Ids and lengths of each feature."""
    return [
        (
            np.array([id_ for each in samples for id_ in each[at]], np.int64),
            np.array([len(each[at]) for each in samples], np.int32),
        )
        for at in range(3)
    ]


def sampled(samples, *, limit_ids, size=10**6):
    sampler = TraceSampler(FEATURES, limit_ids=limit_ids)
    for at in range(0, len(samples), size):
        sampler.add(arrays(samples[at : at + size]))
    return sampler


def content(half):
    """The samples of a half as tuples of bags."""
    bags = half.bags()
    columns = []
    for name in FEATURES:
        ids, lengths = bags[name]
        parts = np.split(ids, np.cumsum(lengths)[:-1]) if lengths.size else []
        columns.append([tuple(part.tolist()) for part in parts])
    return list(zip(*columns, strict=True))


def plain(samples):
    return Counter(tuple(tuple(sorted(bag)) for bag in each) for each in samples)


def same(one, other):
    return all(
        np.array_equal(getattr(getattr(one, half), name), getattr(getattr(other, half), name))
        for half in ("planning", "judging")
        for name in ("lengths", "ids")
    )


@settings(deadline=None)
@given(st.lists(sample, max_size=30))
def test_a_budget_for_everything_keeps_everything(samples):
    trace = sampled(samples, limit_ids=10**6).trace()
    assert Counter(content(trace.planning)) + Counter(content(trace.judging)) == plain(samples)
    assert trace.planning.samples == -(-len(samples) // 2)


@settings(deadline=None)
@given(st.lists(sample, max_size=30), st.integers(1, 60), st.integers(1, 7), st.randoms())
def test_neither_order_nor_batches_nor_parts_matter(samples, limit_ids, size, random):
    whole = sampled(samples, limit_ids=limit_ids).trace()
    shuffled = [tuple(random.sample(bag, len(bag)) for bag in each) for each in samples]
    random.shuffle(shuffled)
    split = sampled(shuffled, limit_ids=limit_ids, size=size)
    assert same(split.trace(), whole)
    middle = len(shuffled) // 3
    first = sampled(shuffled[:middle], limit_ids=limit_ids, size=size)
    first.merge(sampled(shuffled[middle:], limit_ids=limit_ids))
    assert same(first.trace(), whole)
    # Also through traces, as profiles do.
    again = TraceSampler(FEATURES[::-1], limit_ids=limit_ids)
    for part in (shuffled[:middle], shuffled[middle:]):
        again.add_trace(sampled(part, limit_ids=limit_ids).trace())
    kept = again.trace()
    assert content(kept.planning) == content(whole.planning)
    assert kept.up_to_hash == whole.up_to_hash


@settings(deadline=None)
@given(st.lists(sample, max_size=30), st.integers(1, 60))
def test_the_budget_is_kept_and_used(samples, limit_ids):
    trace = sampled(samples, limit_ids=limit_ids, size=4).trace()
    kept = content(trace.planning) + content(trace.judging)
    assert not Counter(kept) - plain(samples)
    costs = [max(3, sum(map(len, each))) for each in kept]
    assert sum(costs) <= limit_ids
    if len(kept) < len(samples):
        longest = max(max(3, sum(map(len, each))) for each in samples)
        assert sum(costs) > limit_ids - longest


def test_every_sample_has_the_same_chance():
    rng = np.random.default_rng(0)
    samples = [
        ([int(a)], [int(b)], [at % 10])
        for at, (a, b) in enumerate(rng.integers(0, 100, (20_000, 2)))
    ]
    trace = sampled(samples, limit_ids=15_000, size=999).trace()
    assert trace.samples == 5000
    for half in (trace.planning, trace.judging):
        ids, lengths = half.bags()["h"]
        assert (lengths == 1).all()
        # 250 of each, of a standard deviation of 15.
        assert abs(np.bincount(ids, minlength=10) - 250).max() < 60
        assert abs(half.bags()["f"][0].mean() - 49.5) < 2.5


def test_bags_of_equal_sums_have_different_hashes():
    samples = [([a, 90 - a], [], []) for a in range(45)]
    trace = sampled(samples, limit_ids=60).trace()
    assert trace.samples == 20
    hashes = sampled(samples, limit_ids=10**6)._parts[-1].hashes
    assert len(set(hashes.tolist())) == 45


def test_batches_are_whole_and_in_order():
    lengths = np.array([[1, 0, 2, 1, 1], [0, 1, 0, 3, 0]])
    half = SampleSet(("f", "g"), lengths, np.arange(9))
    batches = list(half.batches(2))
    assert [{name: ids.tolist() for name, (ids, _) in batch.items()} for batch in batches] == [
        {"f": [0], "g": [5]},
        {"f": [1, 2, 3], "g": [6, 7, 8]},
    ]
    assert [batch["g"][1].tolist() for batch in batches] == [[0, 1], [0, 3]]
    assert [len(list(half.batches(size))) for size in (1, 5, 6)] == [5, 1, 0]
    with pytest.raises(ProfileError, match="samples of a batch must be an integer of 1 or more"):
        next(half.batches(0))


def jagged(samples, **changes):
    ids, lengths = map(np.concatenate, zip(*arrays(samples), strict=True))
    fields = {"keys": list(FEATURES), "values": torch.from_numpy(ids)}
    return KeyedJaggedTensor(
        **{
            **fields,
            "lengths": torch.from_numpy(lengths),
            "stride": len(samples),
            **changes,
        }
    )


def test_batches_of_torchrec_are_traced():
    samples = [([at, 2 * at], [at % 7], []) for at in range(20)]
    profile = AccessProfile.from_batches([jagged(samples[:15]), jagged(samples[15:])], TABLES)
    kept = content(profile.trace.planning) + content(profile.trace.judging)
    assert Counter(kept) == plain(samples)
    assert profile.trace.features == FEATURES
    off = AccessProfile.from_batches([jagged(samples)], TABLES, trace_ids=0)
    assert off.trace is None
    assert off.content_hash != profile.content_hash


def test_samples_that_are_not_whole_end_the_trace():
    uneven = KeyedJaggedTensor(
        keys=["f", "g", "h"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [1], [1]],
        inverse_indices=(["f", "g", "h"], torch.zeros(3, 4, dtype=torch.int64)),
    )
    assert uneven.stride() == 4
    profile = AccessProfile.from_batches([jagged([([1], [2], [3])]), uneven], TABLES)
    assert (profile.samples, profile.trace) == (5, None)
    collector = AccessCollector(TABLES)
    collector.add(0, "f", np.array([1]), np.array([1]), where="here")
    collector.samples += 1
    assert AccessProfile.from_collector(collector).trace is None


def whole(**changes):
    bags = {name: (np.array([1, 2]), np.array([2, 0])) for name in FEATURES}
    return {**bags, **changes}


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        ({"f": whole()["f"]}, "here lacks feature g of table a; its keys are f"),
        (whole(g=(np.array([1]), np.array([1]))), "feature g has 1 bags, others 2; each needs one"),
        (whole(g=(np.array([1]), np.array([1, 1]))), "lengths of feature g sum to 2, but it has 1"),
        (whole(g=(np.array([]), np.array([1, -1]))), "ids of feature g must be integers in one di"),
        (whole(g=(np.array([], int), np.array([1, -1]))), "a bag's length is -1, wanted 0 or more"),
        (whole(h=(np.array([1, 100]), np.array([1, 1]))), "feature h looks up id 100 in table b"),
    ],
)
def test_samples_are_checked(bags, message):
    with pytest.raises(ProfileError) as error:
        AccessCollector(TABLES).add_samples(bags, where="here")
    assert message in str(error.value)


def half(samples=2, features=("f",), **changes):
    fields = {"lengths": np.ones((len(features), samples), int)}
    fields["ids"] = np.arange(samples * len(features))
    return SampleSet(features, **{**fields, **changes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: half(ids=np.array([0.0, 1])),
            "ids must be integers in 1 dimension, found float64",
        ),
        (lambda: half(lengths=np.array([1, 1])), "lengths must be integers in 2 dimensions, found"),
        (lambda: half(lengths=np.array([[3, -1]])), "lengths must be 0 or more, found -1"),
        (lambda: half(ids=np.array([0, -5])), "ids must be 0 or more, found -5"),
        (lambda: half(ids=np.array([0])), "lengths sum to 2, but there are 1 ids"),
        (lambda: half(lengths=np.array([[2**62, 2**62]])), "lengths sum to 9223372036854775808"),
        (lambda: half(features=("f", "f")), "features must be unique, one for each of 2 rows"),
        (lambda: half(features=("f",), lengths=np.ones((2, 1), int)), "one for each of 2 rows"),
        (lambda: half(features=["f"]), "features must be a tuple of names, found ['f']"),
        (lambda: Trace(half(), half(3), 9), "its halves have 2 and 3 samples, wanted alike"),
        (lambda: Trace(half(), half(features=("g",)), 9), "have features ('f',) and ('g',)"),
        (lambda: Trace(half(), half(), 0), "limit_ids must be an integer of 1 or more, found 0"),
        (lambda: Trace(half(), half(), 9, -1), "up_to_hash must be an integer of 0 or more"),
    ],
)
def test_traces_are_checked_on_birth(make, message):
    with pytest.raises(ProfileError) as error:
        make()
    assert message in str(error.value)


def test_a_trace_must_fit_its_profile():
    tables = AccessProfile.from_batches([jagged([([1], [2], [3])] * 4)], TABLES).tables
    three = {name: half(features=FEATURES, samples=2) for name in ("planning", "judging")}
    AccessProfile(tables, 4, Trace(**three, limit_ids=9))
    far = half(features=FEATURES, ids=np.array([0, 1, 2, 3, 4, 100]))
    for samples, trace, message in (
        (4, Trace(half(), half(), 9), "trace has features f, but its tables have f, g, h"),
        (3, Trace(**three, limit_ids=9), "trace has 4 samples, more than the 3 read"),
        (
            4,
            Trace(three["planning"], far, 9),
            "looks up id 100 by feature h, but the ids of table b",
        ),
    ):
        with pytest.raises(ProfileError) as error:
            AccessProfile(tables, samples, trace)
        assert message in str(error.value)
