"""Every door takes the same values, and every reader gives back what was taken.

What a value is in a column is said once, here, without kivi (``kept``). Each example is one value of one type, edges
before all, offered to every door of a server: what the door takes is in the same form in every reader, what it does not
is refused by a typed error and leaves nothing behind.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import math
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kivi
from kivi.cli.append import batches
from kivi.errors import InvalidArgument, OutOfRange
from tests.serverproc import ServerProcess

TYPES: Final = {
    "b": "bool", "i": "int64", "f": "float64", "d": "decimal(5,2)", "s": "string", "y": "bytes", "t": "timestamp"
}  # fmt: skip
EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
TOKYO: Final = dt.timezone(dt.timedelta(hours=9))
FIRST_US, LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
REFUSED: Final = object()
ARROW: Final = {"Content-Type": "application/vnd.apache.arrow.stream"}
JSON: Final = {"Content-Type": "application/json"}
LINES: Final = {"Content-Type": "application/x-ndjson"}


def kept(column: str, value: Any) -> Any:
    """What a reader gives back, or ``REFUSED``."""
    if value is None:
        return None
    number = value.item() if isinstance(value, np.generic) else value
    match column:
        case "b":
            return number if type(number) is bool else REFUSED
        case "i":
            return number if type(number) is int and -(2**63) <= number < 2**63 else REFUSED
        case "f":
            if type(number) not in (int, float) or (type(number) is float and not math.isfinite(number)):
                return REFUSED
            try:
                return float(number) + 0.0 if float(number) == number else REFUSED
            except OverflowError:
                return REFUSED
        case "d":
            try:
                exact = Decimal(number) if type(number) in (int, str, Decimal) else None
            except InvalidOperation:
                exact = None
            if exact is None or not exact.is_finite() or abs(exact) >= 1_000:
                return REFUSED
            return exact if exact == round(exact, 2) else REFUSED
        case "s":
            return value if isinstance(value, str) and _is_unicode(value) else REFUSED
        case "y":
            return bytes(value) if isinstance(value, (bytes, bytearray, memoryview)) else REFUSED
    if isinstance(value, np.datetime64):
        return REFUSED
    if isinstance(value, dt.datetime):
        if value is pd.NaT or value.tzinfo is None or getattr(value, "nanosecond", False):
            return REFUSED
        return EPOCH + (value - EPOCH)
    return EPOCH + dt.timedelta(microseconds=number) if _is_moment(number) else REFUSED


def _is_unicode(text: str) -> bool:
    return text == text.encode("utf-8", "replace").decode()


def _is_moment(number: Any) -> bool:
    return type(number) is int and FIRST_US <= number <= LAST_US


# -- values ---------------------------------------------------------------------------------------------


OTHERS: Final[list[Any]] = [None, True, 0.5, b"a"]
"""Of some types one, which most columns refuse."""
EDGES: Final[dict[str, list[Any]]] = {
    "b": [False, np.bool_(True), 0, "true"],
    "i": [0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**400, np.int64(7), np.uint64(2**64 - 1), "1", 1.0],
    "f": [
        0.0,
        -0.0,
        0.1,
        5e-324,
        1.7976931348623157e308,
        math.inf,
        -math.inf,
        math.nan,
        1e18,
        np.float64(0.25),
        np.float32(0.1),
        2**53,
        2**53 + 1,
        10**400,
        "a",
    ],
    "d": [Decimal(text) for text in ("0.01", "-0.00", "999.99", "-999.99", "999.995", "1E+2", "1.230", "NaN", "-1000")]
    + [Decimal("Infinity"), Decimal("1E+999999"), Decimal("1E-999999"), 0, 999, 1_000, 2**63 - 1, "12.5", "a", ""],
    "s": ["", "a", "\x00", "\u00e9\U0001f600", "\ud800", "a" * 5_000, "2026-01-01T00:00:00Z", '"', "'x'", "1", " b "],
    "y": [b"", b"\x00\xff", bytearray(b"ab"), memoryview(b"abc"), b"x" * 5_000],
    "t": [
        FIRST_US,
        FIRST_US - 1,
        LAST_US,
        LAST_US + 1,
        1780000000 * 10**9,
        -(2**63),
        2**63 - 1,
        2**63,
        dt.datetime(1, 1, 1, tzinfo=dt.UTC),
        dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.UTC),
        dt.datetime(2026, 7, 1, 9, 0, 0, 1, tzinfo=TOKYO),
        dt.datetime(2026, 7, 1, 9),  # noqa: DTZ001
        dt.date(2026, 7, 1),
        pd.Timestamp(1500, unit="ns", tz="UTC"),
        pd.Timestamp(2000, unit="ns", tz="Asia/Tokyo"),
        pd.NaT,
        np.datetime64(1, "us"),
        np.datetime64(1, "ns"),
    ],
}
ANY: Final = {
    "b": st.booleans(),
    "i": st.integers(-(2**63) - 9, 2**63 + 9),
    "f": st.floats(),
    "d": st.decimals(-1_001, 1_001, places=3) | st.decimals(-1_001, 1_001, places=1),
    "s": st.text(),
    "y": st.binary(),
    "t": st.datetimes(timezones=st.sampled_from([dt.UTC, TOKYO]), min_value=dt.datetime(1, 1, 2))  # noqa: DTZ001
    | st.integers(FIRST_US - 9, LAST_US + 9),
}


# -- doors ----------------------------------------------------------------------------------------------


class World(NamedTuple):
    db: Any
    http: httpx.Client
    folder: Path
    described: Any


Door = Callable[[World, int, str, Any], object]
"""Called with the row's number, a column and its value. ``Skipped``: the door has no way to say such a value."""


