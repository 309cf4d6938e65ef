"""Means of bags whose rows lie on several ranks: sums divided by the bags' lengths.

TorchRec's row-wise sharding does this by feature, so a feature that a mean table and
a sum table share goes wrong, and it adds 1e-6 to every divisor. Here it goes by the
column of the result, and nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


@dataclass
class OperContext(EmbeddingBagCollectionContext):
    """TorchRec's context of a batch, with what means need.

    Args:
        scale: [B, D] what the summed columns are multiplied by, or None without means.
    """

    scale: Tensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work on ``stream`` is done."""
        super().record_stream(stream)
        if self.scale is not None:
            self.scale.record_stream(stream)


def mean_scale(
    features: KeyedJaggedTensor,
    mean_features: Sequence[str | None],
    dims: Sequence[int],
) -> Tensor:
    """[B, sum of dims] what turns sums into means: one over the length of each bag.

    Args:
        features: the batch.
        mean_features: for each block of columns, the feature whose bags it is the mean
            of, or None for a sum. Empty bags stay 0.
        dims: for each block of columns, how many.
    """
    lengths = features.lengths().view(len(features.keys()), -1)
    keys = {key: number for number, key in enumerate(features.keys())}
    ones = lengths.new_ones(lengths.shape[1])
    divisors = [lengths[keys[name]] if name is not None else ones for name in mean_features]
    scale = torch.stack(divisors, dim=1).clamp(min=1).float().reciprocal()
    return scale.repeat_interleave(torch.tensor(dims, device=scale.device), dim=1)


def with_means(
    pooled: LazyAwaitable[KeyedTensor], ctx: EmbeddingBagCollectionContext
) -> LazyAwaitable[KeyedTensor]:
    """Have the sums become means, where there are any, when they arrive."""
    if isinstance(ctx, OperContext) and ctx.scale is not None:
        pooled.callbacks.append(partial(_scaled, scale=ctx.scale))
    return pooled


def _scaled(pooled: KeyedTensor, scale: Tensor) -> KeyedTensor:
    return KeyedTensor(
        keys=pooled.keys(),
        length_per_key=pooled.length_per_key(),
        values=pooled.values() * scale,
        key_dim=1,
    )
