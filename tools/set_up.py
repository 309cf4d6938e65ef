"""Makes the project's environment in .venv: Python, what requirements/cpu.lock pins, the package.

    python3 tools/set_up.py

The Makefile runs it first for every target. A second run changes nothing and takes a
fraction of a second; a run that was killed is repaired by the next; two at once wait
for each other. It needs nothing but Python's standard library, and starts even on a
Python 3 that is too old (from 3.6 on) or too new, to say so: therefore annotations with
brackets are quoted, and what comes before the check of Python uses nothing newer.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.13", "3.12", "3.11", "3.10")  # newest first
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
ENVIRONMENT, PACKAGE = "environment.stamp", "package.stamp"
LOCK = "set_up.lock"

if TYPE_CHECKING:
    # Runs a command; gives its exit status and, where told to keep it, its output.
    Run = Callable[..., tuple[int, str]]


class SetUpError(Exception):
    """What stands in the way of the set-up, and what to do about it."""


def main() -> int:
    """Set up; the exit status."""
    try:
        set_up(ROOT)
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; the same command takes it up again", file=sys.stderr)
        return 130
    return 0


def set_up(root: Path, run: "Run | None" = None) -> None:
    """Bring ``root/.venv`` up to date.

    Args:
        root: the folder of the project.
        run: runs commands; tests pass their own.

    Raises:
        SetUpError: Python or the machine doesn't fit, or a command failed.
    """
    run = run or run_command
    check_python(f"{sys.version_info[0]}.{sys.version_info[1]}", sys.platform)
    lock_text = (root / "requirements" / "cpu.lock").read_text(encoding="utf-8")
    venv = root / ".venv"
    with locked(venv):
        environment = environment_key(lock_text, root)
        if not stamped(venv, ENVIRONMENT, environment, needs=venv / "bin" / "python"):
            check_tools()
            make_environment(venv, root, lock_text, run)
            write_stamp(venv, ENVIRONMENT, environment)
        package = package_key(root)
        if not stamped(venv, PACKAGE, package, needs=root / "torchrec_oper" / "_kernels.so"):
            check_tools()
            install_package(venv, root, run)
            write_stamp(venv, PACKAGE, package)


# What the machine must have


def check_python(version: str, system: str) -> None:
    """Raise ``SetUpError`` unless Python ``version`` on ``system`` can run the project."""
    if system != "linux":
        raise SetUpError(f"torchrec-oper runs on Linux, and this system is {system}")
    if version in PYTHONS:
        return
    names = [f"python{name}" for name in PYTHONS]
    found = [name for name in names if runs(name)]
    step = (
        f"Found here: {', '.join(found)}. Name one, as in `make PYTHON={found[0]} test`"
        if found
        else f"None of {', '.join(names)} was found here: install one, then name it,"
        f" as in `make PYTHON={names[2]} test`"
    )
    raise SetUpError(
        f"Python {version} ({sys.executable}) won't do: PyTorch, TorchRec and FBGEMM come"
        f" ready-made for Python {PYTHONS[-1]} to {PYTHONS[0]}. {step}"
    )


def runs(python: str) -> bool:
    """Whether ``python`` is there and starts; a version manager's stand-in may not."""
    if shutil.which(python) is None:
        return False
    silent = subprocess.DEVNULL
    return subprocess.call([python, "-c", ""], stdout=silent, stderr=silent) == 0


