"""Sharded modules for TorchRec's ``DistributedModelParallel``."""

from torchrec_oper.sharder.embedding_bag import OperSharder, ShardedOperEmbeddingBagCollection

__all__ = ["OperSharder", "ShardedOperEmbeddingBagCollection"]
