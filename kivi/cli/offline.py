"""The tools for a store that nobody has open: dump, verify, backup, restore, and ``--store`` of commands that read.

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
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kivi.cli import rekeyed
from kivi.cli.append import Progress
from kivi.cli.folders import check_new, made_whole
from kivi.cli.recount import compare
from kivi.cli.text import plain
from kivi.errors import DataLoss, InvalidArgument, KiviError, NotAStore, OutOfRange, StoreInUse, Unavailable
from kivi.model.scans import Scan

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.encoding.pretty import SchemaOf
    from kivi.model.schema import TableSchema

__all__ = ["backup", "database", "dump", "restore", "verify"]

MARKER: Final = "KIVI"
_COLD: Final = "cold"  # of this directory alone: ``kivi.events.cold_tier``
_LINKED: Final = (".sst", ".blob", ".parquet")  # these are never written to again
_BELOW: Final = ("rows", "derived", "guards", "appends", "runs")


def checked(path: str) -> Path:
    """The directory, if it holds a store that nobody has open."""
    root = Path(path)
    if not (root / MARKER).is_file():
        raise NotAStore(f"{path} is not a kivi store: there is no file {MARKER} in it")
    from kivi.store.opening import cluster_of

    if (name := cluster_of(path)) is not None:
        raise NotAStore(
            f"{path} is a node of the cluster {name}, whose log is elsewhere: make a checkpoint of it "
            "(kivi checkpoint), and look at that"
        )
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

        shutil.copytree(root, target, copy_function=place, ignore=shutil.ignore_patterns("LOCK", _COLD))
        store = Store.open(str(target), settings=Settings(background=False))
        try:
            yield store
        finally:
            store.close()


@contextlib.contextmanager
def database(path: str) -> Iterator[Any]:
    """The database of a directory, as it is now: what is written to it is lost. Raises NotAStore, StoreInUse."""
    from kivi.embedded.database import Database

    with copy_opened(checked(path)) as store, contextlib.closing(Database(store)) as db:
        yield db


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

    def raised(events: Any) -> list[str]:
        return [f"{name(table)} {len(places)} events" for table, _, places in events]

    if record.kind == Kind.COMMIT and is_events(record.body):
        events = decode_events(record.body)
        return {
            "upto": record.last,
            "token": events.request[0],
            "derived": [row(*item) for item in events.derived],
            "events": f"{name(events.table)} {len(events.events[0])} bytes, each event a transaction",
            "runs": [f"{name(table)} {len(data[0])} bytes" for table, data in events.runs],
            **({} if events.rule_ts is None else {"rule_ts": events.rule_ts, "raised": raised(events.raised)}),
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
            **({} if commit.rule_ts is None else {"rule_ts": commit.rule_ts}),
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


def examine(path: str, pinned_for: str | None = None) -> dict[str, Any]:
    """The report of ``verify``. Raises DataLoss that names the file and the offset.

    ``pinned_for``: a copy that is to be made there; objects that it will name are kept for it from before they are
    looked at, unless this raises.
    """
    root = checked(path)
    records, cut = _check_log(root)
    report: dict[str, Any] = {"store": path, "log": f"{records:,} records, chain intact"}
    if cut:
        report["torn"] = f"{cut}; opening cuts this off, nothing acknowledged is in it"
    with copy_opened(root) as store, _pinned(store, pinned_for):
        lease = store.begin()
        report["watermark"] = lease.ts
        report["times"] = f"{store.timeline.check():,} commit times, in order"
        report["tokens"] = f"{store.tokens.check():,} request tokens"
        ready = [schema for schema in store.tables() if schema.state == "ready"]
        with Progress(f"verify {path}", "rows") as progress:
            done = 0
            for schema in ready:
                count = 0
                with _reading(schema, path):
                    columns = readable(store, lease, schema)
                    for batch in store.scan(lease, schema, Scan(columns=columns)):
                        count += rows_in(batch)
                        progress.update(0, done + count)
                done += count
                report[schema.name] = f"{count:,} {'events' if schema.kind == 'event' else 'rows'}"
                unfit = [name for name in schema.output_columns(None) if name not in columns]
                if unfit:
                    report[schema.name] += f", {', '.join(unfit)} not read: a sum does not fit its type right now"
                if (events := store.event_tables.of(schema.id)) is not None and (files := events.check_files()):
                    report[schema.name] += f", {files:,} settled files intact"
                    if cold := sum(file.cold is not None for file in events.files()):
                        report[schema.name] += f", {cold:,} of them in the cold tier"
                if schema.kind == "aggregate":
                    report[schema.name] += ", " + compare(store, schema, path)
                if schema.kind == "view":
                    report[schema.name] += ", " + rekeyed.compare(store, schema, path)
        store.release(lease)
    report["result"] = "good"
    return report


@contextlib.contextmanager
def _pinned(store: Any, copy: str | None) -> Iterator[None]:
    """The objects of a store are kept for a copy, if there is to be one, from here on; not if this block raises."""
    pins = [] if copy is None else store.cold.pin(store.event_tables.objects_in_use(), copy)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Unavailable):
            store.cold.unpin(pins)
        raise


@contextlib.contextmanager
def _reading(schema: TableSchema, path: str) -> Iterator[None]:
    """Makes DataLoss, which names the table, of what its damaged rows break."""
    try:
        yield
    except Exception as error:
        if isinstance(error, KiviError) and not isinstance(error, DataLoss):
            raise
        why = error.message if isinstance(error, DataLoss) else repr(error)
        raise DataLoss(f"table {schema.name!r} cannot be read: {why}; restore a backup", path=path) from error


def rows_in(batch: pa.RecordBatch) -> int:
    """Its length, with every state in it made what a caller gets: so that a damaged one shows."""
    from kivi.arrow.columns import rows_from_batch

    states = [field.name for field in batch.schema if field.metadata]
    if states:
        rows_from_batch(batch.select(states))
    return int(batch.num_rows)


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
    target = check_new(args.to)
    if not target.absolute().parent.is_dir():
        raise InvalidArgument(f"{target.absolute().parent} is not a directory: name one that is there")
    report = examine(args.dir, pinned_for=str(target))
    with made_whole(target) as part:
        shutil.copytree(args.dir, part, ignore=shutil.ignore_patterns("LOCK", "BACKUP", _COLD))
    if args.output == "json":
        print(json.dumps({"copied": args.dir, "to": args.to, "watermark": report["watermark"]}))
    else:
        print(f"{what} of {args.dir} in {args.to}, verified, at watermark {report['watermark']}")
    sys.stdout.flush()
    return 0
