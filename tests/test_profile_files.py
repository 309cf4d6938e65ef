"""Profiles of log files: the same from every format, and for any number of jobs."""

import pickle
from functools import partial

import numpy as np
import pytest
from log_files import counted, write_csv, write_npz, write_parquet

from torchrec_oper.errors import LogFormatError, ProfileError
from torchrec_oper.profile.criteo import criteo_tables
from torchrec_oper.profile.files import TableOutline, profile_files, with_rows
from torchrec_oper.profile.readers import Reading
from torchrec_oper.table import TableSpec

ROWS = 60
TABLES = (TableSpec("t_item", ROWS, 4, ("clicked", "seen")), TableSpec("t_user", 50, 4, ("user",)))


def columns(seed, samples=200):
    """Some samples of three features."""
    rng = np.random.default_rng(seed)
    lengths = {"clicked": 2, "seen": 5, "user": 2}
    return {
        name: [rng.integers(50, size=rng.integers(most)).tolist() for _ in range(samples)]
        for name, most in lengths.items()
    }


WRITERS = {
    "csv": write_csv,
    "parquet": write_parquet,
    "npz": partial(write_npz, save=np.savez_compressed),
}


@pytest.fixture
def logs(tmp_path):
    """Files of each format that hold the same, by format."""
    return {
        kind: [write(tmp_path / f"day{day}.{kind}", columns(day)) for day in range(5)]
        for kind, write in WRITERS.items()
    }


@pytest.mark.parametrize("kind", WRITERS)
def test_counts_are_those_of_the_bags(logs, kind):
    profile = profile_files(logs[kind][:1], TABLES)
    bags = columns(0)
    profile.check_fits(TABLES)
    assert profile.samples == 200
    item, user = profile.table("t_item"), profile.table("t_user")
    assert item.lookups == sum(counted(bags["clicked"] + bags["seen"]).values())
    assert user.lookups == sum(counted(bags["user"]).values())
    assert item.bags == 400
    assert item.empty_bags == sum(not bag for bag in bags["clicked"] + bags["seen"])


def test_every_format_gives_the_same_profile(logs):
    hashes = {kind: profile_files(files, TABLES).content_hash for kind, files in logs.items()}
    assert len(set(hashes.values())) == 1


def test_several_jobs_give_the_same_profile(logs):
    mixed = [logs["parquet"][0], *logs["csv"][1:3], *logs["npz"][3:]]
    alone = profile_files(logs["csv"], TABLES)
    assert alone.samples == 1000
    together = profile_files(mixed, TABLES, jobs=3)
    assert together.content_hash == alone.content_hash


def test_ids_can_be_hashed(tmp_path):
    path = write_csv(tmp_path / "a.csv", {"user": [[7], [-1, 2**63 - 1], [107]]})
    table = TableSpec("t", 100, 4, ("user",))
    profile = profile_files([path], [table], reading=Reading(hashed=True))
    same = write_csv(tmp_path / "b.csv", {"user": [[7], [99, (2**63 - 1) % 100], [7]]})
    assert profile.content_hash == profile_files([same], [table]).content_hash


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("csv", "line 103, column seen"),
        ("parquet", r"row 101 \(from 0\), column seen"),
        ("npz", r"bag 101 \(from 0\) of feature seen"),
    ],
)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ROWS, f"id {ROWS}, but the ids of table t_item run from 0 to {ROWS - 1}; give the table"),
        (-7, "id -7 is negative; leave it out where it stands for none, or hash the ids"),
    ],
)
def test_an_id_outside_its_table_is_named(logs, kind, place, wrong, message):
    bags = columns(1)
    bags["seen"][101] = [1, wrong]
    WRITERS[kind](logs[kind][1], bags)
    with pytest.raises(ProfileError, match=f"day1.{kind}, {place}: {message}"):
        profile_files(logs[kind][:3], TABLES)


def test_a_wrong_line_is_the_error_of_all_jobs(logs):
    logs["csv"][2].write_text("clicked,seen,user\n1,2,3\n1,2,x\n")
    with pytest.raises(LogFormatError, match="day2.csv, line 3, column user: found 'x'"):
        profile_files(logs["csv"], TABLES, jobs=3)


