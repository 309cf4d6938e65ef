"""Placements to compare with: TorchRec's own planner, and the usual rules of thumb.

What needs TorchRec is in ``torchrec_worker``, which runs in a process of its own.
"""

from torchrec_oper.planner.baselines.collectives import stock_loads
from torchrec_oper.planner.baselines.our_exchange import OurExchanges, with_our_exchanges
from torchrec_oper.planner.baselines.rules import (
    GREEDY_SIZES,
    OverMemoryError,
    greedy_table_wise,
    row_wise,
)
from torchrec_oper.planner.baselines.stock_placement import StockPlacement, Task
from torchrec_oper.planner.baselines.torchrec_planner import (
    TorchRecFailedError,
    TorchRecPlanner,
    TorchRecTimeoutError,
)

__all__ = [
    "GREEDY_SIZES",
    "OurExchanges",
    "OverMemoryError",
    "StockPlacement",
    "Task",
    "TorchRecFailedError",
    "TorchRecPlanner",
    "TorchRecTimeoutError",
    "greedy_table_wise",
    "row_wise",
    "stock_loads",
    "with_our_exchanges",
]
