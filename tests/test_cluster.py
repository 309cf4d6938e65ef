"""Cluster: detection and its refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import Cluster, RankSpec
from torchrec_oper.planner.cluster import Rates, _host_bytes


def test_detects_the_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cluster = Cluster.detect()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cluster.world_size == 8
    assert {rank.memory_bytes for rank in cluster.ranks} == {int(host * 0.8) // 4}
    assert cluster.hosts.tolist() == [0] * 4 + [1] * 4


def test_is_one_rank_outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert Cluster.detect().world_size == 1


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_names_a_wrong_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(PlanError, match="WORLD_SIZE must be a positive whole number, found"):
        Cluster.detect()


def test_refuses_no_ranks_and_no_memory() -> None:
    with pytest.raises(PlanError, match="at least one rank, found none"):
        Cluster(())
    with pytest.raises(PlanError, match="memory_bytes must be an integer of 1 or more, found 0"):
        RankSpec(0)


@pytest.mark.parametrize("size", [1.5, 2.0**30, "1", None, float("inf")])
def test_memory_is_a_whole_number(size: object) -> None:
    with pytest.raises(PlanError, match="memory_bytes must be an integer of 1 or more, found"):
        RankSpec(size)


def test_numpy_numbers_become_plain_ones() -> None:
    rank = RankSpec(np.int32(7), np.int64(0), np.float32(0.5))
    assert [type(value) for value in (rank.memory_bytes, rank.host, rank.speed)] == [
        int,
        int,
        float,
    ]
    fields = Cluster.uniform(np.int64(2), memory_bytes=np.int32(7)).to_json()
    assert json.loads(json.dumps(fields)) == fields
    assert fields["memory_bytes"] == [7, 7]
    assert fields["host"] == [0, 0]
    assert fields["speed"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": -1}, "a rank's host must be an integer of 0 or more, found -1"),
        ({"host": 0.0}, "a rank's host must be an integer of 0 or more, found 0.0"),
        ({"speed": 0}, "a rank's speed must be above 0, found 0"),
        ({"speed": True}, "a rank's speed must be a finite number of 0 or more, found True"),
        ({"speed": float("nan")}, "speed must be a finite number of 0 or more, found nan"),
        ({"speed": 10**400}, "speed must be a finite number of 0 or more, found 1000"),
        ({"speed": "1"}, "speed must be a finite number of 0 or more, found '1'"),
    ],
)
def test_a_wrong_rank_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as error:
        RankSpec(5, **change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("ranks", "rates", "message"),
    [
        (RankSpec(5), Rates(), "ranks must be RankSpec values, found RankSpec("),
        ((5,), Rates(), "ranks must be RankSpec values, found 5"),
        ((RankSpec(5),), None, "rates must be a Rates, found None"),
        ((RankSpec(5, 1),), Rates(), "hosts must be numbered from 0 without a gap, found [1]"),
        ((RankSpec(5), RankSpec(5, 2)), Rates(), "without a gap, found [0, 2]"),
        ((RankSpec(5, 2**62),), Rates(), "without a gap, found [4611686018427387904]"),
    ],
)
def test_a_wrong_cluster_is_refused(ranks: object, rates: object, message: str) -> None:
    with pytest.raises(PlanError) as error:
        Cluster(ranks, rates)
    assert message in str(error.value)


def test_what_each_rank_has() -> None:
    ranks = [RankSpec(7, 1), RankSpec(5, 0, 0.5), RankSpec(7, 1)]
    cluster = Cluster(ranks)
    assert cluster.ranks == tuple(ranks)
    assert cluster.hosts.tolist() == [1, 0, 1]
    assert cluster.local_sizes.tolist() == [2, 1, 2]
    assert cluster.speeds.tolist() == [1.0, 0.5, 1.0]
    assert cluster.memory_bytes.tolist() == [7.0, 5.0, 7.0]


def test_uniform_fills_one_host_after_the_other() -> None:
    assert Cluster.uniform(5, memory_bytes=1, ranks_per_host=2).hosts.tolist() == [0, 0, 1, 1, 2]
    assert Cluster.uniform(3, memory_bytes=1).hosts.tolist() == [0, 0, 0]
    with pytest.raises(PlanError, match="ranks_per_host must be an integer of 1 or more, found 0"):
        Cluster.uniform(2, memory_bytes=1, ranks_per_host=0)


@pytest.mark.parametrize("ranks", [0, -2])
def test_detect_refuses_no_ranks(ranks: int) -> None:
    with pytest.raises(
        PlanError, match=f"world_size must be an integer of 1 or more, found {ranks}"
    ):
        Cluster.detect(ranks)


def test_a_container_limit_counts(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert _host_bytes(limit) == host
    for text, wanted in (("4096\n", 4096), ("max\n", host), (f"{2 * host}\n", host)):
        limit.write_text(text)
        assert _host_bytes(limit) == wanted


def test_json_round_trip_and_hash() -> None:
    cluster = Cluster((RankSpec(5), RankSpec(7)))
    again = Cluster.from_json(cluster.to_json())
    assert again == cluster
    assert again.content_hash == cluster.content_hash
    assert Cluster.uniform(2, memory_bytes=5).content_hash != cluster.content_hash
