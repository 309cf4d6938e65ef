"""Cluster: detection and its refusals."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import Cluster, RankSpec
from torchrec_oper.planner.cluster import _host_bytes


def test_detects_the_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cluster = Cluster.detect()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cluster.world_size == 8
    assert {rank.memory_bytes for rank in cluster.ranks} == {int(host * 0.8) // 4}


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
    assert Cluster.uniform(np.int64(2), memory_bytes=np.int32(7)).to_json() == {
        "memory_bytes": [7, 7]
    }


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
