"""TorchRec's constraints on tables: what ours are planned by, and what isn't used."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.adapter.entries import OPER
from torchrec_oper.planner.adapter.model import EmbeddingModules
from torchrec_oper.planner.constraints import Constraints
from torchrec_oper.planner.rates import number
from torchrec_oper.table import TableSpec

TorchRecConstraints = Mapping[str, ParameterConstraints]

MOST_NAMED = 5  # tables of one field that the warning lists


def check_constraints(constraints: Any) -> None:
    """Check that these are constraints, ours or TorchRec's.

    Raises:
        PlanError: they are something else.
    """
    if constraints is None or isinstance(constraints, Constraints):
        return
    wanted = "constraints must be a Constraints, or TorchRec's ParameterConstraints by table"
    if not isinstance(constraints, Mapping):
        raise PlanError(f"{wanted}, found {reprlib.repr(constraints)}")
    for name, one in constraints.items():
        if not isinstance(name, str) or not isinstance(one, ParameterConstraints):
            raise PlanError(f"{wanted}, found {reprlib.repr(one)} for {name!r}")


def tables_kept_from_oper(constraints: TorchRecConstraints) -> set[str]:
    """The tables whose ``sharding_types`` leave ``oper`` out."""
    return {
        name
        for name, one in constraints.items()
        if one.sharding_types and OPER not in one.sharding_types
    }


def pooling_factors(
    constraints: TorchRecConstraints, specs: Sequence[TableSpec]
) -> dict[str, float]:
    """Ids of a bag of each table that says so, the mean over its features.

    Raises:
        PlanError: a table has not one factor for each feature, or one below 0.
    """
    found = {}
    for spec in specs:
        one = constraints.get(spec.name)
        if one is None or not _is_set(one, "pooling_factors"):
            continue
        what = f"table {spec.name}: a pooling factor"
        factors = [number(factor, what, least=0) for factor in one.pooling_factors]
        if len(factors) != len(spec.features):
            raise PlanError(
                f"table {spec.name}: {len(factors)} pooling_factors for {len(spec.features)}"
                " features; give one for each"
            )
        found[spec.name] = sum(factors) / len(factors)
    return found


def unused_constraints(
    constraints: TorchRecConstraints, model: EmbeddingModules, *, profiled: bool
) -> str:
    """What isn't used of the constraints, in words; empty where all is.

    Args:
        constraints: by table.
        model: whose tables they are for. All is used of tables that TorchRec plans.
        profiled: whether a profile says how many ids a bag has.
    """
    of_torchrec = {name for other in model.others for name in other.tables}
    ours = {spec.name for spec in model.specs}
    tables: dict[str, list[str]] = {}
    for name, one in constraints.items():
        if name in ours:
            for field in _unused_fields(one, profiled=profiled):
                tables.setdefault(field, []).append(name)
    parts = [f"{field} of {_listed(names)}" for field, names in tables.items()]
    unknown = [name for name in constraints if name not in ours | of_torchrec]
    if unknown:
        parts.append(f"all for {_listed(unknown)}, which the model lacks")
    return "; ".join(parts)


def _unused_fields(one: ParameterConstraints, *, profiled: bool) -> Iterable[str]:
    used = {
        "sharding_types": True,
        "pooling_factors": not profiled,
        # What type oper does anyway.
        "compute_kernels": EmbeddingComputeKernel.FUSED.value in (one.compute_kernels or ()),
        "device_group": one.device_group == "cpu",
    }
    return [
        field.name
        for field in fields(one)
        if not used.get(field.name, False) and _is_set(one, field.name)
    ]


def _is_set(one: ParameterConstraints, name: str) -> bool:
    """Whether a field differs from what TorchRec puts there."""
    (field,) = (field for field in fields(one) if field.name == name)
    return bool(getattr(one, name) != _default(field))


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"table{'s' if len(names) > 1 else ''} {', '.join(names[:MOST_NAMED])}{more}"
