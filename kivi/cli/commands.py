"""The command line: ``kivi status``, ``kivi scan`` ... (``kivi --help``).

Exit codes: 0, 1 for an error (one line on stderr says what happened and what to do), 2 for wrong usage.
Environment: KIVI_ENDPOINT, KIVI_TOKEN, KIVI_TLS_CA, KIVI_OUTPUT stand in for the options of those names.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kivi.cli.alerts import alerts, silence
from kivi.cli.text import (
    assignments,
    key_of,
    outputs,
    print_columns,
    print_result,
    print_rows,
    print_value,
    time_of,
    times_of,
)
from kivi.errors import InvalidArgument, KiviError, Unavailable
from kivi.model.given import shown
from kivi.model.predicate_text import parse_value, split_names, type_names, where

__all__ = ["main"]


def connect(args: argparse.Namespace) -> Any:
    """A context manager: the server's database, or with ``--store`` that of a directory, for commands that read."""
    from kivi.client.database import Tls, connect

    if getattr(args, "store", None) is not None:
        from kivi.cli.offline import database

        return database(args.store)
    tls = None
    if args.tls or args.tls_ca or args.tls_cert:
        tls = Tls(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key)
    return connect(args.endpoint, access_token=args.token, tls=tls, timeout=args.timeout)


# -- reading ----------------------------------------------------------------------------------------


def status(args: argparse.Namespace) -> int:
    """Ten lines: healthy or not, and what it is doing. 1 if somebody has to do something."""
    try:
        with connect(args) as db:
            before, began = defaultdict[str, Any](int, db.stats()), time.monotonic()
            time.sleep(0.25)
            now, took = defaultdict[str, Any](int, db.stats()), time.monotonic() - began
            tables = db.tables()
            problems = [*_problems(now, before), *_misfits(db, tables, now)]
    except Unavailable as error:
        print_value({"server": args.endpoint, "healthy": False, "reason": error.message}, args.output)
        return 1

    def rate(name: str) -> float:
        return float(max(0.0, (now[name] - before[name]) / took))

    base_bytes = now["engine_sst_bytes"] + now["engine_blob_bytes"]
    lines = {
        "server": args.endpoint,
        "healthy": not problems,
        **({"problems": "; ".join(problems)} if problems else {}),
        "tables": len(tables),
        "watermark": f"{now['watermark']} ({now['watermark_lag']} behind the log)",
        "commits": f"{now['commits']:,} ({rate('commits'):,.0f}/s, {now['in_flight']} in flight)",
        "conflicts": f"{now['aborts_conflict']:,} ({rate('aborts_conflict'):,.0f}/s)",
        "clients": f"{now['server_sessions']} ({now['server_open_transactions']} transactions open)",
        "snapshots": f"{now['leases']} open, the oldest for {now['oldest_snapshot_age_s']:,.0f} s",
        "pending": f"{now['pending_bytes'] / 1e6:,.1f} MB to be folded into base",
        "disk": f"log {now['log_log_bytes'] / 1e6:,.0f} MB, base {base_bytes / 1e6:,.0f} MB, "
        f"{now['disk_free_bytes'] / 1e9:,.1f} GB free{_was_full(now)}",
    }
    print_value(lines, args.output)
    return 1 if problems else 0


_DISK_FREE_MIN = 512 << 20


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _was_full(stats: dict[str, Any]) -> str:
    if not stats.get("disk_full_ended_at_s"):
        return ""
    took = stats["disk_full_ended_at_s"] - stats["disk_full_began_at_s"]
    return (
        f"; was full for {took:,.0f} s until {_moment(stats['disk_full_ended_at_s'])}, when it went on by itself: "
        f"{stats['disk_full_refused']:,} commits and stages were refused"
    )


def _problems(now: dict[str, Any], before: dict[str, Any]) -> Iterator[str]:
    """A sentence for each state that somebody has to do something about."""
    if now.get("log_failed"):
        yield "the commit log failed: look at the disk, and start the server again"
    if now.get("disk_full"):
        since, refused = _moment(now["disk_full_began_at_s"]), now["disk_full_refused"]
        yield f"no disk space since {since}: {refused:,} commits and stages were refused so far, reads go on; " + (
            "make room, and it goes on by itself within seconds"
            if now["disk_free_bytes"] < _DISK_FREE_MIN
            else "there is room now: it goes on by itself within seconds, or else restart the server"
        )
    if now.get("storage_failing"):
        yield "the disk cannot be written (the server's log says why): mend it, and restart the server; nothing is lost"
    if now.get("engine_errors_open") and not now.get("disk_full"):
        yield "RocksDB reports errors: run kivi verify on a copy, restore a backup if it finds damage"
    if now.get("engine_write_stopped"):
        yield "RocksDB stalls all writes: look whether the disk is busy"
    if now.get("disk_size_bytes") and now["disk_free_bytes"] < _DISK_FREE_MIN and not now.get("disk_full"):
        yield "the disk is almost full: make room; without any, writes are refused and reads go on"
    if now.get("watermark_lag", 0) > 1_000 and now["watermark"] == before.get("watermark"):
        yield "the watermark stands still: a commit does not finish"


