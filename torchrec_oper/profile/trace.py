"""The trace: some of the real samples, a half to plan with and a half to judge plans by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import ProfileError
from torchrec_oper.table import whole_number

Ints = npt.NDArray[np.int64]
Bags = tuple[Ints, Ints]

HIGHEST_HASH = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class SampleSet:
    """Whole samples: of each, the bags of all features. Arrays are copied, and read-only.

    Args:
        features: F unique names.
        lengths: int64 [F, S], ids in the bag of each feature and sample.
        ids: int64 [N], 0 or more: feature after feature, in it sample after sample.

    Raises:
        ProfileError: for a value outside what is said above.
    """

    features: tuple[str, ...]
    lengths: Ints
    ids: Ints

    def __post_init__(self) -> None:
        for name, dimensions in (("lengths", 2), ("ids", 1)):
            array = np.asarray(getattr(self, name))
            if array.ndim != dimensions or array.dtype.kind not in "iu":
                raise _wrong(
                    f"{name} must be integers in {dimensions} dimension{'s' * (dimensions > 1)},"
                    f" found {array.dtype} of shape {array.shape}"
                )
            array = array.astype(np.int64)
            if array.size and array.min() < 0:
                raise _wrong(f"{name} must be 0 or more, found {array.min()}")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        names = self.features
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise _wrong(f"features must be a tuple of names, found {names!r}")
        if len(set(names)) != len(names) or len(names) != self.lengths.shape[0]:
            raise _wrong(
                f"features must be unique, one for each of {self.lengths.shape[0]} rows of"
                f" lengths, found {names}"
            )
        total = sum(self.lengths.sum(axis=1, dtype=np.float64).tolist())
        if total != self.ids.size:
            raise _wrong(f"lengths sum to {total:.0f}, but there are {self.ids.size} ids")

    @property
    def samples(self) -> int:
        """How many samples there are, S."""
        return self.lengths.shape[1]

    def batches(self, samples: int) -> Iterator[dict[str, Bags]]:
        """The samples in order, some at a time; those that don't fill a batch are left out.

        Args:
            samples: the samples of a batch, 1 or more: B for the batch of one rank, of
                which the ranks take turns, or W * B for a global batch.

        Yields:
            For each feature the ids, int64 [n], and the bags' lengths, int64 [samples]:
            the bags one after another.

        Raises:
            ProfileError: ``samples`` is below 1.
        """
        size = whole_number(samples, "the samples of a batch", least=1)
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        for start in range(0, self.samples - size + 1, size):
            yield self._bags(ends, start, start + size)

    def bags(self) -> dict[str, Bags]:
        """All samples as one batch: see ``batches``."""
        return self._bags(np.concatenate([[0], np.cumsum(self.lengths)]), 0, self.samples)

    def highest_ids(self) -> dict[str, int]:
        """The highest id of each feature; -1 where it has none."""
        return {name: int(ids.max(initial=-1)) for name, (ids, _) in self.bags().items()}

    def _bags(self, ends: Ints, start: int, end: int) -> dict[str, Bags]:
        """Some samples; ``ends`` [F * S + 1] is where each bag, and all, begin in ``ids``."""
        first = np.arange(len(self.features)) * self.samples
        spans = zip(ends[first + start].tolist(), ends[first + end].tolist(), strict=True)
        return {
            name: (self.ids[begin:finish], self.lengths[at, start:end])
            for at, (name, (begin, finish)) in enumerate(zip(self.features, spans, strict=True))
        }


@dataclass(frozen=True, eq=False)
class Trace:
    """A uniform sample of the input's samples, in an order that says nothing of the input's.

    Samples are kept or not by a hash of what they hold: see ``sampler.TraceSampler``. Ids
    of a bag ascend.

    Args:
        planning: the samples that a planner may look at.
        judging: those that plans are judged by: as many, or one fewer.
        limit_ids: the budget that both halves together stay within.
        up_to_hash: what else was read has at least this hash: traces merge by it.

    Raises:
        ProfileError: the halves have other features, or other numbers of samples.
    """

    planning: SampleSet
    judging: SampleSet
    limit_ids: int
    up_to_hash: int = HIGHEST_HASH

    def __post_init__(self) -> None:
        limit = whole_number(self.limit_ids, "the trace's limit_ids", least=1)
        object.__setattr__(self, "limit_ids", limit)
        up_to = whole_number(self.up_to_hash, "the trace's up_to_hash")
        object.__setattr__(self, "up_to_hash", up_to)
        if self.planning.features != self.judging.features:
            raise _wrong(
                f"its halves have features {self.planning.features} and {self.judging.features}"
            )
        found = self.planning.samples, self.judging.samples
        if found[0] - found[1] not in (0, 1):
            raise _wrong(f"its halves have {found[0]} and {found[1]} samples, wanted alike")

    @property
    def features(self) -> tuple[str, ...]:
        """The features of every sample."""
        return self.planning.features

    @property
    def samples(self) -> int:
        """Samples of both halves."""
        return self.planning.samples + self.judging.samples


def _wrong(what: str) -> ProfileError:
    return ProfileError(f"trace of the profile: {what}")
