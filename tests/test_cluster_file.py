"""Clusters and their rates as JSON and as files that people edit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_oper.errors import ArchiveError, PlanError
from torchrec_oper.planner.cluster import Cluster, Link, RankSpec, Rate, Rates

POSITIVE = st.floats(1e-300, 1e300)
LINKS = st.builds(Link, st.floats(0, 1e9), POSITIVE)
RATES = st.builds(
    Rates,
    *[
        st.dictionaries(st.integers(1, 2**62), POSITIVE, min_size=1, max_size=4).map(
            lambda points: Rate(tuple(sorted(points.items())))
        )
    ]
    * 2,
    LINKS,
    LINKS,
    st.floats(0, 1),
    st.booleans(),
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Any cluster: hosts in any order, unlike ranks."""
    hosts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    number = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    ranks = [
        RankSpec(draw(st.integers(1, 2**63 - 1)), number[host], draw(POSITIVE)) for host in hosts
    ]
    return Cluster(tuple(draw(st.permutations(ranks))), draw(RATES))


def good() -> dict[str, Any]:
    """The fields of a cluster, each time anew."""
    return Cluster((RankSpec(5), RankSpec(7, 1, 0.5))).to_json()


def changed(path: str, value: Any) -> dict[str, Any]:
    """``good()`` with the field at ``path`` (``rates.read``) set, or removed for ``...``."""
    fields = inner = good()
    *outer, name = path.split(".")
    for step in outer:
        inner = inner[step]
    if value is ...:
        del inner[name]
    else:
        inner[name] = value
    return fields


@given(cluster=clusters())
def test_json_and_file_round_trip(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster
) -> None:
    path = tmp_path_factory.mktemp("cluster") / "cluster.json"
    cluster.save(path)
    for again in (
        Cluster.from_json(cluster.to_json()),
        Cluster.from_json(json.loads(json.dumps(cluster.to_json()))),
        Cluster.load(path),
    ):
        assert again == cluster
        assert again.content_hash == cluster.content_hash


