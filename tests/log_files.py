"""Log files that tests write, in every format, and what is in them."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet


def read(log, features, **options):
    """All bags of each feature as lists."""
    found = {feature: [] for feature in features}
    for block in log.blocks(features, **options):
        for feature in features:
            ids, lengths = block.bags[feature]
            assert lengths.shape == (block.samples,)
            assert ids.shape == (lengths.sum(),)
            ends = np.cumsum(lengths)
            found[feature] += [
                ids[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)
            ]
    return found


def write_csv(path, columns, *, delimiter=",", pack=bytes):
    """Columns of bags as a text with a header."""
    lines = [delimiter.join(columns)]
    for bags in zip(*columns.values(), strict=True):
        lines.append(delimiter.join("|".join(map(str, bag)) for bag in bags))
    path.write_bytes(pack(("\n".join(lines) + "\n").encode()))
    return path


def write_parquet(path, columns, **options):
    """Columns of bags as lists of int64."""
    table = pa.table({name: pa.array(bags, pa.list_(pa.int64())) for name, bags in columns.items()})
    pyarrow.parquet.write_table(table, path, **options)
    return path


def write_npz(path, columns, *, save=np.savez):
    """Columns of bags as ids and offsets."""
    arrays = {}
    for name, bags in columns.items():
        arrays[f"{name}.ids"] = np.array([value for bag in bags for value in bag], np.int32)
        arrays[f"{name}.offsets"] = np.cumsum([0, *map(len, bags)])
    save(path, **arrays)
    return path


def counted(bags):
    """How often each id is in the bags."""
    return Counter(value for bag in bags for value in bag)
