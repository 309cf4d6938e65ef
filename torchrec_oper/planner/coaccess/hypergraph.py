"""The hypergraph of a table's bags over its rows, and its partition by Mt-KaHyPar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.row_map import Ints

MOST_PINS = 1 << 20
"""Pins of a hypergraph at most, which take some minutes on one core. The planning half of
a profile of the usual size has fewer."""

# Mt-KaHyPar adds weights up in 32 bits.
MOST_WEIGHT = 1 << 30
SEEDS = 1 << 31


@dataclass(frozen=True, eq=False)
class BagHypergraph:
    """Which rows, and which parts that stay as they are, the bags of one table name together.

    Vertices 0 to R-1 are rows, the T after them parts: all rows of a part that stay there.

    Args:
        rows: [R] int64, positions among the table's listed rows, ascending.
        fixed_parts: [T] int64, parts, ascending.
        nets: the vertices of each bag, two or more, no two bags alike.
        net_weights: how many bags there are of each.
    """

    rows: Ints
    fixed_parts: Ints
    nets: tuple[tuple[int, ...], ...]
    net_weights: tuple[int, ...]


def bag_hypergraph(
    vertices: Ints, lengths: Ints, *, listed_rows: int, most_pins: int = MOST_PINS
) -> BagHypergraph:
    """The hypergraph of bags.

    Bags that a part serves whatever happens to rows, those of less than two vertices, are
    left out; so is what comes after ``most_pins`` pins.

    Args:
        vertices: [N] int64, bag after bag: below ``listed_rows`` the position of a listed
            row, above it ``listed_rows`` and the part of a row that stays there, -1 for
            what no part serves. May have repeats.
        lengths: [B] int64, how many there are in each bag.
        listed_rows: how many rows may move.
        most_pins: vertices of all bags together at most.
    """
    named = vertices >= 0
    bag_of = np.repeat(np.arange(len(lengths)), lengths)[named]
    width = int(vertices.max(initial=-1)) + 1
    bags, pins = np.divmod(np.unique(bag_of * width + vertices[named]), max(width, 1))
    sizes = np.bincount(bags, minlength=len(lengths))
    movable = np.bincount(bags[pins < listed_rows], minlength=len(lengths))
    useful = (sizes > 1) & (movable > 0)
    useful &= np.cumsum(sizes * useful) <= most_pins
    used, pins = np.unique(pins[useful[bags]], return_inverse=True)
    counts: dict[tuple[int, ...], int] = {}
    ends = np.cumsum(sizes[useful])
    flat = pins.tolist()
    for begin, end in zip((ends - sizes[useful]).tolist(), ends.tolist(), strict=True):
        net = tuple(flat[begin:end])
        counts[net] = counts.get(net, 0) + 1
    return BagHypergraph(
        rows=used[used < listed_rows],
        fixed_parts=used[used >= listed_rows] - listed_rows,
        nets=tuple(counts),
        net_weights=tuple(counts.values()),
    )


def partition(
    graph: BagHypergraph, weights: Ints, most_weights: Sequence[float], *, seed: int
) -> Ints:
    """[R] the part of each row, so that bags have their rows in few parts.

    Minimises the sum over bags of the parts that serve it (the connectivity metric),
    deterministically and on one thread.

    Args:
        graph: the bags.
        weights: [R] int64, of the rows.
        most_weights: of the rows of each part; exceeded where nothing else is found.
        seed: of the random choices.

    Raises:
        PlanError: Mt-KaHyPar isn't installed.
    """
    kahypar, rows, parts = mt_kahypar(), len(graph.rows), len(most_weights)
    scale = max(float(weights.sum()) / MOST_WEIGHT, 1.0)
    # Without a weight, a vertex would lose its part.
    fixed = graph.fixed_parts.tolist()
    scaled = np.maximum((weights / scale).astype(np.int64), 1).tolist() + [1] * len(fixed)
    limits = [max(int(most / scale), 1) + (part in fixed) for part, most in enumerate(most_weights)]
    start = kahypar.initialize(1, False)
    context = start.context_from_preset(kahypar.PresetType.DETERMINISTIC)
    context.logging = False
    context.set_partitioning_parameters(parts, 0.0, kahypar.Objective.KM1)
    context.set_individual_target_block_weights(limits)
    made = start.create_hypergraph(
        context, len(scaled), len(graph.nets), graph.nets, scaled, graph.net_weights
    )
    if fixed:
        made.add_fixed_vertices([-1] * rows + fixed, parts)
    kahypar.set_seed(seed % SEEDS)
    found = np.array(made.partition(context).get_partition(), dtype=np.int64)
    return found[:rows]


def mt_kahypar() -> Any:
    """The module ``mtkahypar``.

    Raises:
        PlanError: it isn't installed; the message says how to.
    """
    try:
        import mtkahypar
    except ImportError as error:
        raise PlanError(
            "refinement by co-access needs Mt-KaHyPar, a hypergraph partitioner, which can't be"
            f' imported ({error}); pip install "torchrec-oper[graph]", or plan without it'
        ) from error
    return mtkahypar
