"""Reads KeyedJaggedTensors by what they offer, so that TorchRec needn't be imported."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.collector import AccessCollector

_NEEDED = ("keys", "values", "lengths", "stride", "stride_per_key")

_Bags = dict[str, tuple[npt.NDArray[Any], npt.NDArray[Any]]]


def collect_batch(collector: AccessCollector, batch: Any, *, number: int) -> None:
    """Count one batch.

    Args:
        collector: where the lookups are counted. Its trace needs batches whose keys have
            a bag for each sample; those with a number of bags of their own for each key
            are counted, and end the trace.
        batch: a ``KeyedJaggedTensor`` on any device, or an object that holds one as
            ``sparse_features``. Weights, and keys that no table uses, are ignored.
        number: the batch's place in the input, from 0, for messages.

    Raises:
        ProfileError: the batch isn't one, lacks a feature of the tables, has ids that
            aren't integers or are outside their table, or lengths that don't fit its values.
    """
    where = f"batch {number}"
    jagged = getattr(batch, "sparse_features", batch)
    if not all(callable(getattr(jagged, name, None)) for name in _NEEDED):
        raise ProfileError(
            f"{where} is a {type(batch).__name__}, wanted a KeyedJaggedTensor or an object"
            " that holds one as .sparse_features"
        )
    bags = _bags(jagged, where=where)
    samples = int(jagged.stride())
    if bags and all(lengths.size == samples for _, lengths in bags.values()):
        collector.add_samples(bags, where=where)
        return
    collector.samples += samples
    for table, spec in enumerate(collector.tables):
        for feature in spec.features:
            if feature not in bags:
                raise ProfileError(
                    f"{where} lacks feature {feature} of table {spec.name};"
                    f" its keys are {', '.join(bags) or 'none'}"
                )
            ids, lengths = bags[feature]
            collector.add(table, feature, ids, lengths, where=where)


def _bags(jagged: Any, *, where: str) -> _Bags:
    """Ids [N] and lengths [B] of each key."""
    keys = list(jagged.keys())
    if len(set(keys)) != len(keys):
        raise ProfileError(f"{where} has a key twice: {', '.join(keys)}")
    values = _integers(jagged.values(), what=f"{where}: ids")
    lengths = _integers(jagged.lengths(), what=f"{where}: lengths")
    if lengths.size and lengths.min() < 0:
        raise ProfileError(f"{where}: a bag's length is {lengths.min()}, wanted 0 or more")
    last_bags = np.cumsum([0, *jagged.stride_per_key()]).tolist()
    if last_bags[-1] != lengths.size:
        raise ProfileError(
            f"{where}: {lengths.size} lengths for {last_bags[-1]} bags under {len(keys)} keys"
        )
    spans = list(pairwise(last_bags))
    sums = [int(lengths[first:last].sum(dtype=np.int64)) for first, last in spans]
    ends = np.cumsum([0, *sums]).tolist()
    if ends[-1] != values.size:
        raise ProfileError(
            f"{where}: its lengths sum to {ends[-1]}, but it holds {values.size} ids"
        )
    return {
        key: (values[ends[at] : ends[at + 1]], lengths[first:last])
        for at, (key, (first, last)) in enumerate(zip(keys, spans, strict=True))
    }


def _integers(tensor: Any, *, what: str) -> npt.NDArray[Any]:
    """A tensor's numbers as a flat numpy array; anything but integers is refused."""
    # Checked before the conversion: numpy has no bfloat16.
    dtype = str(tensor.dtype)
    if not dtype.startswith(("torch.int", "torch.uint")):
        raise ProfileError(f"{what} are {dtype}, wanted integers (torch.int32 or torch.int64)")
    array: npt.NDArray[Any] = tensor.detach().cpu().numpy().reshape(-1)
    return array
