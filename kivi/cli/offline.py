"""The tools for a store that nobody has open: dump, verify, backup, restore.

They never write to what they inspect. The log is walked where it is; everything that needs an open
store (replay, folding, scans) happens on a copy in a temporary directory, where finished table files
are linked, not copied, if the file system can.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kivi.cli.append import Progress
from kivi.cli.text import plain
from kivi.errors import DataLoss, InvalidArgument, KiviError, NotAStore, OutOfRange, StoreInUse
from kivi.model.lifetimes import slot_index
from kivi.model.scans import Scan

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.encoding.pretty import SchemaOf
    from kivi.model.schema import TableSchema

__all__ = ["backup", "dump", "restore", "verify"]

MARKER: Final = "KIVI"
_LINKED: Final = (".sst", ".blob")  # RocksDB never writes to these again
_PARTS_MAX: Final = 100  # sums of batches that are kept before they are added up
_BELOW: Final = ("rows", "derived", "guards", "appends", "runs")


def checked(path: str) -> Path:
    """The directory, if it holds a store that nobody has open."""
    root = Path(path)
    if not (root / MARKER).is_file():
        raise NotAStore(f"{path} is not a kivi store: there is no file {MARKER} in it")
    with contextlib.suppress(FileNotFoundError), open(root / "LOCK", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUse(f"{path} is open in another process: stop that one first") from None
    return root


@contextlib.contextmanager
def copy_opened(root: Path) -> Iterator[Any]:
    """A store opened on a copy of the directory."""
    from kivi.runtime.settings import Settings
    from kivi.store.facade import Store

    with tempfile.TemporaryDirectory(prefix="kivi-") as scratch:
        target = Path(scratch, "store")

        def place(source: str, destination: str) -> str:
            if source.endswith(_LINKED):
                with contextlib.suppress(OSError):
                    os.link(source, destination)
                    return destination
            return str(shutil.copy2(source, destination))

        shutil.copytree(root, target, copy_function=place, ignore=shutil.ignore_patterns("LOCK"))
        store = Store.open(str(target), settings=Settings(background=False))
        try:
            yield store
        finally:
            store.close()


# -- dump -------------------------------------------------------------------------------------------


def dump(args: argparse.Namespace) -> int:
    """The marker; every record of the log; every pair of the engine; every table as a reader sees it now."""
    from kivi.encoding import pretty as fmt
    from kivi.store.catalog import SYSTEM

    root = checked(args.dir)
    emit = _json_line if args.output == "json" else _text_line
    emit("store", json.loads((root / MARKER).read_text()))
    with copy_opened(root) as store:

        def schema_of(table: int) -> TableSchema | None:
            found: TableSchema | None = SYSTEM.get(table) or store.catalog.schema_of(table)
            if found is None:  # a stage names a table by its first generation
                found = next((schema for schema in store.tables() if schema.origin == table), None)
            return found

        damaged = _dump_log(root, emit, schema_of)
        for key, data in store.engine.scan(b"", None):
            emit("stored", {"pair": fmt.entry(key, data, schema_of)})
        lease = store.begin()
        for schema in store.tables():
            emit("table", plain(schema.description()))
            for row in _rows(store, lease, schema):
                emit("row", {"table": schema.name, **plain(row)})
        store.release(lease)
    return 1 if damaged else 0


def _text_line(kind: str, facts: dict[str, Any]) -> None:
    """A line; below it, one for each row that a record touches. A stored pair is a sentence of its own."""
    if kind == "stored":
        print(kind, facts["pair"])
        return
    shown = {name: value for name, value in facts.items() if value not in (None, "", [], {})}
    below = {name: value for name, value in shown.items() if name in _BELOW and isinstance(value, list)}
    print(kind, " ".join(f"{name}={value}" for name, value in shown.items() if name not in below))
    for name, lines in below.items():
        for line in lines:
            print(f"    {name:<8} {line}")


def _json_line(kind: str, facts: dict[str, Any]) -> None:
    print(json.dumps({"what": kind, **facts}, ensure_ascii=False))


def _dump_log(root: Path, emit: Any, schema_of: SchemaOf) -> bool:
    from kivi.log.inspect import Damage, inspect

    damaged = False
    for path, offset, item in inspect(str(root / "log")):
        where = {"segment": os.path.basename(path), "offset": offset}
        if isinstance(item, Damage):
            damaged = damaged or item.fatal
            emit("damage", {**where, "reason": item.reason, "fatal": item.fatal})
            continue
        facts = {"ts": item.sequence, "time": _moment(item.time_us), **where, **_record(item, schema_of)}
        emit(item.kind.name.lower(), facts)
    return damaged


def _record(record: Any, schema_of: SchemaOf) -> dict[str, Any]:
    """The facts of one log record, by the names of the tables that are there now."""
    from kivi.encoding import pretty as fmt
    from kivi.encoding.event_names import EventNames
    from kivi.log import Kind
    from kivi.mvcc.record import BLIND, Bulk, decode_abort, decode_commit, decode_events, decode_stage, is_events
    from kivi.mvcc.verdict import EXISTENCE

    def name(table: int) -> str:
        schema = schema_of(table)
        return f"table {table}" if schema is None else schema.name

    def row(table: int, key: bytes, op: Any) -> str:
        schema = schema_of(table)
        if schema is None:
            return f"{name(table)} 0x{key.hex()} {op.barrier.name.lower()}"
        return fmt.operation(schema, key, op.barrier.name, op.puts, op.deltas)

    def guard(table: int, key: bytes, column: int) -> str:
        schema = schema_of(table)
        if schema is None:
            return f"{name(table)} 0x{key.hex()}"
        return fmt.key_text(schema, key) + ("" if column == EXISTENCE else f".{schema.columns[column].name}")

    def retracted(bulk: Bulk) -> str:
        return f"{name(bulk.table)} {EventNames.decode(bulk.parts[0]).size} events"

    if record.kind == Kind.COMMIT and is_events(record.body):
        events = decode_events(record.body)
        return {
            "upto": record.last,
            "token": events.request[0],
            "derived": [row(*item) for item in events.derived],
            "events": f"{name(events.table)} {len(events.events[0])} bytes, each event a transaction",
            "runs": [f"{name(table)} {len(data[0])} bytes" for table, data in events.runs],
        }
    if record.kind == Kind.COMMIT:
        commit = decode_commit(record.body)
        return {
            "start_ts": None if commit.start_ts == BLIND else commit.start_ts,
            "token": commit.request[0] if commit.request else None,
            "batch": list(commit.batch) if commit.batch else None,
            "rows": [row(*item) for item in commit.rows],
            "derived": [row(*item) for item in commit.derived],
            "guards": [guard(*item) for item in commit.guards],
            "appends": [f"{name(bulk.table)} {bulk.nbytes} bytes" for bulk in commit.appends],
            "runs": [f"{name(bulk.table)} {bulk.nbytes} bytes" for bulk in commit.runs],
            **({"retracted": [retracted(bulk) for bulk in commit.retractions]} if commit.retractions else {}),
        }
    if record.kind == Kind.STAGE:
        stage = decode_stage(record.body)
        return {"table": name(stage.table), "events": stage.rows, "owner": stage.owner}
    if record.kind == Kind.ABORT:
        abort = decode_abort(record.body)
        return {"commits": list(abort.commits), "stages": list(abort.stages)}
    return {"bytes": len(record.body)}


def _rows(store: Any, lease: Any, schema: TableSchema) -> Iterator[dict[str, Any]]:
    if schema.state == "ready":
        columns = readable(store, lease, schema)
        moments = [column.name for column in (*schema.key, *schema.columns) if column.type.name == "timestamp"]
        for batch in store.scan(lease, schema, Scan(columns=columns)):
            for row in _in_micros(batch).to_pylist():
                yield row | {name: _moment(row[name]) for name in moments if name in row}


def _moment(time_us: int | None) -> str | int | None:
    """A moment in UTC; the bare microseconds where it lies beyond the years that Python knows."""
    from kivi.model.types import ColumnType

    try:
        shown: str | None = plain(ColumnType("timestamp").from_stored(time_us))
        return shown
    except OutOfRange:
        return time_us


def readable(store: Any, lease: Any, schema: TableSchema) -> tuple[str, ...]:
    """The columns that can be read now: a sum that does not fit its type is no damage, and recovers (R10)."""
    computed = {column.name for column in schema.columns if column.operator} | {name for name, _ in schema.derived}

    def fits(name: str) -> bool:
        try:
            for _ in store.scan(lease, schema, Scan(columns=(name,))):
                pass
        except OutOfRange:
            return False
        return True

    return tuple(name for name in schema.output_columns(None) if name not in computed or fits(name))


# -- verify -----------------------------------------------------------------------------------------


def verify(args: argparse.Namespace) -> int:
    """The log's chain, the recovery of a copy, commit times, every row of every table, aggregates against events."""
    report = examine(args.dir)
    if args.output == "json":
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:<10} {value}")
    return 0


