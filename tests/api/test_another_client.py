"""What one client remembers of a table, and what another one makes of the table meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import kivi
from tests.serverproc import ServerProcess

EVENTS = pa.table({"ts": pa.array([5, 6], pa.timestamp("us", "UTC")), "x": [1, 2]})
ROWS = pa.table({"id": [5, 6], "v": [1, 2]})
FORMS: dict[str, Callable[[pa.Table], Any]] = {
    "list": lambda table: table.to_pylist(),
    "iterator": lambda table: iter(table.to_pylist()),
    "generator": lambda table: (row for row in table.to_pylist()),
    "table": lambda table: table,
    "stream": lambda table: table.to_reader(),
}


pytestmark = pytest.mark.parametrize("db", ["sync", "asyncio"], indirect=True)
"""The client that remembers the tables."""


@pytest.fixture
def other(db: Any, server: ServerProcess) -> Iterator[kivi.client.Database]:
    """The one that makes and alters them."""
    with server.connect() as client:
        for name in ("ev", "t"):
            declare(client, name)
        db.append("ev", [{"ts": 1, "x": 0}])
        db.write("t", [{"id": 1, "v": 0}])
        yield client


def declare(db: Any, table: str) -> None:
    """Makes the table anew."""
    if table in db.tables():
        db.drop(table)
    if table == "ev":
        db.create_event_table("ev", event_time="ts", columns={"ts": "timestamp", "x": "int64"})
    else:
        db.create_table("t", key={"id": "int64"}, columns={"v": "int64"})


@pytest.mark.parametrize("form", FORMS)
def test_records_that_are_read_once_are_not_lost_where_a_table_was_made_anew(
    other: Any, db: kivi.client.Database, form: str
) -> None:
    make = FORMS[form]
    for name, records, write in (
        ("ev", EVENTS, db.append),
        ("t", ROWS, db.write),
        ("ev", EVENTS, lambda name, records: committed(other, db.stage(name, records))),
    ):
        declare(other, name)
        write(name, make(records))
        with other.snapshot() as snap:
            assert snap.to_arrow(name).to_pylist() == records.to_pylist()


def committed(other: Any, stage: bytes) -> None:
    with other.transaction() as tx:
        tx.append_stages("ev", [stage])


def in_transaction(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(other: Any) -> None:
        with other.transaction() as tx:
            write(tx)

    return call


def with_z(form: str, table: pa.Table) -> Any:
    return FORMS[form](table.append_column("z", pa.array([7, 8])))


@pytest.mark.parametrize("form", FORMS)
def test_a_column_that_another_client_has_added_is_written_by_its_name(
    other: Any, db: kivi.client.Database, form: str
) -> None:
    writes: list[tuple[str, Callable[[Any], Any]]] = [
        ("ev", lambda other: other.append("ev", with_z(form, EVENTS))),
        ("ev", in_transaction(lambda tx: tx.append("ev", with_z(form, EVENTS)))),
        ("ev", lambda other: committed(other, other.stage("ev", with_z(form, EVENTS)))),
        ("t", lambda other: other.write("t", with_z(form, ROWS))),
        ("t", in_transaction(lambda tx: tx.write("t", with_z(form, ROWS)))),
    ]
    for table, write in writes:
        declare(other, table)
        db.describe(table)  # as it is without the column
        other.alter_table(table, add_columns={"z": "int64"})
        write(db)
        with other.snapshot() as snap:
            assert snap.to_arrow(table)["z"].to_pylist() == [7, 8]


def test_an_appender_has_the_columns_that_there_are_when_it_is_made(other: kivi.client.Database, db: Any) -> None:
    other.alter_table("ev", add_columns={"z": "int64"})
    if hasattr(db, "_target"):

        async def append() -> int:
            async with db._target.appender("ev") as app:
                return int(await app.append(ts=5, x=1, z=7))

        assert db._loop.run_until_complete(append()) <= other.watermark()
    else:
        with db.appender("ev") as app:
            assert app.append(ts=5, x=1, z=7).result() <= other.watermark()
    with other.snapshot() as snap:
        assert snap.to_arrow("ev", any_order=False)["z"].to_pylist() == [None, 7]


def test_what_is_refused_is_refused_with_the_columns_of_now(other: kivi.client.Database, db: Any) -> None:
    other.alter_table("ev", add_columns={"z": "int64"})
    with pytest.raises(kivi.SchemaError, match="no column 'y'; it has ts, x, z"):
        db.append("ev", iter([{"ts": 5, "y": 1}]))
    with pytest.raises(ZeroDivisionError):
        db.append("ev", (1 // 0 for _ in range(1)))
    with other.snapshot() as snap:
        assert snap.to_arrow("ev").num_rows == 1
