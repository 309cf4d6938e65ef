"""Suites of the planner's bench: their tables, lookups, ranks and errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from torchrec_oper.bench import planner_suites
from torchrec_oper.bench.planner_suites import SUITES, load_suites
from torchrec_oper.errors import ArchiveError, PlanError
from torchrec_oper.planner.zipf import zipf_blocks

DATA = Path("../shared/data")

CONFIGS = {
    "criteo_kaggle": {"rows": [5, 9000], "dim": [16, 8], "pooling": [1, 1]},
    "nvidia_de_v3_tiny": {"rows": [100], "dim": [8], "pooling": [10], "features": [2]},
}
DOCUMENTED = [
    {
        "name": "a",
        "module": "ec",
        "output": "sequence",
        "rows": 50,
        "dim": 8,
        "features": 2,
        "sum_pooling_factor": 6.0,
        "sharding": "RW",
        "cw_dim": None,
        "ranks": list(range(96)),
    },
    {
        "name": "a",
        "module": "ebc",
        "output": "pooled",
        "rows": 20,
        "dim": 8,
        "features": 4,
        "sum_pooling_factor": 1.0,
        "sharding": "CW",
        "cw_dim": 4,
        "ranks": [3, 3],
    },
]


@pytest.fixture
def data(tmp_path):
    (tmp_path / planner_suites.TABLES_FILE).write_text(json.dumps(CONFIGS))
    (tmp_path / planner_suites.DOCUMENTED_FILE).write_text(json.dumps(DOCUMENTED))
    return tmp_path


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.0, 1.1])
def test_zipf_blocks_hold_the_law(skew):
    rows = 50_000
    counts, chances = zipf_blocks(rows, skew)
    exact = np.arange(1, rows + 1) ** -skew
    exact /= exact.sum()
    assert counts.sum() == rows and (counts[:4096] == 1).all()
    np.testing.assert_allclose(chances[:4096], exact[:4096], rtol=1e-7)
    ends = np.cumsum(counts).astype(int)
    np.testing.assert_allclose(np.cumsum(counts * chances), np.cumsum(exact)[ends - 1], rtol=1e-7)
    assert (ends[4097:-1] / ends[4096:-2]).max() < 1.04


def test_few_rows_have_a_block_each():
    counts, chances = zipf_blocks(3, 1.0)
    assert counts.tolist() == [1, 1, 1]
    np.testing.assert_allclose(chances, np.array([6, 3, 2]) / 11)


def test_bags_are_full_or_partly_empty(data):
    [suite] = load_suites(data, names=["nvidia_de_v3_tiny"])
    [demand] = suite.demands(0.9)
    assert (demand.lookups, demand.bags) == (10 * 8192, 2 * 8192)
    assert demand.bag_lengths.tolist() == [5] and demand.listed_rows == 100
    sparse = load_suites(data, names=["torchrec_doc_1935table-pooled"])[0].demands(0.9)[0]
    assert (sparse.lookups, sparse.bags) == (2560, 4 * 2560 * 0.25)
    assert sparse.bag_lengths.tolist() == [1] and len(sparse.table.features) == 4


def test_the_documented_suite_has_its_placement_and_a_pooled_variant(data):
    whole, pooled = load_suites(
        data, names=["torchrec_doc_1935table", "torchrec_doc_1935table-pooled"]
    )
    assert [table.spec.name for table in whole.tables] == ["ec.a", "ebc.a"]
    assert [table.spec.pooling for table in whole.tables] == ["none", "sum"]
    assert [placement.sharding for placement in whole.documented] == ["row_wise", "column_wise"]
    assert whole.documented[1].owners.tolist() == [[3], [3]]
    assert whole.documented[1].widths == (4, 4)
    assert [table.spec.name for table in pooled.tables] == ["ebc.a"]
    assert len(pooled.documented) == 1


def test_the_cluster_is_the_benchs(data):
    [suite] = load_suites(data, names=["criteo_kaggle"])
    assert suite.cluster.world_size == 8 and suite.cluster.rates.shares_memory
    assert set(suite.cluster.memory_bytes) == {60e9}
    [spread] = load_suites(data, names=["torchrec_doc_1935table"])
    assert not spread.cluster.rates.shares_memory
    assert set(spread.cluster.local_sizes) == {8}


def test_quick_takes_the_suites_for_8_ranks(data):
    names = ["criteo_kaggle", "nvidia_de_v3_tiny", "torchrec_doc_1935table"]
    assert [suite.name for suite in load_suites(data, names=names, quick=True)] == names[:2]
    with pytest.raises(PlanError, match="suite for 8 ranks; leave --quick out"):
        load_suites(data, names=names[2:], quick=True)


def test_wrong_input_is_refused(data):
    with pytest.raises(PlanError, match="no suite kaggle; there are mlperf_dlrm_dcnv2, "):
        load_suites(data, names=["kaggle"])
    with pytest.raises(ArchiveError, match="doesn't describe suite mlperf_dlrm_dcnv2.*KeyError"):
        load_suites(data, names=["mlperf_dlrm_dcnv2"])
    file = data / planner_suites.TABLES_FILE
    file.write_text("{")
    with pytest.raises(ArchiveError, match="isn't JSON"):
        load_suites(data)
    file.write_text("[]")
    with pytest.raises(ArchiveError, match="holds a list, wanted a dict"):
        load_suites(data)
    file.unlink()
    with pytest.raises(PlanError):
        load_suites(data)


def test_a_documented_placement_must_cover_its_table(data):
    entries = [dict(DOCUMENTED[1], cw_dim=8)]
    (data / planner_suites.DOCUMENTED_FILE).write_text(json.dumps(entries))
    with pytest.raises(ArchiveError, match="2 slices of 8 for 8"):
        load_suites(data, names=["torchrec_doc_1935table"])


@pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the data in {DATA}")
def test_the_published_suites_load():
    suites = load_suites(DATA)
    assert [(suite.name, suite.ranks, suite.batch_size) for suite in suites] == list(SUITES)
    by_name = {suite.name: suite for suite in suites}
    assert len(by_name["torchrec_doc_1935table"].tables) == 1935
    assert len(by_name["torchrec_doc_1935table-pooled"].tables) == 1933
    assert len(by_name["nvidia_de_v3_colossal"].tables) == 2002
    for suite in suites[:4]:
        assert len(suite.demands(0.9)) == len(suite.tables)
