"""The columns of a Criteo log, and a block of parsed samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import ProfileError
from torchrec_oper.profile.bags import modulo

# TorchRec's names (torchrec.datasets.criteo).
INTEGER_FEATURES = tuple(f"int_{at}" for at in range(13))
CATEGORICAL_FEATURES = tuple(f"cat_{at}" for at in range(26))
COLUMNS = ("label", *INTEGER_FEATURES, *CATEGORICAL_FEATURES)

MOST_HEX_DIGITS = 8


@dataclass(frozen=True, eq=False)
class CriteoBlock:
    """Consecutive samples of a log, n of them.

    Args:
        first_line: the line of the first sample, from 1.
        labels: int8 [n], 1 for a click and 0 for none.
        dense: float32 [n, 13], the integer columns, rounded to the nearest float32;
            NaN where the field is empty.
        hashes: uint32 [26, n], the categorical columns; 0 where the field is empty.
        present: bool [26, n], False where the field is empty.
    """

    first_line: int
    labels: npt.NDArray[np.int8]
    dense: npt.NDArray[np.float32]
    hashes: npt.NDArray[np.uint32]
    present: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        samples = self.labels.size
        assert self.dense.shape == (samples, len(INTEGER_FEATURES))
        assert self.hashes.shape == self.present.shape == (len(CATEGORICAL_FEATURES), samples)

    def ids(self, column: int, rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """One categorical column as the bags of a feature, by the hashing trick.

        Args:
            column: 0 to 25.
            rows: rows of the table.

        Returns:
            Ids, int64 [k]: hash modulo ``rows`` of the fields that aren't empty. Bag
            lengths, int32 [n]: 1, or 0 for an empty field.

        Raises:
            ProfileError: no such column, or ``rows`` is below 1.
        """
        if not 0 <= column < len(CATEGORICAL_FEATURES):
            raise ProfileError(
                f"column must be 0 to {len(CATEGORICAL_FEATURES) - 1}, found {column}"
            )
        if rows < 1:
            raise ProfileError(f"rows must be 1 or more, found {rows}")
        present = self.present[column]
        return modulo(self.hashes[column][present], rows), present.astype(np.int32)
