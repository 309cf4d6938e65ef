"""A picture of a plan: where the seconds of each rank go, and how full its memory is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from torchrec_oper.archive import replace_file
from torchrec_oper.errors import PlanError, VersionError
from torchrec_oper.planner.readable import (
    byte_unit,
    bytes_text,
    count,
    percent,
    seconds_text,
    time_unit,
)

if TYPE_CHECKING:
    from torchrec_oper.planner.plan import Plan

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, which colour-blind people tell apart; one for each part.
COLOURS = {
    "memory": "#0072B2",
    "shards": "#000000",
    "ids": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "allreduce": "#D55E00",
    "latency": "#B5B5B5",
}
TOLD = {
    "memory": "rows read and updated",
    "shards": "overhead of pieces",
    "ids": "ids travel",
    "forward": "values travel",
    "backward": "gradients travel",
    "allreduce": "hot rows' gradients summed",
    "latency": "latency",
}

# So many bars still have room between them.
SEPARATE_BARS = 64


def check_picture(path: str | os.PathLike[str]) -> None:
    """Find before long work what would keep ``save_picture`` from drawing to ``path``.

    Raises:
        VersionError: matplotlib isn't installed; the message says how to.
        PlanError: the suffix isn't one of ``SUFFIXES``.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise PlanError(f"a picture is called *{', *'.join(SUFFIXES)}; found {str(path)!r}")
    _matplotlib()


def save_picture(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draw the predicted seconds and the memory of each rank, all or nothing.

    Args:
        plan: the plan.
        path: a .png, .svg or .pdf file.

    Raises:
        OSError: the file can't be written.
        PlanError, VersionError: see ``check_picture``.
    """
    check_picture(path)
    figure = _figure(plan)
    kind = Path(path).suffix.lower()[1:]
    # Without dates and random names, equal plans give equal files.
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)

    def write(file: IO[bytes]) -> None:
        with _matplotlib().rc_context({"svg.hashsalt": plan.content_hash}):
            figure.savefig(file, format=kind, dpi=150, metadata=undated)

    replace_file(path, write)


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise VersionError(
            "pictures need matplotlib, which isn't installed;"
            " install it with: pip install 'torchrec-oper[report]'"
        ) from error
    return matplotlib


def _figure(plan: Plan) -> Any:
    # Not pyplot: it would look for a screen and keep the figure.
    figure = _matplotlib().figure.Figure(figsize=(10, 6.4), layout="constrained")
    seconds, memory = figure.subplots(2, 1, height_ratios=(3, 1.2), sharex=True)
    tables, ranks = count(len(plan.placements), "table"), count(plan.world_size, "rank")
    doing = "training" if plan.workload.objective == "train" else "inference"
    figure.suptitle(
        f"{tables} on {ranks}, {doing}: a step takes"
        f" {seconds_text(plan.cost_s)}, within {percent(plan.gap)} of the best",
        fontsize=12,
    )
    _draw_seconds(plan, seconds)
    _draw_memory(plan, memory)
    memory.set_xlabel("rank")
    memory.set_xlim(-0.6, plan.world_size - 0.4)
    memory.xaxis.get_major_locator().set_params(integer=True)
    for axes in (seconds, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.5, alpha=0.4)
        axes.set_axisbelow(True)
        handles, labels = _legend(axes)
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        axes.legend(handles, labels, frameon=False, fontsize=9, **place)
    figure.align_ylabels()
    return figure


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    """Handles and labels: lines, then the bars as they lie on each other, the top one first."""
    handles, labels = axes.get_legend_handles_labels()
    lines = [handle in axes.lines for handle in handles]
    numbers = range(len(handles))
    order = [n for n in numbers if lines[n]] + [n for n in reversed(numbers) if not lines[n]]
    return [handles[n] for n in order], [labels[n] for n in order]


def _draw_seconds(plan: Plan, axes: Any) -> None:
    unit = time_unit(plan.rank_s)
    base = np.zeros(plan.world_size)
    for name, values in plan.seconds.items():
        heights = np.array(values) / unit.size
        if heights.any():
            _bars(axes, heights, base, COLOURS.get(name), TOLD.get(name, name))
            base += heights
    mean_s = sum(plan.rank_s) / plan.world_size
    for value_s, style, what in (
        (plan.cost_s, "-", "slowest rank"),
        (mean_s, ":", "mean"),
        (plan.bound_s, "--", "bound"),
    ):
        told = f"{what}: {seconds_text(value_s)}"
        axes.axhline(value_s / unit.size, color="black", linewidth=1, linestyle=style, label=told)
    axes.set_ylabel(f"predicted step [{unit.name}]")
    axes.set_ylim(0, plan.cost_s / unit.size * 1.06 or 1)


def _draw_memory(plan: Plan, axes: Any) -> None:
    caps = plan.cluster.memory_bytes
    unit = byte_unit(plan.memory_bytes)
    used = np.array(plan.memory_bytes, dtype=np.float64) / unit.size
    nothing = np.zeros(plan.world_size)
    _bars(axes, used, nothing, "#009E73", "rows and optimizer state")
    # Caps far above would press the bars flat.
    if caps.min() / unit.size <= 4 * used.max():
        edges = np.arange(plan.world_size + 1) - 0.5
        axes.stairs(caps / unit.size, edges, color="black", label="cap", baseline=None)
    else:
        more = "" if caps.min() == caps.max() else " or more"
        axes.plot([], [], " ", label=f"cap: {bytes_text(float(caps.min()))}{more}")
    axes.set_ylabel(f"memory [{unit.name}]")
    axes.set_ylim(0, None)


def _bars(axes: Any, heights: Any, base: Any, colour: str | None, label: str) -> None:
    """Bars on ``base``, or a filled outline where there are too many to tell apart."""
    if len(heights) <= SEPARATE_BARS:
        ranks = np.arange(len(heights))
        axes.bar(ranks, heights, bottom=base, width=0.8, color=colour, label=label)
    else:
        edges = np.arange(len(heights) + 1) - 0.5
        axes.stairs(base + heights, edges, baseline=base, fill=True, color=colour, label=label)
