"""The import rule of the package: who may know whom."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrec_oper

PACKAGE = Path(torchrec_oper.__file__).resolve().parent

LEAVES = ("errors", "table", "archive", "versions")
ROOMS = ("profile", "planner", "fabric", "sharder", "ops", "gnn", "bench", "cli")
TORCHREC = ("torchrec", "fbgemm_gpu")
TORCHREC_HOMES = ("planner.adapter", "planner.baselines", "sharder", "bench")
NOT_TO_IMPORT = ("gnn", "bench", "cli")
BUT_ALLOWED = {"cli": ("bench",)}  # `oper bench` and `oper calibrate` measure


def violations(package: Path) -> list[str]:
    """Every import in ``package`` that breaks the rule, as ``module imports module``."""
    return [
        f"{module} imports {name}"
        for path in sorted(package.rglob("*.py"))
        for module in [module_name(package, path)]
        for name in sorted(set(imports(package, path)))
        if any(within(name, banned) for banned in banned_for(module))
    ]


def banned_for(module: str) -> list[str]:
    """What ``module`` (a name below the package) may not import."""
    room = module.partition(".")[0]
    at_torchrec = any(within(module, home) for home in TORCHREC_HOMES)
    banned = [] if at_torchrec else list(TORCHREC)
    allowed = (room, *BUT_ALLOWED.get(room, ()))
    rooms = [] if module == "__init__" else [name for name in NOT_TO_IMPORT if name not in allowed]
    if module in LEAVES:
        rooms += ROOMS
    elif room == "profile":
        rooms += ["planner", "fabric", "sharder", "ops"]
    elif room == "planner" and not at_torchrec:
        rooms += ["fabric", "sharder", "ops"]
    elif room == "ops":
        rooms += ["profile", "planner", "sharder"]
    return banned + [f"torchrec_oper.{name}" for name in rooms]


def imports(package: Path, path: Path) -> Iterator[str]:
    """The absolute names that a file imports, wherever in it, also for types only."""
    parts = ("torchrec_oper", *path.relative_to(package).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else ()
            source = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def module_name(package: Path, path: Path) -> str:
    """``planner.adapter`` for planner/adapter.py, ``planner`` for planner/__init__.py."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def test_the_package_keeps_the_rule():
    assert len(list(PACKAGE.rglob("*.py"))) > len(LEAVES)
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("profile/log.py", "import torchrec", "profile.log imports torchrec"),
        ("profile/log.py", "import fbgemm_gpu.sll", "profile.log imports fbgemm_gpu.sll"),
        (
            "profile/__init__.py",
            "from torchrec_oper import ops",
            "profile imports torchrec_oper.ops",
        ),
        (
            "planner/search.py",
            "def f():\n    from torchrec.distributed import planner",
            "planner.search imports torchrec.distributed.planner",
        ),
        (
            "planner/search.py",
            "from ..ops.map_ids import map_ids",
            "planner.search imports torchrec_oper.ops.map_ids.map_ids",
        ),
        (
            "planner/__init__.py",
            "import importlib\nimportlib.import_module('torchrec_oper.sharder')",
            "planner imports torchrec_oper.sharder",
        ),
        (
            "ops/gather.py",
            "from torchrec_oper.planner import Plan",
            "ops.gather imports torchrec_oper.planner.Plan",
        ),
        ("ops/gather.py", "import torchrec", "ops.gather imports torchrec"),
        (
            "ops/gather.py",
            "from torchrec_oper import sharder",
            "ops.gather imports torchrec_oper.sharder",
        ),
        (
            "sharder/__init__.py",
            "import torchrec_oper.bench.run",
            "sharder imports torchrec_oper.bench.run",
        ),
        ("bench/run.py", "from torchrec_oper import cli", "bench.run imports torchrec_oper.cli"),
        ("cli/main.py", "import torchrec_oper.gnn", "cli.main imports torchrec_oper.gnn"),
        ("cli/plan.py", "import torchrec", "cli.plan imports torchrec"),
        (
            "table.py",
            "from .profile import AccessProfile",
            "table imports torchrec_oper.profile.AccessProfile",
        ),
        ("errors.py", "from . import planner", "errors imports torchrec_oper.planner"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, line, found):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(line)
    assert violations(tmp_path) == [found]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("planner/adapter/model.py", "import torchrec\nfrom torchrec_oper.ops import map_ids"),
        ("planner/baselines/row_wise.py", "from torchrec.distributed import planner"),
        ("sharder/modules.py", "import torchrec, fbgemm_gpu\nfrom torchrec_oper import planner"),
        ("cli/main.py", "from torchrec_oper.cli.plan import run\nimport torchrec_oper.planner"),
        ("cli/calibrate.py", "from torchrec_oper.bench.calibrate import calibrate"),
        ("bench/rows.py", "import fbgemm_gpu, torchrec\nfrom torchrec_oper import planner"),
        ("planner/search.py", "from torchrec_oper.profile import AccessProfile\nimport torch"),
        ("table.py", "from torchrec_oper.errors import ProfileError"),
    ],
)
def test_what_is_allowed_passes(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    assert violations(tmp_path) == []


def test_profiles_and_plans_load_neither_torchrec_nor_the_ops():
    program = (
        "import sys, torchrec_oper.profile, torchrec_oper.planner\n"
        "names = 'torchrec', 'fbgemm_gpu', 'torchrec_oper.ops', 'torchrec_oper.sharder'\n"
        "print([name for name in names if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr
