"""Calls map_ids of a given library with arrays that don't fit together.

    python sanitized_map_ids.py LIBRARY SEED CASES

It ends well if every call returns or raises; what runs out of bounds or overflows, the
sanitizers that the library was built with report.
"""

from __future__ import annotations

import random
import sys

import torch

EDGES = (0, 1, 2, 3, 5, -1, -7, 2**31 - 1, 2**31, 2**60, 2**62, 2**63 - 1, -(2**63))


def arguments(draw: random.Random) -> list[torch.Tensor]:
    """Ids that may be right, and row maps of which any number may be wrong."""

    def numbers(count: int) -> torch.Tensor:
        values = [draw.choice((*EDGES, draw.randint(0, 12), draw.randint(0, 12)))] * count
        return torch.tensor([draw.choice((v, draw.randint(0, 12))) for v in values]).long()

    segments, count = draw.randint(1, 3), draw.randint(0, 9)
    listed, buckets, ranges = draw.randint(0, 4), draw.randint(0, 6), draw.randint(1, 3)
    range_starts = numbers(ranges)
    tables = []
    for _ in range(segments):
        begin, first = draw.randint(0, listed), draw.randint(0, ranges - 1)
        end, last = draw.randint(begin, listed), draw.randint(first + 1, ranges)
        span = [draw.choice((4, 11, 20)), begin, end, 0, draw.choice((0, 1, 3, 62)), first, last]
        range_starts[first] = 0
        tables.append(span if draw.random() < 0.8 else numbers(7).tolist())
    cuts = sorted(draw.randint(0, count) for _ in range(segments - 1))
    ids = torch.tensor([draw.randint(0, 10) for _ in range(count)])
    return [
        ids.to(draw.choice((torch.int32, torch.int64))),
        torch.tensor([0, *cuts, count]),
        torch.tensor(tables),
        numbers(listed),
        numbers(listed),
        numbers(buckets),
        range_starts,
        numbers(ranges),
    ]


def main() -> None:
    """Run the cases and print how many calls returned."""
    library, seed, cases = sys.argv[1:]
    torch.ops.load_library(library)
    draw = random.Random(int(seed))
    returned = 0
    for _ in range(int(cases)):
        try:
            torch.ops.oper.map_ids(*arguments(draw))
            returned += 1
        except RuntimeError:
            pass
    print(returned)


if __name__ == "__main__":
    main()
