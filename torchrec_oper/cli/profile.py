"""``oper profile``: count how often logs look up each row."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchrec_oper.cli.interrupt import ended_by_interrupt
from torchrec_oper.cli.table_file import read_tables

if TYPE_CHECKING:  # numpy and what else takes long to import waits until `run`
    from torchrec_oper.profile.access import AccessProfile
    from torchrec_oper.profile.readers import Reading
    from torchrec_oper.table import TableSpec

NAME = "profile"
SUMMARY = "count how often logs look up each row of the embedding tables"
EXAMPLES = """\
formats (by the suffix of each FILE, or --format):
  criteo     Criteo's Kaggle log, train.txt: tab-separated label, 13 integers and 26
             categories, whose tables are t_cat_0 to t_cat_25 unless --table says others;
             an id is the category's hash modulo the rows. Any suffix not named below
  csv        .csv: a header that names columns; a field has no id, one, or several with
             | between them. Tabs instead of commas: --format csv on a .tsv, or --delimiter
  parquet    .parquet, .pq: columns of integers or of lists of them; null is an empty bag
  npz        .npz: arrays FEATURE.ids and FEATURE.offsets, where each bag starts and the
             last ends; or a graph as scipy saves a CSR matrix
  edges      .edges: "source target" a line; consecutive lines of a source are one bag
  adjacency  .adj: "source target target ..." a line
Text may be packed by gzip or zstd. A graph has the features source (a node) and targets
(its neighbours). npz and graphs have a table t_FEATURE for each feature unless --table
says others; a table without rows gets as many as the largest id asks for.

examples:
  oper profile train.txt                      tables as large as the Kaggle log's
  oper profile train.txt.gz -o day0.profile   name the profile
  oper profile train.txt --rows 100000        26 tables of 100,000 rows
  oper profile day_*.parquet -o week.profile --table item=100000:clicked,seen \\
      --table user=5000000:user               four files at a time on four CPUs
  oper profile clicks.csv.zst --table item=100000:clicked --hash
  oper profile ratings.txt --format edges --table user:source --table item:targets
  oper profile --merge mon.profile tue.profile -o week.profile