def examine(path: str) -> dict[str, Any]:
    """The report of ``verify``. Raises DataLoss that names the file and the offset."""
    root = checked(path)
    records, cut = _check_log(root)
    report: dict[str, Any] = {"store": path, "log": f"{records:,} records, chain intact"}
    if cut:
        report["torn"] = f"{cut}; opening cuts this off, nothing acknowledged is in it"
    with copy_opened(root) as store:
        lease = store.begin()
        report["watermark"] = lease.ts
        report["times"] = f"{store.timeline.check():,} commit times, in order"
        report["tokens"] = f"{store.tokens.check():,} request tokens"
        ready = [schema for schema in store.tables() if schema.state == "ready"]
        with Progress(f"verify {path}", "rows") as progress:
            done = 0
            for schema in ready:
                count = 0
                columns = readable(store, lease, schema)
                for batch in store.scan(lease, schema, Scan(columns=columns)):
                    count += batch.num_rows
                    progress.update(0, done + count)
                done += count
                report[schema.name] = f"{count:,} {'events' if schema.kind == 'event' else 'rows'}"
                unfit = [name for name in schema.output_columns(None) if name not in columns]
                if unfit:
                    report[schema.name] += f", {', '.join(unfit)} not read: a sum does not fit its type right now"
                if schema.kind == "aggregate":
                    report[schema.name] += ", " + _compare(store, lease, schema, columns, path)
        store.release(lease)
    report["result"] = "good"
    return report


