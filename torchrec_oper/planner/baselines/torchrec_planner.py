"""TorchRec's own planner, asked in a process that can be stopped."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from torchrec_oper.archive import content_hash, replace_file
from torchrec_oper.errors import PlanError
from torchrec_oper.planner.baselines.stock_placement import Sharding, StockPlacement, Task
from torchrec_oper.planner.demand import TableDemand

WORKER = (sys.executable, "-m", "torchrec_oper.planner.baselines.torchrec_worker")
START_TIMEOUT_S = 120.0  # to import TorchRec
# TorchRec looks at its own time limit between two proposals only, so it gets a part of the
# time: what it has found by then is better than nothing when it is stopped.
SEARCH_SHARE = 0.6

_EXECUTED_AS: dict[str, Sharding] = {
    "table_column_wise": "column_wise",
    "grid_shard": "table_row_wise",
}


class TorchRecTimeoutError(PlanError):
    """TorchRec's planner was stopped because it took too long."""


class TorchRecFailedError(PlanError):
    """TorchRec's planner, or its process, failed."""


@dataclass(frozen=True)
class TorchRecPlan:
    """A plan of TorchRec's.

    Args:
        placements: one for each table.
        seconds: what planning took, without the import of TorchRec.
        search_stopped: whether TorchRec's own time limit ended its search.
        kept: whether an earlier run made it.
    """

    placements: tuple[StockPlacement, ...]
    seconds: float
    search_stopped: bool
    kept: bool = False


