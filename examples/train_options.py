"""What the command line of ``train_dlrm.py`` says."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

from click_log import ClickLogSpec, add_log_options
from torchrec_oper.archive import check_writable

DESCRIPTION = """\
Train TorchRec's DLRM on a click log, with its tables sharded over the ranks:
profile the log, plan, shard, train, evaluate.

Start it plainly, and it starts its ranks; or start it by torchrun."""

EXAMPLES = """\
examples:
  python examples/train_dlrm.py
      2 ranks on a generated log, tables planned by torchrec-oper
  python examples/train_dlrm.py --data train.txt.zst --scale 1 --ranks 8
      a log in Criteo's format, tables of the published size
  python examples/train_dlrm.py --planner torchrec
      the same with TorchRec's own planner and sharders
  python examples/train_dlrm.py --planner none --log-losses whole.jsonl
      the same training in one process, unsharded, to compare the losses with
  torchrun --standalone --nproc-per-node 2 examples/train_dlrm.py --steps 100
      started by torchrun

exit codes: 0 done, 2 an error that you can put right, 130 stopped by Ctrl-C or SIGTERM,
1 a rank ended by something else (under torchrun, 3: because another rank is gone)"""

# Far above what makes sense, and below what overflows in a library.
MOST = {
    "ranks": 1024,
    "dim": 65_536,
    "global_batch_size": 10**9,
    "epochs": 10**9,
    "steps": 10**9,
}
MOST_WIDTH = 65_536

WAIT_FOR_RANK_0_S = 5.0
GENERATED = Path(__file__).resolve().parents[1] / "build" / "generated"


@dataclass(frozen=True)
class Options:
    """The options of a run; ``--help`` says what each means."""

    planner: str
    ranks: int
    data: Path | None
    samples: int
    scale: float
    zipf: float
    seed: int
    holdout: float
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    global_batch_size: int
    epochs: int
    steps: int | None
    lr: float
    log_losses: Path | None

    @property
    def log_spec(self) -> ClickLogSpec:
        """The log to generate, without ``data``."""
        return ClickLogSpec(self.samples, self.scale, self.zipf, self.seed)

    @property
    def log(self) -> Path:
        """The log to train on, whether or not it is generated yet."""
        return self.data or GENERATED / self.log_spec.file_name

    def complaint(self) -> str | None:
        """What is wrong with the options, or None."""
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                return f"{_flag(name)} must be between 1 and {most:,}, found {value}"
        if self.planner == "none" and self.ranks > 1:
            return (
                f"--planner none trains unsharded in one process, found {self.ranks} ranks:"
                " start it with --ranks 1, or choose --planner oper or torchrec"
            )
        if self.global_batch_size % self.ranks:
            return (
                f"--global-batch-size must be a multiple of the {self.ranks} ranks, found"
                f" {self.global_batch_size}"
            )
        if not 0 <= self.holdout < 1:
            return f"--holdout must be at least 0 and below 1, found {self.holdout}"
        if not 0 < self.lr < float("inf"):
            return f"--lr must be a number above 0, found {self.lr}"
        if self.data and not self.data.is_file():
            return f"--data: {self.data} is not there, or is not a file"
        try:
            self.log_spec  # noqa: B018 (it checks itself)
        except ValueError as error:
            return f"--{error}"
        return self._complaint_of_output()

    def _complaint_of_output(self) -> str | None:
        """What would keep the losses from being written, after hours of training."""
        if self.log_losses is None:
            return None
        if self.log_losses.resolve() == self.log.resolve():  # perhaps not generated yet
            return f"--log-losses: {self.log_losses} is the log to train on"
        try:
            check_writable(self.log_losses, inputs=[self.log])
        except OSError as error:
            return f"--log-losses: {error.filename}: {error.strerror}"
        return None


class OneVoiceParser(argparse.ArgumentParser):
    """A parser of which only rank 0 is heard, and that complains in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message once and exit with code 2."""
        if _first():
            print(f"error: {message} (see --help)", file=sys.stderr, flush=True)
        else:
            # The launcher ends all ranks when one ends: rank 0 has to have said it.
            time.sleep(WAIT_FOR_RANK_0_S)
        raise SystemExit(2)


def parse(arguments: list[str] | None = None) -> Options:
    """The options; prints one line and exits with code 2 when they don't make sense."""
    parser = _parser()
    found = parser.parse_args(arguments)
    started_ranks = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    if found.ranks is not None and started_ranks not in (None, found.ranks):
        parser.error(f"--ranks {found.ranks}, but torchrun started {started_ranks} ranks")
    if found.ranks is None:
        found.ranks = started_ranks or (1 if found.planner == "none" else 2)
    options = Options(**{field.name: getattr(found, field.name) for field in fields(Options)})
    complaint = options.complaint()
    if complaint is not None:
        parser.error(complaint)
    return options


def _parser() -> OneVoiceParser:
    parser = OneVoiceParser(
        prog="train_dlrm.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("how to run")
    run.add_argument(
        "--planner",
        choices=("oper", "torchrec", "none"),
        default="oper",
        help="who places the tables: this project, TorchRec's own planner and sharders, or none:"
        " unsharded in one process, as the reference (default: %(default)s)",
    )
    run.add_argument(
        "--ranks",
        type=int,
        help="processes to start on this machine (default: 2, or 1 with --planner none; torchrun"
        " has its own option)",
    )
    _add_data_options(parser.add_argument_group("data"))
    _add_model_options(parser.add_argument_group("model"))
    _add_training_options(parser.add_argument_group("training"))
    return parser


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="click log in Criteo's format (tab-separated; plain, .gz or .zst); without it, one is"
        " generated in the project's build/generated and reused; rank 0 unpacks the log to the"
        " folder for temporary files ($TMPDIR), 157 bytes a sample",
    )
    add_log_options(group)
    group.add_argument(
        "--holdout",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the samples, the log's last, to evaluate on (default: %(default)s)",
    )


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dim", type=int, default=16, help="elements of an embedding row (default: %(default)s)"
    )
    group.add_argument(
        "--bottom",
        type=_widths,
        default=(64,),
        metavar="WIDTHS",
        help="hidden layers for the dense values, like 512,256 (default: 64)",
    )
    group.add_argument(
        "--top",
        type=_widths,
        default=(64, 32),
        metavar="WIDTHS",
        help="hidden layers after the interaction (default: 64,32)",
    )


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--global-batch-size",
        type=int,
        default=1024,
        metavar="SAMPLES",
        help="samples of all ranks together in a step (default: %(default)s)",
    )
    group.add_argument(
        "--epochs",
        type=int,
        default=1,
        help="passes over the training samples, in file order (default: %(default)s)",
    )
    group.add_argument("--steps", type=int, help="stop after this many steps")
    group.add_argument(
        "--lr",
        type=float,
        default=0.02,
        help="learning rate of Adagrad, row-wise for the tables (default: %(default)s)",
    )
    group.add_argument(
        "--log-losses",
        type=Path,
        metavar="FILE",
        help='write {"step": ..., "loss": ...} for each step, the mean of the global batch',
    )


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(width) for width in text.split(","))
    except ValueError:
        widths = ()
    if not widths or min(widths) < 1 or max(widths) > MOST_WIDTH:
        raise argparse.ArgumentTypeError(
            f"wanted widths like 64,32, none above {MOST_WIDTH:,}, found {text!r}"
        )
    return widths


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"
