"""Runs a function on several ranks, each a real process in a gloo process group."""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# The fork server imports these once; forked ranks then start at once.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torchrec", "torchrec_oper.sharder"])

TIMEOUT_S = 120.0


class RankError(Exception):
    """A rank raised; the message holds its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of ``function(rank, *args)`` on every rank, in rank order.

    ``function`` and what it takes and returns have to be picklable; it finds an
    initialised default process group. Raises ``RankError`` when a rank raises, dies or
    is not done in time; the other ranks are then killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _CONTEXT.Process(
                target=_rank_main,
                args=(rank, world_size, folder, send, function, args),
                daemon=True,
            )
            for rank, (_, send) in enumerate(pipes)
        ]
        for process, (_, send) in zip(processes, pipes, strict=True):
            process.start()
            send.close()
        try:
            return _collect([receive for receive, _ in pipes])
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = mp.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"not done after {TIMEOUT_S:.0f} s; done: {sorted(results)}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                failed, value = pipe.recv()
            except EOFError as error:
                raise RankError(f"rank {rank} died") from error
            if failed:
                raise RankError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    faulthandler.enable()
    torch.set_num_threads(1)
    # As in conftest.py, which this process doesn't run.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
        )
        result = (False, function(rank, *args))
    except BaseException:
        result = (True, traceback.format_exc())
    pipe.send(result)
    pipe.close()
    if dist.is_initialized() and not result[0]:
        dist.destroy_process_group()
