"""``oper profile`` as a user runs it."""

import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchrec_oper
from torchrec_oper.archive import write_archive
from torchrec_oper.cli import main as cli
from torchrec_oper.profile import AccessProfile
from torchrec_oper.profile.criteo import criteo_tables
from torchrec_oper.profile.files import profile_files

ROOT = Path(__file__).parents[1]
LINE = "\t".join(["1", *["5"] * 13, *["0000000a"] * 25, ""]) + "\n"


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log of three samples in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("train.txt")
    path.write_text(LINE * 3)
    return path


def oper(*arguments, through=(), **options):
    options = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, **options}
    return subprocess.Popen(
        [*through, sys.executable, "-m", "torchrec_oper.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def complaint(capsys, *arguments):
    """The one line that a user sees after a mistake."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("oper: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_a_profile_is_written_and_summed_up(log, capsys):
    assert cli.main(["profile", "train.txt", "--rows", "1000"]) == 0
    profile = AccessProfile.load("train.profile")
    tables = criteo_tables(rows=[1000] * 26)
    assert profile.content_hash == profile_files([log], tables).content_hash
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 samples made 75 lookups in 26 tables.")
    assert lines[2].split() == ["table", "rows", "touched", "lookups", "hot", "empty", "bags"]
    assert lines[3].split() == ["t_cat_0", "1,000", "1", "3", "100.0%", "0.0%"]
    assert lines[28].split() == ["t_cat_25", "1,000", "0", "0", "0.0%", "100.0%"]
    assert lines[30] == f"written to train.profile ({os.path.getsize('train.profile'):,} bytes)"
    assert "AccessProfile.load('train.profile')" in lines[31]


def test_sizes_of_tables(log):
    assert cli.main(["profile", "train.txt", "--scale", "0.1"]) == 0
    AccessProfile.load("train.profile").check_fits(criteo_tables(scale=0.1))
    rows = range(11, 37)
    assert cli.main(["profile", "train.txt", "--rows", ",".join(map(str, rows))]) == 0
    AccessProfile.load("train.profile").check_fits(criteo_tables(rows=rows))


def test_where_the_profile_goes(log):
    Path("logs").mkdir()
    Path("logs/day.0.tsv.gz").write_bytes(gzip.compress(LINE.encode()))
    assert cli.main(["profile", "logs/day.0.tsv.gz"]) == 0
    assert AccessProfile.load("day.0.profile").samples == 1
    assert cli.main(["profile", "train.txt", "-o", "logs/mine"]) == 0
    assert AccessProfile.load("logs/mine").samples == 3
    assert cli.main(["profile", "train.txt", "-o", os.devnull]) == 0
    assert not Path(os.devnull).is_file()


def test_what_is_no_file_has_no_size_and_no_next_step(log, capsys):
    assert cli.main(["profile", "train.txt", "-o", os.devnull]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {os.devnull}"


def test_mistakes_are_one_line(log, capsys):
    assert complaint(capsys, "profile", "none.txt") == "oper: none.txt: No such file or directory\n"
    assert complaint(capsys, "profile", ".") == "oper: .: Is a directory\n"
    assert complaint(capsys, "profile", log, "--rows", "1,2") == (
        "oper: rows must be 26 numbers, one for each categorical column, found 2\n"
    )
    for option, message in (
        ("--scale=-1", "oper: scale must be above 0 and below 9.1e+11, found -1.0\n"),
        ("--scale=1e300", "oper: scale must be above 0 and below 9.1e+11, found 1e+300\n"),
        ("--rows=99999999999999999999", "oper: table t_cat_0: rows must be below 2**63"),
    ):
        assert complaint(capsys, "profile", log, option).startswith(message)
    assert complaint(capsys, "profile", log, "-o", "no/p") == (
        f"oper: no/p: there is no such folder: {Path.cwd()}/no\n"
    )
    assert complaint(capsys, "profile", log, "-o", ".") == (
        "oper: .: is a folder, wanted a file to write\n"
    )
    assert complaint(capsys, "profile", log, "-o", "./train.txt") == (
        "oper: train.txt: is read as an input; choose another file to write\n"
    )
    assert complaint(capsys, "profile", log, "-o", "/dev/full") == (
        "oper: /dev/full: No space left on device\n"
    )
    log.write_text(LINE + "x" + LINE)
    assert complaint(capsys, "profile", log) == (
        "oper: train.txt, line 2: label: found 'x1', wanted 0 or 1\n"
    )
    assert os.listdir() == ["train.txt"]


def test_wrong_arguments_show_the_usage(log, capsys):
    for arguments, message in (
        (["profile"], "the following arguments are required: FILE"),
        (["profile", "f", "--rows", "ten"], "argument --rows: wanted N or N,N,..., found 'ten'"),
        (["profile", "f", "--rows", "9", "--scale", "1"], "not allowed with argument --rows"),
        ([], "the following arguments are required: COMMAND"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 2
        printed = capsys.readouterr().err
        assert printed.startswith("usage: oper")
        assert message in printed


def test_help_and_version(capsys):
    for arguments, text in (
        (["--help"], "profile"),
        (["profile", "--help"], "oper profile train.txt --rows 100000"),
        (["--version"], f"torchrec-oper {torchrec_oper.__version__}\n"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
        assert text in capsys.readouterr().out


def test_interrupted_while_reading(log):
    os.mkfifo("endless")
    write_archive("endless.profile", "profile", {}, {})
    old = Path("endless.profile").read_bytes()
    process = oper("profile", "endless")
    with process, open("endless", "w") as pipe:  # opens once the command reads
        pipe.write(LINE)
        pipe.flush()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr.read() == "oper: interrupted\n"
    assert Path("endless.profile").read_bytes() == old
    assert sorted(os.listdir()) == ["endless", "endless.profile", "train.txt"]


def test_interrupted_while_importing(log):
    # Python finds this numpy first. As the real one does, it hides what interrupts it.
    Path("numpy.py").write_text(
        "import time\nprint('importing', flush=True)\ntry: time.sleep(60)\n"
        "except BaseException: raise ImportError('failed to import')\n"
    )
    process = oper("profile", log, env={**os.environ, "PYTHONPATH": f"{Path.cwd()}:{ROOT}"})
    with process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGINT


def test_an_interrupt_that_is_ignored_stays_so(log):
    def ignore():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    Path("numpy.py").write_text(
        "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\n"
        "del sys.modules['numpy']; sys.path.pop(0)\nimport numpy\n"
    )
    process = oper("profile", log, preexec_fn=ignore)
    assert "train.profile" in process.communicate()[0]
    assert process.returncode == 0


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_done_without(log, closed):
    whole = oper("profile", log).communicate()
    expected = {">&-": ("", whole[1]), "2>&-": (whole[0], "")}.get(closed, ("", ""))
    Path("train.profile").unlink()
    for arguments, status in (([log], 0), (["none.txt"], 2)):
        shell = oper("profile", *arguments, through=["sh", "-c", f'exec "$@" {closed}', "sh"])
        out, err = shell.communicate()
        assert shell.returncode == status
        if status == 0:
            assert (out, err) == expected
            assert AccessProfile.load("train.profile").samples == 3
        else:
            assert (out, err) == (
                "",
                "oper: none.txt: No such file or directory\n" * ("2" not in closed),
            )


def test_a_closed_pipe_is_quiet(log):
    process = oper("profile", log)
    process.stdout.close()
    with process:
        assert process.stderr.read() == ""
    assert process.returncode == 141
    assert AccessProfile.load("train.profile").samples == 3


def test_a_full_disk_is_one_line_and_leaves_the_old_profile(log):
    Path("train.profile").write_bytes(b"old")

    def limit():
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    process = oper("profile", log, preexec_fn=limit)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (2, "", "oper: train.profile: File too large\n")
    assert Path("train.profile").read_bytes() == b"old"
    assert sorted(os.listdir()) == ["train.profile", "train.txt"]
