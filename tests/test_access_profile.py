"""AccessProfile against plain counting, its file, and its errors."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_oper.archive import read_archive, write_archive
from torchrec_oper.errors import ArchiveError, ProfileError
from torchrec_oper.profile import AccessProfile, TableAccess
from torchrec_oper.profile.batches import collect_batch
from torchrec_oper.profile.collector import AccessCollector
from torchrec_oper.profile.table_access import ARRAYS
from torchrec_oper.table import TableSpec

ROOT = Path(__file__).parents[1]
# b shares feature g with a; the batches carry feature x besides, which no table uses.
TABLES = (TableSpec("a", 7, 4, ("f", "g")), TableSpec("b", 300, 4, ("g",)))
KEYS = ("f", "x", "g")
NONE = np.empty(0, int)

samples = st.lists(st.tuples(*[st.lists(st.integers(0, 6), max_size=4)] * len(KEYS)), max_size=5)


def jagged(batch, *, dtype=torch.int64, weighted=False):
    """A KeyedJaggedTensor of ``batch``: for each sample, a bag for each of ``KEYS``."""
    columns = [[sample[at] for sample in batch] for at in range(len(KEYS))]
    values = [row for column in columns for bag in column for row in bag]
    return KeyedJaggedTensor(
        keys=list(KEYS),
        values=torch.tensor(values, dtype=dtype),
        lengths=torch.tensor([len(bag) for column in columns for bag in column], dtype=torch.int32),
        weights=torch.full((len(values),), 0.5) if weighted else None,
        stride=len(batch),
    )


def profile_of(*batches):
    return AccessProfile.from_batches([jagged(batch) for batch in batches], TABLES)


BATCH = [([1, 2], [9], [3]), ([1], [], []), ([6, 6, 1], [0], [3])]


@settings(deadline=None)
@given(
    st.lists(samples, min_size=1, max_size=5).filter(any),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
    st.integers(1, 9),
)
def test_profile_equals_plain_counting(batches, dtype, weighted, pending_ids):
    collector = AccessCollector(TABLES, pending_ids=pending_ids)
    for number, batch in enumerate(batches):
        collect_batch(collector, jagged(batch, dtype=dtype, weighted=weighted), number=number)
    profile = AccessProfile.from_collector(collector)

    everything = [sample for batch in batches for sample in batch]
    assert profile.samples == len(everything)
    for table in profile.tables:
        used = [sample[KEYS.index(key)] for sample in everything for key in table.features]
        counts = Counter(row for bag in used for row in bag)
        hottest_first = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        assert list(zip(table.ids.tolist(), table.counts.tolist(), strict=True)) == hottest_first
        assert table.lookups == sum(counts.values())
        assert (table.bags, table.empty_bags) == (len(used), used.count([]))


@settings(deadline=None)
@given(samples.filter(bool), st.integers(1, 5))
def test_hash_does_not_depend_on_the_split_into_batches(everything, size):
    split = [everything[at : at + size] for at in range(0, len(everything), size)]
    assert profile_of(*split).content_hash == profile_of(everything).content_hash


@pytest.mark.parametrize(
    "changed",
    [
        [([1, 2], [], [3])],
        [([1, 2], [], [3]), ([1], [], [])],
        [([1, 2], [], [3]), ([1], [], []), ([6, 6, 2], [], [3])],
        [([1, 2], [], [3]), ([1], [], []), ([6, 6, 1, 1], [], [3])],
        [([1, 2], [], [3]), ([1], [], []), ([6, 6, 1], [], [3]), ([], [], [])],
    ],
)
def test_hash_differs_where_lookups_differ(changed):
    assert profile_of(changed).content_hash != profile_of(BATCH).content_hash


def test_many_merges_keep_every_lookup():
    spec = TableSpec("t", 5_000, 4, ("f",))
    collector = AccessCollector([spec], pending_ids=64)
    everything = np.random.default_rng(0).zipf(1.3, 40_000) % spec.rows
    for ids in np.split(everything, 160):
        collector.add(0, "f", ids, np.ones(ids.size, np.int32), where="here")
    collector.samples = everything.size
    table = AccessProfile.from_collector(collector).table("t")
    assert dict(zip(table.ids.tolist(), table.counts.tolist(), strict=True)) == Counter(
        everything.tolist()
    )


def test_a_buffer_that_the_loader_reuses_is_copied():
    batch = jagged(BATCH)

    def loader():
        for row in (1, 5):
            batch.values().fill_(row)
            yield batch

    assert AccessProfile.from_batches(loader(), TABLES).table("b").ids.tolist() == [1, 5]


def test_batches_of_torchrec_and_a_collection():
    collection = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=spec.name,
                num_embeddings=spec.rows,
                embedding_dim=spec.dim,
                feature_names=list(spec.features),
            )
            for spec in TABLES
        ],
    )
    batch = Batch(torch.zeros(3, 1), jagged(BATCH), torch.zeros(3))
    profile = AccessProfile.from_batches(iter([batch]), collection)
    profile.check_fits(TABLES)
    assert profile.content_hash == profile_of(BATCH).content_hash


def test_keys_with_different_numbers_of_bags():
    batch = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.tensor([1, 1, 2, 3]),
        lengths=torch.tensor([2, 0, 1, 1]),
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(["f", "g"], torch.tensor([[0, 0, 0], [0, 1, 2]])),
    )
    profile = AccessProfile.from_batches([batch], TABLES)
    assert profile.samples == 3
    table = profile.table("b")
    assert (table.ids.tolist(), table.bags, table.empty_bags) == ([2, 3], 3, 1)
    assert profile.table("a").counts.tolist() == [2, 1, 1]


def ids(*values, dtype=torch.int64, keys=("f", "g")):
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.tensor(values, dtype=dtype),
        lengths=torch.tensor([len(values)] + [0] * (len(keys) - 1)),
    )


def inconsistent(values=1, lengths=(1, 0), strides=(1, 1)):
    return SimpleNamespace(
        keys=lambda: ["f", "g"],
        values=lambda: torch.zeros(values, dtype=torch.int64),
        lengths=lambda: torch.tensor(lengths),
        stride=lambda: 1,
        stride_per_key=lambda: list(strides),
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (ids(1, 7), "batch 1: feature f looks up id 7 in table a, whose ids run from 0 to 6 (7 r"),
        (ids(1, -2), "batch 1: feature f looks up id -2 in table a, whose ids run from 0 to 6"),
        (ids(1, keys=("f", "h")), "batch 1 lacks feature g of table a; its keys are f, h"),
        (ids(0.5, dtype=torch.float32), "batch 1: ids are torch.float32, wanted integers"),
        (ids(0.5, dtype=torch.bfloat16), "batch 1: ids are torch.bfloat16, wanted integers"),
        (ids(True, dtype=torch.bool), "batch 1: ids are torch.bool, wanted integers"),
        ((1, 2), "batch 1 is a tuple, wanted a KeyedJaggedTensor or an object that holds one"),
        (SimpleNamespace(sparse_features=3), "batch 1 is a SimpleNamespace, wanted a KeyedJagged"),
        (inconsistent(values=2), "batch 1: its lengths sum to 1, but it holds 2 ids"),
        (inconsistent(lengths=(2, -1)), "batch 1: a bag's length is -1, wanted 0 or more"),
        (inconsistent(strides=(1, 2)), "batch 1: 2 lengths for 3 bags under 2 keys"),
        (ids(1, keys=("f", "f")), "batch 1 has a key twice: f, f"),
    ],
)
def test_a_wrong_batch_is_refused(batch, message):
    with pytest.raises(ProfileError) as error:
        AccessProfile.from_batches([ids(1), batch], TABLES)
    assert message in str(error.value)


def test_no_sample_is_refused():
    for batches in ([], [jagged([])]):
        with pytest.raises(ProfileError, match="the input holds no sample"):
            AccessProfile.from_batches(batches, TABLES)


def access(**changes):
    fields = {
        "name": "t",
        "rows": 10,
        "features": ("f",),
        "ids": np.array([4, 1, 3]),
        "counts": np.array([5, 2, 2]),
        "bags": 8,
        "empty_bags": 2,
    }
    return TableAccess(**{**fields, **changes})


def tail(rows, counts):
    return {
        "tail_rows": np.array(rows, int),
        "tail_counts": np.array(counts or [], type(counts[0]) if counts else int),
    }


def lengths(rows, counts):
    return {"bag_rows": np.array(rows), "bag_counts": np.array(counts)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": np.array([4, 3, 1])}, "hottest first, smaller id first among equals; id 1 at pl"),
        ({"counts": np.array([2, 2, 5])}, "must come hottest first"),
        ({"ids": np.array([4, 1, 4])}, "id 4 is listed twice"),
        ({"ids": np.array([4, 1, 10])}, "id 10 is outside 0 to 9"),
        ({"ids": np.array([4, -1, 3])}, "id -1 is outside 0 to 9"),
        ({"counts": np.array([5, 2, 0])}, "counts must be 1 or more, found 0"),
        ({"counts": np.array([5, 4])}, "3 ids, but 2 counts"),
        ({"counts": np.array([5.0, 2, 2])}, "counts must be a one-dimensional array of integers"),
        ({"ids": np.array([[4, 1, 3]])}, "found int64 of shape (1, 3)"),
        ({"ids": np.array([True])}, "ids must be a one-dimensional array of integers, found bool"),
        ({"bags": 1}, "9 lookups can't come from 1 bags of which 2 are empty"),
        ({"bags": 12}, "9 lookups can't come from 12 bags of which 2 are empty"),
        ({"empty_bags": 8}, "9 lookups can't come from 8 bags of which 8 are empty"),
        ({"empty_bags": -1}, "empty_bags must be an integer of 0 or more, found -1"),
        ({"bags": 8.0}, "bags must be an integer of 0 or more, found 8.0"),
        ({"bags": 10**30}, f"t: bags must be below 2**63 (about 9.2e18), found {10**30}"),
        ({"counts": np.array([2**62, 2**62, 2])}, "its counts add up to 2**63 lookups or more"),
        ({"rows": 10**30}, "table t: rows must be below 2**63"),
        ({"rows": 0}, "table t: rows must be an integer of 1 or more, found 0"),
        ({"features": ()}, "table t: needs at least one feature"),
        ({"sketched": 1}, "sketched must be true or false, found 1"),
        (tail([1], []), "1 tail_rows, but 0 tail_counts"),
        (tail([0], [2]), "tail_rows must be 1 or more, found 0"),
        (tail([2], [1]), "tail_counts must be at least tail_rows"),
        (tail([1], [np.nan]), "tail_counts must be a one-dimensional array of integers"),
        (tail([1], [3]), "tail_counts / tail_rows must not rise, nor be above a listed row's"),
        (tail([1, 1], [1, 2]), "tail_counts / tail_rows must not rise"),
        (tail([8], [8]), "more rows in ids and tail_rows than the table's 10"),
        (tail([1], [2**63 - 1]), "its counts add up to 2**63 lookups or more"),
        (lengths([6], [3, 3]), "2 bag_counts, but 1 bag_rows"),
        (lengths([5], [5]), "bag_counts sum to 5, but 6 bags hold ids"),
        (lengths([10], [6]), "10 rows in bag_rows, more than the 9 lookups"),
        (lengths([5], [6]), "bag_rows must be at least bag_counts"),
        (lengths([6, 3], [3, 3]), "bag_rows / bag_counts must not fall"),
    ],
)
def test_table_access_is_checked_on_birth(changes, message):
    with pytest.raises(ProfileError) as error:
        access(**changes)
    assert message in str(error.value)


def test_arrays_are_copies_and_read_only():
    given_ids = np.array([4, 1, 3], dtype=np.uint8)
    table = access(ids=given_ids)
    given_ids[0] = 9
    assert table.ids.tolist() == [4, 1, 3]
    assert table.ids.dtype == table.counts.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        table.counts[0] = 1


def test_share_of_the_hottest_rows():
    table = access()
    assert table.share_of_hottest(0.01) == 5 / 9
    assert table.share_of_hottest(0.2) == 7 / 9
    assert table.share_of_hottest(1.0) == 1.0
    unused = access(ids=np.array([], int), counts=np.array([], int), bags=2)
    assert (unused.lookups, unused.share_of_hottest(0.5)) == (0, 0.0)


def test_a_profile_is_checked_on_birth():
    for samples, message in (
        (0, "the samples of a profile must be an integer of 1 or more, found 0"),
        (2.0, "the samples of a profile must be an integer of 1 or more, found 2.0"),
        (10**30, "the samples of a profile must be below 2..63"),
    ):
        with pytest.raises(ProfileError, match=message):
            AccessProfile((access(),), samples)
    with pytest.raises(ProfileError, match="found twice: t"):
        AccessProfile((access(), access()), 1)
    with pytest.raises(ProfileError, match="the profile has no table z; its tables are a, b"):
        profile_of(BATCH).table("z")


def test_check_fits_names_every_difference():
    profile = profile_of(BATCH)
    profile.check_fits([TABLES[1], TableSpec("a", 7, 64, ("g", "f"), "float16")])
    with pytest.raises(ProfileError) as error:
        profile.check_fits([TableSpec("a", 8, 4, ("f",)), TableSpec("c", 8, 4, ("f",))])
    assert str(error.value) == (
        "this is a profile of other tables: table a has 7 rows in the profile, wanted 8;"
        " table a has features f, g in the profile, wanted f; table c isn't in the profile;"
        " table b is only in the profile. Profile the input again with the model's tables"
    )


def test_round_trip(tmp_path):
    profile = profile_of(BATCH)
    profile.save(tmp_path / "p")
    loaded = AccessProfile.load(tmp_path / "p")
    assert loaded.content_hash == profile.content_hash
    assert loaded.samples == 3
    assert loaded.trace.planning.ids.tolist() == profile.trace.planning.ids.tolist()
    for table, again in zip(profile.tables, loaded.tables, strict=True):
        assert (table.name, table.rows, table.features) == (again.name, again.rows, again.features)
        assert (table.bags, table.empty_bags) == (again.bags, again.empty_bags)
        for name in ARRAYS:
            assert np.array_equal(getattr(table, name), getattr(again, name)), name
            assert (
                getattr(again, name).dtype == np.int64 and not getattr(again, name).flags.writeable
            )


def test_integers_of_numpy_are_saved_too(tmp_path):
    numbers = {"rows": np.int64(10), "bags": np.uint8(8), "empty_bags": np.int32(2)}
    profile = AccessProfile((access(**numbers),), np.int64(3))
    profile.save(tmp_path / "p")
    assert AccessProfile.load(tmp_path / "p").content_hash == profile.content_hash
    assert profile.content_hash == AccessProfile((access(),), 3).content_hash


def test_arrays_on_disk_are_as_small_as_their_values(tmp_path):
    table = access(
        rows=2**40,
        ids=np.array([2**33, 1, 3]),
        counts=np.array([256, 2, 2]),
        bags=260,
        empty_bags=0,
    )
    AccessProfile((table, access(name="u")), 1).save(tmp_path / "p")
    _, arrays = read_archive(tmp_path / "p", "profile")
    dtypes = {name: array.dtype for name, array in arrays.items()}
    assert dtypes.pop("0.ids") == np.uint64
    assert dtypes.pop("0.counts") == np.uint16
    assert set(dtypes.values()) == {np.dtype(np.uint8)}
    assert AccessProfile.load(tmp_path / "p").table("t").ids.tolist() == [2**33, 1, 3]


@pytest.mark.parametrize(
    ("header", "arrays", "message"),
    [
        (
            {"format": 3},
            {},
            "has profile format 3, but this version of torchrec-oper reads up to 2",
        ),
        ({"format": "1"}, {}, "format must be an integer of 1 or more, found '1'"),
        ({"samples": None}, {}, "the samples of a profile must be an integer of 1 or more, found"),
        ({"samples": 10**30}, {}, "the samples of a profile must be below 2**63"),
        ({"tables": []}, {}, "needs at least one table, found none"),
        ({"tables": 3}, {}, "a value is missing or of the wrong type"),
        ({"tables": [{"name": "a"}]}, {}, "a value is missing or of the wrong type: 'rows'"),
        ({}, {"1.ids": np.array([3, 3])}, "profile of table b: 2 ids, but 1 counts"),
        ({}, {"0.counts": np.array([1, 2, 3, 4])}, "profile of table a: ids must come hottest"),
        ({}, {"0.counts": np.array([0.5] * 4)}, "profile of table a: counts must be a one-dim"),
        ({}, {"1.ids": np.array([2**63], np.uint64)}, "is outside 0 to 299"),
        ({}, {"1.ids": None}, "a value is missing or of the wrong type: '1.ids'"),
        ({}, {"0.tail_rows": None}, "a value is missing or of the wrong type: '0.tail_rows'"),
        ({}, {"0.tail_rows": np.array([1])}, "profile of table a: 1 tail_rows, but 0 tail_counts"),
        ({}, {"0.bag_rows": np.array([9, 9])}, "a: 18 rows in bag_rows, more than the 8 lookups"),
        ({"trace": 7}, {}, "a value is missing or of the wrong type"),
        ({"trace": {"features": ["f", "g"]}}, {}, "of the wrong type: 'limit_ids'"),
        (
            {"trace": {"features": "fg", "limit_ids": 9, "up_to_hash": 1}},
            {},
            "features must be a tuple of names",
        ),
        (
            {"trace": {"features": ["f", "x"], "limit_ids": 9, "up_to_hash": 1}},
            {},
            "trace has features f, x, but",
        ),
        ({}, {"planning.ids": np.array([1])}, "trace of the profile: lengths sum to"),
        (
            {},
            {"judging.lengths": np.zeros((2, 9), int), "judging.ids": NONE},
            "2 and 9 samples, wanted alike",
        ),
        ({}, {"planning.ids": np.array([np.nan])}, "ids must be integers in 1 dimension, found"),
    ],
)
def test_an_edited_file_is_refused(tmp_path, header, arrays, message):
    path = tmp_path / "p"
    profile_of(BATCH).save(path)
    old_header, old_arrays = read_archive(path, "profile")
    changed = {name: array for name, array in {**old_arrays, **arrays}.items() if array is not None}
    write_archive(path, "profile", {**old_header, **header}, changed)
    with pytest.raises(ProfileError) as error:
        AccessProfile.load(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))


def test_a_file_of_format_1_is_read(tmp_path):
    header = {"name": "t", "rows": 10, "features": ["f"], "bags": 8, "empty_bags": 2}
    arrays = {"0.ids": np.array([4, 1, 3], np.uint8), "0.counts": np.array([5, 2, 2], np.uint8)}
    write_archive(
        tmp_path / "p", "profile", {"format": 1, "samples": 8, "tables": [header]}, arrays
    )
    profile = AccessProfile.load(tmp_path / "p")
    assert profile.content_hash == AccessProfile((access(),), 8).content_hash
    assert profile.trace is None
    # 9 lookups in 6 bags: 1.5 in each.
    assert profile.table("t").bag_lengths.tolist() == [1, 2]
    assert profile.table("t").bag_shares.tolist() == [0.5, 0.5]
    profile.save(tmp_path / "p")
    assert read_archive(tmp_path / "p", "profile")[0]["format"] == 2
    assert AccessProfile.load(tmp_path / "p").content_hash == profile.content_hash


def test_another_file_is_refused(tmp_path):
    (tmp_path / "p").write_text("user item\n")
    with pytest.raises(ArchiveError, match="p is not a profile of torchrec-oper"):
        AccessProfile.load(tmp_path / "p")


def test_profiling_imports_neither_torchrec_nor_ops():
    code = (
        "import sys, torchrec_oper.profile.criteo, torchrec_oper.cli.main\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'torchrec'"
        " or name.startswith('torchrec_oper.ops')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"
