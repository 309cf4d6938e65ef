"""Files shared out to processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.parallel import map_files, usable_cpus


def size_of(path, tick):
    """The size of a file, told in two ticks; what its name asks for first."""
    name = Path(path).name
    if name == "slow":
        time.sleep(0.3)
    if name == "fails":
        raise ProfileError(f"{name} is wrong")
    if name == "odd":
        raise type("Odd", (Exception,), {})("can't be sent")
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "waits":
        time.sleep(60)
    size = os.path.getsize(path)
    tick(size // 2)
    tick(size - size // 2)
    return name, size


def process_of(path, tick):
    time.sleep(0.1)
    return os.getpid()


@pytest.fixture
def paths(tmp_path):
    """Eight files, the first of which is slow."""
    names = ["slow", *(f"file{at}" for at in range(7))]
    for at, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(100 * at))
    return [tmp_path / name for name in names]


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_results_come_in_order_and_all_bytes_are_ticked(paths, jobs):
    ticks = []
    found = list(map_files(size_of, paths, jobs=jobs, tick=ticks.append))
    assert found == [(path.name, 100 * at) for at, path in enumerate(paths)]
    assert sum(ticks) == 2800


def test_each_job_is_a_process(paths):
    pids = set(map_files(process_of, paths, jobs=2, tick=print))
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert set(map_files(process_of, paths, jobs=1, tick=print)) == {os.getpid()}
    assert set(map_files(process_of, paths[:1], jobs=5, tick=print)) == {os.getpid()}
    assert list(map_files(process_of, [], jobs=5, tick=print)) == []
    assert alive(pids) == set()


def alive(pids):
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("fails", ProfileError, "fails is wrong"),
        ("odd", RuntimeError, "Odd: can't be sent"),
        ("dies", ProfileError, r"the process that read .*dies died \(exit code -9\); if memory"),
        ("missing", FileNotFoundError, "missing"),
    ],
)
def test_what_fails_in_a_process_fails_here(paths, name, kind, message):
    wrong = paths[0].with_name(name)
    if name != "missing":
        wrong.touch()
    with pytest.raises(kind, match=message):
        list(map_files(size_of, [*paths, wrong], jobs=2, tick=print))


def test_closing_it_ends_the_processes(paths):
    results = map_files(process_of, paths, jobs=2, tick=print)
    pid = next(results)
    assert alive({pid})
    results.close()
    assert not alive({pid})


def test_jobs_below_one_are_refused(paths):
    with pytest.raises(ProfileError, match="jobs must be 1 or more, found 0"):
        list(map_files(size_of, paths, jobs=0, tick=print))


def test_usable_cpus_are_those_of_the_affinity():
    assert usable_cpus() == len(os.sched_getaffinity(0))


PROGRAM = """\
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_parallel import size_of
from torchrec_oper.profile.parallel import map_files

if __name__ == "__main__":
    files = map_files(size_of, sys.argv[1:], jobs=2, tick=print)
    try:
        print(next(files), flush=True)
        next(files)
    except KeyboardInterrupt:
        files.close()
        sys.exit("interrupted")
"""


def test_ctrl_c_ends_every_process_quietly(tmp_path):
    (tmp_path / "first").write_bytes(b"x")
    (tmp_path / "waits").touch()
    here = Path(__file__)
    (tmp_path / "main.py").write_text(
        PROGRAM.format(root=str(here.parents[1]), tests=str(here.parent))
    )
    process = subprocess.Popen(
        [sys.executable, "main.py", "first", "waits"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        while not process.stdout.readline().startswith("('first', 1)"):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(timeout=20) == 1
        assert process.stderr.read() == "interrupted\n"
    # multiprocessing's own helper notices a little later that it is alone.
    deadline = time.monotonic() + 10
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def group_is_alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
