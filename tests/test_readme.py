"""The README's first example runs as shown and prints what is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_example_prints_what_the_readme_shows() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    code, shown = re.search(
        r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", text, re.S
    ).groups()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert without_hash(run.stdout) == without_hash(shown)


def without_hash(report: str) -> str:
    """The report without the plan's hash, which counts the last bit of every float."""
    found, times = re.subn(r"^plan [0-9a-f]{12}:", "plan:", report)
    assert times == 1
    return found


def test_the_training_script_runs_on_two_ranks(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(re.search(r"train\.py`:\n\n```python\n(.*?)```", text, re.S)[1])
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = subprocess.run(
        [sys.executable, *launcher, str(script)], capture_output=True, text=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    served = [int(count) for count in re.findall(r"rank \d served (\d+) lookups", run.stdout)]
    assert len(served) == 2
    assert sum(served) == 2 * 10 * 64


def test_names_used_in_the_readme_exist() -> None:
    import torchrec_oper
    from torchrec_oper import Plan, sharding_plan
    from torchrec_oper.sharder import ShardedOperEmbeddingBagCollection

    assert {"AccessProfile", "OperPlanner", "OperSharder"} <= set(dir(torchrec_oper))
    for name in ("save", "load", "report", "content_hash", "planned_lookups", "bound_s", "gap"):
        assert hasattr(Plan, name)
    assert hasattr(ShardedOperEmbeddingBagCollection, "served_lookups")
    assert callable(sharding_plan)
