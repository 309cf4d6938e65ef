"""From measured times to a cluster, and the measuring itself on tiny sizes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm.auto import tqdm

from ranks import RankError, run_ranks
from torchrec_oper.bench import calibrate as measuring
from torchrec_oper.bench import link_times, row_times
from torchrec_oper.bench.calibrate import Calibration, Effort, calibrate, report_lines
from torchrec_oper.bench.group import Group, all_ranks
from torchrec_oper.errors import PlanError
from torchrec_oper.planner.calibration import (
    LinkFit,
    RowTimes,
    calibrated,
    fit_link,
    host_numbers,
    speeds,
)
from torchrec_oper.planner.cluster import Link, RankSpec, Rate, Rates

TINY = Effort(
    row_bytes=(32, 64),
    lookups=64,
    table_bytes=2**14,
    message_bytes=(256, 2**18),
    repeats=2,
)


def test_two_points_by_hand() -> None:
    # 2 s to start, then 5 bytes a second.
    fit = fit_link([10, 40], [4.0, 10.0])
    assert fit.link.latency_s == pytest.approx(2.0)
    assert fit.link.bytes_per_s == pytest.approx(5.0)
    assert fit.worst_error == pytest.approx(0.0, abs=1e-12)


@given(
    latency=st.floats(0, 1e-2),
    rate=st.floats(1e6, 1e12),
    sizes=st.lists(st.integers(1, 2**30), min_size=2, max_size=8, unique=True),
)
def test_exact_times_give_exact_parameters(latency: float, rate: float, sizes: list[int]) -> None:
    times = latency + np.array(sizes) / rate
    fit = fit_link(sizes, times.tolist())
    assert fit.worst_error < 1e-6
    assert fit.link.latency_s + max(sizes) / fit.link.bytes_per_s == pytest.approx(max(times))


def test_the_squares_of_relative_errors_are_least() -> None:
    sizes, times = [1, 2, 4, 8], [3.0, 3.5, 6.0, 9.0]
    fit = fit_link(sizes, times)

    def squares(latency: float, slope: float) -> float:
        return float((((latency + slope * np.array(sizes)) / np.array(times) - 1) ** 2).sum())

    latency, slope = fit.link.latency_s, 1 / fit.link.bytes_per_s
    least = squares(latency, slope)
    assert least == pytest.approx(float((fit.errors**2).sum()))
    for step in (-1e-3, 1e-3):
        assert squares(latency + step, slope) > least
        assert squares(latency, slope + step) > least


def test_no_latency_is_below_zero() -> None:
    # A line through the points would start at -1; with latency 0, slopes 1/2 and 2/3 are
    # weighed: sum(x/t) / sum((x/t)^2) = (2 + 3/2) / (4 + 9/4) = 0.56.
    fit = fit_link([2, 3], [1.0, 2.0])
    assert fit.link.latency_s == 0.0
    assert 1 / fit.link.bytes_per_s == pytest.approx(0.56)
    assert fit.errors == pytest.approx([0.12, -0.16])
    assert fit.worst_error == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([5], [1.0], "a link needs the times of two sizes or more, found 1"),
        ([5, 5], [1.0, 1.0], "a link needs the times of two sizes or more, found 2"),
        ([5, 6], [1.0, 0.0], "a link's sizes and times must be above 0"),
        ([5, 6], [1.0, float("nan")], "a link's sizes and times must be above 0"),
        ([1000, 2000], [2.0, 1.0], "sending 2,000 bytes took no longer than sending 1,000;"),
    ],
)
def test_times_without_sense_are_refused(
    sizes: list[int], times: list[float], message: str
) -> None:
    with pytest.raises(PlanError) as error:
        fit_link(sizes, times)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ([7.0], [1.0]),
        ([1.0, 1.04, 1.02], [1.0, 1.0, 1.0]),
        ([1.02, 3.0, 0.98, 3.0], [0.5, 1.5, 0.5, 1.5]),
        ([1.0, 1.06], [0.971, 1.029]),
        ([1e-9, 1.0], [0.001, 2.0]),
    ],
)
def test_speeds_forget_noise(rates: list[float], found: list[float]) -> None:
    assert speeds(rates).tolist() == found
    assert speeds(np.array(rates) * 1e9).tolist() == found


def rank(host: str, read: float) -> RowTimes:
    return RowTimes(host, 100, (32, 64), (read, 2 * read), (read / 4, read / 2))


def test_a_cluster_of_what_was_measured() -> None:
    fit = LinkFit(Link(1.23456e-5, 9.87654e9), (1, 2), (1.0, 1.0))
    ranks = [rank("b", 1e9), rank("a", 3e9), rank("b", 1e9), rank("a", 3e9)]
    cluster = calibrated(ranks, intra_host=fit, inter_host=None)
    assert cluster.ranks == (
        RankSpec(100, 0, 0.5),
        RankSpec(100, 1, 1.5),
        RankSpec(100, 0, 0.5),
        RankSpec(100, 1, 1.5),
    )
    assert cluster.rates == Rates(
        read=Rate(((32, 2e9), (64, 4e9))),
        update=Rate(((32, 5e8), (64, 1e9))),
        intra_host=Link(1.235e-5, 9.877e9),
    )
    assert host_numbers(["x", "y", "x"]) == [0, 1, 0]


def test_the_report_says_how_well_the_model_fits_and_what_is_missing() -> None:
    ranks = (rank("b", 1e9), rank("b", 3e9))
    intra = LinkFit(Link(1e-6, 1e9), (1000, 9000), (2e-6, 8e-6))
    cluster = calibrated(ranks, intra_host=intra, inter_host=None)
    text = "\n".join(report_lines(Calibration(ranks, intra, None, cluster, 3)))
    assert text.startswith("measured 2 ranks on 1 host, all at once; medians of 3\n")
    assert "          32        2.00        0.500\n" in text
    assert "speeds of ranks: 0.5 1.5\n" in text
    assert "links within a host (gloo): 1.0 us to start a phase, then 1.00 GB/s" in text
    assert "       9,000          8.0       10.0     25%\nworst error of the model: 25%\n" in text
    assert "  links between hosts: there is no such pair of ranks\n" in text
    assert "a poor fit" not in text
    poor = LinkFit(Link(1e-6, 1e9), (1000, 9000), (2e-6, 4e-6))
    text = "\n".join(report_lines(Calibration(ranks, poor, None, cluster, 3)))
    assert "worst error of the model: 150%\na poor fit: if something else" in text


def test_one_process_measures_itself() -> None:
    with all_ranks() as group:
        calibration = calibrate(group, TINY)
    cluster = calibration.cluster
    assert cluster.world_size == 1
    assert cluster.speeds.tolist() == [1.0]
    assert [size for size, _ in cluster.rates.read.points] == [32, 64]
    assert [size for size, _ in cluster.rates.update.points] == [32, 64]
    assert cluster.rates.intra_host == Rates().intra_host
    assert calibration.intra_host is None
    assert calibration.inter_host is None


def measured(rank: int, host_of_rank: list[str], seconds: dict[int, float]) -> Any:
    """What each of the ranks gets, with pretended host names and times of messages."""
    measuring.socket.gethostname = lambda: host_of_rank[rank]  # type: ignore[assignment]
    real = link_times._phase

    def phase(group: Group, level: link_times.Level, message_bytes: int) -> float:
        elapsed = real(group, level, message_bytes)
        assert (elapsed > 0) == any(level.peers)
        return seconds[message_bytes] * (1 + rank) * any(level.peers)

    link_times._phase = phase
    calibration = calibrate(Group(), TINY)
    intra, inter = calibration.intra_host, calibration.inter_host
    return calibration.cluster.to_json(), intra and intra.link, inter and inter.link


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("hosts", "numbers", "sent_within", "sent_between", "slowest"),
    [
        (["a", "b"], [0, 1], 0, 1, (0, 2)),
        (["a", "b", "b"], [0, 1, 1], 1, 2, (3, 3)),
    ],
)
def test_all_ranks_agree(
    hosts: list[str],
    numbers: list[int],
    sent_within: int,
    sent_between: int,
    slowest: tuple[int, int],
) -> None:
    # 1 s to start, then 256 messages' bytes a second, as the first rank has it.
    seconds = {256: 2.0, 2**18: 1.0 + 2**10}
    results = run_ranks(len(hosts), measured, hosts, seconds)
    assert results == [results[0]] * len(hosts)
    fields, intra, inter = results[0]
    assert fields["host"] == numbers
    peer_counts = (sent_within, sent_between)
    for link, peers, factor in zip((intra, inter), peer_counts, slowest, strict=True):
        if not peers:
            assert link is None
            continue
        assert link.latency_s == pytest.approx(factor)
        assert link.bytes_per_s == pytest.approx(256 * peers / factor)


def failing(rank: int) -> None:
    def fail() -> None:
        raise PlanError("rank 0 can't")

    with pytest.raises(PlanError, match="rank 0 can't"):
        Group().on_first(fail)
    assert Group().on_first(lambda: rank + 7) == 7
    Group().on_first(lambda: Path("/no/such/file").read_text())


@pytest.mark.ranks
def test_what_rank_0_raises_reaches_all() -> None:
    with pytest.raises(RankError, match="No such file or directory: '/no/such/file'"):
        run_ranks(2, failing)


def test_ranks_that_nobody_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    message = "WORLD_SIZE is '2', but .*start them with torchrun"
    with pytest.raises(PlanError, match=message), all_ranks():
        pass


def test_rates_come_from_bytes_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # 8 lookups of 32 bytes: 256 bytes in 2 s, and 5 distinct rows. The backward pass reads
    # 2 gradients in 0.5 s first; of 0.6 s at least half is the update.
    for backward_s, update_s in ((4.5, 4.0), (0.6, 0.3)):
        times = (2.0, backward_s, 5.0)
        monkeypatch.setattr(row_times, "_pass", lambda *args, times=times: times)
        bar = tqdm(disable=False, file=io.StringIO())
        read, update = row_times.row_rates(
            Group(),
            row_bytes=(32,),
            table_bytes=2**10,
            lookups=8,
            repeats=3,
            tick=bar.update,
        )
        assert read.tolist() == [128.0]
        assert update == pytest.approx([160 / update_s])
        assert bar.n == 4


def test_the_table_is_larger_than_the_caches(tmp_path: Path) -> None:
    for index, text in enumerate(("48K\n", "2M\n", "strange\n")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(text)
    assert row_times._largest_cache_bytes(tmp_path) == 2**21
    assert row_times._largest_cache_bytes(tmp_path / "none") == row_times.CACHE_BYTES
    assert row_times.fitting_table_bytes(2**40) >= 2**28
    assert row_times.fitting_table_bytes(2**26) == 2**24
