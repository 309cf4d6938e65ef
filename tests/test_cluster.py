"""Cluster: detection and its refusals."""

from __future__ import annotations

import os

import pytest

from torchrec_oper.errors import PlanError
from torchrec_oper.planner import Cluster, RankSpec


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
    with pytest.raises(PlanError, match="memory_bytes must be 1 or more, found 0"):
        RankSpec(0)


def test_json_round_trip_and_hash() -> None:
    cluster = Cluster((RankSpec(5), RankSpec(7)))
    again = Cluster.from_json(cluster.to_json())
    assert again == cluster
    assert again.content_hash == cluster.content_hash
    assert Cluster.uniform(2, memory_bytes=5).content_hash != cluster.content_hash
