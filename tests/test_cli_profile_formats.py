"""``oper profile`` of every format, of several files, and of tables that the user names."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from log_files import write_csv, write_npz, write_parquet

from torchrec_oper.cli import main as cli
from torchrec_oper.profile import AccessProfile
from torchrec_oper.profile.files import profile_files
from torchrec_oper.table import TableSpec

ROOT = Path(__file__).parents[1]
COLUMNS = {"user": [[3], [], [12]], "seen": [[1, 2, 3], [7], []]}
TABLES = (TableSpec("u", 20, 1, ("user",)), TableSpec("i", 9, 1, ("seen",)))
OPTIONS = ("--table", "u=20:user", "--table", "i=9:seen")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the same samples in three formats."""
    monkeypatch.chdir(tmp_path)
    write_csv(Path("a.csv"), COLUMNS)
    write_csv(Path("a.tsv"), COLUMNS, delimiter="\t")
    write_parquet(Path("a.parquet"), COLUMNS)
    write_npz(Path("a.npz"), COLUMNS)
    return tmp_path


def oper(*arguments):
    assert cli.main(["profile", *map(str, arguments)]) == 0


def complaint(capsys, *arguments):
    """The one line that a user sees after a mistake."""
    assert cli.main(["profile", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("oper: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.npz", "a.tsv"])
def test_every_format(folder, name):
    oper(name, *OPTIONS, *(["--format", "csv"] if name == "a.tsv" else []))
    wanted = profile_files(["a.csv"], TABLES).content_hash
    assert AccessProfile.load("a.profile").content_hash == wanted


def test_several_files_in_any_number_of_jobs(folder, capsys):
    files = ["a.csv", "a.parquet", "a.npz"]
    hashes = set()
    for jobs in ([], ["--jobs", 1], ["--jobs", 3]):
        oper(*files, *OPTIONS, *jobs, "-o", "all.profile")
        hashes.add(AccessProfile.load("all.profile").content_hash)
        assert capsys.readouterr().out.startswith("9 samples made 18 lookups in 2 tables.")
    assert hashes == {profile_files(files, TABLES).content_hash}


def test_tables_from_a_file(folder):
    Path("tables.json").write_text(json.dumps([table.to_json() for table in TABLES]))
    oper("a.csv", "--tables", "tables.json")
    AccessProfile.load("a.profile").check_fits(TABLES)


def test_rows_and_tables_from_the_data(folder, capsys):
    oper("a.npz")
    assert capsys.readouterr().out.splitlines()[:2] == [
        "table t_seen: 8 rows, as many as the ids ask for",
        "table t_user: 13 rows, as many as the ids ask for",
    ]
    oper("a.csv", "--table", "x:user,seen")
    assert capsys.readouterr().out.startswith("table x: 13 rows, as many as the ids ask for\n")
    assert AccessProfile.load("a.profile").table("x").features == ("user", "seen")


def test_graphs(folder, capsys):
    Path("ratings.txt").write_text("0 5\n0 6\n3 5\n")
    oper("ratings.txt", "--format", "edges", "--table", "user:source", "--table", "item:targets")
    profile = AccessProfile.load("ratings.profile")
    assert [(table.name, table.rows, table.lookups) for table in profile.tables] == [
        ("user", 4, 2),
        ("item", 7, 3),
    ]
    np.savez("graph.npz", indices=[1, 0], indptr=[0, 1, 2], shape=[2, 4])
    capsys.readouterr()
    oper("graph.npz")
    assert capsys.readouterr().out.startswith("table t_targets: 4 rows, as many as the ids ask")


def test_options_of_the_text(folder):
    Path("b.csv").write_text("user;seen\n3;1,2,3\n;7\n12;\n")
    oper("b.csv", *OPTIONS, "--delimiter", ";", "--list-separator", ",")
    wanted = profile_files(["a.csv"], TABLES).content_hash
    assert AccessProfile.load("b.profile").content_hash == wanted


def test_hashed_ids(folder):
    oper("a.csv", "--table", "u=5:user", "--hash")
    assert AccessProfile.load("a.profile").table("u").ids.tolist() == [2, 3]


def test_limits_and_merged_profiles(folder, capsys):
    oper("a.csv", *OPTIONS, "-o", "one.profile", "--trace-ids", 0)
    assert AccessProfile.load("one.profile").trace is None
    oper("a.npz", *OPTIONS, "-o", "two.profile", "--trace-ids", 0)
    oper("a.csv", "a.npz", *OPTIONS, "-o", "both.profile", "--trace-ids", 0)
    oper("--merge", "one.profile", "two.profile", "-o", "merged.profile")
    merged, both = (AccessProfile.load(f"{name}.profile") for name in ("merged", "both"))
    assert merged.content_hash == both.content_hash
    oper("--merge", "one.profile", "two.profile", "-o", "cut.profile", "--head-rows", 1)
    oper("a.csv", "a.npz", *OPTIONS, "-o", "head.profile", "--trace-ids", 0, "--head-rows", 1)
    cut, head = (AccessProfile.load(f"{name}.profile") for name in ("cut", "head"))
    assert cut.table("i").ids.size == 1
    assert cut.content_hash == head.content_hash
    for option in (["--jobs", "2"], ["--format", "csv"], ["--rows", "9"], ["--table", "u:user"]):
        assert "--merge reads no log: leave out --" in complaint(
            capsys, "--merge", "one.profile", "-o", "x", *option
        )
    assert "aren't listed by id" in complaint(capsys, "--merge", "cut.profile", "-o", "x")


def test_mistakes_are_one_line(folder, capsys):
    Path("a.json").write_text("{}")
    Path("b.json").write_text("[{}]")
    Path("c.json").write_text("oops")
    for arguments, message in (
        (
            ["a.csv"],
            "which columns of a.csv hold ids? It has user, seen; say --table NAME=ROWS",
        ),
        (["a.parquet"], "which columns of a.parquet hold ids? It has user, seen; say --table"),
        (["a.csv", "--table", "t:ghost"], "a.csv has no column ghost; its header"),
        (
            ["a.csv", "--table", "t=5:user"],
            "a.csv, line 4, column user: id 12, but the ids of t",
        ),
        (["a.csv", "--table", "t:user", "--hash"], "table t needs a number of rows: the ids of a"),
        (["a.csv", "a.npz"], "several files make one profile: name it with -o OUT"),
        (["a.csv", *OPTIONS, "--jobs", "0"], "jobs must be 1 or more, found 0"),
        (["a.csv", "--tables", "a.json"], "a.json holds a dict, wanted a list of tables"),
        (["a.csv", "--tables", "b.json"], "b.json: not the fields of a table: "),
        (["a.csv", "--tables", "c.json"], "c.json isn't JSON: "),
        (["a.csv", "--tables", "none.json"], "none.json: No such file or directory"),
        (["a.csv", *OPTIONS, "--tables", "a.json"], "--table and --tables both give the tables"),
        (["a.csv", "--rows", "9"], "--scale and --rows size the tables of a Criteo log"),
        (["train.txt", *OPTIONS, "--scale", "1"], "train.txt: No such file or directory"),
        (["a.csv", *OPTIONS, "-o", "a.csv"], "a.csv: is read as an input"),
        (["a.csv", *OPTIONS, "--delimiter", "||"], "the delimiter must be one ASCII character"),
        (["a.npz", "gone.npz", *OPTIONS, "-o", "x"], "gone.npz: No such file or directory"),
    ):
        assert complaint(capsys, *arguments).startswith(f"oper: {message}"), arguments
    assert not list(Path().glob("*.profile"))


@pytest.mark.parametrize("text", ["user", "=5:user", "u=x:user", "u=:user", "u=-1:user", "u=5:"])
def test_a_wrong_table_shows_the_usage(folder, capsys, text):
    with pytest.raises(SystemExit):
        cli.main(["profile", "a.csv", f"--table={text}"])
    assert "wanted NAME=ROWS:FEATURE,FEATURE..., or NAME:FEATURE,..." in capsys.readouterr().err


def test_interrupted_with_several_jobs(folder):
    os.mkfifo("endless.csv")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torchrec_oper.cli.main", "profile", "a.csv", "endless.csv"),
            *(*OPTIONS, "--jobs", "2", "-o", "all.profile"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    opened = threading.Event()

    def write():
        with open("endless.csv", "w") as pipe:  # opens once a job reads it
            pipe.write("user,seen\n")
            pipe.flush()
            opened.set()
            time.sleep(0.5)

    writer = threading.Thread(target=write)
    writer.start()
    with process:
        assert opened.wait(timeout=30)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(timeout=20) == 130
        assert process.stderr.read() == "oper: interrupted\n"
    writer.join()
    assert not Path("all.profile").exists()