def check_tools() -> None:
    """Raise ``SetUpError`` unless there are a C++ compiler and the venv module."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise SetUpError(
                f"{sys.executable} lacks its module {module}. Debian and Ubuntu keep it in a"
                f" package of its own: `apt install {name}-venv`, then run the same command again"
            )
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]
    if shutil.which(compiler) is None:
        raise SetUpError(
            f"the kernels need a C++17 compiler, and there is no {compiler!r}. Install one"
            " (Debian, Ubuntu: `apt install g++`) or name yours, as in `CXX=clang++ make test`,"
            " then run the same command again"
        )


# The two steps


def make_environment(venv: Path, root: Path, lock_text: str, run: "Run") -> None:
    """Make ``venv`` from nothing with all that the lock pins."""
    empty(venv)
    say(f"[1/3] making .venv with Python {platform.python_version()}")
    must(run([sys.executable, "-m", "venv", str(venv)]), "making .venv failed, see above")
    say("[2/3] installing what requirements/cpu.lock pins (minutes on a slow line)")
    install = [*pip(venv), "install", "--no-deps"]
    wanted = pinned(lock_text, "torch")
    _, listing = run([*pip(venv), "index", "versions", "torch"], keep=True)
    index = torch_index(wanted, available_versions(listing))
    hint = (
        "pip couldn't install it all, its own words are above. Where it finds no"
        f" torch=={wanted}: that build is at {TORCH_INDEX}, or set pip's find-links to a folder"
        " with the wheel. Then run the same command again"
    )
    if index:
        say(f"      pip's own index has no torch {wanted}: taking it from {TORCH_INDEX}")
        # PyTorch alone, so that nothing else is looked for at an index of few packages.
        must(run([*install, *index, f"torch=={wanted}"]), hint)
    must(run([*install, "-r", str(root / "requirements" / "cpu.lock")]), hint)


def install_package(venv: Path, root: Path, run: "Run") -> None:
    """Build the kernels and make the package in ``root`` importable in ``venv``."""
    remove_stamp(venv, PACKAGE)
    # An installation that was killed may lack the list of its files, which pip wants.
    for packages in venv.glob("lib/python*/site-packages"):
        for pattern in ("torchrec_oper-*", "~orchrec_oper*", "__editable__*torchrec_oper*"):
            for path in packages.glob(pattern):
                remove(path)
    say("[3/3] building the kernels and installing the package")
    command = [*pip(venv), "install", "--no-build-isolation", "--no-deps"]
    status, output = run([*command, "--editable", str(root)], keep=True)
    if status:
        print(output, file=sys.stderr)
    must((status, ""), "building the package failed, see above; mend it and run the command again")


def pip(venv: Path) -> "list[str]":
    """The start of a pip command in ``venv``."""
    return [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def must(outcome: "tuple[int, str]", message: str) -> None:
    """Raise ``SetUpError`` with ``message`` unless the command did well."""
    if outcome[0]:
        raise SetUpError(message)


def run_command(command: "list[str]", *, keep: bool = False) -> "tuple[int, str]":
    """Run ``command``: its exit status, and its output if ``keep`` (else it is shown)."""
    # PIP_USER and PIP_TARGET, where set, would send packages elsewhere than .venv.
    away = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV")
    done = subprocess.run(
        command,
        env={name: value for name, value in os.environ.items() if name not in away},
        stdout=subprocess.PIPE if keep else None,
        stderr=subprocess.STDOUT if keep else None,
        text=True,
        close_fds=False,  # hands the lock on, see `locked`
        check=False,
    )
    return done.returncode, done.stdout or ""


def say(line: str) -> None:
    """Tell how far the set-up is."""
    print(line, flush=True)


# Where PyTorch comes from


def pinned(lock_text: str, name: str) -> str:
    """The version that the lock pins for ``name``.

    Raises:
        SetUpError: there is no such line.
    """
    match = re.search(rf"^{re.escape(name)}==([^\s;]+)", lock_text, re.MULTILINE)
    if match is None:
        raise SetUpError(f"requirements/cpu.lock has no line `{name}==...`; restore the file")
    return match[1]


def available_versions(listing: str) -> "list[str]":
    """The versions in what ``pip index versions`` printed; none if it found none."""
    match = re.search(r"^Available versions: (.*)$", listing, re.MULTILINE)
    return [version.strip() for version in match[1].split(",")] if match else []


def torch_index(wanted: str, available: "list[str]") -> "list[str]":
    """What pip must be told to find PyTorch ``wanted``: nothing if it has it anyway."""
    return [] if wanted in available else ["--extra-index-url", TORCH_INDEX]


# What is done already


def environment_key(lock_text: str, root: Path) -> str:
    """A hash of all that .venv depends on: the lock, the Python, its place on the disk."""
    python = [sys.version_info[:2], sys.base_prefix, platform.machine(), str(root)]
    return hashlib.sha256(repr([lock_text, python]).encode()).hexdigest()


def package_key(root: Path) -> str:
    """A hash of all that the installed package is built from."""
    files = [root / "pyproject.toml", root / "setup.py"]
    files += sorted(path for path in (root / "kernels").rglob("*") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root)}\0{content}\0".encode())
    return digest.hexdigest()


def stamped(venv: Path, name: str, key: str, *, needs: Path) -> bool:
    """Whether the step ``name`` was completed with ``key``, and ``needs`` is still there."""
    try:
        return (venv / name).read_text(encoding="utf-8") == key and needs.exists()
    except FileNotFoundError:
        return False


def write_stamp(venv: Path, name: str, key: str) -> None:
    """Note that the step ``name`` is complete with ``key``."""
    part = venv / f"{name}.part"
    part.write_text(key, encoding="utf-8")
    os.replace(part, venv / name)


def remove_stamp(venv: Path, name: str) -> None:
    """Note that the step ``name`` is not complete."""
    with contextlib.suppress(FileNotFoundError):
        (venv / name).unlink()


def empty(venv: Path) -> None:
    """Remove all of ``venv`` but the lock; the stamps first, in case of a kill midway."""
    for name in (PACKAGE, ENVIRONMENT):
        remove_stamp(venv, name)
    for path in venv.iterdir():
        if path.name != LOCK:
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextlib.contextmanager
def locked(venv: Path) -> "Iterator[None]":
    """Hold the lock of ``venv``, which marks the folder as made here.

    The programs that are started inherit the lock: if only this one is killed, the next
    set-up waits until pip has ended rather than work beside it.

    Raises:
        SetUpError: ``venv`` was made by somebody else.
    """
    venv.mkdir(exist_ok=True)
    names = [path.name for path in venv.iterdir()]
    if names and LOCK not in names:
        raise SetUpError(
            f"{venv} is there already and wasn't made by tools/set_up.py, so it is left alone."
            " Move it away or delete it, then run the same command again"
        )
    with (venv / LOCK).open("a") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work in this folder: waiting for it to end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
