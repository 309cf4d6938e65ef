"""Measures this machine's ranks: their random reads and updates, and the links among them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

from tqdm.auto import tqdm

from torchrec_oper.bench.group import Group
from torchrec_oper.bench.link_times import level_count, link_fits
from torchrec_oper.bench.row_times import fitting_table_bytes, row_rates
from torchrec_oper.planner.calibration import LinkFit, RowTimes, calibrated, host_numbers
from torchrec_oper.planner.cluster import Cluster, available_bytes

POOR_FIT = 0.5  # the report warns of a model that is further off


@dataclass(frozen=True)
class Effort:
    """What is measured, and how often.

    Args:
        row_bytes: row sizes, multiples of 16, ascending.
        lookups: ids of a pass, a multiple of 4.
        table_bytes: size of a table; by default several times the largest cache.
        message_bytes: what a rank sends to one peer, ascending.
        repeats: measurements of each, of which the median counts.
    """

    row_bytes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    lookups: int = 2**17
    table_bytes: int | None = None
    message_bytes: tuple[int, ...] = tuple(4**power for power in range(5, 13))
    repeats: int = 9


FULL = Effort()
QUICK = Effort(
    row_bytes=(32, 128, 512),
    lookups=2**15,
    message_bytes=tuple(4**power for power in range(5, 11)),
    repeats=3,
)


@dataclass(frozen=True)
class Calibration:
    """What was measured, and the cluster made of it.

    Args:
        ranks: [W] how fast each rank was.
        intra_host: the link within hosts; None where no host has two ranks.
        inter_host: the link between hosts; None where there is one.
        cluster: what a plan needs.
        repeats: measurements of each value.
    """

    ranks: tuple[RowTimes, ...]
    intra_host: LinkFit | None
    inter_host: LinkFit | None
    cluster: Cluster
    repeats: int


def calibrate(group: Group, effort: Effort = FULL, *, progress: bool = False) -> Calibration:
    """Measure; every rank calls it and gets the same.

    Args:
        group: all ranks.
        effort: what is measured, and how often.
        progress: show a bar on rank 0, where stderr is a terminal.

    Raises:
        PlanError: the times make no sense.
    """
    name = socket.gethostname()
    names = group.gather(name)
    hosts = host_numbers(names)
    memory_bytes = available_bytes() // names.count(name)
    rounds = effort.repeats + 1
    total = rounds * (len(effort.row_bytes) + level_count(hosts) * len(effort.message_bytes))
    # None lets tqdm keep quiet where stderr is not a terminal.
    hidden = None if progress and group.rank == 0 else True
    with tqdm(total=total, desc="calibrate", unit=" measurements", disable=hidden) as bar:
        read, update = row_rates(
            group,
            row_bytes=effort.row_bytes,
            table_bytes=effort.table_bytes or fitting_table_bytes(memory_bytes),
            lookups=effort.lookups,
            repeats=effort.repeats,
            tick=bar.update,
        )
        links = link_fits(
            group,
            hosts,
            message_bytes=effort.message_bytes,
            repeats=effort.repeats,
            ticks=bar.update,
        )
    mine = RowTimes(
        host=name,
        memory_bytes=memory_bytes,
        row_bytes=effort.row_bytes,
        read_bytes_per_s=tuple(read.tolist()),
        update_bytes_per_s=tuple(update.tolist()),
    )
    ranks = tuple(group.gather(mine))
    intra, inter = links
    cluster = group.on_first(lambda: calibrated(ranks, intra_host=intra, inter_host=inter))
    return Calibration(ranks, intra, inter, cluster, effort.repeats)


def report_lines(calibration: Calibration) -> Iterator[str]:
    """What was measured and how well the model fits, for people."""
    cluster = calibration.cluster
    hosts = int(cluster.hosts.max()) + 1
    ranks = cluster.world_size
    yield (
        f"measured {ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}, all at"
        f" once; medians of {calibration.repeats}"
    )
    yield ""
    yield f"{'row bytes':>12}{'read GB/s':>12}{'update GB/s':>13}   (the mean rank)"
    pairs = zip(cluster.rates.read.points, cluster.rates.update.points, strict=True)
    for (size, read), (_, update) in pairs:
        yield f"{size:12,}{read / 1e9:12.2f}{update / 1e9:13.3f}"
    yield ""
    found = " ".join(f"{speed:g}" for speed in dict.fromkeys(cluster.speeds.tolist()))
    yield f"speeds of ranks: {'all alike' if found == '1' else found}"
    fits = (("within a host", calibration.intra_host), ("between hosts", calibration.inter_host))
    for where, fit in fits:
        if fit is not None:
            yield ""
            yield from _link_lines(where, fit)
    yield ""
    yield "not measured, taken from the defaults:"
    for where, fit in fits:
        if fit is None:
            yield f"  links {where}: there is no such pair of ranks"
    yield "  shard_overhead_s: what a piece of a table costs in each pass"
    yield "  shares_memory (false): the host and cuda fabrics, which this version doesn't have"


def _link_lines(where: str, fit: LinkFit) -> Iterator[str]:
    link = fit.link
    yield (
        f"links {where} (gloo): {link.latency_s * 1e6:.1f} us to start a phase, then"
        f" {link.bytes_per_s / 1e9:.2f} GB/s for each rank and direction"
    )
    yield f"{'bytes sent':>12}{'measured us':>13}{'model us':>11}{'error':>8}"
    for sent, seconds, error in zip(fit.sent_bytes, fit.seconds, fit.errors, strict=True):
        yield f"{sent:12,}{seconds * 1e6:13.1f}{seconds * (1 + error) * 1e6:11.1f}{error:8.0%}"
    yield f"worst error of the model: {fit.worst_error:.0%}"
    if fit.worst_error > POOR_FIT:
        yield "a poor fit: if something else kept the machine busy, measure again"
