"""No arrays make map_ids read out of bounds or overflow: built with ASan and UBSan."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shlex.split(os.environ.get("CXX", "c++"))


def _runtime(name: str) -> str:
    command = [*COMPILER, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{COMPILER[0]} has no {name}")
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sanitized") / "_kernels.so"
    torch_folder = Path(torch.__file__).parent
    subprocess.run(
        [
            *COMPILER,
            *("-std=c++17", "-O1", "-g", "-fPIC", "-shared"),
            *("-fsanitize=address,undefined", "-fno-sanitize=vptr"),
            "-fno-sanitize-recover=undefined",
            "-DTORCH_TARGET_VERSION=0x020a000000000000",
            *("-isystem", str(torch_folder / "include")),
            *map(str, sorted((ROOT / "kernels").rglob("*.cpp"))),
            *("-o", str(target), f"-L{torch_folder / 'lib'}", "-ltorch_cpu"),
        ],
        check=True,
    )
    return target


def test_wrong_arrays_are_refused_or_give_a_wrong_row(library: Path) -> None:
    runtimes = [_runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    run = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "sanitized_map_ids.py"), library, "1", "5000"],
        env={**os.environ, "LD_PRELOAD": ":".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) > 200
