"""The ops of ``torch.ops.oper``: for each its Python door, fake and reference."""

from torchrec_oper.ops.map_ids import RowMapTensors, map_ids, map_ids_reference

__all__ = ["RowMapTensors", "map_ids", "map_ids_reference"]
