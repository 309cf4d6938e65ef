"""The file of an access profile: a JSON header, and arrays in the smallest type for each.

Format 1 had neither tails, nor bags by their distinct rows, nor a trace: it is still read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.archive import read_archive, write_archive
from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.table_access import ARRAYS, TableAccess
from torchrec_oper.profile.trace import SampleSet, Trace
from torchrec_oper.table import whole_number

FORMAT = 2
KIND = "profile"

_FORMAT_1_ARRAYS = ("ids", "counts")
_HALVES = ("planning", "judging")

Contents = tuple[dict[str, Any], dict[str, npt.NDArray[np.int64]]]
Parts = tuple[tuple[TableAccess, ...], Any, Trace | None]


def contents(tables: Sequence[TableAccess], samples: int, trace: Trace | None) -> Contents:
    """Header and arrays of a profile, for its hash and its file."""
    header: dict[str, Any] = {
        "samples": samples,
        "tables": [
            {
                "name": table.name,
                "rows": table.rows,
                "features": list(table.features),
                "bags": table.bags,
                "empty_bags": table.empty_bags,
                "sketched": table.sketched,
            }
            for table in tables
        ],
        "trace": None,
    }
    # By position: a table's name may hold what a file name mustn't.
    arrays = {
        f"{at}.{name}": getattr(table, name) for at, table in enumerate(tables) for name in ARRAYS
    }
    if trace is not None:
        header["trace"] = {
            "features": list(trace.features),
            "limit_ids": trace.limit_ids,
            "up_to_hash": trace.up_to_hash,
        }
        for half in _HALVES:
            arrays[f"{half}.lengths"] = getattr(trace, half).lengths
            arrays[f"{half}.ids"] = getattr(trace, half).ids
    return header, arrays


def write(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    arrays: Mapping[str, npt.NDArray[np.int64]],
) -> None:
    """Write a profile's ``contents`` to ``path``, all or nothing.

    Raises:
        OSError: the folder can't be written or the disk is full; an older file at
            ``path`` is untouched.
    """
    small = {name: _smallest(array) for name, array in arrays.items()}
    write_archive(path, KIND, {"format": FORMAT, **header}, small)


def read(path: str | os.PathLike[str]) -> Parts:
    """The tables, samples and trace of the profile at ``path``.

    Raises:
        FileNotFoundError: there is no such file.
        ArchiveError: the file is damaged or isn't a profile.
        ProfileError: it was written by a newer version, or its values are wrong.
    """
    header, arrays = read_archive(path, KIND)
    found = whole_number(header.get("format"), f"{path}: format", least=1)
    if found > FORMAT:
        raise ProfileError(
            f"{path} has profile format {found}, but this version of torchrec-oper reads"
            f" up to {FORMAT}; upgrade torchrec-oper, or profile the input again"
        )
    try:
        tables = tuple(
            _table(fields, arrays, at, format_1=found == 1)
            for at, fields in enumerate(header["tables"])
        )
        trace = None if found == 1 else _trace(header["trace"], arrays)
        return tables, header["samples"], trace
    except (KeyError, TypeError) as error:
        raise ProfileError(f"{path}: a value is missing or of the wrong type: {error}") from error
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def _table(
    fields: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], at: int, *, format_1: bool
) -> TableAccess:
    return TableAccess(
        name=fields["name"],
        rows=fields["rows"],
        features=_names(fields["features"]),
        bags=fields["bags"],
        empty_bags=fields["empty_bags"],
        sketched=False if format_1 else fields["sketched"],
        **{name: arrays[f"{at}.{name}"] for name in (_FORMAT_1_ARRAYS if format_1 else ARRAYS)},
    )


def _trace(
    fields: Mapping[str, Any] | None, arrays: Mapping[str, npt.NDArray[Any]]
) -> Trace | None:
    if fields is None:
        return None
    features = _names(fields["features"])
    planning, judging = (
        SampleSet(features, arrays[f"{half}.lengths"], arrays[f"{half}.ids"]) for half in _HALVES
    )
    return Trace(
        planning=planning,
        judging=judging,
        limit_ids=fields["limit_ids"],
        up_to_hash=fields["up_to_hash"],
    )


def _names(names: Any) -> Any:
    """A list as a tuple; anything else is left for the value to refuse."""
    return tuple(names) if isinstance(names, list) else names


def _smallest(array: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """``array`` in the smallest unsigned type that holds it."""
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))