class Skipped(Exception):
    pass


def _event(number: int, column: str, value: Any) -> dict[str, Any]:
    return {"ts": 0, "n": number, column: value}


def _put(world: World, number: int, column: str, value: Any) -> None:
    with world.db.transaction() as tx:
        tx.put("rows", (number,), **{column: value})


def _insert(world: World, number: int, column: str, value: Any) -> None:
    with world.db.transaction() as tx:
        tx.get("rows", (number,))
        tx.insert("rows", (number,), **{column: value})


def _appender(each: bool) -> Door:
    def appended(world: World, number: int, column: str, value: Any) -> None:
        with world.db.appender("events", each=each) as app:
            future = app.append(**_event(number, column, value))
        future.result()

    return appended


def _batch(number: int, column: str, value: Any, time: str = "ts") -> pa.RecordBatch:
    """In the type that Arrow itself gives it, as programs have it that made a file of it."""
    if column == "d" and isinstance(value, str):
        raise Skipped  # a text of Arrow is none of its decimals
    if column == "t" and isinstance(value, (np.datetime64, dt.date)) and not isinstance(value, dt.datetime):
        raise Skipped  # which are moments in Arrow
    if column == "t" and isinstance(value, dt.datetime) and value.tzinfo is None:
        raise Skipped  # and so are these, in UTC
    if column == "t" and getattr(value, "nanosecond", False):
        value = pd.Series([value])
    try:
        array = pa.array(value if isinstance(value, pd.Series) else [value])
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        raise Skipped from None
    if pa.types.is_null(array.type) and value is not None:
        raise Skipped  # NaT, which is a null there
    columns = {"n": pa.array([number]), column: array}
    return pa.record_batch({time: pa.array([0]), **columns} if time else columns)


def _arrow(world: World, number: int, column: str, value: Any) -> None:
    world.db.append("events", _batch(number, column, value))


def _arrow_rows(world: World, number: int, column: str, value: Any) -> None:
    world.db.write("rows", _batch(number, column, value, time=""))


def _http_arrow(world: World, number: int, column: str, value: Any) -> None:
    batch, sink = _batch(number, column, value), io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    _told(world.http.post("/v1/tables/events/append", content=sink.getvalue(), headers=ARROW))


