"""Tables in a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrec_oper.table import TableSpec


def read_tables(path: Path) -> tuple[TableSpec, ...]:
    """The tables in a file that lists what ``TableSpec.to_json`` gives for each.

    Raises:
        OSError: there is no such file, or it may not be read.
        ProfileError: it isn't such a list; says what is wrong.
    """
    from torchrec_oper.errors import ProfileError
    from torchrec_oper.table import TableSpec, table_specs

    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} isn't JSON: {error}") from error
    if not isinstance(values, list):
        raise ProfileError(f"{path} holds a {type(values).__name__}, wanted a list of tables")
    try:
        return table_specs([TableSpec.from_json(fields) for fields in values])
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
