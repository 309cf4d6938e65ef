"""What a model holds: the tables that we place, and the modules that TorchRec places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchrec.distributed.sharding_plan import get_module_to_default_sharders
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.modules.itep_embedding_modules import (
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)

from torchrec_oper.errors import PlanError
from torchrec_oper.planner.adapter.entries import OPER
from torchrec_oper.table import TableSpec, table_specs

# The modules of TorchRec's that hold tables, or hold what does and change how it is used.
EMBEDDING_MODULES = (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
    *get_module_to_default_sharders(),
)

# Bytes of optimizer state for an element of a row, and for a row, by EmbOptimType: those
# that FBGEMM has for the CPU.
OPTIMIZER_STATE_BYTES = {
    "exact_sgd": (0, 0),
    "exact_adagrad": (4, 0),
    "exact_row_wise_adagrad": (0, 4),
}


@dataclass(frozen=True, eq=False)
class OtherModule:
    """A module that a sharder of TorchRec's takes.

    Args:
        path: its path in the model.
        module: the module.
        sharder: what shards it.
    """

    path: str
    module: nn.Module
    sharder: ModuleSharder[nn.Module]

    @property
    def tables(self) -> list[str]:
        """The names of its tables."""
        return list(self.sharder.shardable_parameters(self.module))


@dataclass(frozen=True, eq=False)
class EmbeddingModules:
    """The embedding modules of a model.

    Args:
        tables: module path and description of each table that ``OperSharder`` shards.
        others: the modules that TorchRec's planner places.
    """

    tables: tuple[tuple[str, TableSpec], ...]
    others: tuple[OtherModule, ...]

    @property
    def specs(self) -> list[TableSpec]:
        """The tables that ``OperSharder`` shards."""
        return [spec for _, spec in self.tables]


def read_model(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    *,
    not_oper: Collection[str] = (),
) -> EmbeddingModules:
    """The embedding modules of the model, by who plans them.

    Args:
        module: the model.
        sharders: what will shard it.
        not_oper: tables that mustn't have type ``oper``; TorchRec plans their modules.

    Raises:
        PlanError: no sharder takes an embedding module, there is no table for
            ``OperSharder``, two of its tables have one name, one isn't supported, or
            ``not_oper`` names some tables of a module, but not all.
    """
    by_type = _sharders_by_type(sharders)
    taken: list[str] = []
    tables: list[tuple[str, TableSpec]] = []
    others: list[OtherModule] = []
    for path, child in module.named_modules():
        if _is_below(path, taken):
            continue
        sharder = by_type.get(type(child))
        if sharder is None:
            if isinstance(child, EMBEDDING_MODULES):
                raise _no_sharder(path, child, by_type)
            continue
        taken.append(path)
        if takes_row_maps(sharder) and not _is_left_out(path, child, not_oper):
            tables += [(path, spec) for spec in _specs(child, sharder)]
        else:
            others.append(OtherModule(path, child, sharder))
    _check_tables(tables, others)
    return EmbeddingModules(tuple(tables), tuple(others))


def _sharders_by_type(
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> dict[type[nn.Module], ModuleSharder[nn.Module]]:
    """The sharder of each type of module, chosen as ``DistributedModelParallel`` does."""
    for sharder in sharders:
        if not isinstance(sharder, ModuleSharder):
            raise PlanError(f"sharders must be ModuleSharder values, found {sharder!r}")
    by_type = {sharder.module_type: sharder for sharder in sharders}
    for sharder in sharders:
        last = by_type[sharder.module_type]
        if takes_row_maps(sharder) and not takes_row_maps(last):
            raise PlanError(
                f"{type(sharder).__name__} and {type(last).__name__} both shard"
                f" {sharder.module_type.__name__}, and DistributedModelParallel takes the last:"
                f" leave {type(last).__name__} out, {type(sharder).__name__} shards tables of"
                " TorchRec's types too"
            )
    if not any(map(takes_row_maps, by_type.values())):
        raise PlanError(
            "OperPlanner plans for OperSharder, which isn't among the sharders: pass"
            f" OperSharder() too, found {[type(one).__name__ for one in sharders]}"
        )
    return by_type


def _is_below(path: str, taken: Sequence[str]) -> bool:
    """Whether a module is inside one that is sharded whole."""
    return any(not outer or path.startswith(f"{outer}.") for outer in taken)


def _no_sharder(
    path: str, module: nn.Module, by_type: Mapping[type[nn.Module], ModuleSharder[nn.Module]]
) -> PlanError:
    kinds = ", ".join(kind.__name__ for kind in by_type)
    return PlanError(
        f"{_named(path)} is of type {type(module).__name__}, which OperPlanner can't plan with"
        f" these sharders; they shard {kinds}: pass a sharder of this type too, or keep the module"
        " out of the model"
    )


def _named(path: str) -> str:
    return f"module {path}" if path else "the model"


def _is_left_out(path: str, module: Any, not_oper: Collection[str]) -> bool:
    """Whether a module isn't ours, as none of its tables may be.

    Raises:
        PlanError: some may be.
    """
    names = [config.name for config in module.embedding_bag_configs()]
    out = [name for name in names if name in not_oper]
    if out and len(out) < len(names):
        rest = [name for name in names if name not in not_oper]
        raise PlanError(
            f"{_named(path)}: the constraints keep tables {', '.join(out)} from sharding type"
            f" {OPER}, but not {', '.join(rest)}; a module is planned as a whole: put {OPER!r}"
            " among the sharding types of all its tables or of none"
        )
    return bool(out)


def _specs(module: Any, sharder: ModuleSharder[nn.Module]) -> list[TableSpec]:
    """The tables of a collection that ``OperSharder`` shards."""
    fused_params = getattr(sharder, "fused_params", None) or {}
    found = []
    for spec, config in zip(table_specs(module), module.embedding_bag_configs(), strict=True):
        _check_supported(spec, config, weighted=module.is_weighted())
        parameter = module.embedding_bags[spec.name].weight
        size = optimizer_bytes_per_row(spec, parameter, fused_params)
        found.append(replace(spec, optimizer_bytes_per_row=size))
    return found


def _check_tables(tables: Sequence[tuple[str, TableSpec]], others: Sequence[OtherModule]) -> None:
    times = Counter(table.name for _, table in tables)
    repeated = sorted(name for name, count in times.items() if count > 1)
    if repeated:
        raise PlanError(f"table names must be unique in the model, found twice: {repeated}")
    if tables:
        return
    if others:
        raise PlanError(
            "the model has no table for OperSharder, only modules that TorchRec shards: plan it"
            " with TorchRec's EmbeddingShardingPlanner"
        )
    raise PlanError("the model has no EmbeddingBagCollection to plan")


def _check_supported(spec: TableSpec, config: Any, *, weighted: bool) -> None:
    """Raise ``PlanError`` for a table that the run-time couldn't train."""
    reasons = {
        f"its dim is {spec.dim}, and FBGEMM needs a multiple of 4": spec.dim % 4,
        "FBGEMM has no bfloat16 rows on the CPU": spec.dtype == "bfloat16",
        "it takes the mean of weighted bags": weighted and spec.pooling == "mean",
        "it is a virtual table": getattr(config, "use_virtual_table", False),
        "its rows come in buckets": getattr(config, "total_num_buckets", None),
        "it was pruned": getattr(config, "num_embeddings_post_pruning", None),
    }
    for reason, found in reasons.items():
        if found:
            raise PlanError(f"table {spec.name} isn't supported: {reason}")