def test_a_missing_file_is_named_before_anything_is_read(logs, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        profile_files([*logs["csv"], tmp_path / "none.csv"], TABLES, jobs=2)
    assert error.value.filename == str(tmp_path / "none.csv")


def test_no_file_and_no_sample_are_refused(tmp_path):
    with pytest.raises(ProfileError, match="there is no log to read; name at least one file"):
        profile_files([], TABLES)
    path = write_csv(tmp_path / "a.csv", {"clicked": [], "seen": [], "user": []})
    with pytest.raises(ProfileError, match="holds no sample"):
        profile_files([path], TABLES)


def test_rows_come_from_the_data(logs):
    outlines = [
        TableOutline("t_item", ("clicked", "seen")),
        TableOutline("t_given", ("seen",), 99),
        TableOutline("t_user", ("user",)),
    ]
    bags = [columns(day) for day in range(5)]
    largest = {
        name: max(value for day in bags for bag in day[name] for value in bag) for name in bags[0]
    }
    for kind, files in logs.items():
        tables = with_rows(files, outlines, jobs=2 if kind == "csv" else 1)
        assert [table.rows for table in tables] == [
            max(largest["clicked"], largest["seen"]) + 1,
            99,
            largest["user"] + 1,
        ], kind
        assert [table.name for table in tables] == ["t_item", "t_given", "t_user"]
        profile_files(files, tables).check_fits(tables)


def test_rows_of_a_graph_come_from_its_shape(tmp_path):
    path = tmp_path / "graph.npz"
    np.savez(path, indices=[1, 0], indptr=[0, 1, 2, 2], shape=[3, 9])
    outlines = [TableOutline("a", ("source",)), TableOutline("b", ("targets",))]
    assert [table.rows for table in with_rows([path], outlines)] == [3, 9]


def test_rows_that_the_data_can_not_tell_are_refused(tmp_path, logs):
    outline = TableOutline("t", ("user",))
    with pytest.raises(
        ProfileError, match="table t needs a number of rows: the ids of .* are hash"
    ):
        with_rows(logs["csv"], [outline], reading=Reading(hashed=True))
    with pytest.raises(
        ProfileError, match="table t needs a number of rows: the ids of .* are hash"
    ):
        with_rows([tmp_path / "train.txt"], [outline])
    with pytest.raises(ProfileError, match="/dev/null is no regular file"):
        with_rows(["/dev/null"], [outline], reading=Reading("csv"))
    with pytest.raises(ProfileError, match="found twice: t"):
        with_rows(logs["csv"], [outline, outline])
    with pytest.raises(ProfileError, match="table t: rows must be an integer of 1 or more"):
        TableOutline("t", ("user",), 0)
    with pytest.raises(ProfileError, match="table t: needs at least one feature"):
        TableOutline("t", ())


def test_the_suffix_or_the_caller_names_the_format():
    names = {
        "a.parquet": "parquet",
        "A.PQ": "parquet",
        "a.csv": "csv",
        "a.csv.gz": "csv",
        "a.b.npz": "npz",
        "a.edges.zst": "edges",
        "a.adj": "adjacency",
        "train.txt": "criteo",
        "day_0": "criteo",
        "a.tsv.gz": "criteo",
    }
    assert {name: Reading().format_of(name) for name in names} == names
    assert Reading("csv").format_of("a.npz") == "csv"
    assert Reading().is_hashed("train.txt")
    assert not Reading().is_hashed("a.csv")
    with pytest.raises(ProfileError, match="there is no format 'orc'; choose one of criteo, par"):
        Reading("orc")
    assert pickle.loads(pickle.dumps(Reading("csv", hashed=True))) == Reading("csv", hashed=True)


def test_criteo_columns_are_named(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("\t".join(["1", *["5"] * 13, *["0000000a"] * 26]) + "\n")
    assert profile_files([path], criteo_tables(rows=[7] * 26)).table("t_cat_3").lookups == 1
    with pytest.raises(ProfileError, match="there is no feature int_0; the categorical columns"):
        profile_files([path], [TableSpec("w", 10, 4, ("int_0",))])
