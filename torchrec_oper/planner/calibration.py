"""From measured times to a cluster. ``torchrec_oper.bench`` measures, nothing here does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.cluster import Cluster, RankSpec
from torchrec_oper.planner.rates import Link, Rate, Rates

Floats = npt.NDArray[np.float64]

DIGITS = 4  # of a calibrated number: more would be noise, and hard to read
# Two ranks whose speeds differ by less than this are taken for alike: it is noise.
ALIKE = 1.05


@dataclass(frozen=True)
class LinkFit:
    """A link's model beside the times it was fitted to.

    Args:
        link: latency and rate.
        sent_bytes: what a rank sent to the others in a phase, for each measured size.
        seconds: the measured time of each.
    """

    link: Link
    sent_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def errors(self) -> Floats:
        """[sizes] the model's time over the measured one, less 1."""
        modelled = self.link.latency_s + np.array(self.sent_bytes) / self.link.bytes_per_s
        return np.asarray(modelled / np.array(self.seconds) - 1)

    @property
    def worst_error(self) -> float:
        """The largest of the errors, whatever its sign."""
        return float(np.abs(self.errors).max())


def fit_link(sent_bytes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """The latency and rate that make the squares of the relative errors least.

    ``seconds`` = latency + ``sent_bytes`` / rate, each equation divided by its measured
    time, is linear in the latency and in 1 / rate. A latency below 0 becomes 0.

    Args:
        sent_bytes: [sizes], at least two different ones.
        seconds: [sizes] above 0.

    Raises:
        PlanError: there are fewer than two sizes, or more bytes didn't take longer.
    """
    sent = np.array(sent_bytes, dtype=np.float64)
    times = np.array(seconds, dtype=np.float64)
    if sent.shape != times.shape or len(np.unique(sent)) < 2:
        raise PlanError(f"a link needs the times of two sizes or more, found {len(times)}")
    if not (np.isfinite(times).all() and (times > 0).all() and (sent > 0).all()):
        raise PlanError("a link's sizes and times must be above 0")
    # In units near 1, so that neither column drowns in the other.
    unit_bytes, unit_s = sent.mean(), times.mean()
    columns = np.stack([unit_s / times, sent / unit_bytes * unit_s / times], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
    if latency < 0:
        latency = 0.0
        slope = columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    if slope <= 0:
        raise PlanError(
            f"sending {int(sent.max()):,} bytes took no longer than sending {int(sent.min()):,};"
            " something else kept the machine busy: measure again"
        )
    link = Link(float(latency * unit_s), float(unit_bytes / (slope * unit_s)))
    return LinkFit(link, tuple(int(size) for size in sent_bytes), tuple(times.tolist()))


def speeds(rates: npt.ArrayLike) -> Floats:
    """The speed of each rank relative to the mean, where noise doesn't make a difference.

    From the slowest rank up, ranks within ``ALIKE`` of the slowest of their group get the
    group's mean, to three decimal places.

    Args:
        rates: [W] bytes per second of each rank, above 0.

    Returns:
        [W] speeds; all 1 where all ranks are alike.
    """
    relative = np.asarray(rates, dtype=np.float64)
    relative = relative / relative.mean()
    order = np.argsort(relative, kind="stable")
    groups: list[list[int]] = []
    for rank in order.tolist():
        if groups and relative[rank] < relative[groups[-1][0]] * ALIKE:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    found = np.empty(len(relative))
    for group in groups:
        # Never 0, however slow a rank.
        found[group] = max(round(float(relative[group].mean()), 3), 1e-3)
    return found


@dataclass(frozen=True)
class RowTimes:
    """How fast one rank read and updated random rows, with all others at work too.

    Args:
        host: the name of its host.
        memory_bytes: see ``RankSpec``.
        row_bytes: the measured row sizes, ascending.
        read_bytes_per_s: for each size.
        update_bytes_per_s: for each size.
    """

    host: str
    memory_bytes: int
    row_bytes: tuple[int, ...]
    read_bytes_per_s: tuple[float, ...]
    update_bytes_per_s: tuple[float, ...]


def host_numbers(names: Sequence[str]) -> list[int]:
    """[W] a number for each host, in the order of their first ranks."""
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return [number[name] for name in names]


def calibrated(
    ranks: Sequence[RowTimes], *, intra_host: LinkFit | None, inter_host: LinkFit | None
) -> Cluster:
    """The cluster that was measured.

    A rank's speed is the geometric mean of its read rates over the row sizes, relative to
    the mean rank; the cluster's rates are the mean of the ranks' after division by their
    speeds. What was measured is rounded to ``DIGITS`` digits; the rest is as in ``Rates()``.

    Args:
        ranks: of each rank, in rank order, the same row sizes.
        intra_host: the link within hosts; None where it wasn't measured.
        inter_host: the link between hosts; likewise.

    Raises:
        PlanError: a measured value is out of range.
    """
    reads = np.array([rank.read_bytes_per_s for rank in ranks])
    updates = np.array([rank.update_bytes_per_s for rank in ranks])
    found = speeds(np.exp(np.log(reads).mean(axis=1)))
    hosts = host_numbers([rank.host for rank in ranks])

    def rate(measured: Floats) -> Rate:
        means = (measured / found[:, None]).mean(axis=0)
        return Rate(tuple(zip(ranks[0].row_bytes, map(_rounded, means.tolist()), strict=True)))

    def link(fit: LinkFit | None, default: Link) -> Link:
        if fit is None:
            return default
        return Link(_rounded(fit.link.latency_s), _rounded(fit.link.bytes_per_s))

    default = Rates()
    rates = Rates(
        read=rate(reads),
        update=rate(updates),
        intra_host=link(intra_host, default.intra_host),
        inter_host=link(inter_host, default.inter_host),
    )
    specs = (
        RankSpec(rank.memory_bytes, host, speed)
        for rank, host, speed in zip(ranks, hosts, found.tolist(), strict=True)
    )
    return Cluster(tuple(specs), rates)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
