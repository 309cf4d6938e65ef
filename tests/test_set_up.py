"""The set-up, the Makefile and the build, in made-up projects."""

import ast
import builtins
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

specification = importlib.util.spec_from_file_location("set_up", ROOT / "tools" / "set_up.py")
tool = importlib.util.module_from_spec(specification)
specification.loader.exec_module(tool)

CPU_LOCK = "# PyTorch\ntorch==2.13.0+cpu\ntorchrec==1.8.0\ntomli==2.5.0 ; python_version < '3.11'\n"
LISTING = "torch (2.14.1)\nAvailable versions: 2.14.1, 2.13.0+cpu, 2.13.0\n  LATEST: 2.14.1\n"

# A process that sets up with a stand-in for commands, see `Commands`.
DRIVER = """
import importlib.util, sys
specification = importlib.util.spec_from_file_location("tests", sys.argv[1])
tests = importlib.util.module_from_spec(specification)
specification.loader.exec_module(tests)
commands = tests.Commands(tests.Path(sys.argv[2]), kill_at=int(sys.argv[3]), seconds=0.1)
tests.tool.set_up(commands.root, commands)
"""


class Commands:
    """Stands in for running commands: notes them, leaves a trace of each in .venv."""

    def __init__(self, root, *, listing=LISTING, kill_at=-1, fail_at=None, seconds=0.0):
        self.root = root
        self.listing = listing
        self.kill_at = kill_at
        self.fail_at = fail_at
        self.seconds = seconds
        self.seen = []

    def __call__(self, command, *, keep=False):
        name = self.name(command)
        (self.root / "commands.log").open("a").write(f"begin {name}\n")
        python = self.root / ".venv" / "bin" / "python"
        python.parent.mkdir(exist_ok=True)
        (python.parent / f"trace-{name.replace('/', '-')}").touch()
        if len(self.seen) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        python.touch()
        if name == "editable":
            (self.root / "torchrec_oper" / "_kernels.so").touch()
        self.seen.append(name)
        (self.root / "commands.log").open("a").write(f"end {name}\n")
        return (1 if name == self.fail_at else 0), (self.listing if name == "index" else "")

    def name(self, command):
        if command[1:3] == ["-m", "venv"]:
            return "venv"
        assert command[0] == str(self.root / ".venv" / "bin" / "python")
        assert command[1:4] == ["-m", "pip", "--disable-pip-version-check"]
        if command[4] == "index":
            return "index"
        assert "--no-deps" in command
        if "--editable" in command:
            assert command[-1] == str(self.root)
            assert "--no-build-isolation" in command
            return "editable"
        if "-r" in command:
            assert command[-1] == str(self.root / "requirements" / "cpu.lock")
            return "lock"
        return " ".join(command[6:])


ALL = ["venv", "index", "lock", "editable"]


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "my project"
    for folder in ("requirements", "kernels/cpu", "torchrec_oper"):
        (root / folder).mkdir(parents=True)
    (root / "requirements" / "cpu.lock").write_text(CPU_LOCK)
    (root / "kernels" / "cpu" / "op.cpp").write_text("int op();")
    for name in ("pyproject.toml", "setup.py"):
        (root / name).touch()
    return root


def commands_of(project, **options):
    commands = Commands(project, **options)
    tool.set_up(project, commands)
    return commands.seen


def driver(project, kill_at=-1):
    arguments = [str(Path(__file__)), str(project), str(kill_at)]
    return subprocess.Popen([sys.executable, "-c", DRIVER, *arguments])


# Where PyTorch comes from


def test_pytorch_comes_from_where_pip_looks_if_it_is_there():
    available = tool.available_versions(LISTING)
    assert available == ["2.14.1", "2.13.0+cpu", "2.13.0"]
    assert tool.torch_index("2.13.0+cpu", available) == []


@pytest.mark.parametrize(
    "listing", ["", "ERROR: No matching distribution found", LISTING.replace("+cpu", "+cu130")]
)
def test_pytorch_comes_from_its_own_index_otherwise(listing):
    index = tool.torch_index("2.13.0+cpu", tool.available_versions(listing))
    assert index == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


def test_only_pytorch_is_looked_for_at_its_own_index(project, capsys):
    alone = "--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu"
    assert commands_of(project, listing="") == ["venv", "index", alone, "lock", "editable"]
    assert "pip's own index has no torch 2.13.0+cpu" in capsys.readouterr().out


