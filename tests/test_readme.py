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
    assert run.stdout == shown


def test_names_used_in_the_readme_exist() -> None:
    import torchrec_oper
    from torchrec_oper.planner import Plan, sharding_plan
    from torchrec_oper.sharder import ShardedOperEmbeddingBagCollection

    assert {"AccessProfile", "OperPlanner", "OperSharder"} <= set(dir(torchrec_oper))
    for name in ("save", "load", "report", "content_hash", "planned_lookups"):
        assert hasattr(Plan, name)
    assert hasattr(ShardedOperEmbeddingBagCollection, "served_lookups")
    assert callable(sharding_plan)