def _parquet(world: World, number: int, column: str, value: Any) -> None:
    path = world.folder / "some.parquet"
    try:
        pq.write_table(pa.table(_batch(number, column, value)), path)
    except pa.ArrowException:
        raise Skipped from None
    _file(world, path)


def _json(column: str, value: Any) -> Any:
    """As JSON says it."""
    if isinstance(value, np.datetime64):
        raise Skipped
    if isinstance(value, np.generic):
        value = value.item()
    if column == "t" and getattr(value, "nanosecond", False):
        raise Skipped  # the digits of a text beyond its microseconds are cut off
    if isinstance(value, str) and column not in "ds":
        raise Skipped  # a number, a moment or bytes in the form of a text
    if isinstance(value, (bytes, bytearray, memoryview)) and column == "y":
        return "0x" + bytes(value).hex()
    if isinstance(value, dt.datetime) and column == "t" and value is not pd.NaT and value.tzinfo is not None:
        return value.isoformat()
    if isinstance(value, Decimal) and column == "d":
        return str(value)
    if column == "f" and type(value) is int:
        raise Skipped  # a number of JSON is the nearest float
    if column == "d" and isinstance(value, float):
        raise Skipped  # and the decimal that is written
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise Skipped
    if isinstance(value, (int, float)) and not abs(value) < 2**70:
        raise Skipped
    return value


def _told(reply: httpx.Response) -> None:
    if reply.status_code != 200:
        assert reply.status_code == 400 and reply.json()["reason"] in ("InvalidArgument", "SchemaError"), reply.text
        raise InvalidArgument(reply.text)


def _http_put(world: World, number: int, column: str, value: Any) -> None:
    put = {"op": "put", "table": "rows", "key": [number], "values": {column: _json(column, value)}}
    _told(world.http.post("/v1/transactions", content=json.dumps({"operations": [put]}), headers=JSON))


def _http_append(world: World, number: int, column: str, value: Any) -> None:
    event = json.dumps(_event(number, column, _json(column, value)))
    _told(world.http.post("/v1/tables/events/append", content=event, headers=LINES))


def _ndjson(world: World, number: int, column: str, value: Any) -> None:
    if column != "s" and isinstance(value, str):
        raise Skipped  # is read as on a command line
    path = world.folder / "some.json"
    path.write_text(json.dumps(_event(number, column, _json(column, value))) + "\n")
    _file(world, path)


NATURAL: Final = {"b": (bool,), "i": (int,), "f": (float,), "d": (int, str), "s": (str,), "y": (str,), "t": (int, str)}


def _csv(world: World, number: int, column: str, value: Any) -> None:
    said = _json(column, value)
    if said is not None and type(said) not in NATURAL[column]:
        raise Skipped  # all of CSV is text
    if isinstance(value, str) and (column != "s" or "\x00" in value or "\r" in value or not _is_unicode(value)):
        raise Skipped
    text = "" if said is None else json.dumps(said) if isinstance(said, bool) else str(said)
    if column == "s" and said is not None:
        text = '"' + text.replace('"', '""') + '"'
    path = world.folder / "some.csv"
    path.write_text(f"ts,n,{column}\n0,{number},{text}\n", newline="")
    _file(world, path)


def _file(world: World, path: Path) -> None:
    """As ``kivi append`` does it."""
    for batch in batches(str(path), world.described):
        world.db.append("events", batch.rows)


DOORS: Final[dict[str, Door]] = {
    "put": _put,
    "insert, after a read": _insert,
    "write, dicts": lambda world, n, c, v: world.db.write("rows", [{"n": n, c: v}]),
    "write, Arrow": _arrow_rows,
    "append, dicts": lambda world, n, c, v: world.db.append("events", [_event(n, c, v)]),
    "append, Arrow": _arrow,
    "appender": _appender(False),
    "appender, each": _appender(True),
    "HTTP, a transaction": _http_put,
    "HTTP, lines": _http_append,
    "HTTP, Arrow": _http_arrow,
    "a file of JSON": _ndjson,
    "a file of CSV": _csv,
    "a file of Parquet": _parquet,
}


