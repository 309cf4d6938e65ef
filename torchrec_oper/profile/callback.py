"""Counts the batches of a training run as they go by."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.access import AccessProfile
from torchrec_oper.profile.bags import Bags
from torchrec_oper.profile.batches import collect_batch
from torchrec_oper.profile.collector import HEAD_ROWS, TRACE_IDS, AccessCollector
from torchrec_oper.profile.over_ranks import merge_over_ranks
from torchrec_oper.profile.row_counter import EXACT_ROWS
from torchrec_oper.table import TableSpec, table_specs, whole_number

Batch = TypeVar("Batch")

WAITING_IDS = 1 << 17  # that are counted at once


class ProfileCallback:
    """Profiles the batches that a data loader gives, while a model trains on them.

    Ids are copied in the thread that asks for a batch, just before it gets it, and are
    counted there, some batches at once: small batches cost less that way, and no other
    thread takes its turn in Python. ``oper bench profile`` says what share of a step all
    that takes; where it is too much, as for batches in a GPU's memory, which are copied
    to the host, count every k-th.

        callback = ProfileCallback(model.ebc)
        for batch in callback.watch(loader):
            ...
        profile = callback.merged_profile()

    Args:
        tables: an ``EmbeddingBagCollection`` or ``TableSpec`` values.
        every: count the first batch, and then each ``every``-th.
        head_rows: see ``AccessCollector``, as for the other two.
        exact_rows: how many distinct rows of a table are counted one by one.
        trace_ids: ids of the trace at most; 0 for no trace.

    Raises:
        ProfileError: ``every`` is below 1, or no tables are given.
    """

    def __init__(
        self,
        tables: Any,
        *,
        every: int = 1,
        head_rows: int = HEAD_ROWS,
        exact_rows: int = EXACT_ROWS,
        trace_ids: int = TRACE_IDS,
    ) -> None:
        self.every = whole_number(every, "every", least=1)
        self.seen = 0
        self._collector = WaitingCollector(
            table_specs(tables), head_rows=head_rows, exact_rows=exact_rows, trace_ids=trace_ids
        )
        self._failure: Exception | None = None

    def watch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of ``loader``, unchanged; may be called again, as for each epoch.

        Args:
            loader: gives ``KeyedJaggedTensor`` values, or objects that hold one as
                ``sparse_features``.

        Raises:
            ProfileError: a batch lacks a feature of the tables, or doesn't fit them; see
                ``AccessProfile.from_batches``. An id outside its table is found when
                it is counted: up to ``WAITING_IDS`` ids later, or here at the end; the
                message names its batch. Nothing is counted after that.
        """
        for batch in loader:
            self._count(batch)
            yield batch
        with self._failures_kept():
            self._collector.flush()

    def profile(self) -> AccessProfile:
        """The profile of what this rank has counted so far.

        Raises:
            ProfileError: no sample was counted, or counting failed.
        """
        if self._failure is None:
            with self._failures_kept():
                self._collector.flush()
        if self._failure is not None:
            raise ProfileError(f"counting failed: {self._failure}") from self._failure
        return AccessProfile.from_collector(self._collector)

    def merged_profile(self, group: dist.ProcessGroup | None = None) -> AccessProfile:
        """The profile of what all ranks of ``group`` have counted, on every rank.

        Every rank has to call it. What this rank has counted stays its own, so that it
        can go on.

        Raises:
            ProfileError: see ``merge_over_ranks``; also where counting failed on a rank.
        """
        if self._failure is None:
            with suppress(Exception), self._failures_kept():
                self._collector.flush()
        # A copy, since it is merged into.
        return merge_over_ranks(self._failure or copy.deepcopy(self._collector), group)

    def _count(self, batch: Any) -> None:
        number = self.seen
        self.seen += 1
        if number % self.every:
            return
        with self._failures_kept():
            collect_batch(self._collector, batch, number=number)

    @contextmanager
    def _failures_kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = error
            raise


class WaitingCollector(AccessCollector):
    """A collector that copies samples, and counts them when there are ``WAITING_IDS`` ids.

    ``flush`` counts what waits; it comes before anything else is asked of the collector.
    For the arguments see ``AccessCollector``.
    """

    def __init__(self, tables: Sequence[TableSpec], **limits: int) -> None:
        super().__init__(tables, **limits)
        self._features = tuple(
            dict.fromkeys(feature for spec in self.tables for feature in spec.features)
        )
        self._waiting: list[tuple[dict[str, Bags], str]] = []
        self._waiting_ids = 0

    def add_samples(self, bags: Mapping[str, Bags], *, where: str) -> None:
        """See ``AccessCollector.add_samples``; an id outside its table is found by ``flush``."""
        used = [bags[feature] for feature in self._features if feature in bags]
        sizes = {lengths.shape for _, lengths in used}
        if len(used) < len(self._features) or len(sizes) > 1:
            super().add_samples(bags, where=where)  # which says what is wrong
        copied = {
            feature: (ids.copy(), lengths.copy())
            for feature, (ids, lengths) in zip(self._features, used, strict=True)
        }
        self._waiting.append((copied, where))
        self._waiting_ids += sum(ids.size for ids, _ in used)
        if self._waiting_ids >= WAITING_IDS:
            self.flush()

    def flush(self) -> None:
        """Count what waits.

        Raises:
            ProfileError: an id is outside its table.
        """
        waiting, self._waiting, self._waiting_ids = self._waiting, [], 0
        if not waiting:
            return
        joined = {}
        for feature in self._features:
            ids, lengths = zip(*(bags[feature] for bags, _ in waiting), strict=True)
            joined[feature] = np.concatenate(ids), np.concatenate(lengths)
        try:
            super().add_samples(joined, where=f"{waiting[0][1]} and those after it")
        except ProfileError:
            for bags, where in waiting:  # whose batch was it?
                AccessCollector(self.tables, trace_ids=0).add_samples(bags, where=where)
            raise