class TorchRecPlanner:
    """``EmbeddingShardingPlanner`` in a process that serves one task after the other.

    A context manager: at its end the process is stopped.

    Args:
        timeout_s: seconds for one plan, after which the process is stopped.
        keep_in: a folder for answers, made where it is missing; a task that was answered
            before, by this version of TorchRec in this time limit, isn't asked again.
        command: what to start, for tests.
    """

    def __init__(
        self, *, timeout_s: float, keep_in: Path | None = None, command: Sequence[str] = WORKER
    ) -> None:
        if not timeout_s > 0:
            raise PlanError(f"the time limit must be above 0 seconds, found {timeout_s}")
        if keep_in is not None:
            keep_in.mkdir(parents=True, exist_ok=True)
        self._keep_in = keep_in
        self._timeout_s = timeout_s
        self._command = tuple(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> TorchRecPlanner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        self._complaints.close()

    def plan(self, task: Task, *, min_partition: int | None = None) -> TorchRecPlan:
        """TorchRec's plan for a task, for its objective, rates and memory caps.

        Args:
            task: the tables and ranks.
            min_partition: the least width of a column slice; TorchRec's default is 128.

        Raises:
            TorchRecTimeoutError: it took longer than ``timeout_s``.
            TorchRecFailedError: TorchRec found no plan, or failed.
            OSError: the folder for answers can't be read or written.
        """
        search_s = max(1, int(self._timeout_s * SEARCH_SHARE))
        request = _request(task, min_partition, search_s)
        file = None if self._keep_in is None else self._keep_in / f"{_request_hash(request)}.json"
        answer = None if file is None else _kept(file)
        kept = answer is not None
        if answer is None:
            answer = self._ask(request)
            if file is not None:
                _keep(file, answer)
        if "error" in answer:
            raise TorchRecFailedError(f"TorchRec's planner: {answer['error'][:500]}")
        placements = tuple(
            _placement(entry, demand)
            for entry, demand in zip(answer["tables"], task.demands, strict=True)
        )
        seconds = float(answer["seconds"])
        return TorchRecPlan(placements, seconds, search_stopped=seconds > search_s, kept=kept)

    def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The process's answer; one that doesn't answer is stopped."""
        try:
            return self._exchange(request)
        except BaseException:
            self._stop()  # also on Ctrl-C: its answer would be taken for the next one's
            raise

    def _exchange(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        process = self._started()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended; reading says why
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        return self._answer(process, self._timeout_s, "planning")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # or Ctrl-C would reach it before us
            )
            self._answer(self._process, START_TIMEOUT_S, "importing TorchRec")
        return self._process

    def _answer(
        self, process: subprocess.Popen[bytes], timeout_s: float, doing: str
    ) -> Mapping[str, Any]:
        """The next line of the process."""
        assert process.stdout is not None
        end, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TorchRecTimeoutError(f"stopped after {timeout_s:g} s of {doing}")
            piece = os.read(process.stdout.fileno(), 1 << 20)
            if not piece:
                raise TorchRecFailedError(
                    f"its process ended with status {process.wait()} while {doing}:"
                    f" {self._last_complaint()}"
                )
            line += piece
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _last_complaint(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")[:300]

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _request_hash(request: Mapping[str, Any]) -> str:
    """What tells one task from another, and one version of TorchRec from another."""
    try:
        version = metadata.version("torchrec")
    except metadata.PackageNotFoundError:
        version = "none"
    return content_hash({"torchrec": version, **request}, {})


def _kept(file: Path) -> Mapping[str, Any] | None:
    try:
        answer = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError):  # a damaged answer is asked for again
        return None
    return answer if isinstance(answer, dict) else None


def _keep(file: Path, answer: Mapping[str, Any]) -> None:
    def write(out: IO[bytes]) -> None:
        out.write(json.dumps(answer).encode() + b"\n")

    replace_file(file, write)


def _request(task: Task, min_partition: int | None, search_s: int) -> dict[str, Any]:
    """The task as the worker reads it.

    TorchRec knows one rate of memory: it is told that of reading, at the mean size of the
    rows that are looked up, in bytes per millisecond. A backward pass takes it twice a
    forward pass by default; told that it takes three times as long, which is the ratio of
    reads to updates in ``oper bench planner``, it made worse plans.
    """
    cluster, rates = task.cluster, task.cluster.rates
    local = set(cluster.local_sizes.tolist())
    if len(local) != 1:
        raise PlanError(f"TorchRec wants hosts of one size, found hosts of {sorted(local)} ranks")
    weights = [demand.lookups for demand in task.demands]
    sizes = [demand.table.row_bytes for demand in task.demands]
    row_bytes = np.average(sizes, weights=weights) if sum(weights) else np.mean(sizes)
    read = float(rates.read.bytes_per_s(row_bytes))
    return {
        "topology": {
            "world_size": cluster.world_size,
            "local_world_size": local.pop(),
            "hbm_cap": int(cluster.memory_bytes.min()),
            "hbm_mem_bw": read / 1e3,
            "intra_host_bw": rates.intra_host.bytes_per_s / 1e3,
            "inter_host_bw": rates.inter_host.bytes_per_s / 1e3,
        },
        "tables": [_described(demand, task.batch_size) for demand in task.demands],
        "batch_size": task.batch_size,
        "objective": task.objective,
        "min_partition": min_partition,
        "search_s": search_s,
    }


def _described(demand: TableDemand, batch_size: int) -> dict[str, Any]:
    table = demand.table
    return {
        "rows": table.rows,
        "dim": table.dim,
        "features": len(table.features),
        "lookups": demand.lookups / batch_size,
        "pooled": table.pooling != "none",
    }


def _placement(entry: Mapping[str, Any], demand: TableDemand) -> StockPlacement:
    """The worker's entry for a table: its type, and of each shard rank, offsets and sizes."""
    sharding = _EXECUTED_AS.get(entry["sharding"], entry["sharding"])
    if sharding == "data_parallel":
        return StockPlacement(sharding, np.empty((1, 0), dtype=np.int64), (demand.table.dim,))
    slices: dict[int, list[tuple[int, int]]] = {}
    widths: dict[int, int] = {}
    for rank, row, column, _, width in entry["shards"]:
        slices.setdefault(column, []).append((row, rank))
        widths[column] = width
    owners = [[rank for _, rank in sorted(slices[column])] for column in sorted(slices)]
    return StockPlacement(
        sharding, np.array(owners), tuple(widths[column] for column in sorted(slices))
    )
