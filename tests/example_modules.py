"""The modules of the example, for tests that call them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(*names: str) -> SimpleNamespace:
    """The modules of these names, and no trace in ``sys.modules``.

    Both folders have a ``ranks.py``, so what the tests have imported is put aside.
    """
    ours = {path.stem for path in EXAMPLES.glob("*.py")}
    aside = {name: sys.modules.pop(name) for name in ours if name in sys.modules}
    sys.path.insert(0, str(EXAMPLES))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in ours:
            sys.modules.pop(name, None)
        sys.modules.update(aside)
