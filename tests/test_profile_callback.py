"""Profiles of what a training loop is fed, on one rank and over several."""

import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from ranks import run_ranks
from torchrec_oper.errors import ProfileError
from torchrec_oper.profile import AccessProfile, over_ranks
from torchrec_oper.profile import callback as callback_module
from torchrec_oper.profile.callback import ProfileCallback
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.profile.over_ranks import merge_over_ranks
from torchrec_oper.table import TableSpec

TABLES = (TableSpec("t_item", 40, 4, ("clicked", "seen")), TableSpec("t_user", 9, 4, ("user",)))
KEYS = ["clicked", "seen", "user"]


def batch(seed, samples=30, user_rows=9):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(4, size=3 * samples)
    ends = lengths.reshape(3, samples).sum(axis=1)
    ids = [
        rng.integers(rows, size=size) for rows, size in zip((40, 40, user_rows), ends, strict=True)
    ]
    return KeyedJaggedTensor(
        keys=KEYS,
        values=torch.from_numpy(np.concatenate(ids)),
        lengths=torch.from_numpy(lengths),
    )


def test_batches_come_through_and_are_counted():
    batches = [batch(seed) for seed in range(5)]
    callback = ProfileCallback(TABLES)
    for epoch in range(2):
        found = list(callback.watch(iter(batches)))
        assert all(one is other for one, other in zip(found, batches, strict=True))
        assert callback.seen == 5 * (epoch + 1)
    wanted = AccessProfile.from_batches(batches * 2, TABLES).content_hash
    assert callback.profile().content_hash == wanted
    assert callback.merged_profile().content_hash == wanted  # there is no process group


def test_a_batch_is_counted_before_the_loop_has_it():
    callback = ProfileCallback(TABLES)
    next(callback.watch([batch(0)]))
    assert callback.profile().samples == 30


def test_every_kth_batch():
    batches = [batch(seed) for seed in range(8)]
    callback = ProfileCallback(TABLES, every=3)
    assert len(list(callback.watch(batches))) == 8
    assert len(list(callback.watch(batches[:2]))) == 2  # the ninth and tenth
    wanted = AccessProfile.from_batches([batches[0], batches[3], batches[6], batches[1]], TABLES)
    assert callback.profile().content_hash == wanted.content_hash
    with pytest.raises(ProfileError, match="every must be an integer of 1 or more, found 0"):
        ProfileCallback(TABLES, every=0)


def test_a_wrong_batch_is_named_and_spoils_the_profile():
    callback = ProfileCallback(TABLES)
    with pytest.raises(ProfileError, match="batch 1.*feature user looks up id .* table t_user"):
        list(callback.watch([batch(0), batch(1, user_rows=1000)]))
    for profile in (callback.profile, callback.merged_profile):
        with pytest.raises(ProfileError, match="batch 1.*feature user looks up id"):
            profile()


@pytest.mark.parametrize("waiting_ids", [1, 200, 10**6])
def test_batches_wait_to_be_counted_in_copies(monkeypatch, waiting_ids):
    monkeypatch.setattr(callback_module, "WAITING_IDS", waiting_ids)
    batches = [batch(seed) for seed in range(7)]
    wanted = AccessProfile.from_batches(batches, TABLES)
    callback = ProfileCallback(TABLES)
    for each in callback.watch(batches):
        each.values().zero_()  # as a loader that fills one buffer again and again
    assert callback.profile().content_hash == wanted.content_hash
    assert callback.profile().trace is not None


def test_a_wrong_batch_is_named_however_many_wait(monkeypatch):
    monkeypatch.setattr(callback_module, "WAITING_IDS", 150)
    batches = [batch(seed, user_rows=1000 if seed == 4 else 9) for seed in range(20)]
    callback = ProfileCallback(TABLES)
    seen = []
    with pytest.raises(ProfileError, match="batch 4: feature user looks up id"):
        seen.extend(callback.watch(batches))
    assert 4 <= callback.seen - 1 <= 6


def test_a_missing_feature_is_told_at_once():
    callback = ProfileCallback(TABLES)
    other = KeyedJaggedTensor(["user"], torch.tensor([1]), lengths=torch.tensor([1]))
    batches = callback.watch([batch(0), other, batch(1)])
    next(batches)
    with pytest.raises(ProfileError, match="batch 1 lacks feature clicked of table t_item"):
        next(batches)


