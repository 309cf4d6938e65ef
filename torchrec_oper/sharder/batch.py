"""What a batch has to be before its ids travel."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_oper.errors import BatchError

INTEGERS = (torch.int32, torch.int64)


def checked_batch(features: KeyedJaggedTensor, *, weighted: bool) -> KeyedJaggedTensor:
    """The batch, in contiguous tensors, with float32 weights or none.

    FBGEMM's kernels read past the ends of lengths that don't fit the ids, and TorchRec
    applies the weights of a batch to a collection that isn't weighted; neither here.

    Args:
        features: a batch.
        weighted: whether the collection takes weights; others are dropped.

    Raises:
        BatchError: the batch isn't one that tables of type ``oper`` take.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise BatchError(f"a batch has to be a KeyedJaggedTensor, found {type(features).__name__}")
    if features.variable_stride_per_key():
        raise BatchError(
            "features of different batch sizes (variable batch per feature) aren't supported for"
            " tables of type oper"
        )
    values, lengths = features.values(), features.lengths()
    _check_integers(values, "ids")
    _check_integers(lengths, "lengths")
    if lengths.numel() != len(features.keys()) * features.stride():
        raise BatchError(
            f"a batch of {features.stride()} samples of {len(features.keys())} features needs a"
            f" length for each bag, found {lengths.numel()}"
        )
    if lengths.numel() and int(lengths.min()) < 0:
        raise BatchError(f"a bag's length is 0 or more, found {int(lengths.min())}")
    if int(lengths.sum()) != values.numel():
        raise BatchError(
            f"the bags' lengths add up to {int(lengths.sum())}, but there are {values.numel()} ids"
        )
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values.contiguous(),
        weights=_weights(features) if weighted else None,
        lengths=lengths.contiguous(),
        stride=features.stride(),
    )


def _check_integers(tensor: torch.Tensor, what: str) -> None:
    if tensor.dim() != 1 or tensor.dtype not in INTEGERS:
        raise BatchError(
            f"{what} have to be one-dimensional int32 or int64, found {tensor.dtype} of shape"
            f" {list(tensor.shape)}"
        )


def _weights(features: KeyedJaggedTensor) -> torch.Tensor:
    weights: torch.Tensor | None = features.weights_or_none()
    if weights is None:
        raise BatchError("the collection is weighted, but the batch has no weights")
    if weights.shape != features.values().shape or not weights.is_floating_point():
        raise BatchError(
            f"weights have to be floats, one for each of {features.values().numel()} ids, found"
            f" {weights.dtype} of shape {list(weights.shape)}"
        )
    return weights.float().contiguous()
