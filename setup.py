"""Builds torchrec_oper/_kernels.so from kernels/; all else is in pyproject.toml.

The shared object registers ``torch.ops.oper`` through PyTorch's stable ABI and is
loaded with ``torch.ops.load_library``, never imported: it holds no Python API, so
one file serves every Python, and PyTorch 2.10 and later.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent
OBJECTS = ROOT / "build" / "kernels"
STABLE_ABI = "0x020a000000000000"  # the oldest PyTorch that can load the result: 2.10
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    f"-DTORCH_TARGET_VERSION={STABLE_ABI}",
]


def sources(*suffixes: str) -> list[str]:
    """The files of kernels/ with one of ``suffixes``, relative to the project, sorted."""
    found = (path for path in (ROOT / "kernels").rglob("*") if path.suffix in suffixes)
    return sorted(str(path.relative_to(ROOT)) for path in found)


def torch_folder() -> Path:
    """Where PyTorch is installed, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise PlatformError(
            "the kernels of torchrec-oper are built against the installed PyTorch, and"
            f" {sys.executable} has none. Install PyTorch 2.13 first, then build with"
            " `python -m pip install --no-build-isolation --no-deps .`"
            " (`make build` in a checkout does it all)"
        )
    return Path(spec.origin).parent


class BuildKernels(build_ext):
    """Compiles each source at most once, several at a time.

    An object file is named after a hash of everything that goes into it, and every
    file is renamed into place when it is complete: a build that was cut short, or two
    at once, leave nothing behind that a later one could take for good.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """A plain ``_kernels.so``: the name that PyTorch loads it by."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None: the file has no ``PyInit`` function, as it is never imported."""
        return []

    def build_extension(self, ext: Extension) -> None:
        """Compile and link the shared object."""
        torch = torch_folder()
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        if shutil.which(compiler[0]) is None:
            raise PlatformError(
                f"building the kernels needs a C++17 compiler, and there is no {compiler[0]!r}."
                " Install one (Debian, Ubuntu: `apt install g++`) or name yours in CXX"
            )
        if not ext.sources:
            raise PlatformError(f"found no C++ source under {ROOT / 'kernels'}")
        command = [*compiler, *FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        command += ["-isystem", str(torch / "include")]
        common = hashlib.sha256(repr(command).encode())
        common.update((torch / "version.py").read_bytes())
        for header in ext.depends:
            common.update(header.encode() + (ROOT / header).read_bytes())

        def compile_one(source: str) -> Path:
            digest = common.copy()
            digest.update(source.encode() + (ROOT / source).read_bytes())
            target = OBJECTS / f"{digest.hexdigest()[:32]}.o"
            run_once([*command, "-c", source], target, f"compiling {source}")
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        link = [*command, "-shared", "-Wl,--no-undefined", *map(str, objects)]
        # No rpath: PyTorch's libraries are in the process before this one is loaded.
        link += [f"-L{torch / 'lib'}", "-ltorch_cpu"]
        self.linked = OBJECTS / f"{hashlib.sha256(repr(link).encode()).hexdigest()[:32]}.so"
        target = Path(self.get_ext_fullpath(ext.name))
        run_once(link, self.linked, f"linking {target.name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.linked, target)

    def copy_extensions_to_source(self) -> None:
        """Put the shared object into the source tree (editable installs), by renaming."""
        for ext in self.extensions:
            target = ROOT / self.get_ext_filename(self.get_ext_fullname(ext.name))
            part = part_of(OBJECTS / target.name)
            shutil.copy(self.linked, part)
            os.replace(part, target)


def run_once(command: list[str], target: Path, doing: str) -> None:
    """Unless ``target`` exists, let ``command`` write a temporary file and rename it so."""
    if target.exists():
        return
    sys.stdout.write(f"{doing}\n")
    sys.stdout.flush()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(target)
    if subprocess.run([*command, "-o", str(part)], cwd=ROOT).returncode:
        part.unlink(missing_ok=True)
        raise CompileError(f"{doing} failed, see above; the command was: {shlex.join(command)}")
    os.replace(part, target)


def part_of(target: Path) -> Path:
    """A temporary name beside ``target`` that no other process uses."""
    return target.with_name(f"{target.name}.{os.getpid()}.part")


class StableWheel(bdist_wheel):
    """Tags the wheel by platform only."""

    def get_tag(self) -> tuple[str, str, str]:
        """``py3-none-<platform>``: native code, and no Python API in it."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension("torchrec_oper._kernels", sources(".cpp"), depends=sources(".h", ".cuh"))
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": StableWheel},
)
