"""Chooses the samples of a trace while batches stream by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.profile.row_sketch import mixed
from torchrec_oper.profile.trace import HIGHEST_HASH, SampleSet, Trace

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Integers = npt.NDArray[Any]
Bags = tuple[Integers, Integers]


@dataclass(frozen=True, eq=False)
class _Kept:
    """Samples, s of them: hashes [s], lengths int32 [s, F], ids [n] sample after sample."""

    hashes: Ints
    lengths: npt.NDArray[np.int32]
    ids: Ints

    @classmethod
    def joined(cls, parts: Sequence[_Kept]) -> _Kept:
        return cls(
            np.concatenate([part.hashes for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.ids for part in parts]),
        )

    def taken(self, samples: Ints) -> _Kept:
        """Some of the samples, in the order of their places, int64 [k]."""
        sizes = self.lengths.sum(axis=1, dtype=np.int64)
        ids = self.ids[ragged(np.cumsum(sizes)[samples] - sizes[samples], sizes[samples])]
        return _Kept(self.hashes[samples], self.lengths[samples], ids)


class TraceSampler:
    """The samples of the lowest hashes that fit into a budget (bottom-k sampling).

    A sample's hash is one of what it holds, the ids of a bag in any order: so the choice
    depends neither on the order nor on the batches, and two samplers merge into what one
    would have kept (E. Cohen and H. Kaplan, "Summarizing data using bottom-k sketches",
    PODC 2007). Samples of equal content have equal hashes, and follow each other.

    Memory: about 24 bytes for each id of the budget, and a batch.

    Args:
        features: F unique names.
        limit_ids: the budget. A sample costs its ids, but F at least.
    """

    def __init__(self, features: Sequence[str], *, limit_ids: int) -> None:
        self.features = tuple(features)
        self.limit_ids = limit_ids
        self._salts = np.array([_salt(name) for name in self.features], np.uint64)
        none = np.empty(0, np.int64)
        self._parts = [_Kept(none, np.empty((0, len(self.features)), np.int32), none)]
        self._cost = 0
        self._up_to = HIGHEST_HASH

    def add(self, bags: Sequence[Bags]) -> None:
        """Offer S samples.

        Args:
            bags: of each feature ids, integers [N], and bag lengths, integers [S].
        """
        sums = np.zeros(bags[0][1].size, np.uint64)
        starts = []
        for salt, (ids, lengths) in zip(self._salts, bags, strict=True):
            of_bags, begins = _bag_hashes(ids, lengths, salt)
            sums += of_bags
            starts.append(begins)
        hashes: Ints = (mixed(sums.view(np.int64)) >> np.uint64(1)).view(np.int64)
        chosen = np.flatnonzero(hashes <= self._up_to)
        if not chosen.size:
            return
        sizes = np.stack([lengths[chosen] for _, lengths in bags]).astype(np.int64)
        picked = [
            ids[ragged(begins[chosen], size)]
            for (ids, _), begins, size in zip(bags, starts, sizes, strict=True)
        ]
        self._keep(
            _Kept(
                hashes[chosen],
                sizes.T.astype(np.int32),
                _transposed(np.concatenate(picked, dtype=np.int64, casting="unsafe"), sizes),
            )
        )

    def merge(self, other: TraceSampler) -> None:
        """Offer what another sampler, of the same features and budget, has kept."""
        assert (self.features, self.limit_ids) == (other.features, other.limit_ids)
        self._up_to = min(self._up_to, other._up_to)
        self._keep(_Kept.joined(other._parts))
        self._cut()

    def add_trace(self, trace: Trace) -> None:
        """Offer the samples of a trace of the same features, in any order."""
        assert set(self.features) == set(trace.features)
        self._up_to = min(self._up_to, trace.up_to_hash)
        for half in (trace.planning, trace.judging):
            bags = half.bags()
            self.add([bags[name] for name in self.features])

    def trace(self) -> Trace:
        """What is kept, samples by turns to plan with and to judge by."""
        self._cut()
        kept = _Kept.joined(self._parts)
        kept = _Kept(kept.hashes, kept.lengths, _sorted_in_bags(kept.ids, kept.lengths))
        places = np.arange(kept.hashes.size)
        halves = [self._sample_set(kept.taken(places[at::2])) for at in (0, 1)]
        return Trace(
            planning=halves[0], judging=halves[1], limit_ids=self.limit_ids, up_to_hash=self._up_to
        )

    def _keep(self, more: _Kept) -> None:
        self._parts.append(more)
        self._cost += int(self._costs(more).sum())
        if self._cost > 2 * self.limit_ids:
            self._cut()

    def _cut(self) -> None:
        """Drop the highest hashes until the rest fits into the budget."""
        kept = _Kept.joined(self._parts)
        kept = kept.taken(np.flatnonzero(kept.hashes <= self._up_to))
        order = np.argsort(kept.hashes, kind="stable")
        total = np.cumsum(self._costs(kept)[order])
        fitting = int(np.searchsorted(total, self.limit_ids, side="right"))
        if fitting < order.size:
            self._up_to = int(kept.hashes[order[fitting]])
        self._parts = [kept.taken(order[:fitting])]
        self._cost = int(total[fitting - 1]) if fitting else 0

    def _costs(self, kept: _Kept) -> Ints:
        sizes: Ints = kept.lengths.sum(axis=1, dtype=np.int64)
        return np.maximum(sizes, max(1, len(self.features)))

    def _sample_set(self, kept: _Kept) -> SampleSet:
        """The samples feature by feature."""
        sizes = kept.lengths.astype(np.int64)
        return SampleSet(self.features, sizes.T, _transposed(kept.ids, sizes))


def _bag_hashes(ids: Integers, lengths: Integers, salt: np.uint64) -> tuple[Hashes, Ints]:
    """The sum of the hashes of each bag's ids, [S], and where the bag begins, [S]."""
    hashes = ids.astype(np.int64, copy=False).view(np.uint64) + salt
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(32)  # or the sum would be one of the ids
    if lengths.size and int(lengths.min()) == int(lengths.max()) == 1:
        return hashes, np.arange(lengths.size)
    ends = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    running = np.zeros(ids.size + 1, np.uint64)
    np.cumsum(hashes, out=running[1:])
    reached = running[ends]
    return reached[1:] - reached[:-1], ends[:-1]


def _transposed(ids: Ints, sizes: Ints) -> Ints:
    """Ids of spans of ``sizes`` [A, B], in order, as those of the spans [B, A]."""
    flat = sizes.ravel()
    starts = (np.cumsum(flat) - flat).reshape(sizes.shape)
    return ids[ragged(starts.T.ravel(), sizes.T.ravel())]


def ragged(starts: Ints, sizes: Ints) -> Ints:
    """The places ``start, start + 1, ...`` of each of some spans, one after another."""
    if sizes.size and sizes.min() == sizes.max() == 1:
        return starts
    before = np.cumsum(sizes) - sizes
    places: Ints = np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))
    return places


def _sorted_in_bags(ids: Ints, lengths: npt.NDArray[np.int32]) -> Ints:
    if ids.size == 0 or lengths.max() <= 1:
        return ids
    bag = np.repeat(np.arange(lengths.size), lengths.ravel())
    return np.asarray(ids[np.lexsort((ids, bag))])


def _salt(feature: str) -> int:
    return int.from_bytes(hashlib.sha256(feature.encode()).digest()[:8], "little")
