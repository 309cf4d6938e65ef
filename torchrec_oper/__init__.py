"""Optimality-guided placement of embedding rows for TorchRec.

The names below are loaded when first used, so that reading a log or making a plan
(``torchrec_oper.profile``, ``torchrec_oper.planner``) imports neither TorchRec nor
the compiled ops.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torchrec_oper.versions import check_versions

if TYPE_CHECKING:
    from torchrec_oper.planner import Cluster, Constraints, Plan, RowMap
    from torchrec_oper.planner.adapter import OperPlanner, sharding_plan
    from torchrec_oper.profile import AccessProfile
    from torchrec_oper.profile.callback import ProfileCallback
    from torchrec_oper.sharder import OperSharder
    from torchrec_oper.table import TableSpec

__all__ = [
    "AccessProfile",
    "Cluster",
    "Constraints",
    "OperPlanner",
    "OperSharder",
    "Plan",
    "ProfileCallback",
    "RowMap",
    "TableSpec",
    "__version__",
    "sharding_plan",
]

__version__ = "0.1.0"

_HOMES = {
    "AccessProfile": "torchrec_oper.profile",
    "Cluster": "torchrec_oper.planner",
    "Constraints": "torchrec_oper.planner",
    "OperPlanner": "torchrec_oper.planner.adapter",
    "OperSharder": "torchrec_oper.sharder",
    "Plan": "torchrec_oper.planner",
    "ProfileCallback": "torchrec_oper.profile.callback",
    "RowMap": "torchrec_oper.planner",
    "TableSpec": "torchrec_oper.table",
    "sharding_plan": "torchrec_oper.planner.adapter",
}

if not TYPE_CHECKING:  # hidden, or type checkers would take any name for an attribute

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


check_versions()