def _misfits(db: Any, tables: list[str], now: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each kind of OpenTelemetry's spans or points that is refused, which the server knows; what a table
    lacks its definition says, of those whose name is known here, and that this token is for."""
    if not any(value for name, value in now.items() if name.startswith("otlp_unfit_")):
        return
    from kivi_server.otlp.metric_tables import NAMED_KINDS
    from kivi_server.otlp.tables import INVOCATIONS_KIND, misfit

    for kind in (INVOCATIONS_KIND, *NAMED_KINDS):
        if not now[f"otlp_unfit_{kind.name}"]:
            continue
        is_named = kind is not INVOCATIONS_KIND
        reason = is_named and kind.name in tables and misfit(db.describe(kind.name), kind)
        table = f"table {kind.name!r}" if is_named else "the table of --otlp-table"
        yield f"OpenTelemetry is refused: {reason or f'{table} has other columns; the log of the server says which'}"


def tables(db: Any, args: argparse.Namespace) -> None:
    found = [db.describe(name) for name in db.tables()]
    rows = [
        {
            "table": d["name"],
            "kind": d["kind"],
            "state": d["state"],
            "key": ", ".join(d["key"]) or None,
            "columns": len(d["columns"]),
            "source": d.get("source"),
        }
        for d in found
    ]
    print_rows(rows, ["table", "kind", "state", "key", "columns", "source"], args.output)


def describe(db: Any, args: argparse.Namespace) -> None:
    found = db.describe(args.table)
    if args.output == "json":
        print_value(found, "json")
        return
    rows = [{"column": name, "type": declared, "role": "key"} for name, declared in found["key"].items()]
    measures = found.get("measures", {})
    rows += [{"column": n, "type": text, "role": measures.get(n, "")} for n, text in found["columns"].items()]
    rows += [{"column": n, "type": text, "role": "derived"} for n, text in found.get("derived", {}).items()]
    for row in rows:
        if row["column"] == found.get("event_time"):
            row["role"] = "event time"
    if args.output == "table":
        kind = found["kind"]
        facts = [f"{found['name']}: {kind}{' table' * (kind != 'view')}, {found['state']}"]
        if found.get("source"):
            facts.append(f"{kind} of {found.get('declared_source') or found['source']}")
        for name in ("history_us", "retention_us"):
            if found.get(name):
                facts.append(f"{name.removesuffix('_us')} {found[name] / 1e6:,.0f} s")
        facts += [f"{name} {value:,}" for name, value in found["statistics"].items()]
        print("; ".join(facts))
    print_rows(rows, ["column", "type", "role"], args.output)


def query_of(description: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The values of the options of ``add_query``, as arguments of ``scan`` and ``subscribe``."""
    return {
        "prefix": key_of(description, args.prefix, partial=True),
        "where": where(args.where, type_names(description)) if args.where else None,
        "columns": outputs(description, args.columns) if args.columns else None,
        "limit": args.limit,
    }


def as_of(args: argparse.Namespace) -> Any:
    if args.as_of is None:
        return None
    return int(args.as_of) if args.as_of.isdigit() else parse_value("timestamp", args.as_of, "--as-of")


def seen_by(snap: Any, table: str) -> dict[str, Any]:
    """A table's description, as the snapshot sees it."""
    described: dict[str, Any] = snap._table_schema(table).description()
    return described


def get(db: Any, args: argparse.Namespace) -> None:
    with db.snapshot(as_of=as_of(args)) as snap:
        found = seen_by(snap, args.table)
        row = snap.get(args.table, key_of(found, args.key))
    if row is None:
        raise InvalidArgument(f"{args.table} has no row with the key {' '.join(args.key)}")
    if args.output == "table":
        print_value(row, "table")
    else:
        print_rows([row], list(row), args.output)


def scan(db: Any, args: argparse.Namespace) -> None:
    with db.snapshot(as_of=as_of(args)) as snap:
        found = seen_by(snap, args.table)
        order = split_names(args.order_by) if args.order_by else ()
        wanted = query_of(found, args)
        rows = snap.scan(args.table, **wanted, reverse=args.reverse, order_by=order, offset=args.offset)
        print_rows(rows, outputs(found, args.columns), args.output)


def rollup(db: Any, args: argparse.Namespace) -> None:
    times = times_of(args)
    with db.snapshot(as_of=as_of(args)) as snap:
        found = seen_by(snap, args.table)
        result = snap.rollup(
            args.table,
            by=split_names(args.by) if args.by else (),
            step=args.step,
            tz=args.tz,
            last=args.last,
            prefix=key_of(found, args.prefix, partial=True),
            where=where(args.where, type_names(found)) if args.where else None,
            measures=split_names(args.columns) if args.columns else None,
            **times,
        )
    print_result(result, args)


def sql(db: Any, args: argparse.Namespace) -> None:
    with db.snapshot(as_of=as_of(args)) as snap:
        table = snap.sql(args.text, args.parameter or None)
    if args.output != "arrow":
        print_columns(table, args.output)
        return
    if sys.stdout.isatty():
        raise InvalidArgument("Arrow is for programs: write it to a file or a pipe")
    import pyarrow as pa

    with pa.ipc.new_stream(sys.stdout.buffer, table.schema) as writer:
        writer.write_table(table)


def query(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli.query import asked

    with db.snapshot(as_of=as_of(args)) as snap:
        print_result(asked(snap, args), args)


def match(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli.match import asked

    with db.snapshot(as_of=as_of(args)) as snap:
        print_result(asked(snap, args), args)


def export(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli.export import export

    found = db.describe(args.table)
    with db.snapshot(as_of=as_of(args)) as snap:
        said = export(snap, args.table, found, args.dir, format_=args.format, by=args.by)
    print_value(said, args.output)


def watch(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli.watch import follow

    found = db.describe(args.table)
    wanted = {
        **query_of(found, args),
        "order_by": split_names(args.order_by) if args.order_by else (),
        "offset": args.offset,
        "interval_ms": args.interval,
        "since": args.since,
        "from_time": parse_value("timestamp", args.from_time, "--from") if args.from_time else None,
        "until_time": parse_value("timestamp", args.until_time, "--until") if args.until_time else None,
        "name": args.name,
        "user": args.user,
    }
    follow(db, wanted, found, outputs(found, args.columns), args.output)


# -- writing ----------------------------------------------------------------------------------------


def write(db: Any, args: argparse.Namespace) -> None:
    """put, delta, delete: one transaction."""
    found = db.describe(args.table)
    keys = len(found["key"])
    key = key_of(found, args.words[:keys])
    values = assignments(found, args.words[keys:])
    if args.command == "delete" and values:
        raise InvalidArgument("delete takes a key and nothing else")
    with db.transaction() as tx:
        getattr(tx, args.command)(args.table, key, **values)
    print_value({"commit_ts": tx.commit_ts}, args.output)


def append(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli.append import Progress, batches, located
    from kivi.cli.create import create_for

    if made := args.create and args.table not in db.tables():
        create_for(db, args)
    stops: tuple[type[BaseException], ...] = ()
    if args.follow:
        # a shell starts background jobs with SIGINT ignored; here it is how one says that it is enough
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stops = (KeyboardInterrupt,)
    count, commit_ts = 0, None
    try:
        found = db.describe(args.table)
        if found["kind"] != "event":
            raise InvalidArgument(f"{args.table} is not an event table: use put, delta or an application")
        with Progress(f"{args.table} <- {args.file}") as progress, contextlib.suppress(*stops):
            for batch in batches(args.file, found, follow=args.follow):
                try:
                    commit_ts = db.append(args.table, batch.rows, late=args.late)
                except KiviError as error:
                    located(error, args.file, batch)
                    raise
                count += len(batch.rows)
                progress.update(batch.done, count, batch.total)
    except KiviError as error:
        if count:
            error.message += f" (the {count:,} events before it are appended)"
        elif made:  # it stays: others may have appended to it since, and this append may be there, too
            error.message += f" (the table was created: append to {args.table} again, or kivi drop {args.table})"
        raise
    print_value({"events": count, "commit_ts": commit_ts}, args.output)


def retract(db: Any, args: argparse.Namespace) -> None:
    found = db.describe(args.table)
    start, end = (
        None if text is None else (time_of(text, option),)
        for text, option in ((args.start, "--start"), (args.end, "--end"))
    )
    # An empty text is that of a variable which is not set, and does not mean all events.
    selected = None if args.where is None else where(args.where, type_names(found))
    with db.transaction() as tx:
        events = tx.retract(args.table, where=selected, start=start, end=end)
        if not args.yes:
            print(f"{events:,} events of {args.table} match. Remove them for good? [y/N] ", end="", file=sys.stderr)
            sys.stderr.flush()
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                tx.rollback()
                raise InvalidArgument("nothing was retracted: answer y, or give --yes")
    print_value({"events": events, "commit_ts": tx.commit_ts}, args.output)


def rules(db: Any, args: argparse.Namespace) -> None:
    names = [
        "name",
        "source",
        "against",
        "where",
        "into",
        "judged",
        "raised",
        "missing",
        "failed",
        "late",
        "match",
        "error",
    ]
    print_rows(db.rules(), names, args.output)


def create(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli import create as creating

    creating.create(db, args)


def drop(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli import create as creating

    creating.drop(db, args)


def view(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli import view as creating

    creating.view(db, args)


def aggregate(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli import aggregate as creating

    creating.aggregate(db, args)


def alter(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli import alter as altering

    altering.alter(db, args)


def mcp(db: Any, args: argparse.Namespace) -> None:
    from kivi.cli.mcp import serve

    serve(db)


def shell(db: Any, args: argparse.Namespace) -> int:
    from kivi.cli.shell import Shell

    return Shell(db, args.output).run()


# -- the server and the offline tools, which open a store -------------------------------------------


def serve(args: argparse.Namespace) -> int:
    from kivi_server.options import options_of, printed

    options = options_of(args)
    if args.print_settings:
        print(printed(options))
        return 0
    from kivi.runtime.imports import uncollected

    with uncollected():
        from kivi_server.process.serve import run

    return run(options)


def up(args: argparse.Namespace) -> int:
    from kivi.cli.up import up as serve_all

    return serve_all(args)


def offline(args: argparse.Namespace) -> int:
    from kivi.cli import offline

    tool: Callable[[argparse.Namespace], int] = getattr(offline, args.command)
    return tool(args)


def orphans(args: argparse.Namespace) -> int:
    from kivi.cli.orphans import orphans

    return orphans(args)


def cluster_status(db: Any, args: argparse.Namespace) -> int:
    from kivi.cli.cluster import status

    return status(db, args)


def cluster_verify(db: Any, args: argparse.Namespace) -> int:
    from kivi.cli.cluster import verify

    return verify(db, args)


def cluster_shards(db: Any, args: argparse.Namespace) -> int:
    from kivi.cli.cluster import shards

    return shards(db, args)


def cluster_forget(db: Any, args: argparse.Namespace) -> int:
    from kivi.cli.cluster import forget

    return forget(db, args)


def cluster_begin(args: argparse.Namespace) -> int:
    from kivi.cli.cluster import begin

    return begin(args)


def backup(args: argparse.Namespace) -> int:
    if args.to is not None:
        if args.keep is not None:
            raise InvalidArgument("--keep is for backups of a running server, which go to one directory")
        return offline(args)
    with connect(args) as db:
        print_value(db.backup(os.path.abspath(args.dir), keep=args.keep), args.output)
    return 0


def checkpoint(db: Any, args: argparse.Namespace) -> int:
    db.checkpoint(os.path.abspath(args.dir))
    return 0


# -- arguments --------------------------------------------------------------------------------------


def add_client_options(to: argparse.ArgumentParser) -> None:
    """How to reach a server and how to print: before or after the command."""
    environment = os.environ.get
    to.add_argument(
        "--endpoint", default=environment("KIVI_ENDPOINT", "localhost:7420"), metavar="HOST:PORT", help="the server"
    )
    to.add_argument("--token", default=environment("KIVI_TOKEN"), help="access token; better in KIVI_TOKEN")
    to.add_argument("--tls", action="store_true", help="speak TLS, trusting the system's authorities")
    to.add_argument("--tls-ca", default=environment("KIVI_TLS_CA"), metavar="FILE", help="trust this authority")
    to.add_argument("--tls-cert", metavar="FILE", help="the client's certificate, where the server asks for one")
    to.add_argument("--tls-key", metavar="FILE", help="its private key")
    to.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for each call")
    styles = ("table", "json", "csv", "arrow")  # the last one: what is an Arrow table by itself
    to.add_argument("-o", "--output", choices=styles, default=environment("KIVI_OUTPUT", "table"))


def add_store(to: argparse.ArgumentParser) -> None:
    """Where a command that only reads may read instead."""
    to.add_argument(
        "--store",
        metavar="DIR",
        help="read a store's directory, which nobody has open, and no server; it stays as it is",
    )


def add_query(to: argparse.ArgumentParser) -> None:
    """Which rows of a table, and what of them: see ``query_of``."""
    to.add_argument("table")
    to.add_argument("prefix", nargs="*", help="values of the first key columns")
    to.add_argument("--where", metavar="PREDICATE", help="endpoint_id == 251 & slot >= '2023-11-16T18:00:00Z'")
    to.add_argument("--columns", metavar="A,B", help="only these")
    to.add_argument("--limit", type=int, metavar="N")


def add_events(to: argparse.ArgumentParser) -> None:
    """What an event table has: see ``kivi.cli.create``."""
    to.add_argument("--event-time", metavar="COLUMN", help="of events: the column that says when each was")
    to.add_argument("--retention", metavar="DURATION", help="of events: forget them after so long, for example 30d")
    to.add_argument("--expires", metavar="COLUMN", help="of events: the column that says until when each is there")
    to.add_argument("--index", metavar="A,B", help="of events: columns by whose values they are looked for")
    to.add_argument("--local", metavar="DURATION", help="of events: older ones move to --cold")
    to.add_argument("--cold", metavar="URL", help="of events: an object store, such as s3://bucket/prefix")


def add_question(to: argparse.ArgumentParser) -> None:
    """What is asked: see ``kivi.cli.query``."""
    to.add_argument("table")
    to.add_argument(
        "--measure", action="append", default=[], metavar="NAME=MEASURE",
        help="calls=count, total=sum(COLUMN), latency=quantiles:COLUMN ..., each with ' where PREDICATE' behind it;"
        " repeat it for each; of an aggregate combine:MEASURE, or none for all",
    )  # fmt: skip
    to.add_argument(
        "--by", "--group-by", action="append", default=[], metavar="COLUMN",
        help="a column, name=COLUMN/5m for a time slot, or name=EXPRESSION; repeat it for each",
    )  # fmt: skip
    to.add_argument("--start", metavar="TIME", help="from this event time on")
    to.add_argument("--end", metavar="TIME", help="before this event time")
    to.add_argument("--where", metavar="PREDICATE", help="of events: status >= 500 & _commit_ts > 1000")
    to.add_argument("--derived", action="append", default=[], metavar="NAME=EXPRESSION", help="computed of measures")
    to.add_argument("--having", metavar="PREDICATE", help="of rows of the answer: calls > 100")
    to.add_argument("--order-by", metavar="A,-B", help="with -, from the largest down; write --order-by=-B")
    to.add_argument("--limit", type=int, metavar="N")
    to.add_argument("--offset", type=int, default=0, metavar="N")
    to.add_argument("--columns", metavar="A,B", help="only these of the answer")
    to.add_argument("--size", metavar="WIDTH", help="in windows of event time so long: 5m, 1d, 1month")
    to.add_argument("--slide", metavar="WIDTH", help="a window begins so long after the one before, and not at its end")
    to.add_argument("--session", metavar="WIDTH", help="in sessions: windows of events with gaps no longer than this")
    to.add_argument("--tz", metavar="ZONE", help="the time zone of --size, and of time slots")
    to.add_argument("--explain", action="store_true", help="say what was read, on standard error")


def add_pattern(to: argparse.ArgumentParser) -> None:
    """A pattern: see ``kivi.cli.match``."""
    to.add_argument("table")
    to.add_argument("pattern", help="'A B+ C': symbols, with ( ) | and the quantifiers * + ? {m,n}")
    to.add_argument("--by", action="append", default=[], metavar="COLUMN", help="events are apart by it; repeat it")
    to.add_argument("--within", metavar="DURATION", help="of a match from its first row to its last: 15m")
    to.add_argument(
        "--define", action="append", default=[], metavar="SYMBOL=PREDICATE",
        help="B=resp_time_us > prev(resp_time_us); repeat it for each; without one a symbol is any row",
    )  # fmt: skip
    to.add_argument(
        "--measure", action="append", default=[], metavar="NAME=MEASURE",
        help="began=first:A.ts, rises=count:B, rows=count, total=sum:COLUMN ...; repeat it for each",
    )  # fmt: skip
    to.add_argument("--skip", default="past_last_row", metavar="WHERE", help="past_last_row (default), to_next_row ...")
    to.add_argument("--start", metavar="TIME", help="from this event time on")
    to.add_argument("--end", metavar="TIME", help="before this event time")
    to.add_argument("--where", metavar="PREDICATE", help="of events, before they are matched")
    to.add_argument("--limit", type=int, metavar="N")
    to.add_argument("--explain", action="store_true", help="say what was read, on standard error")


def parser() -> argparse.ArgumentParser:
    from kivi_server.options import add_arguments as add_server_arguments  # light: loads no store

    top = argparse.ArgumentParser(prog="kivi", description="A transactional key-value store with online aggregates.")
    add_client_options(top)
    common = argparse.ArgumentParser(add_help=False)
    add_client_options(common)
    for action in common._actions:  # after the command they override what stands before it, and only if they are given
        action.default = argparse.SUPPRESS
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    reading = argparse.ArgumentParser(add_help=False)
    add_store(reading)

    def command(
        name: str,
        run: Callable[..., int | None],
        text: str,
        *words: str,
        client: bool = True,
        connects: bool = True,
        reads: bool = False,
    ) -> Any:
        """``run`` takes the arguments, and before them a database if it ``connects``, which may be that of a directory
        if it only ``reads``. ``words`` stand first."""
        parents = ([common] if client else []) + ([reading] if reads else [])
        sub = commands.add_parser(name, help=text, description=text, parents=parents, allow_abbrev=False)
        sub.set_defaults(run=run, connects=client and connects)
        for word in words:
            sub.add_argument(word)
        return sub

    sub = command("serve", serve, "run a server on a directory", client=False)
    add_server_arguments(sub)
    text = "a server with all that a service needs to try it: spans on 4317 and 4318, HTTP on 7421"
    sub = command("up", up, text, client=False)
    add_server_arguments(sub)
    command("status", status, "healthy or not, and what it is doing", connects=False)
    command("tables", tables, "all tables", reads=True)
    command("describe", describe, "one table's columns", "table", reads=True)
    command("alerts", alerts, "alerts and their instances: pending, firing, resolved", reads=True)
    sub = command("silence", silence, "tell nobody that an alert fires, until a time, for a while (2h), or not (now)")
    sub.add_argument("name")
    sub.add_argument("until", metavar="UNTIL")
    sub = command("get", get, "one row", "table", reads=True)
    sub.add_argument("key", nargs="+")
    sub.add_argument("--as-of", metavar="TS", help="a commit timestamp or a time")
    sub = command("scan", scan, "rows in key order; events in commit order", reads=True)
    add_query(sub)
    sub.add_argument("--reverse", action="store_true")
    sub.add_argument("--order-by", metavar="A,-B", help="with -, from the largest down; write --order-by=-B")
    sub.add_argument("--offset", type=int, default=0, metavar="N", help="leave out so many rows, from the first on")
    sub.add_argument("--as-of", metavar="TS", help="a commit timestamp or a time")
    sub = command(
        "rollup", rollup, "rows of an aggregate, combined to fewer key columns or longer slots", "table", reads=True
    )
    sub.add_argument("prefix", nargs="*", help="only keys that begin with these values")
    sub.add_argument("--by", metavar="A,B", help="key columns to keep; default none: all rows are one")
    sub.add_argument("--step", metavar="WIDTH", help="slots of the result: 1h, 1d, 1month")
    sub.add_argument("--tz", metavar="ZONE", help="the time zone of --step; default the table's")
    sub.add_argument("--start", metavar="TIME", help="from this slot on")
    sub.add_argument("--end", metavar="TIME", help="up to this slot, exclusive")
    sub.add_argument("--last", metavar="DURATION", help="the time up to the end of the newest slot: 15m")
    sub.add_argument("--where", metavar="EXPR", help="of rows, before they are combined: 'calls > 10'")
    sub.add_argument("--columns", metavar="A,B", help="measures and derived columns; default all")
    sub.add_argument("--as-of", metavar="TS", help="a commit timestamp or a time")
    sub.add_argument("--explain", action="store_true", help="say what was read, on standard error")
    sub = command("sql", sql, "a question in SQL over the tables of a snapshot", "text", reads=True)
    sub.add_argument("parameter", nargs="*", help="for each ? of the text, a text")
    sub.add_argument("--as-of", metavar="TS", help="a commit timestamp or a time")
    sub = command("query", query, "a question of events, grouped and measured, or of an aggregate's rows", reads=True)
    add_question(sub)
    sub.add_argument("--as-of", metavar="TS", help="a commit timestamp or a time")
    sub = command("match", match, "the matches of a pattern over a table's events", reads=True)
    add_pattern(sub)
    sub.add_argument("--as-of", metavar="TS", help="a commit timestamp or a time")
    sub = command(
        "export", export, "a table at a snapshot, as files that others read: Parquet or Delta", "table", reads=True
    )
    sub.add_argument("dir", metavar="DIR", help="a directory that is new, or empty")
    sub.add_argument("--format", choices=("parquet", "delta"), default="parquet", help="default parquet")
    sub.add_argument("--by", choices=("day", "none"), help="events by the day of their time; default: if they are many")
    sub.add_argument("--as-of", metavar="TS", help="a commit timestamp or a time")
    sub = command("watch", watch, "rows as they change, events as they come")
    add_query(sub)
    sub.add_argument("--order-by", metavar="A,-B", help="with -, from the largest down; write --order-by=-B")
    sub.add_argument("--offset", type=int, default=0, metavar="N")
    sub.add_argument("--interval", type=float, default=100.0, metavar="MS", help="at most one update in so long")
    sub.add_argument("--since", type=int, metavar="TS", help="go on from this commit timestamp")
    sub.add_argument("--from", dest="from_time", metavar="TIME", help="of events: from this event time on")
    sub.add_argument("--until", dest="until_time", metavar="TIME", help="of events: up to here, and end then")
    sub.add_argument("--name", help="of events: remember under this name what was delivered, and go on behind it")
    sub.add_argument("--user", default="", help="whose subscription that is")
    for name, text in (
        ("put", "set columns of a row"),
        ("delta", "add to delta columns of a row"),
        ("delete", "delete a row"),
    ):
        sub = command(name, write, text, "table")
        sub.add_argument("words", nargs="+", metavar="KEY... column=value...")
    sub = command("create", create, "create a table of rows, or of events", "table")
    text = "id=int64 name=string 'balance=sum(int64)' ...: docs/reference/kivi.md has the types"
    sub.add_argument("columns", nargs="+", metavar="NAME=TYPE", help=text)
    sub.add_argument("--key", metavar="A,B", help="of rows: the columns that are the key, in order")
    sub.add_argument("--history", metavar="DURATION", help="of rows: keep older versions for so long, for example 1h")
    add_events(sub)
    sub = command("drop", drop, "drop a table with all that it has", "table")
    sub.add_argument("--yes", action="store_true", help="do not ask")
    sub = command("append", append, "append events from a CSV, JSON lines, Parquet or Arrow file", "table", "file")
    sub.add_argument("--follow", action="store_true", help="go on with lines that are written later (CSV, JSON lines)")
    text = "events below the retention floor fail their batch (default), or are left out: `describe` counts them"
    sub.add_argument("--late", choices=["fail", "drop"], default="fail", help=text)
    text = "if there is no such table, create it with the columns of the file, which are shown and asked for first"
    sub.add_argument("--create", action="store_true", help=text)
    sub.add_argument("--event-time", metavar="COLUMN", help="with --create: when an event was; default: the only time")
    sub.add_argument("--yes", action="store_true", help="with --create: do not ask")
    sub = command("retract", retract, "remove events; aggregates answer as if they had never been", "table")
    sub.add_argument("--where", metavar="PREDICATE", help="user == 'ana' & us > 1000; without any of these all events")
    sub.add_argument("--start", metavar="TIME", help="from this event time on")
    sub.add_argument("--end", metavar="TIME", help="before this event time")
    sub.add_argument("--yes", action="store_true", help="do not ask")
    sub = command("aggregate", aggregate, "create online aggregates of an event table, or of an aggregate")
    sub.add_argument("name", help="of the new aggregate; with --level, what the names of all begin with")
    sub.add_argument("source", metavar="SOURCE", help="the event table, or an aggregate")
    text = (
        "as in Python, sum(tokens * price), count(where=status >= 500), or without quotes sum:COLUMN, count, "
        "argmax:COLUMN:by=COLUMN and so on (docs/reference/measures.md), each with ' where PREDICATE' behind it; of an "
        "aggregate combine:MEASURE, or none for all"
    )
    sub.add_argument("measures", nargs="*", metavar="NAME=MEASURE", help=text)
    text = "a key column, or name=COLUMN/5m (1h, 1d, 1w, 1month ...) for a time slot; for each, in key order"
    sub.add_argument("--by", action="append", default=[], metavar="COLUMN", help=text)
    text = "instead of --by, an aggregate by these columns and each --slot; repeat it for each"
    sub.add_argument("--level", action="append", default=[], metavar="COLUMN,...", help=text)
    sub.add_argument("--slot", action="append", default=[], metavar="WIDTH", help="of the slots of each --level")
    sub.add_argument("--tz", metavar="ZONE", help="time zone of the slots, for example Europe/Madrid")
    text = "computed when it is read: 'avg=total / calls'"
    sub.add_argument("--derived", action="append", default=[], metavar="NAME=EXPRESSION", help=text)
    sub.add_argument("--history", metavar="DURATION", help="keep older versions for so long, for example 1h")
    text = "forget rows when their time slot ended so long before the newest event, for example 400d"
    sub.add_argument("--retention", metavar="DURATION", help=text)
    command("rules", rules, "the rules that judge events, and how many events each has judged and raised")
    sub = command("view", view, "create a secondary view of a row table: its rows under another key")
    sub.add_argument("name", help="of the new view")
    sub.add_argument("source", metavar="SOURCE", help="the row table")
    sub.add_argument("--key", required=True, metavar="COLUMN,...", help="the columns of its key, in order")
    sub.add_argument("--columns", metavar="COLUMN,...", help="the other columns that it has; without it all")
    sub.add_argument("--unique", action="store_true", help="no two rows may come under one key")
    sub = command("alter", alter, "add columns to a table, or measures to an aggregate, while it is used", "table")
    text = "a column, nickname=string or visits=sum:int64; of an aggregate a measure, most=max:resp_us; repeat it"
    sub.add_argument("--add", action="append", default=[], metavar="NAME=WHAT", help=text)
    text = "computed of an aggregate's columns when it is read: 'avg=total / calls'"
    sub.add_argument("--derived", action="append", default=[], metavar="NAME=EXPRESSION", help=text)
    sub.add_argument("--later-only", action="store_true", help="new measures have only the events from now on")
    text = "what it is of, for the console: services, endpoints, dependencies, models, traces, names; '' for none"
    sub.add_argument("--role", help=text)
    command("shell", shell, "transactions by hand")
    command("mcp", mcp, "questions for language models, by the Model Context Protocol on standard input; read only")
    for name, text in (
        ("dump", "print what a store's files hold; reads only"),
        ("verify", "check a store's files, sums and counts; reads only"),
        ("restore", "verify a backup and copy it to where a store is wanted"),
    ):
        sub = command(name, offline, text, client=False)
        sub.add_argument("dir", metavar="DIR")
        if name == "restore":
            sub.add_argument("to", metavar="TO", help="a directory that does not exist yet")
        sub.add_argument("-o", "--output", choices=("table", "json"), default="table")
    sub = command("orphans", orphans, "list objects of cold tiers that none of these name; reads only", client=False)
    text = "stores that nobody has open, backups, and directories of backups: all that there are"
    sub.add_argument("dirs", metavar="DIR", nargs="+", help=text)
    sub.add_argument("-o", "--output", choices=("table", "json"), default="table")
    text = "of the running server into DIR, or with TO of the store in DIR, which nobody has open"
    sub = command("backup", backup, text, connects=False)
    sub.add_argument("dir", metavar="DIR", help="the server's machine: where backups are kept; or a store's directory")
    sub.add_argument("to", metavar="TO", nargs="?", help="a directory that does not exist yet")
    sub.add_argument("--keep", type=int, metavar="N", help="of a running server: so many backups stay, the oldest go")
    sub = command("checkpoint", checkpoint, "copy the running server's store, which a node of a cluster may begin with")
    sub.add_argument("dir", metavar="DIR", help="on the server's machine: a directory that does not exist yet")
    actions = commands.add_parser("cluster", help="how a cluster is; and begin one with a store").add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    text = "its nodes, its log, and what somebody has to do; 1 if there is something"
    sub = actions.add_parser("status", help=text, description=text, parents=[common], allow_abbrev=False)
    sub.set_defaults(run=cluster_status, connects=True)
    text = "have its nodes compare what they store; 1 if they differ, and then those that most contradict stop"
    sub = actions.add_parser("verify", help=text, description=text, parents=[common], allow_abbrev=False)
    sub.set_defaults(run=cluster_verify, connects=True)
    text = "for so long it is waited until all have told; default 3600"
    sub.add_argument("--wait", type=float, default=3_600.0, metavar="SECONDS", help=text)
    text = "which of its nodes hold which shards of sharded tables; 1 if nobody holds some. With words: move them"
    sub = actions.add_parser("shards", help=text, description=text, parents=[common], allow_abbrev=False)
    sub.set_defaults(run=cluster_shards, connects=True)
    text = "nothing, or 'move' and shards like 0-15, or 'rebalance', or 'cancel' and the id of a move"
    sub.add_argument("words", metavar="WORD", nargs="*", help=text)
    sub.add_argument("--to", metavar="NODE", help="move: who takes them, by address or number")
    text = "move: who gives them up; default: the only other node that holds them"
    sub.add_argument("--from", dest="source", metavar="NODE", help=text)
    sub.add_argument("--copy", action="store_true", help="move: nobody gives them up")
    text = "rebalance: so many nodes are to hold each shard; default: as many as now"
    sub.add_argument("--copies", type=int, metavar="N", help=text)
    text = "rebalance: a node that is to hold none; may be given again"
    sub.add_argument("--away-from", action="append", default=[], metavar="NODE", help=text)
    text = "rebalance: nodes that are left as they are; default: those that hold all shards, if others do not"
    sub.add_argument("--keep", metavar="NODE,...", help=text)
    sub.add_argument("--dry-run", action="store_true", help="rebalance: only say what would be moved")
    sub.add_argument("--wait", action="store_true", help="move, rebalance: until it is over")
    text = "go on without a node that is gone for good, and without its server of the log"
    sub = actions.add_parser("forget", help=text, description=text, parents=[common], allow_abbrev=False)
    sub.set_defaults(run=cluster_forget, connects=True)
    sub.add_argument("node", metavar="NODE", help="by address or number, as kivi cluster status has it")
    for name, text in (
        ("adopt", "make a cluster of the store in DIR, which nobody has open: with a log that begins after it"),
        ("reseed", "end a cluster's log, and begin anew with the best node: with DIR, which nobody has open"),
    ):
        sub = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=cluster_begin, connects=False)
        sub.add_argument("dir", metavar="DIR")
        sub.add_argument("--cluster", metavar="NAME", required=True)
        text = "the servers of its log, if they run by themselves: a log of that name is looked for there"
        sub.add_argument("--nats", metavar="URL[,URL]", help=text)
        sub.add_argument("--timeout", type=float, metavar="SECONDS", help="to reach the servers; default 60")
        if name == "reseed":
            sub.add_argument("--yes", action="store_true", help="do not ask")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    if argv is None:  # the process is the command's own
        from kivi.runtime.imports import do_without_pandas

        do_without_pandas()
    reader = parser()
    args, rest = reader.parse_known_args(argv)
    if args.command in ("aggregate", "create") and not any(word.startswith("-") for word in rest):
        words = args.measures if args.command == "aggregate" else args.columns
        words += rest  # argparse takes the empty list for what stands behind options
    elif rest:
        reader.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        run: Callable[..., int | None] = args.run
        if args.command != "sql" and getattr(args, "output", None) == "arrow":
            raise InvalidArgument("Arrow is what kivi sql prints: this prints a table, json or csv (-o)")
        if not args.connects:
            return run(args) or 0
        with connect(args) as db:
            return run(db, args) or 0
    except KiviError as error:
        print(f"kivi: {error.message or type(error).__name__}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # of a path that was given
        path = "" if error.filename is None else f"{shown(error.filename)}: "
        print(f"kivi: {path}{error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
