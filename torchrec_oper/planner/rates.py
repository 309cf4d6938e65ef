"""How fast ranks read and update rows and talk to each other."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from torchrec_oper.errors import PlanError
from torchrec_oper.table import whole_number

T = TypeVar("T")


def number(value: Any, what: str, *, least: float) -> float:
    """``value``, a finite number of Python or numpy, as a ``float``.

    Raises:
        PlanError: it is something else, or below ``least``.
    """
    good = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        as_float = float(value) if good else math.nan
    except OverflowError:  # an integer of hundreds of digits
        as_float = math.inf
    if not (math.isfinite(as_float) and as_float >= least):
        raise PlanError(
            f"{what} must be a finite number of {least} or more, found {reprlib.repr(value)}"
        )
    return as_float


def positive_number(value: Any, what: str) -> float:
    """``value`` as ``number`` gives it; ``PlanError`` where it isn't above 0."""
    as_float = number(value, what, least=0)
    if not as_float:
        raise PlanError(f"{what} must be above 0, found {value!r}")
    return as_float


def json_object(
    value: Any, what: str, *, needed: tuple[str, ...] = (), optional: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    """``value``, which must have the fields ``needed`` and may have those ``optional``.

    Raises:
        PlanError: it is no mapping, or a field is missing or unknown; the message names it.
    """
    if not isinstance(value, Mapping):
        raise PlanError(f"{what} must be an object with fields, found {reprlib.repr(value)}")
    known = (*needed, *optional)
    for field in value:
        if field not in known:
            raise PlanError(
                f"{what}: unknown field {reprlib.repr(field)}; the fields are {', '.join(known)}"
            )
    for field in needed:
        if field not in value:
            raise PlanError(f"{what}: the field {field!r} is missing")
    return value


def _pairs(points: Any) -> list[tuple[Any, Any]]:
    wanted = "a rate must be a list of pairs (row bytes, bytes per second)"
    if not isinstance(points, list | tuple):
        raise PlanError(f"{wanted}, found {reprlib.repr(points)}")
    for point in points:
        if not isinstance(point, list | tuple) or len(point) != 2:
            raise PlanError(f"{wanted}, found {reprlib.repr(point)} in it")
    return [(size, rate) for size, rate in points]


@dataclass(frozen=True)
class Rate:
    """Bytes per second of random access to rows, by row size.

    Args:
        points: (bytes of a row, bytes per second), row sizes ascending. Between two
            points the rate is linear in the logarithm of the row size; outside them it is
            that of the nearest.

    Raises:
        PlanError: for a value outside what is said above.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        pairs = []
        for size, rate in _pairs(self.points):
            row_bytes = whole_number(size, "a rate's row bytes", least=1, error=PlanError)
            pairs.append((row_bytes, positive_number(rate, "a rate's bytes per second")))
        if not pairs:
            raise PlanError("a rate needs at least one (row bytes, bytes per second), found none")
        if any(a >= b for (a, _), (b, _) in itertools.pairwise(pairs)):
            raise PlanError(f"a rate's row sizes must ascend, found {[size for size, _ in pairs]}")
        object.__setattr__(self, "points", tuple(pairs))

    def bytes_per_s(self, row_bytes: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The rate for rows of each of ``row_bytes``, in that array's shape."""
        sizes = np.log([size for size, _ in self.points])
        rates = [rate for _, rate in self.points]
        return np.asarray(np.interp(np.log(row_bytes), sizes, rates))


@dataclass(frozen=True)
class Link:
    """What a rank can send, and at the same time receive, over one level of links.

    Args:
        latency_s: seconds to start a phase of an exchange.
        bytes_per_s: bytes per second in each direction.

    Raises:
        PlanError: the latency is no finite number of 0 or more, or the rate none above 0.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        latency = number(self.latency_s, "a link's latency_s", least=0)
        object.__setattr__(self, "latency_s", latency)
        rate = positive_number(self.bytes_per_s, "a link's bytes_per_s")
        object.__setattr__(self, "bytes_per_s", rate)


@dataclass(frozen=True)
class Rates:
    """How fast a rank of ``speed`` 1 works. Presets: ``torchrec_oper.planner.presets``.

    The defaults are a guess at a CPU server; ``oper calibrate`` measures.

    Args:
        read: random reads of rows, in bytes of rows read.
        update: random updates of rows by a fused optimizer, in bytes of rows updated.
        intra_host: to and from ranks of the same host.
        inter_host: to and from ranks of other hosts.
        shard_overhead_s: seconds that a piece of a table costs its owner in each pass.
        shares_memory: whether a rank can read every other rank's memory directly.

    Raises:
        PlanError: a value is of another type, or ``shard_overhead_s`` is below 0.
    """

    read: Rate = Rate(((1, 1e10),))
    update: Rate = Rate(((1, 3e9),))
    intra_host: Link = Link(5e-5, 5e9)
    inter_host: Link = Link(1e-4, 1.25e9)
    shard_overhead_s: float = 5e-6
    shares_memory: bool = False

    def __post_init__(self) -> None:
        kinds: tuple[tuple[str, type], ...] = (
            ("read", Rate),
            ("update", Rate),
            ("intra_host", Link),
            ("inter_host", Link),
        )
        for name, kind in kinds:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise PlanError(f"{name} must be a {kind.__name__}, found {reprlib.repr(value)}")
        overhead = number(self.shard_overhead_s, "shard_overhead_s", least=0)
        object.__setattr__(self, "shard_overhead_s", overhead)
        if not isinstance(self.shares_memory, bool | np.bool_):
            raise PlanError(
                f"shares_memory must be true or false, found {reprlib.repr(self.shares_memory)}"
            )
        object.__setattr__(self, "shares_memory", bool(self.shares_memory))

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; ``from_json`` reads them back."""
        fields = asdict(self)
        for name in ("read", "update"):
            fields[name] = [list(point) for point in getattr(self, name).points]
        return fields

    @classmethod
    def from_json(cls, fields: Any) -> Rates:
        """The rates that ``to_json`` wrote.

        Raises:
            PlanError: a field is missing, unknown, or has a wrong value.
        """
        values = dict(json_object(fields, "rates", needed=tuple(cls.__dataclass_fields__)))
        for name in ("read", "update"):
            values[name] = _named(f"rates: {name}", Rate, values[name])
        for name in ("intra_host", "inter_host"):
            what = f"rates: {name}"
            link = json_object(values[name], what, needed=("latency_s", "bytes_per_s"))
            values[name] = _named(what, Link, link["latency_s"], link["bytes_per_s"])
        return _named("rates", cls, **values)


def _named(what: str, kind: Callable[..., T], *args: Any, **fields: Any) -> T:
    """A ``kind`` of those values, whose refusal begins with where they were found."""
    try:
        return kind(*args, **fields)
    except PlanError as error:
        raise PlanError(f"{what}: {error}") from None
