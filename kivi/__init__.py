"""kivi: an online-aggregates transactional key-value store.

``kivi.open`` is the store in this process, ``kivi.connect`` and ``kivi.aio.connect`` are clients of a server
(``kivi.client.Tls`` says how to reach one over TLS), ``kivi.spark`` is the Spark side. Names load when they are first
used, so that a client never loads the storage engine and ``import kivi`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kivi import errors as errors
from kivi.errors import (
    AlreadyExists,
    CommitUnknown,
    Conflict,
    DataLoss,
    Disconnected,
    DiskFull,
    EventsRetracted,
    FeatureOff,
    FormatTooNew,
    InvalidArgument,
    KiviError,
    NotAStore,
    NotFound,
    OutOfRange,
    OutOfSequence,
    PermissionDenied,
    ResourceExhausted,
    Retryable,
    RowExists,
    SchemaError,
    SnapshotTooOld,
    StoreInUse,
    Unauthenticated,
    Unavailable,
)

if TYPE_CHECKING:
    from kivi import aio as aio
    from kivi import client as client
    from kivi import polars as polars
    from kivi import spark as spark
    from kivi import testing as testing
    from kivi.client.database import connect
    from kivi.embedded.database import open_database as open
    from kivi.model.declarations import time_slot
    from kivi.model.expressions import case, coalesce, col, quad, within_km
    from kivi.model.outcomes import ABORTED, UNKNOWN
    from kivi.model.patterns import next, pattern, prev
    from kivi.model.rules import lookup, previous_slot, ref
    from kivi.model.surface import combine, count, max, min, sum, transactional

__version__ = "0.2.0"

__all__ = [
    "ABORTED",
    "UNKNOWN",
    "AlreadyExists",
    "CommitUnknown",
    "Conflict",
    "DataLoss",
    "Disconnected",
    "DiskFull",
    "EventsRetracted",
    "FeatureOff",
    "FormatTooNew",
    "InvalidArgument",
    "KiviError",
    "NotAStore",
    "NotFound",
    "OutOfRange",
    "OutOfSequence",
    "PermissionDenied",
    "Quantiles",
    "ResourceExhausted",
    "Retryable",
    "RowExists",
    "SchemaError",
    "SnapshotTooOld",
    "StoreInUse",
    "Top",
    "Unauthenticated",
    "Unavailable",
    "aio",
    "argmax",
    "argmin",
    "avg",
    "case",
    "client",
    "coalesce",
    "col",
    "combine",
    "connect",
    "count",
    "distinct",
    "errors",
    "first",
    "largest",
    "last",
    "lookup",
    "max",
    "measure",
    "min",
    "next",
    "open",
    "pattern",
    "polars",
    "prev",
    "previous_slot",
    "quad",
    "quantiles",
    "ref",
    "register_measure",
    "smallest",
    "spark",
    "stddev",
    "sum",
    "testing",
    "time_slot",
    "top",
    "transactional",
    "var",
    "weighted_quantiles",
    "within_km",
]

_ELSEWHERE = {
    "Quantiles": "kivi.model.quantiles",
    "Top": "kivi.model.values",
    "ABORTED": "kivi.model.outcomes",
    "UNKNOWN": "kivi.model.outcomes",
    "case": "kivi.model.expressions",
    "coalesce": "kivi.model.expressions",
    "col": "kivi.model.expressions",
    "connect": "kivi.client.database",
    "lookup": "kivi.model.rules",
    "next": "kivi.model.patterns",
    "open": "kivi.embedded.database",
    "pattern": "kivi.model.patterns",
    "prev": "kivi.model.patterns",
    "previous_slot": "kivi.model.rules",
    "quad": "kivi.model.expressions",
    "ref": "kivi.model.rules",
    "register_measure": "kivi.states.own",
    "time_slot": "kivi.model.declarations",
    "within_km": "kivi.model.expressions",
}
"""Where names load from that are not in ``kivi.model.surface``, as most are."""
_MODULES = ("aio", "client", "polars", "spark", "testing")
_RENAMED = {"open": "open_database"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kivi.{name}")
    if name in __all__:
        module = importlib.import_module(_ELSEWHERE.get(name, "kivi.model.surface"))
        value = getattr(module, _RENAMED.get(name, name))
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kivi' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