def test_the_pinned_version_is_read_from_the_lock():
    assert tool.pinned(CPU_LOCK, "torch") == "2.13.0+cpu"
    assert tool.pinned(CPU_LOCK, "tomli") == "2.5.0"
    with pytest.raises(tool.SetUpError, match=r"has no line `numpy==\.\.\.`; restore the file"):
        tool.pinned(CPU_LOCK, "numpy")


def test_the_lock_of_the_project_pins_pytorch():
    assert tool.pinned((ROOT / "requirements" / "cpu.lock").read_text(), "torch")


# What the machine must have


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_a_python_that_works_passes(version):
    tool.check_python(version, "linux")


@pytest.mark.parametrize("version", ["3.9", "3.14", "2.7"])
def test_another_python_is_told_which_work(version, monkeypatch):
    monkeypatch.setattr(tool, "runs", lambda name: name in ("python3.10", "python3.12"))
    with pytest.raises(tool.SetUpError) as caught:
        tool.check_python(version, "linux")
    assert str(caught.value) == (
        f"Python {version} ({sys.executable}) won't do: PyTorch, TorchRec and FBGEMM come"
        " ready-made for Python 3.10 to 3.13. Found here: python3.12, python3.10. Name one,"
        " as in `make PYTHON=python3.12 test`"
    )