def test_no_batch_is_no_profile():
    with pytest.raises(ProfileError, match="holds no sample"):
        ProfileCallback(TABLES).profile()


def collector_of(seeds):
    callback = ProfileCallback(TABLES)
    list(callback.watch(batch(seed) for seed in seeds))
    return callback._collector


def merged_on(rank, world_size):
    """Hashes of two merges, the second in a group without rank 0, and of what is its own."""
    seeds = {member: [10 * member + at for at in range(1 + member)] for member in range(world_size)}
    callback = ProfileCallback(TABLES)
    batches = [batch(seed) for seed in seeds[rank]]
    list(callback.watch(batches))
    first = callback.merged_profile()
    again = callback.merged_profile(dist.group.WORLD)
    others = list(range(1, world_size))
    group = dist.new_group(others)
    part = merge_over_ranks(collector_of(seeds[rank]), group).content_hash if rank else None
    if rank == 0:
        with pytest.raises(ProfileError, match="this rank isn't in the group"):
            merge_over_ranks(collector_of([0]), group)
    own = AccessProfile.from_batches(batches, TABLES).content_hash
    assert callback.profile().content_hash == own
    return first.content_hash, again.content_hash, part


def hash_of(ranks):
    batches = [batch(10 * rank + at) for rank in ranks for at in range(1 + rank)]
    return AccessProfile.from_batches(batches, TABLES).content_hash


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_get_the_profile_of_all(world_size):
    everything, part = hash_of(range(world_size)), hash_of(range(1, world_size))
    found = run_ranks(world_size, merged_on, world_size)
    assert found == [(everything, everything, part if rank else None) for rank in range(world_size)]


def merged_in_pieces(rank):
    over_ranks.PIECE_BYTES = 1000
    return merge_over_ranks(collector_of([rank])).content_hash


@pytest.mark.ranks
def test_messages_are_cut_into_pieces():
    wanted = AccessProfile.from_batches([batch(0), batch(1)], TABLES).content_hash
    assert run_ranks(2, merged_in_pieces) == [wanted, wanted]


def failing_on(rank):
    """What this rank is told when rank 1 or 2 can't merge, in several ways."""
    failures = {
        "counting": lambda: ProfileError("batch 7 is wrong"),
        "foreign": lambda: KeyError("oops"),
        "tables": lambda: AccessCollector([TableSpec("other", 3, 4, ("user",))]),
        "pickle": unpicklable,
    }
    found = {}
    for which in (1, 2):
        for kind, make in failures.items():
            with pytest.raises(ProfileError) as error:
                merge_over_ranks(make() if rank == which else collector_of([rank]))
            found[kind, which] = str(error.value)
    with pytest.raises(ProfileError) as error:
        merge_over_ranks(AccessCollector(TABLES))
    merge_over_ranks(collector_of([rank]))  # and the ranks are in step still
    return found, str(error.value)


def unpicklable():
    collector = collector_of([0])
    collector.extra = lambda: None
    return collector


@pytest.mark.ranks
def test_a_failure_of_one_rank_is_raised_on_all():
    first, *others = run_ranks(3, failing_on)
    assert others == [first, first]
    found, empty = first
    assert "holds no sample" in empty
    for which in (1, 2):
        told = f"rank {which} has no counts to merge: "
        assert found["counting", which] == f"{told}batch 7 is wrong"
        assert found["foreign", which] == f"{told}KeyError: 'oops'"
        assert found["pickle", which].startswith(told)
        assert found["tables", which].startswith("rank 0 has no counts to merge: ")
        assert "other" in found["tables", which]


def test_a_group_without_gloo_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(
        ProfileError, match="merged over gloo, but the group's backend is cuda:nccl"
    ):
        merge_over_ranks(collector_of([0]))


def test_collectors_can_be_pickled():
    collector = collector_of([3])
    copied = pickle.loads(pickle.dumps(collector))
    one, other = (AccessProfile.from_collector(each) for each in (collector, copied))
    assert one.content_hash == other.content_hash
