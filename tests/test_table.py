"""TableSpec and the ways to get one."""

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.types import DataType

from torchrec_oper.errors import ProfileError
from torchrec_oper.table import TableSpec, check_unique_names, table_specs

GOOD = {"name": "t", "rows": 10, "dim": 4, "features": ("f",)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "a table needs a name, found ''"),
        ({"name": 3}, "a table needs a name, found 3"),
        ({"rows": 0}, "table t: rows must be an integer of 1 or more, found 0"),
        ({"rows": 2.0}, "table t: rows must be an integer of 1 or more, found 2.0"),
        ({"rows": True}, "table t: rows must be an integer of 1 or more, found True"),
        ({"dim": "8"}, "table t: dim must be an integer of 1 or more, found '8'"),
        ({"rows": np.float64(2)}, "rows must be an integer of 1 or more, found np.float64(2.0)"),
        ({"rows": np.True_}, "rows must be an integer of 1 or more, found np.True_"),
        ({"rows": 2**63}, "table t: rows must be below 2**63 (about 9.2e18), found 922337203685"),
        ({"dim": 10**30}, f"table t: dim must be below 2**63 (about 9.2e18), found {10**30}"),
        ({"dim": 10**5000}, "dim must be below 2**63 (about 9.2e18), found an integer of 16610 b"),
        ({"dim": -(10**5000)}, "dim must be an integer of 1 or more, found an integer of 16610 b"),
        ({"optimizer_bytes_per_row": 2**64}, "optimizer_bytes_per_row must be below 2**63"),
        ({"rows": 2**59}, f"table t: {2**59} rows of 16 bytes, optimizer state included, are over"),
        (
            {"rows": 2**58, "optimizer_bytes_per_row": 16},
            f"table t: {2**58} rows of 32 bytes, optimizer state included, are over the limit of"
            " 2**63 bytes",
        ),
        ({"features": ()}, "table t: needs at least one feature"),
        ({"features": "abc"}, "features must be a tuple of names, found 'abc'"),
        ({"features": ("a", 1)}, "features must be a tuple of names, found ('a', 1)"),
        ({"features": ("a", "a")}, "a feature is named twice"),
        ({"dtype": "int8"}, "dtype must be one of ['bfloat16', 'float16', 'float32']"),
        ({"dtype": ["float32"]}, "dtype must be one of"),
        ({"pooling": "max"}, "pooling must be one of sum, mean, none, found 'max'"),
        ({"optimizer_bytes_per_row": -1}, "optimizer_bytes_per_row must be an integer of 0"),
    ],
)
def test_a_wrong_field_is_refused(change, message):
    with pytest.raises(ProfileError) as error:
        TableSpec(**{**GOOD, **change})
    assert message in str(error.value)


def test_bytes_of_a_row():
    spec = TableSpec(**GOOD, dtype="bfloat16", optimizer_bytes_per_row=4)
    assert (spec.row_bytes, spec.stored_row_bytes) == (8, 12)


def test_the_largest_table_and_integers_of_numpy():
    assert TableSpec(**{**GOOD, "rows": 2**59 - 1}).rows == 2**59 - 1
    spec = TableSpec("t", np.int32(10), np.uint8(4), ("f",), optimizer_bytes_per_row=np.int64(3))
    assert spec == TableSpec(**GOOD, optimizer_bytes_per_row=3)
    assert {type(spec.rows), type(spec.dim), type(spec.optimizer_bytes_per_row)} == {int}


def test_json_round_trip_and_wrong_fields():
    spec = TableSpec(**GOOD, dtype="float16", pooling="mean", optimizer_bytes_per_row=4)
    assert TableSpec.from_json(spec.to_json()) == spec
    for fields in ({**spec.to_json(), "colour": 1}, {"name": "t"}):
        with pytest.raises(ProfileError, match="not the fields of a table"):
            TableSpec.from_json(fields)
    for value, found in ((None, "None"), ("t", "'t'"), ([1] * 99, "[1, 1, 1, 1, 1, 1, ...]")):
        with pytest.raises(ProfileError) as error:
            TableSpec.from_json(value)
        assert str(error.value) == (f"not the fields of a table: wanted a mapping, found {found}")


def test_specs_of_a_collection():
    collection = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name="a", num_embeddings=7, embedding_dim=8, feature_names=["f", "g"]
            ),
            EmbeddingBagConfig(
                name="b",
                num_embeddings=9,
                embedding_dim=4,
                feature_names=["f"],
                data_type=DataType.FP16,
                pooling=PoolingType.MEAN,
            ),
        ],
    )
    assert table_specs(collection) == (
        TableSpec("a", 7, 8, ("f", "g")),
        TableSpec("b", 9, 4, ("f",), "float16", "mean"),
    )


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "needs at least one table, found none"),
        (TableSpec(**GOOD), "tables are of type TableSpec, wanted an EmbeddingBagCollection"),
        (["t"], "tables hold one of type str, wanted an EmbeddingBagCollection or TableSpec"),
        ([TableSpec(**GOOD)] * 2, "table names must be unique, found twice: t"),
    ],
)
def test_what_is_no_table_is_refused(tables, message):
    with pytest.raises(ProfileError, match=message):
        table_specs(tables)


def test_unique_names_pass():
    check_unique_names([TableSpec(**GOOD), TableSpec(**{**GOOD, "name": "u"})])
