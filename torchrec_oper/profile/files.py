"""The profile of log files, of any format, read in one process or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.access import AccessProfile
from torchrec_oper.profile.bags import BagBlock, BagLog, modulo
from torchrec_oper.profile.collector import HEAD_ROWS, TRACE_IDS, AccessCollector
from torchrec_oper.profile.parallel import map_files
from torchrec_oper.profile.progress import Tick, bytes_bar
from torchrec_oper.profile.readers import Reading
from torchrec_oper.profile.row_counter import EXACT_ROWS
from torchrec_oper.table import TableSpec, check_unique_names, table_specs

Path = str | os.PathLike[str]

DEFAULT_READING = Reading()


def profile_files(
    paths: Sequence[Path],
    tables: Any,
    *,
    reading: Reading = DEFAULT_READING,
    jobs: int = 1,
    progress: bool = False,
    head_rows: int = HEAD_ROWS,
    exact_rows: int = EXACT_ROWS,
    trace_ids: int = TRACE_IDS,
) -> AccessProfile:
    """The access profile of some logs together, the same for any number of jobs.

    Args:
        paths: the logs, 1 or more.
        tables: an ``EmbeddingBagCollection`` or ``TableSpec`` values; their features are
            columns (Criteo, Parquet, CSV) or features (npz, graphs) of every log.
        reading: how the logs are read.
        jobs: processes that read, see ``map_files``; memory is that of a collector for
            each, and of one more.
        progress: show on a terminal's stderr how many bytes of the files are read.
        head_rows: see ``AccessCollector``, as for the other two.
        exact_rows: how many distinct rows of a table are counted one by one.
        trace_ids: ids of the trace at most; 0 for no trace, nor is there one where a
            hashed feature has several tables of different rows.

    Raises:
        OSError: a log can't be read.
        LogFormatError: a log breaks its format, or lacks a feature; says where.
        ProfileError: an id is negative or not below its table's rows; says where. There
            is no sample at all.
        VersionError: pyarrow is missing, and a log needs it.
    """
    specs = table_specs(tables)
    new_collector = partial(
        AccessCollector, specs, head_rows=head_rows, exact_rows=exact_rows, trace_ids=trace_ids
    )
    work = partial(_collected, new_collector=new_collector, reading=reading)
    merged: AccessCollector | None = None
    with bytes_bar(_checked(paths), shown=progress, task=_task(paths, "profile")) as tick:
        for collector in map_files(work, paths, jobs=jobs, tick=tick):
            if merged is None:
                merged = collector
            else:
                merged.merge(collector)
    assert merged is not None
    return AccessProfile.from_collector(merged)


@dataclass(frozen=True)
class TableOutline:
    """A table as far as a profile needs it; its rows may be left to ``with_rows``.

    Args:
        name: the table's name.
        features: the features that look it up.
        rows: its rows, or None for as many as the logs need.
    """

    name: str
    features: tuple[str, ...]
    rows: int | None = None

    def __post_init__(self) -> None:
        # The rules are TableSpec's.
        TableSpec(self.name, 1 if self.rows is None else self.rows, 1, self.features)


def with_rows(
    paths: Sequence[Path],
    outlines: Sequence[TableOutline],
    *,
    reading: Reading = DEFAULT_READING,
    jobs: int = 1,
    progress: bool = False,
) -> tuple[TableSpec, ...]:
    """Tables of ``outlines``, those without rows as large as the largest id asks for.

    Where a log doesn't say how many rows there are, as a graph in CSR does, it is read once
    for that. For the other arguments, and what is raised, see ``profile_files``.

    Returns:
        The tables in order; their dim of 1 says nothing.

    Raises:
        ProfileError: ids are hashed, so that any number of rows would do.
    """
    check_unique_names(outlines)
    without = [outline for outline in outlines if outline.rows is None]
    if not without:
        return tuple(_spec(outline, {}) for outline in outlines)
    for path in _checked(paths):
        if reading.is_hashed(path):
            raise ProfileError(
                f"table {without[0].name} needs a number of rows: the ids of {path} are hashed,"
                " and fit any"
            )
        if not os.path.isfile(path):
            raise ProfileError(
                f"table {without[0].name} needs a number of rows: {path} is no regular file, and"
                " can't be read once for it and once more to profile"
            )
    features = tuple(dict.fromkeys(name for outline in without for name in outline.features))
    work = partial(_rows_needed, features=features, reading=reading)
    rows = dict.fromkeys(features, 1)
    with bytes_bar(paths, shown=progress, task=_task(paths, "find rows")) as tick:
        for needed in map_files(work, paths, jobs=jobs, tick=tick):
            rows = {feature: max(rows[feature], needed[feature]) for feature in features}
    return tuple(_spec(outline, rows) for outline in outlines)


def _spec(outline: TableOutline, rows: dict[str, int]) -> TableSpec:
    count = outline.rows or max(rows[feature] for feature in outline.features)
    return TableSpec(outline.name, count, 1, outline.features)


def _task(paths: Sequence[Path], verb: str) -> str:
    return f"{verb} {os.path.basename(paths[0]) if len(paths) == 1 else f'{len(paths)} files'}"


def _checked(paths: Sequence[Path]) -> Sequence[Path]:
    if not paths:
        raise ProfileError("there is no log to read; name at least one file")
    return paths


def _collected(
    path: Path, tick: Tick, *, new_collector: Callable[[], AccessCollector], reading: Reading
) -> AccessCollector:
    """What one log looks up."""
    log = reading.open(path)
    collector = new_collector()
    features = [feature for spec in collector.tables for feature in spec.features]
    count = _count_hashed if reading.is_hashed(path) else _count
    for block in log.blocks(features, tick=tick):
        count(collector, block, log)
    return collector


def _count(collector: AccessCollector, block: BagBlock, log: BagLog) -> None:
    try:
        collector.add_samples(block.bags, where=str(log.path))
    except ProfileError:
        for spec in collector.tables:
            for feature in spec.features:
                ids = block.bags[feature][0]
                wrong = np.flatnonzero((ids < 0) | (ids >= spec.rows))
                if wrong.size:
                    raise _unfit(log, block, feature, int(wrong[0]), spec) from None
        raise


def _count_hashed(collector: AccessCollector, block: BagBlock, log: BagLog) -> None:
    rows: dict[str, int] = {}
    for spec in collector.tables:
        for feature in spec.features:
            if rows.setdefault(feature, spec.rows) != spec.rows:
                _count_apart(collector, block, log)
                return
    bags = {
        feature: (modulo(block.bags[feature][0], count), block.bags[feature][1])
        for feature, count in rows.items()
    }
    collector.add_samples(bags, where=str(log.path))


def _count_apart(collector: AccessCollector, block: BagBlock, log: BagLog) -> None:
    """Where a feature has other ids in one table than in another; there is no trace then."""
    collector.samples += block.samples
    for table, spec in enumerate(collector.tables):
        for feature in spec.features:
            ids, lengths = block.bags[feature]
            hashed = modulo(ids, spec.rows)
            collector.add(table, feature, hashed, lengths, where=str(log.path))


def _unfit(log: BagLog, block: BagBlock, feature: str, at: int, spec: TableSpec) -> ProfileError:
    found = int(block.bags[feature][0][at])
    place = f"{log.path}, {block.locate(feature, at)}"
    if found < 0:
        return ProfileError(
            f"{place}: id {found} is negative; leave it out where it stands for none, or hash the"
            " ids (--hash, Reading(hashed=True))"
        )
    return ProfileError(
        f"{place}: id {found}, but the ids of table {spec.name} run from 0 to {spec.rows - 1};"
        " give the table more rows, or hash the ids (--hash, Reading(hashed=True))"
    )


def _rows_needed(
    path: Path, tick: Tick, *, features: Sequence[str], reading: Reading
) -> dict[str, int]:
    """For each feature of one log its largest id + 1."""
    log = reading.open(path)
    told = {feature: log.rows(feature) for feature in features}
    rows = {feature: count or 1 for feature, count in told.items()}
    unknown = [feature for feature in features if told[feature] is None]
    for block in log.blocks(unknown, tick=tick) if unknown else ():
        for feature in unknown:
            ids = block.bags[feature][0]
            rows[feature] = max(rows[feature], int(ids.max(initial=0)) + 1)
    return rows
