"""``oper profile``: count how often a click log looks up each row."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torchrec_oper.cli.interrupt import ended_by_interrupt

if TYPE_CHECKING:  # numpy and what else takes long to import waits until `run`
    from torchrec_oper.profile.access import AccessProfile

NAME = "profile"
SUMMARY = "count how often a click log looks up each row of the embedding tables"
EXAMPLES = """\
FILE is in the format of Criteo's Kaggle log (train.txt): tab-separated label, 13
integers and 26 categories; plain, or packed by gzip or zstd. Each category has a
table, t_cat_0 to t_cat_25; an id is the category's hash modulo the table's rows.

examples:
  oper profile train.txt                      tables as large as the Kaggle log's
  oper profile train.txt.gz -o day0.profile   name the profile
  oper profile train.txt --scale 0.1          tables a tenth as large
  oper profile train.txt --rows 100000        26 tables of 100,000 rows
"""

_HOTTEST = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the click log")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        type=Path,
        help="where the profile goes (default: FILE's stem + .profile in the current folder)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--scale",
        metavar="S",
        type=float,
        default=1.0,
        help="rows of a table as a share of the Kaggle log's distinct values (default: 1)",
    )
    size.add_argument(
        "--rows",
        metavar="N[,N...]",
        type=_rows,
        help="rows of every table, or of each of the 26",
    )


def run(arguments: argparse.Namespace) -> None:
    """Profile the log, save the profile, and print a summary.

    Raises:
        OSError: the log can't be read, or the profile can't be written.
        OperError: the log breaks its format, or an argument has a wrong value.
    """
    with ended_by_interrupt():
        from torchrec_oper.archive import check_writable
        from torchrec_oper.profile.criteo import CATEGORICAL_FEATURES, criteo_tables, profile_log

    output = arguments.output or Path(f"{_stem(arguments.file)}.profile")
    rows = arguments.rows
    if rows is not None and len(rows) == 1:
        rows *= len(CATEGORICAL_FEATURES)
    tables = criteo_tables(scale=arguments.scale, rows=rows)
    check_writable(output, inputs=[arguments.file])
    profile = profile_log(arguments.file, tables, progress=True)
    profile.save(output)
    for line in _summary(profile):
        print(line)
    if not output.is_file():
        print(f"\nwritten to {output}")
        return
    print(f"\nwritten to {output} ({os.path.getsize(output):,} bytes)")
    print(f"next: plan with it, OperPlanner(profile=AccessProfile.load({str(output)!r}), ...)")


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
        f"{profile.samples:,} samples made {lookups:,} lookups in {len(profile.tables)} tables."
        f" hot: the share of a table's lookups in the hottest {_HOTTEST:.0%} of its rows."
    )
    yield ""
    yield f"{'table':10}{'rows':>13}{'touched':>13}{'lookups':>15}{'hot':>8}{'empty bags':>12}"
    for table in profile.tables:
        empty = table.empty_bags / table.bags
        yield (
            f"{table.name:10}{table.rows:13,}{table.ids.size:13,}{table.lookups:15,}"
            f"{table.share_of_hottest(_HOTTEST):8.1%}{empty:12.1%}"
        )
