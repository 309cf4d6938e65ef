"""The description of one embedding table that every part of the package shares."""

from __future__ import annotations

import operator
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from torchrec_oper.errors import OperError, ProfileError

Pooling = Literal["sum", "mean", "none"]

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

COUNT_LIMIT = 2**63  # of rows, bytes and lookups: they are counted in int64


def whole_number(
    value: Any, what: str, *, least: int = 0, error: type[OperError] = ProfileError
) -> int:
    """``value``, an integer of Python or numpy, as an ``int``.

    Args:
        value: what a caller or a file gave.
        what: what it counts, for the message.
        least: the least that will do.
        error: the kind of error to raise.

    Raises:
        OperError: of kind ``error``; it is no integer, or not from ``least`` to below
            ``COUNT_LIMIT``.
    """
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise error(f"{what} must be an integer of {least} or more, found {_shown(number, value)}")
    if number >= COUNT_LIMIT:
        raise error(f"{what} must be below 2**63 (about 9.2e18), found {_shown(number, value)}")
    return number


@dataclass(frozen=True)
class TableSpec:
    """One embedding table.

    Args:
        name: the table's name, unique in a model.
        rows: number of rows; ids run from 0 to ``rows - 1``.
        dim: elements of a row.
        features: the input features that look rows of this table up, in order.
        dtype: element type of a row, a key of ``ELEMENT_BYTES``.
        pooling: how the rows of a bag become one vector; ``none`` where they stay apart,
            as in an ``EmbeddingCollection``.
        optimizer_bytes_per_row: bytes of optimizer state kept for a row.

    Integers of numpy are kept as ``int``. The table's bytes stay below 2**63.

    Raises:
        ProfileError: for a value outside what is said above.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    dtype: str = "float32"
    pooling: Pooling = "sum"
    optimizer_bytes_per_row: int = 0

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ProfileError(f"a table needs a name, found {self.name!r}")
        for field, least in (("rows", 1), ("dim", 1), ("optimizer_bytes_per_row", 0)):
            number = whole_number(getattr(self, field), f"table {self.name}: {field}", least=least)
            object.__setattr__(self, field, number)
        # A lone string would pass for a tuple of one-letter features.
        if not isinstance(self.features, tuple) or not all(
            isinstance(feature, str) for feature in self.features
        ):
            raise ProfileError(
                f"table {self.name}: features must be a tuple of names, found {self.features!r}"
            )
        if not self.features:
            raise ProfileError(f"table {self.name}: needs at least one feature")
        if len(set(self.features)) != len(self.features):
            raise ProfileError(f"table {self.name}: a feature is named twice: {self.features}")
        if not isinstance(self.dtype, str) or self.dtype not in ELEMENT_BYTES:
            raise ProfileError(
                f"table {self.name}: dtype must be one of {sorted(ELEMENT_BYTES)},"
                f" found {self.dtype!r}"
            )
        if self.pooling not in get_args(Pooling):
            raise ProfileError(
                f"table {self.name}: pooling must be one of {', '.join(get_args(Pooling))},"
                f" found {self.pooling!r}"
            )
        if self.rows * self.stored_row_bytes >= COUNT_LIMIT:
            raise ProfileError(
                f"table {self.name}: {self.rows} rows of {self.stored_row_bytes} bytes, optimizer"
                " state included, are over the limit of 2**63 bytes (about 9.2e18)"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes that a lookup of one row reads."""
        return self.dim * ELEMENT_BYTES[self.dtype]

    @property
    def stored_row_bytes(self) -> int:
        """Bytes that a row takes in memory, optimizer state included."""
        return self.row_bytes + self.optimizer_bytes_per_row

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; ``from_json`` reads them back."""
        return {**asdict(self), "features": list(self.features)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TableSpec:
        """The table that ``to_json`` wrote.

        Raises:
            ProfileError: a field is missing, unknown, or has a wrong value.
        """
        if not isinstance(fields, Mapping):
            raise ProfileError(
                f"not the fields of a table: wanted a mapping, found {reprlib.repr(fields)}"
            )
        features = fields.get("features")
        if isinstance(features, list):
            fields = {**fields, "features": tuple(features)}
        try:
            return cls(**fields)
        except TypeError as error:
            raise ProfileError(f"not the fields of a table: {error}") from error


class Named(Protocol):
    """Anything with a table's name."""

    @property
    def name(self) -> str:
        """The table's name."""


def table_specs(tables: Any) -> tuple[TableSpec, ...]:
    """The tables as ``TableSpec``.

    Args:
        tables: ``TableSpec`` values, or a module with TorchRec's
            ``embedding_bag_configs()`` (an ``EmbeddingBagCollection``).

    Raises:
        ProfileError: for no table at all, two tables of one name, or something else.
    """
    if hasattr(tables, "embedding_bag_configs"):
        specs = tuple(_from_config(config) for config in tables.embedding_bag_configs())
    else:
        specs = _given(tables)
    check_unique_names(specs)
    return specs


def check_unique_names(tables: Sequence[Named]) -> None:
    """Raise ``ProfileError`` unless there are tables, and each has its own name."""
    if not tables:
        raise ProfileError("needs at least one table, found none")
    times = Counter(table.name for table in tables)
    repeated = sorted(name for name, count in times.items() if count > 1)
    if repeated:
        raise ProfileError(f"table names must be unique, found twice: {', '.join(repeated)}")


def _shown(number: int | None, value: Any) -> str:
    """The value in words of bounded length; Python refuses to print thousands of digits."""
    if number is not None and number.bit_length() > 256:
        return f"an integer of {number.bit_length()} bits"
    return reprlib.repr(value) if number is None else str(number)


def _given(tables: Any) -> tuple[TableSpec, ...]:
    wanted = "wanted an EmbeddingBagCollection or TableSpec values"
    try:
        specs = tuple(tables)
    except TypeError as error:
        raise ProfileError(f"tables are of type {type(tables).__name__}, {wanted}") from error
    for spec in specs:
        if not isinstance(spec, TableSpec):
            raise ProfileError(f"tables hold one of type {type(spec).__name__}, {wanted}")
    return specs


def _from_config(config: Any) -> TableSpec:
    """A ``TableSpec`` from TorchRec's ``EmbeddingBagConfig``, without importing TorchRec."""
    dtypes = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}
    data_type = str(config.data_type.value)
    return TableSpec(
        name=config.name,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        features=tuple(config.feature_names),
        dtype=dtypes.get(data_type, data_type),
        pooling=config.pooling.value.lower(),
    )
