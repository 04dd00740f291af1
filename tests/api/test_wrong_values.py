"""Every public call, with one argument at a time that is of no use: a typed error in one line, and nothing is done.

The methods and their parameters are found by looking (``arguments``): a method that is new has to be given a call here
that works. What is wrong is what programs hand over by mistake: an array, a data frame or a list for one value, None
and NA, what nests or counts too far.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kivi
from kivi.api import interface
from kivi.errors import KiviError

T0 = 1_700_000_000_000_000


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


WRONG: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array([1, 2]),
    "array of no dimension": lambda: np.array(1.5),
    "data frame": lambda: pd.DataFrame({"a": [1, 2]}),
    "NA": lambda: pd.NA,
    "nested": lambda: nested(5_000),
    "long": lambda: 10**5_000,
    "bytes": lambda: b"\xff",
    "nan": lambda: math.nan,
    "dict": lambda: {"a": nested(5_000)},
    "generator": lambda: (each for each in (nested(5_000),)),
}


def operator_of(column: str, op: str) -> Callable[[Any], Any]:
    return lambda value: getattr(kivi.col(column), op)(value)


def pattern() -> Any:
    b = kivi.col("x") > 2
    return kivi.pattern("A B", within="5m", define={"B": b}, measures={"began": kivi.first("A.x")})


EVENT = {"ts": T0, "x": 1, "s": "a"}
SLOT = kivi.time_slot("ts", "5m", name="slot")
N = {"n": kivi.count()}
TABLE = {"table": "t"}
EVENTS = {"table": "ev"}
OTHER = {"name": "other"}
NOTHING = {"name": "nothing"}
GROUPED = {**EVENTS, "group_by": ["s"], "measures": N}

CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "Database": {
        "create_table": {**OTHER, "key": {"id": "int64"}, "columns": {"n": "int64"}},
        "create_event_table": {**OTHER, "event_time": "ts", "columns": {"ts": "timestamp"}},
        "create_aggregate": {**OTHER, "source": "ev", "group_by": ["x", SLOT], "measures": N},
        "create_aggregates": {**OTHER, "source": "ev", "levels": ["x"], "slots": ["5m"], "measures": N},
        "create_view": {**OTHER, "source": "t", "key": ["v", "id"]},
        "create_hierarchy": OTHER,
        "create_rule": {**OTHER, "source": "ev", "into": "raised"},
        "create_alert": {**OTHER, "on": "ag", "where": kivi.col("n") > 1},
        "alter_table": {"name": "t", "add_columns": {"w": "int64"}},
        "alter_aggregate": {"name": "ag", "add_measures": {"m": kivi.count()}},
        "describe": {"name": "t"},
        "drop": NOTHING,
        "drop_rule": NOTHING,
        "drop_alert": NOTHING,
        "silence": {**NOTHING, "until": None},
        "unsubscribe": NOTHING,
        "subscriptions": {},
        "store_subscriptions": {**EVENTS, "subscriptions": [{"name": "one"}]},
        "subscribe": TABLE,
        "subscribe_matches": {**EVENTS, "pattern": pattern()},
        "reached": {**EVENTS, "ts": 5},
        "subscribers": {**EVENTS, "ts": 5},
        "get": {**TABLE, "key": (1,)},
        "get_many": {**TABLE, "keys": [(1,)]},
        "split_points": TABLE,
        "tail_points": EVENTS,
        "run": {"fn": lambda tx: None},
        "append": {**EVENTS, "records": [EVENT]},
        "write": {**TABLE, "records": [{"id": 1}]},
        "appender": EVENTS,
        "stage": {**EVENTS, "records": [EVENT]},
        "discard_stages": {"ids": []},
        "batch_scopes": {},
        "outcome": {"token": "none"},
        "transaction": {},
        "snapshot": {},
        "checkpoint": {"path": "/nowhere/x"},
        "backup": {"repository": "/nowhere/x"},
        "cancel_move": {"move": "x"},
        "move_shards": {"shards": "0-1", "to": "x"},
        "rebalance_shards": {},
        "forget_node": {"node": "x"},
    },
    "Transaction": {
        "get": {**TABLE, "key": (1,)},
        "get_many": {**TABLE, "keys": [(1,)]},
        "put": {**TABLE, "key": (1,), "v": "x"},
        "insert": {**TABLE, "key": (9,), "v": "x"},
        "delta": {**TABLE, "key": (1,), "n": 1},
        "delete": {**TABLE, "key": (9,)},
        "guard": {**TABLE, "key": (1,)},
        "scan": TABLE,
        "scan_batches": TABLE,
        "summary": {**EVENTS, "measures": N},
        "append": {**EVENTS, "records": [EVENT]},
        "append_stages": {**EVENTS, "stages": []},
        "write": {**TABLE, "records": [{"id": 1}]},
        "retract": EVENTS,
        "overwrite": TABLE,
        "renew": {},
    },
    "Snapshot": {
        "get": {**TABLE, "key": (1,)},
        "get_many": {**TABLE, "keys": [(1,)]},
        "scan": TABLE,
        "scan_batches": TABLE,
        "to_arrow": TABLE,
        "to_pandas": TABLE,
        "to_polars": TABLE,
        "changes": {**EVENTS, "since": 0},
        "change_batches": {**EVENTS, "since": 0},
        "summary": {**EVENTS, "measures": N},
        "query": GROUPED,
        "windows": {**GROUPED, "size": "5m"},
        "rollup": {"table": "ag", "by": ["x"]},
        "match": {**EVENTS, "pattern": pattern()},
        "sql": {"text": "select 1"},
        "dataset": TABLE,
        "relation": TABLE,
        "renew": {},
    },
}
NO_ARGUMENTS = {"alerts", "close", "cluster_status", "commit", "consolidate", "rollback", "rules", "stats", "tables"}
NO_ARGUMENTS |= {"verify_cluster", "watermark"}

NAMES = ("sum", "min", "max", "count", "avg", "var", "stddev", "quantiles", "distinct", "first", "last")
MEASURES: dict[str, dict[str, Any]] = {
    **{name: {"source": "x"} for name in NAMES},
    **{name: {"source": "x", "by": "x"} for name in ("argmax", "argmin", "weighted_quantiles")},
    **{name: {"source": "x", "n": 2} for name in ("largest", "smallest")},
    "top": {"source": "x", "k": 2},
    "measure": {"name": "avg", "source": "x"},
}
OPERATORS = ("__eq__", "__lt__", "isin", "startswith", "contains", "matches", "under", "covers")
EXPRESSIONS: dict[str, Callable[[Any], Any]] = {
    **{f"{column} {op}": operator_of(column, op) for column in ("x", "s", "ts") for op in OPERATORS},
    "+": lambda value: kivi.col("x") + value > 1,
    "&": lambda value: (kivi.col("x") > 1) & value,
    "col": lambda value: kivi.col(value) == 1,
    "case": lambda value: kivi.case((kivi.col("x") > 1, value), otherwise=1) == 1,
    "coalesce": lambda value: kivi.coalesce(kivi.col("x"), value) == 1,
    "quad": lambda value: kivi.quad("x", "x", value) == "0",
    "within_km": lambda value: kivi.within_km("x", "x", 1.0, 1.0, value),
    "year": lambda value: kivi.col("ts").year(value) == 2020,
    "where": lambda value: value,
}
GROUPS: dict[str, Callable[[Any], Any]] = {
    "column": lambda value: value,
    "name": lambda value: (value, kivi.col("x")),
    "expression": lambda value: ("g", value),
    "time_slot.column": lambda value: kivi.time_slot(value, "5m"),
    "time_slot.width": lambda value: kivi.time_slot("ts", value),
    "time_slot.name": lambda value: kivi.time_slot("ts", "5m", value),
    "time_slot.tz": lambda value: kivi.time_slot("ts", "5m", tz=value),
}
MADE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "pattern": (kivi.pattern, {"text": "A", "measures": {"m": kivi.first("A.x")}}),
    "lookup": (kivi.lookup, {"table": "t", "by": ["x"]}),
    "previous_slot": (kivi.previous_slot, {"table": "ag", "by": ["x"]}),
    "combine": (kivi.combine, {"measure": "n"}),
    "prev": (kivi.prev, {"column": "x", "n": 1}),
    "ref": (kivi.ref, {"name": "x"}),
    "transactional": (kivi.transactional(lambda tx: None), {"db_or_tx": None}),
    "connect": (
        lambda **how: kivi.connect(**how).close(),
        {"endpoint": "localhost:1", "access_token": None, "tls": None},
    ),
}
TAKEN = {"appender.max_events: long", "run.timeout: long", "snapshot.ttl_s: long"}
"""As many as there are, for ever, and what a server says no to once it is asked."""


def declare(db: Any) -> None:
    columns = {"n": kivi.sum("int64"), "v": "string"}
    db.create_table("t", key={"id": "int64"}, columns=columns)
    db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "x": "int64", "s": "string"})
    db.create_event_table("raised", event_time="ts", columns={"ts": "timestamp", "x": "int64"})
    db.create_aggregate("ag", source="ev", group_by=["x", SLOT], measures=N)
    db.append("ev", [EVENT])


def arguments(kind: type, name: str, good: dict[str, Any]) -> Iterator[str]:
    taken = [each for each in inspect.signature(getattr(kind, name)).parameters.values() if each.name != "self"]
    return iter(dict.fromkeys([*(each.name for each in taken if each.kind != each.VAR_KEYWORD), *good]))


def called(target: Any, name: str, given: dict[str, Any]) -> None:
    at_first = (
        [given.pop("fn")]
        if name == "run"
        else [given.pop(each) for each in ("table", "key") if name in ("put", "insert", "delta")]
    )
    found = getattr(target, name)(*at_first, **given)
    if name in ("subscribe", "subscribe_matches", "appender", "transaction", "snapshot"):
        with found as opened:
            opened.next(timeout_s=0) if hasattr(opened, "next") else None
            opened.get("t", (1,)) if name == "transaction" else None
    elif hasattr(found, "__iter__") and not isinstance(found, (str, bytes)):
        list(itertools.islice(iter(found), 3))


def refusals(what: str, call: Callable[[dict[str, Any]], Any], good: dict[str, Any], at: str) -> set[str]:
    """What takes something wrong; what fails otherwise than it should fails the test."""
    taken = set()
    for wrong, make in WRONG.items():
        try:
            call({**good, at: make()})
        except KiviError as error:
            said = str(error)
            assert said and "\n" not in said and len(said) < 1_000, f"{what}, {wrong}: {said[:200]}"
        except Exception as error:
            raise AssertionError(f"{what}, {wrong}: {type(error).__name__}: {error}"[:300]) from error
        else:
            taken.add(f"{what}: {wrong}")
    return taken


def entered(db: Any, kind: str) -> Any:
    return {"Transaction": db.transaction, "Snapshot": db.snapshot}.get(kind, lambda: contextlib.nullcontext(db))()


def test_every_public_method_is_called() -> None:
    for kind, calls in CALLS.items():
        public = {name for name, of in inspect.getmembers(getattr(interface, kind), callable) if name[0] != "_"}
        assert public - NO_ARGUMENTS == calls.keys()


@pytest.mark.parametrize("kind", CALLS)
def test_methods(db: Any, kind: str) -> None:
    declare(db)
    tables, taken = db.tables(), set[str]()
    for name, good in CALLS[kind].items():
        if name == "run" and type(db).__name__ == "Driven":
            continue  # it wraps the function
        for parameter in arguments(getattr(interface, kind), name, good):
            with entered(db, kind) as target:
                taken |= refusals(f"{name}.{parameter}", partial(called, target, name), good, parameter)
                assert target.get("t", (1,)) is None  # it goes on, and nothing was done
            assert db.tables() == tables, f"{name}.{parameter}"
    assert taken <= TAKEN


def test_flags_are_true_or_false(db: Any) -> None:
    """Not whatever Python takes for one: ``reverse="no"`` would be true."""
    declare(db)
    flags = 0
    for kind, calls in CALLS.items():
        for name, good in calls.items():
            for each in inspect.signature(getattr(getattr(interface, kind), name)).parameters.values():
                wrongs: tuple[Any, ...] = ("no", 1, None, []) if each.annotation == "bool" else ()
                for wrong in wrongs:
                    with entered(db, kind) as target, pytest.raises(kivi.InvalidArgument, match="is True or False"):
                        called(target, name, {**good, each.name: wrong})
                    flags += 1
    assert flags > 100
    with db.snapshot() as snap:
        assert list(snap.scan("t", reverse=np.bool_(True))) == []


def test_nothing_is_half_made(db: Any) -> None:
    declare(db)
    tables = db.tables()
    with pytest.raises(kivi.SchemaError, match="at most 128"):
        db.create_hierarchy("a" * 120)  # whose view would have too long a name
    with pytest.raises(kivi.InvalidArgument, match="not a duration"):
        db.create_aggregate("other", source="ev", group_by=["x", SLOT], measures=N, retention={"5m": "30d"})
    assert db.tables() == tables


def test_names_that_can_be_read_once(db: Any) -> None:
    declare(db)
    with db.subscribe("ag", rollup={"by": (name for name in ("x",))}) as live:
        assert live.next(timeout_s=60) is not None
        assert live.rows == [{"x": 1, "n": 1}]


def test_measures_and_expressions() -> None:
    with kivi.open() as db:
        declare(db)
        with db.snapshot() as snap:
            for name, good in MEASURES.items():
                for parameter in {**inspect.signature(getattr(kivi, name)).parameters, **good}:
                    assert refusals(f"{name}.{parameter}", partial(measured, snap, name), good, parameter) == set()
            for name, predicate in EXPRESSIONS.items():
                found = refusals(name, partial(selected, snap, predicate), {}, "value")
                assert found <= {"x isin: array", "ts isin: array", "s isin: dict"}  # whose elements are such values
            for name, group in GROUPS.items():
                assert refusals(name, partial(grouped, snap, group), {}, "value") == set()
    for name, (function, good) in MADE.items():
        for parameter in good:
            assert refusals(name, partial(made, function), good, parameter) == set()


def measured(snap: Any, name: str, given: dict[str, Any]) -> None:
    list(snap.query("ev", measures={"m": getattr(kivi, name)(**given)}))


def selected(snap: Any, made: Callable[[Any], Any], given: dict[str, Any]) -> None:
    list(snap.scan("ev", where=made(given["value"])))


def grouped(snap: Any, made: Callable[[Any], Any], given: dict[str, Any]) -> None:
    list(snap.query("ev", group_by=[made(given["value"])], measures=N))


def made(function: Callable[..., Any], given: dict[str, Any]) -> None:
    function(**given)