def _check_log(root: Path) -> tuple[int, str]:
    from kivi.log.inspect import Damage, inspect

    records, cut = 0, ""
    for path, offset, item in inspect(str(root / "log")):
        if not isinstance(item, Damage):
            records += 1
        elif item.fatal:
            raise DataLoss(
                f"{path} is damaged at byte {offset}: {item.reason}; restore a backup", path=path, offset=offset
            )
        else:
            cut = f"{os.path.basename(path)} at byte {offset}: {item.reason}"
    return records, cut


def _in_micros(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Moments as integers: they may lie beyond the years that Python knows."""
    import pyarrow as pa

    fields = [field.with_type(pa.int64()) if pa.types.is_timestamp(field.type) else field for field in batch.schema]
    return batch.cast(pa.schema(fields))


def _compare(store: Any, lease: Any, schema: TableSchema, columns: tuple[str, ...], path: str) -> str:
    """The aggregate against a recount of its source's events."""
    source = store.table(schema.source or "")
    if source.retention_us is not None:
        return "not compared with its events, of which old ones are dropped"
    complete = _complete(schema)
    expected, bounds = recount(complete, store.scan(lease, source, Scan()))
    expected = _kept(store, lease, schema, expected)
    found = {}
    measures = [column.name for column in complete.columns if column.name in columns]
    for batch in store.scan(lease, schema, Scan(columns=columns)):
        for row in _in_micros(batch).to_pylist():
            found[tuple(row[name] for name in schema.key_names)] = {name: row[name] for name in measures}
    for key in expected.keys() | found.keys():
        if not _same(expected.get(key), found.get(key), bounds.get(key, {})):
            raise DataLoss(
                f"aggregate {schema.name!r} has {found.get(key)} at {key}, its events give {expected.get(key)}: "
                "drop the aggregate and create it again",
                path=path,
            )
    left_out = [column.name for column in schema.shown_columns if column not in complete.columns]
    later = f", but for {', '.join(left_out)}, which were added later and have no earlier ones" if left_out else ""
    return "equal to a recount of the events" + later


def _complete(schema: TableSchema) -> TableSchema:
    """The aggregate with the measures alone that have every event."""
    since = schema.measures_since
    kept = [i for name, i in schema.index_of.items() if since[name] is None]
    columns, measures = tuple(schema.columns[i] for i in kept), tuple(schema.measures[i] for i in kept)
    return replace(schema, columns=columns, measures=measures, derived=(), alterations=())


def _kept(
    store: Any, lease: Any, schema: TableSchema, rows: dict[tuple[Any, ...], dict[str, Any]]
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Those, by their keys, that the aggregate's own retention keeps. The keys have moments in microseconds."""
    floor_us = store.retention.seen_at(schema.id, lease.ts)
    index = slot_index(schema.group_by)
    if floor_us is None or index is None:
        return rows
    return {key: row for key, row in rows.items() if key[index] >= floor_us}


def _same(expected: dict[str, Any] | None, found: dict[str, Any] | None, bounds: dict[str, float]) -> bool:
    """Whether what was found is as expected. ``bounds``: how far two orders of addition may lie apart, per measure."""
    if expected is None or found is None:
        return False
    pairs = [(found[name], expected[name], bounds[name]) for name in found]
    return all(
        abs(a - b) <= bound if isinstance(a, float) and isinstance(b, float) else a == b for a, b, bound in pairs
    )


def recount(
    schema: TableSchema, events: Iterator[pa.RecordBatch]
) -> tuple[dict[tuple[Any, ...], dict[str, Any]], dict[tuple[Any, ...], dict[str, float]]]:
    """The aggregate's rows from the events themselves, by Arrow kernels and exact sums; and a bound for each float sum.

    Floats are added in another order here. n additions in any order stay within n * 2**-53 * sum(|v|) of the exact sum.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    keys, calls = [f"key {group.name}" for group in schema.group_by], []
    for measure in schema.measures:
        operator = "sum" if measure.operator == "count" else measure.operator
        options = pc.ScalarAggregateOptions(min_count=0 if operator == "sum" else 1)
        calls.append((f"measure {measure.name}", operator, options))
    calls += [(f"size {measure.name}", "sum", pc.ScalarAggregateOptions(min_count=0)) for measure in schema.measures]
    names = [*keys, *(name for name, _, _ in calls)]

    def summed(parts: list[pa.Table]) -> pa.Table:
        grouped = pa.concat_tables(parts).group_by(keys).aggregate(calls)
        return grouped.select([*keys, *(f"{name}_{operator}" for name, operator, _ in calls)]).rename_columns(names)

    rows, parts = 0, list[pa.Table]()
    for batch in map(_in_micros, events):
        rows += batch.num_rows
        columns: dict[str, Any] = {}
        for group in schema.group_by:
            column = batch[group.source]
            if group.slot is not None:
                column = pa.array(group.slot.starts(column.to_numpy()), pa.int64())
            columns[f"key {group.name}"] = column
        for measure in schema.measures:
            if measure.operator == "count":
                ones = pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)
                column = batch[measure.source].is_valid().cast(pa.int64()) if measure.source else ones
            else:
                column = batch[measure.source]
                if measure.operator == "sum" and pa.types.is_integer(column.type):
                    column = column.cast(pa.decimal128(19, 0)).cast(pa.decimal128(38, 0))
            columns[f"measure {measure.name}"] = column
            is_float = pa.types.is_floating(column.type)
            columns[f"size {measure.name}"] = pc.abs(column) if is_float else pa.repeat(0.0, batch.num_rows)
        parts.append(summed([pa.table(columns)]))
        if len(parts) >= _PARTS_MAX:
            parts = [summed(parts)]
    if not parts:
        return {}, {}
    total, bounds = {}, {}
    for row in summed(parts).to_pylist():
        key = tuple(row[name] for name in keys)
        values = [(column, row[f"measure {column.name}"]) for column in schema.columns]
        total[key] = {c.name: int(v) if c.type.name == "int64" and v is not None else v for c, v in values}
        bounds[key] = {each.name: 2 * rows * 2.0**-53 * (row[f"size {each.name}"] or 0.0) for each in schema.measures}
    return total, bounds


# -- backup and restore -----------------------------------------------------------------------------


def backup(args: argparse.Namespace) -> int:
    """Verifies the store and copies it. A store that is being served: use a checkpoint instead."""
    return _copy(args, "backup")


def restore(args: argparse.Namespace) -> int:
    """Verifies the backup and copies it; of a directory of backups the newest."""
    from kivi.store import backups

    with contextlib.suppress(NotAStore):
        found = backups.newest(args.dir)
        if found is None:
            raise InvalidArgument(f"there is no backup in {args.dir} yet")
        args.dir = found
    backups.check(args.dir)
    return _copy(args, "store")


def _copy(args: argparse.Namespace, what: str) -> int:
    from kivi.store.opening import sync_directory  # which a file is to the system, too

    target = Path(args.to)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidArgument(f"{args.to} is there already: name a directory that does not exist yet")
    if not target.absolute().parent.is_dir():
        raise InvalidArgument(f"{target.absolute().parent} is not a directory: name one that is there")
    report = examine(args.dir)
    made = part = target.with_name(f"{target.name}.part-{secrets.token_hex(4)}")
    try:
        shutil.copytree(args.dir, part, ignore=shutil.ignore_patterns("LOCK", "BACKUP"))
        for folder, _, names in os.walk(part):
            for name in (*names, ""):
                sync_directory(os.path.join(folder, name))
        if target.exists():
            target.rmdir()
        made = part.rename(target)
        sync_directory(str(target.parent))
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, OSError):
            raise KiviError(f"cannot write {args.to}: {error.strerror or error}") from None
        raise
    if args.output == "json":
        print(json.dumps({"copied": args.dir, "to": args.to, "watermark": report["watermark"]}))
    else:
        print(f"{what} of {args.dir} in {args.to}, verified, at watermark {report['watermark']}")
    sys.stdout.flush()
    return 0