def test_a_file_is_for_people(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    Cluster((RankSpec(5), RankSpec(7, 1, 0.5))).save(path)
    lines = path.read_text().splitlines()
    assert lines[:7] == [
        "{",
        '  "kind": "cluster",',
        '  "schema": 1,',
        '  "memory_bytes": [5, 7],',
        '  "host": [0, 1],',
        '  "speed": [1.0, 0.5],',
        '  "rates": {',
    ]
    assert '    "intra_host": {' in lines
    path.write_text(path.read_text().replace("[5, 7]", "[5, 8]"))
    assert Cluster.load(path).ranks[1] == RankSpec(8, 1, 0.5)


def test_the_first_format_is_read() -> None:
    assert Cluster.from_json({"memory_bytes": [5, 7]}) == Cluster((RankSpec(5), RankSpec(7)))


def test_hosts_and_speeds_may_be_left_out_alone() -> None:
    assert Cluster.from_json(changed("speed", ...)).speeds.tolist() == [1.0, 1.0]
    assert Cluster.from_json(changed("host", ...)).hosts.tolist() == [0, 0]
    assert Cluster.from_json(changed("rates", ...)).rates == Rates()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([5], "a cluster must be an object with fields, found [5]"),
        (changed("memory_bytes", ...), "a cluster: the field 'memory_bytes' is missing"),
        (changed("hosts", [0]), "unknown field 'hosts'; the fields are memory_bytes, host, speed,"),
        (changed("memory_bytes", 5), "memory_bytes must be a list, a value for each rank, found 5"),
        (changed("memory_bytes", []), "host has 2 values, but memory_bytes 0"),
        ({"memory_bytes": []}, "needs at least one rank, found none"),
        (changed("speed", [1]), "speed has 1 values, but memory_bytes 2"),
        (changed("memory_bytes", [5, "7"]), "memory_bytes must be an integer of 1 or more"),
        (changed("memory_bytes", [5, 7.0]), "memory_bytes must be an integer of 1 or more"),
        (changed("host", [0, 2]), "hosts must be numbered from 0 without a gap, found [0, 2]"),
        (changed("speed", [1, float("inf")]), "speed must be a finite number of 0 or more"),
        (changed("rates", [1]), "rates must be an object with fields, found [1]"),
        (changed("rates.reed", 1), "rates: unknown field 'reed'; the fields are read, update, int"),
        (changed("rates.read", ...), "rates: the field 'read' is missing"),
        (changed("rates.read", 1e9), "rates: read: a rate must be a list of pairs (row bytes, by"),
        (changed("rates.read", [[1]]), "rates: read: a rate must be a list of pairs (row bytes,"),
        (changed("rates.read", []), "rates: read: a rate needs at least one (row bytes, bytes per"),
        (changed("rates.read", [[4, 1], [4, 2]]), "a rate's row sizes must ascend, found [4, 4]"),
        (changed("rates.read", [[0, 1]]), "row bytes must be an integer of 1 or more, found 0"),
        (changed("rates.update", [[1, 0]]), "update: a rate's bytes per second must be above 0"),
        (changed("rates.intra_host", 5), "rates: intra_host must be an object with fields, found"),
        (changed("rates.intra_host.latency_s", -1), "intra_host: a link's latency_s must be a fin"),
        (changed("rates.inter_host.bytes_per_s", 0), "inter_host: a link's bytes_per_s must be ab"),
        (changed("rates.inter_host.rate", 0), "rates: inter_host: unknown field 'rate'; the field"),
        (changed("rates.shard_overhead_s", None), "rates: shard_overhead_s must be a finite numbe"),
        (changed("rates.shares_memory", "false"), "rates: shares_memory must be true or false, fo"),
    ],
)
def test_wrong_content_is_refused(tmp_path: Path, fields: Any, message: str) -> None:
    with pytest.raises(PlanError) as error:
        Cluster.from_json(fields)
    assert message in str(error.value)
    if isinstance(fields, dict):
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps({"kind": "cluster", "schema": 1, **fields}))
        with pytest.raises(PlanError) as error:
            Cluster.load(path)
        assert str(error.value).startswith(f"{path}: ")
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a cluster of torchrec-oper: Expecting value: line 1"),
        (b"\xff\xfe\x00", "is not a cluster of torchrec-oper: "),
        (b"[" * 100_000, "is not a cluster of torchrec-oper: "),
        (b'{"schema": 1}', 'is not a cluster of torchrec-oper (no "kind": "cluster" in it); write'),
        (b"[]", "is not a cluster of torchrec-oper (no"),
        (b'{"kind": "plan"}', "is not a cluster of torchrec-oper (no"),
        (b'{"kind": "cluster"}', "found a cluster of schema None, wanted 1; write it again"),
        (b'{"kind": "cluster", "schema": 2}', "found a cluster of schema 2, wanted 1"),
        (b'{"kind": "cluster", "schema": true}', "found a cluster of schema True, wanted 1"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_bytes(content)
    with pytest.raises(ArchiveError) as error:
        Cluster.load(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.json"
    old = Cluster((RankSpec(5),))
    old.save(path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        Cluster((RankSpec(6),)).save(path)
    assert Cluster.load(path) == old
    assert os.listdir(tmp_path) == ["cluster.json"]
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        old.save(tmp_path / "no" / "cluster.json")
    with pytest.raises(FileNotFoundError):
        Cluster.load(tmp_path / "other.json")


def test_a_rate_is_linear_in_the_logarithm_of_the_row_size() -> None:
    rate = Rate(((4, 1.0), (64, 5.0)))
    assert rate.bytes_per_s([1, 4, 8, 16, 64, 1000]) == pytest.approx([1, 1, 2, 3, 5, 5])
    assert rate.bytes_per_s(8) == pytest.approx(2.0)
    assert Rate([[4, 1]]) == Rate(((np.int64(4), np.float32(1)),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"read": 1e9}, "read must be a Rate, found 1000000000.0"),
        ({"inter_host": (1, 2)}, "inter_host must be a Link, found (1, 2)"),
        ({"shard_overhead_s": -1}, "shard_overhead_s must be a finite number of 0 or more, found"),
        ({"shares_memory": 1}, "shares_memory must be true or false, found 1"),
    ],
)
def test_wrong_rates_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        Rates(**change)
    assert message in str(error.value)
    assert Rates(shares_memory=np.True_).shares_memory is True