def test_the_tool_loads_on_a_python_that_is_too_old():
    # Python 3.6 evaluates annotations: plain names and quoted texts are all it can take.
    tree = ast.parse((ROOT / "tools" / "set_up.py").read_text(), feature_version=(3, 6))
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is None or isinstance(annotation, ast.Constant):
                continue
            assert isinstance(annotation, ast.Name), ast.unparse(annotation)
            assert annotation.id == "Path" or hasattr(builtins, annotation.id), annotation.id


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9"])
def test_a_python_that_is_too_old_says_so_itself(version):
    if not tool.runs(f"python{version}"):
        pytest.skip(f"needs python{version}")
    command = [f"python{version}", str(ROOT / "tools" / "set_up.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"set-up: Python {version} (")
    assert "for Python 3.10 to 3.13" in done.stderr
    assert done.stderr.count("\n") == 1


def test_where_no_python_works_the_message_says_to_install_one(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(tool.SetUpError, match="install one, then name it, as in `make PYTHON="):
        tool.check_python("3.9", "linux")


def test_a_stand_in_that_does_not_start_is_not_a_python(tmp_path, monkeypatch):
    stand_in = tmp_path / "python3.12"
    stand_in.write_text("#!/bin/sh\nexit 127\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not tool.runs("python3.12")
    assert tool.runs(sys.executable)


def test_another_system_is_refused():
    with pytest.raises(tool.SetUpError, match="runs on Linux, and this system is darwin"):
        tool.check_python("3.11", "darwin")


def test_a_missing_compiler_is_named_before_anything_is_made(project, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-c++ -m64")
    commands = Commands(project)
    with pytest.raises(tool.SetUpError, match=r"no 'no-such-c\+\+'.*apt install g\+\+"):
        tool.set_up(project, commands)
    assert commands.seen == []


def test_a_missing_venv_module_is_named(project, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ensurepip" else found(name)
    )
    with pytest.raises(tool.SetUpError, match=r"lacks its module ensurepip.*apt install .*-venv"):
        tool.set_up(project, Commands(project))


# What is done, and what is done again


def test_the_second_run_does_nothing(project):
    assert commands_of(project) == ALL
    assert commands_of(project) == []


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (lambda root: (root / "requirements/cpu.lock").open("a").write("six==1.17.0\n"), ALL),
        (lambda root: (root / ".venv/bin/python").unlink(), ALL),
        (lambda root: (root / "kernels/cpu/op.cpp").write_text("long op();"), ALL[3:]),
        (lambda root: (root / "kernels/op.h").touch(), ALL[3:]),
        (lambda root: (root / "kernels/cpu/op.cpp").rename(root / "kernels/op.cpp"), ALL[3:]),
        (lambda root: (root / "pyproject.toml").write_text("[project]"), ALL[3:]),
        (lambda root: (root / "torchrec_oper/_kernels.so").unlink(), ALL[3:]),
        (lambda root: (root / "torchrec_oper/module.py").touch(), []),
        (lambda root: os.utime(root / "kernels/cpu/op.cpp"), []),
    ],
)
def test_only_what_changed_is_done_again(project, change, again):
    commands_of(project)
    change(project)
    assert commands_of(project) == again
    assert commands_of(project) == []


def test_a_project_that_was_moved_is_set_up_again(project):
    commands_of(project)
    moved = project.rename(project.parent / "moved")
    assert commands_of(moved) == ALL


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("venv", "making .venv failed, see above"),
        ("lock", "no torch==2.13.0+cpu: that build is at https://download.pytorch.org/whl/cpu"),
        ("editable", "building the package failed, see above"),
    ],
)
def test_a_step_that_failed_is_named_and_done_again(project, step, message):
    with pytest.raises(tool.SetUpError) as caught:
        commands_of(project, fail_at=step)
    assert message in str(caught.value)
    assert commands_of(project) == (ALL[3:] if step == "editable" else ALL)


@pytest.mark.parametrize("kill_at", range(4))
def test_the_next_run_repairs_one_that_was_killed(project, kill_at):
    assert driver(project, kill_at).wait(30) == -signal.SIGKILL
    left = project / ".venv" / "bin" / f"trace-{ALL[kill_at]}"
    assert left.exists()
    left.write_text("of the killed run")
    assert commands_of(project) == (ALL if kill_at < 3 else ALL[3:])
    if kill_at < 3:
        assert left.read_text() == ""
    assert commands_of(project) == []


def test_what_a_killed_installation_left_of_the_package_is_removed(project):
    assert driver(project, 3).wait(30) == -signal.SIGKILL
    packages = project / ".venv/lib/python3.11/site-packages"
    for name in ("torchrec_oper-0.1.0.dist-info", "~orchrec_oper-0.1.0.dist-info", "torch"):
        (packages / name).mkdir(parents=True)
    (packages / "__editable__.torchrec_oper-0.1.0.pth").touch()
    commands_of(project)
    assert [path.name for path in packages.iterdir()] == ["torch"]


def test_two_at_once_wait_for_each_other(project):
    both = [driver(project), driver(project)]
    assert [process.wait(30) for process in both] == [0, 0]
    log = (project / "commands.log").read_text().splitlines()
    assert log == [line for name in ALL for line in (f"begin {name}", f"end {name}")]


def test_the_lock_lasts_as_long_as_the_program_that_a_killed_run_started(project):
    read_end, write_end = os.pipe()
    program = (
        "import importlib.util, os, signal, sys\n"
        "s = importlib.util.spec_from_file_location('set_up', sys.argv[1])\n"
        "tool = importlib.util.module_from_spec(s); s.loader.exec_module(tool)\n"
        "with tool.locked(tool.Path(sys.argv[2])):\n"
        "    tool.run_command(['sh', '-c', 'kill -9 $PPID; read line'])\n"
    )
    (project / ".venv").mkdir()
    killed = subprocess.Popen(
        [sys.executable, "-c", program, str(ROOT / "tools/set_up.py"), str(project / ".venv")],
        stdin=read_end,
    )
    os.close(read_end)
    assert killed.wait(30) == -signal.SIGKILL
    with (project / ".venv" / tool.LOCK).open("a") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(write_end)  # ends the program
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.01)
    pytest.fail("the lock outlived the program")


def test_an_environment_that_was_made_by_hand_is_left_alone(project):
    mine = project / ".venv" / "pyvenv.cfg"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(tool.SetUpError, match="wasn't made by tools/set_up.py, so it is left"):
        commands_of(project)
    assert [path.name for path in mine.parent.iterdir()] == ["pyvenv.cfg"]


def test_settings_that_send_packages_elsewhere_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")
    status, output = tool.run_command(["env"], keep=True)
    assert status == 0
    assert "PIP_USER" not in output
    assert "PIP_FIND_LINKS=wheels" in output


# The Makefile, from other folders and in a folder with an awkward name


@pytest.fixture
def made(tmp_path):
    """A project whose Python only tells how it was called."""
    root = tmp_path / "two  spaces, it's $awkward"
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "in $PWD"\nfor each in "$@"; do echo "<$each>"; done\n')
    python.chmod(0o755)
    (root / "tools").mkdir()
    (root / "tools" / "set_up.py").write_text("print('set up', __file__)")
    shutil.copy(ROOT / "Makefile", root)
    return root


def make(*arguments, folder):
    environment = {**os.environ, "PYTHON": sys.executable}
    for name in ("ARGS", "OMP_NUM_THREADS", "MAKEFLAGS", "MAKEFILES", "MAKELEVEL"):
        environment.pop(name, None)
    result = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_make_train_from_elsewhere(made, tmp_path):
    lines = make("-f", f"{made}/Makefile", "train", "ARGS=--steps 5 my.tsv", folder=tmp_path)
    assert lines[0] == f"set up {made}/tools/set_up.py"
    assert lines[1] == f"in {tmp_path}"  # so that my.tsv is the one meant
    assert lines[2:] == [f"<{made}/examples/train_dlrm.py>", *("<--steps>", "<5>", "<my.tsv>")]


@pytest.mark.parametrize("way", ["-C", "-f", "here"])
def test_make_test_from_elsewhere(made, tmp_path, way):
    arguments = {"-C": ["-C", str(made)], "-f": ["-f", f"{made}/Makefile"], "here": []}[way]
    lines = make(*arguments, "test", folder=made if way == "here" else tmp_path)
    assert lines[0] == f"set up {made}/tools/set_up.py"
    assert lines[1] == f"in {made}"
    assert lines[2:] == ["<-m>", "<pytest>"]


def test_make_alone_says_what_there_is_and_does_nothing(made):
    text = "\n".join(make(folder=made))
    for target in ("train", "test", "lint", "types", "build", "clean"):
        assert f"make {target}" in text
    assert "set up" not in text


def test_make_clean_removes_what_was_built_and_nothing_else(made):
    for name in ("build", "dist", "torchrec_oper/__pycache__", "torchrec_oper.egg-info", "kernels"):
        (made / name).mkdir(parents=True)
    (made / "torchrec_oper" / "_kernels.so").touch()
    make("clean", folder=made)
    assert sorted(path.name for path in made.iterdir()) == [
        ".venv", "Makefile", "kernels", "tools", "torchrec_oper",
    ]  # fmt: skip
    assert list((made / "torchrec_oper").iterdir()) == []


# The build


@pytest.fixture
def sources(tmp_path):
    """A project with one small kernel and the real build files."""
    root = tmp_path / "with space"
    (root / "kernels" / "cpu").mkdir(parents=True)
    (root / "torchrec_oper").mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, root)
    (root / "README.md").touch()
    (root / "torchrec_oper" / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (root / "kernels" / "one.h").write_text("#pragma once\n#define ONE 1\n")
    (root / "kernels" / "cpu" / "one.cpp").write_text(
        '#include "../one.h"\n#include <torch/csrc/stable/tensor.h>\nextern "C" __attribute__(('
        'visibility("default"))) int one() { return ONE; }\n'
    )
    (root / "kernels" / "two.cpp").write_text("int two() { return 2; }\n")
    return root


def build(root, *command, python=("setup.py",)):
    return subprocess.run(
        [sys.executable, *python, "-q", *command],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def test_only_changed_sources_are_compiled(sources):
    in_place = ("build_ext", "--inplace")
    first = build(sources, *in_place)
    assert sorted(first.stdout.splitlines()) == [
        "compiling kernels/cpu/one.cpp",
        "compiling kernels/two.cpp",
        "linking _kernels.so",
    ], first.stderr
    library = sources / "torchrec_oper" / "_kernels.so"
    before = library.read_bytes()

    assert build(sources, *in_place).stdout == ""
    assert library.read_bytes() == before

    (sources / "kernels" / "two.cpp").write_text("int two() { return 22; }\n")
    assert "one.cpp" not in (changed := build(sources, *in_place).stdout)
    assert "compiling kernels/two.cpp" in changed
    assert library.read_bytes() != before

    (sources / "kernels" / "two.cpp").write_text("int two( { return 2; }\n")
    failed = build(sources, *in_place)
    assert failed.returncode != 0
    assert "compiling kernels/two.cpp failed, see above; the command was: c++" in failed.stderr
    assert list(sources.rglob("*.part")) == []


def test_the_wheel_serves_every_python_of_its_platform(sources):
    assert build(sources, "bdist_wheel").returncode == 0
    (wheel,) = (sources / "dist").iterdir()
    assert wheel.name.startswith("torchrec_oper-0.1.0-py3-none-linux_")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] == ["torchrec_oper/_kernels.so"]


def test_a_build_without_pytorch_is_one_clear_error(sources):
    hide = (
        "import importlib.util as u, runpy, sys; f = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else f(name, *a)\n"
        "sys.argv[0] = 'setup.py'; runpy.run_path('setup.py', run_name='__main__')"
    )
    result = build(sources, "build_ext", "--inplace", python=("-c", hide))
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1] == (
        "error: the kernels of torchrec-oper are built against the installed PyTorch, and"
        f" {sys.executable} has none. Install PyTorch 2.13 first, then build with"
        " `python -m pip install --no-build-isolation --no-deps .` (`make build` in a"
        " checkout does it all)"
    )