OF_ROWS: Final = {"put", "insert, after a read", "write, dicts", "write, Arrow", "HTTP, a transaction"}


# -- readers --------------------------------------------------------------------------------------------


def _of_arrow(table: pa.Table) -> list[dict[str, Any]]:
    return table.to_pylist()


def _of_json(world: World, table: str, first: int) -> list[dict[str, Any]]:
    reply = world.http.get(f"/v1/tables/{table}/rows", params={"where": f"n >= {first}", "limit": 10_000})
    assert reply.status_code == 200, reply.text
    rows: list[dict[str, Any]] = reply.json()["rows"]
    for row in rows:
        for name, read in (("t", dt.datetime.fromisoformat), ("d", Decimal), ("y", lambda x: bytes.fromhex(x[2:]))):
            if row[name] is not None:
                row[name] = read(row[name])
    return rows


def _readings(world: World, table: str, first: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    where = kivi.col("n") >= first
    yield "HTTP", _of_json(world, table, first)
    with world.db.snapshot() as snap:
        yield "scan", list(snap.scan(table, where=where))
        yield "to_arrow", _of_arrow(snap.to_arrow(table, where=where))
        yield "sql", _of_arrow(snap.sql(f"select * from {table} where n >= ?", [first]))
        if table == "rows":
            numbers = [(row["n"],) for row in snap.scan(table, where=where, columns=["n"])]
            yield "get_many", list(snap.get_many(table, numbers))
        else:
            measures = {name: kivi.last(name) for name in TYPES if name != "y"}
            yield "query", list(snap.query(table, where=where, group_by=["n"], measures=measures))


# -- the property ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="world")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("doors")
    with (
        ServerProcess(folder / "data", "--http", "localhost:0") as server,
        server.connect() as db,
        httpx.Client(base_url=server.http, timeout=60) as http,
    ):
        db.create_table("rows", key={"n": "int64"}, columns=TYPES)
        db.create_event_table("events", event_time="ts", columns={"ts": "timestamp", "n": "int64", **TYPES})
        yield World(db, http, folder, db.describe("events"))


NUMBERS: Final = iter(range(10**9))


def _offer(world: World, door: str, column: str, value: Any, wanted: Any) -> int | None:
    """The row's number, if it is taken."""
    number = next(NUMBERS)
    try:
        DOORS[door](world, number, column, value)
    except Skipped:
        return None
    except (InvalidArgument, OutOfRange) as error:
        refused = str(error)
    else:
        refused = ""
    assert bool(refused) is (wanted is REFUSED), f"{door}: {value!r} is {refused or 'taken'}"
    return None if refused else number


def _check(world: World, column: str, values: list[Any]) -> None:
    first = next(NUMBERS)
    taken = dict[str, dict[int, Any]](rows={}, events={})
    for value in values:
        wanted = kept(column, value)
        for door in DOORS:
            number = _offer(world, door, column, value, wanted)
            if number is not None:
                taken["rows" if door in OF_ROWS else "events"][number] = wanted
    for table, numbers in taken.items():
        for reader, rows in _readings(world, table, first):
            assert sorted(row["n"] for row in rows) == sorted(numbers), reader
            for row in rows:
                if column not in row:
                    continue  # of bytes nothing is measured
                found, wanted = row[column], numbers[row["n"]]
                assert type(found) is type(wanted) and found == wanted, (reader, found, wanted)
                assert math.copysign(1, found) == 1 if found == 0 and column == "f" else True
                assert all(row[other] is None for other in row.keys() & TYPES.keys() - {column})


@pytest.mark.parametrize("column", TYPES)
def test_what_one_door_takes_all_take_and_every_reader_gives_back(world: World, column: str) -> None:
    _check(world, column, EDGES[column] + OTHERS)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data(), st.sampled_from(sorted(TYPES)))
def test_so_it_is_of_any_value(world: World, data: st.DataObject, column: str) -> None:
    _check(world, column, data.draw(st.lists(ANY[column], min_size=1, max_size=2)))
