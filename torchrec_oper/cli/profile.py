"""``oper profile``: count how often a click log looks up each row."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.access import AccessProfile
from torchrec_oper.profile.criteo import CATEGORICAL_FEATURES, criteo_tables, profile_log

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
        help=f"rows of every table, or of each of the {len(CATEGORICAL_FEATURES)}",
    )


def run(arguments: argparse.Namespace) -> None:
    """Profile the log, save the profile, and print a summary.

    Raises:
        OSError: the log can't be read, or the profile can't be written.
        OperError: the log breaks its format, or an argument has a wrong value.
    """
    output = arguments.output or Path(f"{_stem(arguments.file)}.profile")
    tables = criteo_tables(scale=arguments.scale, rows=arguments.rows)
    _check_paths(arguments.file, output)
    profile = profile_log(arguments.file, tables, progress=True)
    profile.save(output)
    for line in _summary(profile):
        print(line)
    print(f"\nwritten to {output} ({os.path.getsize(output):,} bytes)")
    print(f"next: plan with it, OperPlanner(profile=AccessProfile.load({str(output)!r}), ...)")


def _rows(text: str) -> tuple[int, ...]:
    try:
        rows = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted N or N,N,..., found {text!r}") from None
    return rows * len(CATEGORICAL_FEATURES) if len(rows) == 1 else rows


def _stem(file: Path) -> str:
    name = file.stem if file.suffix in (".gz", ".zst") else file.name
    return Path(name).stem


def _check_paths(file: Path, output: Path) -> None:
    """Find before a long read what would fail after it."""
    if output.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, wanted a file to write", str(output))
    if output.exists() and not output.is_file():
        return  # a device or a pipe, which is written to directly
    if not output.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(output.parent))
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "can't write in this folder", str(output.parent))
    if file.exists() and output.exists() and file.samefile(output):
        raise ProfileError(f"{output} is the log itself; choose another file with -o")


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
