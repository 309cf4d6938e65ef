"""Train TorchRec's DLRM on a click log: profile, plan, shard, train, evaluate.

``python examples/train_dlrm.py --help`` says what it can do.
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
from pathlib import Path

from stopping import StopRequest

STOP = StopRequest()  # before the slow imports, which a signal may end too

from torch import nn
from torchrec.models.dlrm import DLRMTrain

from click_batches import Split, read_log
from click_log import generate
from dlrm_model import (
    LookupCounter,
    ModelShape,
    build_model,
    embedding_bags,
    make_optimizer,
    make_plan,
    materialise,
    set_initial_rows,
    shard,
    train_rows_in_backward,
)
from ranks import Ranks, launch, run_ranks, started_by_launcher
from torchrec_oper.planner import OperShardingPlan, load_table
from torchrec_oper.profile import AccessProfile
from torchrec_oper.profile.criteo import criteo_tables
from train_loop import LossLog, evaluate, train
from train_options import Options, parse
from wording import counted


def run(options: Options, ranks: Ranks, stop: StopRequest) -> None:
    """The whole program, as every rank runs it."""
    shape = ModelShape(
        criteo_tables(scale=options.scale, dim=options.dim), options.bottom, options.top
    )
    data = read_log(log_file(options, ranks), shape.tables, ranks)
    split = Split(data, options.global_batch_size, held_out=int(len(data) * options.holdout))
    steps = options.steps or split.steps * options.epochs
    say_data(shape, split, ranks)

    whole = build_model(shape, seed=options.seed)
    if options.planner == "none":
        model, planned = unsharded(whole, options), None
    else:
        model, planned = sharded(whole, split, options, ranks)
    set_initial_rows(model, shape, seed=options.seed)
    optimizer = make_optimizer(model, lr=options.lr)

    lookups = LookupCounter(model)
    say_training(split, steps, ranks)
    with stop.at_step_boundary(), LossLog(options.log_losses if ranks.first else None) as log:
        rate = train(model, optimizer, split, log, steps=steps, ranks=ranks, stop=stop)
    measured = lookups.of_all_ranks(ranks)
    say_results(rate, evaluate(model, split, ranks), ranks)
    say_lookups(planned, measured, epochs=steps / split.steps, ranks=ranks)
    log.check()


def log_file(options: Options, ranks: Ranks) -> Path:
    """The log to train on, generated first if the user gave none."""
    if options.data is not None:
        return options.data
    spec = options.log_spec
    path = options.log

    def generate_unless_there() -> None:
        if path.exists():
            print(f"log: {path}, generated before", flush=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        generate(spec, path)
        print(f"log: generated {path}", flush=True)

    ranks.first_does(generate_unless_there)
    return path


def unsharded(model: DLRMTrain, options: Options) -> DLRMTrain:
    """The model as it is, whole tables in one process."""
    materialise(model)
    train_rows_in_backward(model, lr=options.lr)
    return model


def sharded(
    model: DLRMTrain, split: Split, options: Options, ranks: Ranks
) -> tuple[nn.Module, tuple[int, ...] | None]:
    """The model spread over the ranks, and the lookups that the plan expects of each.

    TorchRec's planner reads no profile and expects no number.
    """
    train_rows_in_backward(model, lr=options.lr)
    profile = None
    if options.planner == "oper":
        # What an epoch looks up, exactly: the plan is made for it, and can be held to it.
        profile = ranks.first_does(
            lambda: AccessProfile.from_batches(split, embedding_bags(model), progress=True),
            share=False,
        )
    batch_size = options.global_batch_size // ranks.world_size
    plan, sharders = make_plan(
        options.planner, model, profile, batch_size=batch_size, seed=options.seed
    )
    if isinstance(plan, OperShardingPlan):
        ranks.say(plan.report())
        return shard(model, plan, sharders), plan.oper.planned_lookups
    ranks.say(str(plan))
    return shard(model, plan, sharders), None


def say_data(shape: ModelShape, split: Split, ranks: Ranks) -> None:
    """What is trained, and on what."""
    rows = sum(table.rows for table in shape.tables)
    ranks.say(
        f"model: DLRM, {len(shape.tables)} tables with {rows:,} rows of {shape.tables[0].dim}\n"
        f"data: {counted(len(split.data), 'sample')}, the last {split.held_out:,} held out;"
        f" {counted(split.steps, 'step')} to an epoch"
    )


def say_training(split: Split, steps: int, ranks: Ranks) -> None:
    """What comes now."""
    ranks.say(
        f"train: {counted(steps, 'step')}, a global batch of"
        f" {counted(split.global_batch_size, 'sample')} over {counted(ranks.world_size, 'rank')}"
    )


def say_results(rate: float, scores: str | None, ranks: Ranks) -> None:
    """How fast and how well."""
    ranks.say(f"\ntraining: {rate:,.0f} samples/s (median step)")
    if scores is not None:
        ranks.say(f"held out: {scores}")


def say_lookups(
    planned: tuple[int, ...] | None, measured: list[int], *, epochs: float, ranks: Ranks
) -> None:
    """Whether each rank looked up as many rows as planned."""
    if planned is None:
        planned = (0,) * ranks.world_size
        ranks.say("\nlookups in training (no number was planned):")
    elif epochs.is_integer():
        planned = tuple(int(epochs) * lookups for lookups in planned)
        ranks.say("\nlookups in training, planned for the same batches:")
    else:
        ranks.say(
            f"\nlookups in training, planned for 1 epoch and measured over {epochs:.4g} epochs:"
            " compare the shares, not the counts"
        )
    ranks.say(load_table(planned, measured))


def main() -> int:
    """Run as a rank if torchrun started this process, or else start the ranks."""
    options = parse()
    if options.ranks > 1 and not started_by_launcher():
        return launch(options.ranks, sys.argv)
    run_ranks(lambda ranks, stop: run(options, ranks, stop), STOP)


if __name__ == "__main__":
    sys.exit(main())