def takes_row_maps(sharder: ModuleSharder[nn.Module]) -> bool:
    """Whether a sharder accepts plan entries of type ``oper``."""
    return OPER in getattr(sharder, "row_map_sharding_types", ())


def optimizer_bytes_per_row(
    table: TableSpec, parameter: nn.Parameter, fused_params: dict[str, Any]
) -> int:
    """Bytes of optimizer state of a row, from what will train it.

    Args:
        table: the table.
        parameter: its weight, marked by ``apply_optimizer_in_backward`` or not.
        fused_params: the sharder's, whose ``optimizer`` applies to unmarked weights.

    Raises:
        PlanError: an optimizer that FBGEMM doesn't have, or of unknown state.
    """
    classes = getattr(parameter, "_optimizer_classes", [])
    if len(classes) > 1:
        raise PlanError(
            f"table {table.name}: {len(classes)} optimizers in backward found, one is supported"
        )
    try:
        kind = (
            optimizer_type_to_emb_opt_type(classes[0]) if classes else fused_params.get("optimizer")
        )
    except ValueError as error:
        raise PlanError(f"table {table.name}: FBGEMM has no fused {classes[0].__name__}") from error
    name = str(getattr(kind, "value", kind)).lower() if kind is not None else "exact_sgd"
    if name not in OPTIMIZER_STATE_BYTES:
        raise PlanError(
            f"table {table.name}: optimizer {name} isn't supported; supported are"
            f" {', '.join(OPTIMIZER_STATE_BYTES)}"
        )
    for_element, for_row = OPTIMIZER_STATE_BYTES[name]
    return for_element * table.dim + for_row