"""

_HOTTEST = 0.01
_FORMATS = ("criteo", "parquet", "csv", "npz", "edges", "adjacency")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="a log")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        help="where the profile goes (default for one FILE: its stem + .profile, in the"
        " current folder)",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="files to read at a time, each in a process (default: one for each CPU that may"
        " be used)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="FILEs are profiles of the same tables, to be made one; each must list every row"
        " (--head-rows at least as many as are looked up)",
    )
    parser.add_argument(
        "--head-rows",
        metavar="N",
        type=int,
        help="rows of each table to list by id, the hottest; others are in blocks (default: 65536,"
        " or with --merge all)",
    )
    parser.add_argument(
        "--trace-ids",
        metavar="N",
        type=int,
        help="ids of whole samples to keep for judging plans, 0 for none (default: 2097152)",
    )
    _add_format(parser.add_argument_group("how to read"))
    _add_tables(parser.add_argument_group("tables"))


def _add_format(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--format", choices=_FORMATS, help="of all FILEs (default: by suffix)")
    group.add_argument(
        "--hash", action="store_true", help="take ids modulo the rows of their table"
    )
    group.add_argument("--delimiter", metavar="C", help="between the columns of a CSV file")
    group.add_argument(
        "--list-separator",
        metavar="C",
        default="|",
        help="between the ids of a field of a CSV file (default: %(default)s)",
    )


def _add_tables(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--table",
        metavar="NAME[=ROWS]:FEATURE[,FEATURE...]",
        action="append",
        type=_table,
        default=[],
        help="a table and the columns or features that look it up; repeat for each",
    )
    group.add_argument(
        "--tables",
        metavar="JSON",
        type=Path,
        help="a file with a list of tables instead: objects of name, rows, dim, features",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--scale",
        metavar="S",
        type=float,
        help="Criteo: rows as a share of the Kaggle log's distinct values (default: 1)",
    )
    size.add_argument(
        "--rows",
        metavar="N[,N...]",
        type=_rows,
        help="Criteo: rows of every table, or of each of the 26",
    )


def run(arguments: argparse.Namespace) -> None:
    """Profile the logs, save the profile, and print a summary.

    Raises:
        OSError: a log can't be read, or the profile can't be written.
        OperError: a log breaks its format, or an argument has a wrong value.
    """
    with ended_by_interrupt():
        from torchrec_oper.archive import check_writable
        from torchrec_oper.errors import ProfileError

    files: list[Path] = arguments.files
    if arguments.output is None and len(files) > 1:
        raise ProfileError("several files make one profile: name it with -o OUT")
    output = arguments.output or Path(f"{_stem(files[0])}.profile")
    for file in files:
        os.stat(file)
    check_writable(output, inputs=[*files, *filter(None, [arguments.tables])])
    profile = _merged(arguments) if arguments.merge else _profiled(arguments)
    profile.save(output)
    for line in _summary(profile):
        print(line)
    if not output.is_file():
        print(f"\nwritten to {output}")
        return
    print(f"\nwritten to {output} ({os.path.getsize(output):,} bytes)")
    print(
        f"next: oper plan --profile {output} --dim D ..., or in Python"
        f" OperPlanner(AccessProfile.load({str(output)!r}))"
    )


def _profiled(arguments: argparse.Namespace) -> AccessProfile:
    """The profile of the logs."""
    from torchrec_oper.profile.files import profile_files
    from torchrec_oper.profile.parallel import usable_cpus
    from torchrec_oper.profile.readers import Reading

    jobs = usable_cpus() if arguments.jobs is None else arguments.jobs
    reading = Reading(
        arguments.format,
        hashed=arguments.hash,
        delimiter=arguments.delimiter,
        separator=arguments.list_separator,
    )
    limits = {"head_rows": arguments.head_rows, "trace_ids": arguments.trace_ids}
    return profile_files(
        arguments.files,
        _tables(arguments, reading, jobs),
        reading=reading,
        jobs=jobs,
        progress=True,
        **{name: limit for name, limit in limits.items() if limit is not None},
    )


def _merged(arguments: argparse.Namespace) -> AccessProfile:
    """One profile of several."""
    from torchrec_oper.errors import ProfileError
    from torchrec_oper.profile import AccessProfile, merge_profiles

    for option in ("format", "tables", "scale", "rows", "jobs", "trace_ids"):
        if getattr(arguments, option) is not None:
            raise ProfileError(f"--merge reads no log: leave out --{option.replace('_', '-')}")
    if arguments.table or arguments.hash:
        raise ProfileError("--merge reads no log: leave out --table and --hash")
    merged = merge_profiles([AccessProfile.load(file) for file in arguments.files])
    return merged if arguments.head_rows is None else merged.binned(arguments.head_rows)


def _tables(arguments: argparse.Namespace, reading: Reading, jobs: int) -> tuple[TableSpec, ...]:
    """The tables that the arguments give, or those that the first log has by default."""
    from torchrec_oper.errors import ProfileError
    from torchrec_oper.profile.files import TableOutline, with_rows

    files = arguments.files
    kind = reading.format_of(files[0])
    given = bool(arguments.table) + (arguments.tables is not None)
    sized = arguments.rows is not None or arguments.scale is not None
    if given > 1:
        raise ProfileError("--table and --tables both give the tables; take one of them")
    if sized and (given or kind != "criteo"):
        raise ProfileError(
            "--scale and --rows size the tables of a Criteo log; here use --table NAME=ROWS:FEATURE"
        )
    if arguments.tables is not None:
        return read_tables(arguments.tables)
    if not given and kind == "criteo":
        return _criteo_tables(arguments)
    outlines = [TableOutline(name, features, rows) for name, rows, features in arguments.table]
    if not given:
        names = reading.open(files[0]).features()
        if kind in ("csv", "parquet"):
            raise ProfileError(
                f"which columns of {files[0]} hold ids? It has {', '.join(names)}; say"
                " --table NAME=ROWS:COLUMN, once for each table"
            )
        # A graph's nodes are what is summed over: its sources are looked up only on request.
        names = ("targets",) if set(names) == {"source", "targets"} else names
        outlines = [TableOutline(f"t_{name}", (name,)) for name in names]
    tables = with_rows(files, outlines, reading=reading, jobs=jobs, progress=True)
    for outline, table in zip(outlines, tables, strict=True):
        if outline.rows is None:
            print(f"table {table.name}: {table.rows:,} rows, as many as the ids ask for")
    return tables


def _criteo_tables(arguments: argparse.Namespace) -> tuple[TableSpec, ...]:
    from torchrec_oper.profile.criteo import CATEGORICAL_FEATURES, criteo_tables

    rows = arguments.rows
    if rows is not None and len(rows) == 1:
        rows *= len(CATEGORICAL_FEATURES)
    scale = 1.0 if arguments.scale is None else arguments.scale
    return criteo_tables(scale=scale, rows=rows)


def _table(text: str) -> tuple[str, int | None, tuple[str, ...]]:
    """Name, rows and features in ``NAME[=ROWS]:FEATURE[,FEATURE...]``."""
    head, colon, features = text.partition(":")
    name, equals, rows = head.partition("=")
    if not colon or not name or not features or (equals and not rows.isdecimal()):
        raise argparse.ArgumentTypeError(
            f"wanted NAME=ROWS:FEATURE,FEATURE..., or NAME:FEATURE,..., found {text!r}"
        )
    return name, int(rows) if equals else None, tuple(features.split(","))


def _rows(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted N or N,N,..., found {text!r}") from None


def _stem(file: Path) -> str:
    name = file.stem if file.suffix in (".gz", ".zst") else file.name
    return Path(name).stem


def _summary(profile: AccessProfile) -> Iterator[str]:
    lookups = sum(table.lookups for table in profile.tables)
    yield (
        f"{profile.samples:,} samples made {lookups:,} lookups in {len(profile.tables)}"
        f" table{'s' * (len(profile.tables) != 1)}."
        f" hot: the share of a table's lookups in the hottest {_HOTTEST:.0%} of its rows."
    )
    yield ""
    width = max(10, *(len(table.name) + 1 for table in profile.tables))
    yield (
        f"{'table':{width}}{'rows':>13}{'touched':>13}{'lookups':>15}{'hot':>8}{'empty bags':>12}"
    )
    for table in profile.tables:
        empty = table.empty_bags / table.bags
        yield (
            f"{table.name:{width}}{table.rows:13,}{table.seen_rows:13,}{table.lookups:15,}"
            f"{table.share_of_hottest(_HOTTEST):8.1%}{empty:12.1%}"
        )
