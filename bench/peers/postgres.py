"""PostgreSQL: a cluster that is thrown away, with default settings, driven by its own pgbench.

::

    row trigger          each event adds itself to its row: one event a transaction, or COPY of 1,000
    ... in pipelines     the same, where a client sends many such transactions before it waits for an answer
    statement trigger    a transition table, grouped, upserted in the order of the keys: COPY of 10,000
    counter              UPDATE of one row by one, the counterpart of a one-delta transaction

pgbench is a C program with prepared statements: no client of PostgreSQL is faster. COPY reads files that the server
itself opens, in the binary format, so that no client has to be fed either. All columns are bigint, times are
microseconds. Nothing but the socket's place is configured: fsync and synchronous_commit are on.

A pipeline holds ``depth`` transactions. psycopg's have a sync behind each INSERT, which commits it (``pipelined``).
pgbench has no such sync before PostgreSQL 17, and without it a pipeline is a single transaction: its pipelines are of
BEGIN, INSERT and COMMIT. Either way every event has a transaction id of its own, which is counted (``check_each``).

As root the cluster runs as the user ``postgres``, since PostgreSQL refuses to be root's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import environment
from bench.context import Context
from bench.data import ENDPOINTS, HOT, SLOT_US, SLOTS, START_US, Pool, Totals, make
from bench.peers import PeerFailed
from bench.peers.pipelined import Order, Taken
from bench.sheet import Sheet
from bench.verify import WrongTotals, same

__all__ = ["COPIES_OF", "SINGLE_CLIENTS", "Cluster", "copies", "counters", "percentiles", "singles", "singles_of"]

_VERSION_MIN: Final = 15
_FILES: Final = 20  # of one batch each, for COPY
SINGLE_CLIENTS: Final = (1, 8, 32, 64)
PIPELINE_DEPTHS: Final = (10, 100)
COUNTER_CLIENTS: Final = (8, 32, 64)
# Trigger, rows, clients. Row by row the rows are locked in the order of the events: several clients only deadlock.
_COPIES: Final = (("row", 1_000, 1), ("statement", 10_000, 1), ("statement", 10_000, 8))
COPIES_OF: Final = {
    kind: [f"{kind}, {rows:,}, {trigger} trigger, {clients} clients" for trigger, rows, clients in _COPIES]
    for kind in ("hot", "wide")
}
_WARM_UP_S: Final = 1.0

_TABLES: Final = """
    DROP TABLE IF EXISTS events, endpoint_5m;
    CREATE TABLE events (endpoint_id bigint NOT NULL, ts bigint NOT NULL, resp_time_us bigint NOT NULL);
    CREATE TABLE endpoint_5m (
        endpoint_id bigint, slot bigint, total bigint NOT NULL, n bigint NOT NULL, PRIMARY KEY (endpoint_id, slot));
"""
_TRIGGERS: Final = {
    "row": f"""
    CREATE OR REPLACE FUNCTION add_event() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO endpoint_5m AS a VALUES (NEW.endpoint_id, NEW.ts - NEW.ts % {SLOT_US}, NEW.resp_time_us, 1)
        ON CONFLICT (endpoint_id, slot) DO UPDATE SET total = a.total + EXCLUDED.total, n = a.n + EXCLUDED.n;
        RETURN NULL;
    END $$;
    CREATE TRIGGER add_event AFTER INSERT ON events FOR EACH ROW EXECUTE FUNCTION add_event();
    """,
    "statement": f"""
    CREATE OR REPLACE FUNCTION add_events() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO endpoint_5m AS a
        SELECT endpoint_id, ts - ts % {SLOT_US} AS slot, sum(resp_time_us), count(*) FROM added
        GROUP BY 1, 2 ORDER BY 1, 2
        ON CONFLICT (endpoint_id, slot) DO UPDATE SET total = a.total + EXCLUDED.total, n = a.n + EXCLUDED.n;
        RETURN NULL;
    END $$;
    CREATE TRIGGER add_events AFTER INSERT ON events REFERENCING NEW TABLE AS added
        FOR EACH STATEMENT EXECUTE FUNCTION add_events();
    """,
}
_INCREMENT: Final = "UPDATE counters SET hits = hits + 1 WHERE id = 1;"
_ONE_EVENT: Final = {
    "hot": f"""
\\set ts {START_US} + random(0, {SLOT_US - 1})
\\set v random(1000, 1000000)
INSERT INTO events VALUES ({HOT}, :ts, :v);
""",
    "wide": f"""
\\set e random_zipfian(1, {ENDPOINTS}, 1.001)
\\set ts {START_US} + random(0, {SLOT_US * SLOTS - 1})
\\set v random(1000, 1000000)
INSERT INTO events VALUES (:e, :ts, :v);
""",
}

_P99: Final = f"""
\\set i random(1, {{last}})
SELECT ts - ts % {SLOT_US} AS slot, percentile_disc(0.99) WITHIN GROUP (ORDER BY resp_time_us)
FROM events WHERE endpoint_id = (ARRAY[{{ids}}])[:i] GROUP BY 1 ORDER BY 1 DESC LIMIT {SLOTS};
"""


def singles_of(kind: str) -> list[str]:
    """The cases of one event a transaction, with and without pipelines."""
    return [_single(kind, *single) for single in _SINGLES]


def _single(kind: str, clients: int, depth: int, driver: str) -> str:
    case = f"{kind}, row trigger, {clients} clients"
    return f"{case} x {depth} in {driver} pipelines" if driver else case


# Clients, transactions in a pipeline, and who sends pipelines.
_SINGLES: Final = [(clients, 1, "") for clients in SINGLE_CLIENTS] + [
    (clients, depth, driver)
    for driver in ("pgbench", "psycopg")
    for clients in SINGLE_CLIENTS
    for depth in PIPELINE_DEPTHS
]


class NotThere(Exception):
    """PostgreSQL cannot be had; the message says why."""


@cache
def binaries() -> Path:
    """The directory of PostgreSQL's programs; as root on Debian they are installed if they are missing."""
    if (found := _found()) is not None:
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotThere(f"no PostgreSQL {_VERSION_MIN} or newer in /usr/lib/postgresql: apt-get install postgresql")
    quiet: dict[str, Any] = {"capture_output": True, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    subprocess.run(["apt-get", "update", "-qq"], **quiet)
    # The package would start a cluster of its own, which nobody asked for and which would take part of the machine.
    configured = Path("/etc/postgresql-common/createcluster.conf")
    if not configured.exists():
        configured.parent.mkdir(parents=True, exist_ok=True)
        configured.write_text("create_main_cluster = false\n")
    ended = subprocess.run(["apt-get", "install", "-qq", "--yes", "--no-install-recommends", "postgresql"], **quiet)
    if (found := _found()) is None:
        raise NotThere(f"apt-get install postgresql: {ended.stderr.decode().strip()[-200:] or 'too old'}")
    return found


def _found() -> Path | None:
    versions = {
        int(path.parent.parent.name): path.parent
        for path in Path("/usr/lib/postgresql").glob("*/bin/pgbench")
        if path.parent.parent.name.isdigit() and (path.parent / "initdb").exists()
    }
    newest = max(versions, default=0)
    return versions[newest] if newest >= _VERSION_MIN else None


class Cluster:
    """A running cluster in ``home``, reached by the socket in it."""

    def __init__(self, home: Path) -> None:
        self.bin = binaries()
        self.home = home
        self._as: list[str] = []
        if os.geteuid() == 0:
            shutil.chown(home, "postgres", "postgres")
            self._as = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
        self._run("initdb", "-D", str(home / "data"), "-A", "trust", "-U", "bench")
        self._start()

    def _start(self) -> None:
        options = f"-c listen_addresses='' -c unix_socket_directories='{self.home}'"
        log = str(self.home / "log")
        self._run("pg_ctl", "-D", str(self.home / "data"), "-w", "-l", log, "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.home / "data"), "-w", "-m", "immediate", "stop")

    def sql(self, text: str) -> list[list[str]]:
        found = self._run(
            "psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-h", str(self.home), "-U", "bench", "-c", text, "postgres"
        )
        return [line.split("|") for line in found.splitlines()]

    def took_s(self, text: str) -> float:
        """Seconds of these statements by psql's own clock: how long psql takes to begin is not in them."""
        said = self._run(
            "psql", "-Xqt", "-v", "ON_ERROR_STOP=1", "-h", str(self.home), "-U", "bench",
            "-c", r"\timing on", "-c", text, "postgres",
        )  # fmt: skip
        return sum(float(ms) for ms in re.findall(r"^Time: ([\d.]+) ms", said, re.MULTILINE)) / 1000

    def pgbench(self, script: str, clients: int, seconds: float, prepared: bool = True) -> tuple[int, float]:
        """Transactions that were committed, and how many a second. Deadlocks are tried again."""
        path = self.home / "script.sql"
        path.write_text(script)
        said = self._run(
            "pgbench", "-n", "-h", str(self.home), "-U", "bench", "-c", str(clients), "-j", str(min(clients, 2)),
            "-M", "prepared" if prepared else "simple", "-T", str(max(1, round(seconds))), "--max-tries=1000",
            "-f", str(path), "postgres",
        )  # fmt: skip
        processed = re.search(r"transactions actually processed: (\d+)", said)
        rate = re.search(r"tps = ([\d.]+) \(without initial", said)
        if processed is None or rate is None:
            raise RuntimeError(f"pgbench said: {said}")
        return int(processed[1]), float(rate[1])

    def measured(self, script: str, clients: int, seconds: float, prepared: bool = True) -> tuple[int, float]:
        """The same after a warm-up, whose transactions are counted and not timed."""
        before, _ = self.pgbench(script, clients, _WARM_UP_S, prepared)
        count, rate = self.pgbench(script, clients, seconds, prepared)
        return before + count, rate

    def prepare(self, trigger: str) -> None:
        """Empty tables, with one of the triggers; and nothing left to do from before."""
        self.sql(_TABLES + _TRIGGERS[trigger])
        self.sql("CHECKPOINT")

    def check(self, events: int) -> None:
        """Raises WrongTotals unless so many events are stored and the aggregate is what they sum up to."""
        (of_events,) = self.sql(
            f"SELECT count(DISTINCT (endpoint_id, ts - ts % {SLOT_US})), count(*), sum(resp_time_us) FROM events"
        )
        (held,) = self.sql("SELECT count(*), sum(n), sum(total) FROM endpoint_5m")
        stored = Totals(*map(int, of_events))
        same("postgres", Totals(*map(int, held)), stored)
        if stored.count != events:
            raise WrongTotals(f"postgres holds {stored.count:,} events, but acknowledged {events:,}")

    def check_each(self, events: int) -> None:
        """``check``, and that each event was inserted by a transaction of its own."""
        self.check(events)
        ((transactions,),) = self.sql("SELECT count(DISTINCT xmin::text) FROM events")
        if int(transactions) != events:
            raise WrongTotals(f"postgres committed {events:,} events in {int(transactions):,} transactions")

    def psycopg(self, kind: str, clients: int, depth: int, seconds: float) -> Taken:
        """One event a transaction, through pipelines of psycopg. Raises CannotInstall or PeerFailed."""
        order = Order(str(self.home), kind, clients, depth, _WARM_UP_S, seconds)
        command = [environment.python(), "-m", "bench.peers.pipelined", json.dumps(asdict(order))]
        ended = subprocess.run(command, cwd=environment.ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise PeerFailed(" | ".join(ended.stderr.strip().splitlines()[-3:]))
        return Taken(**json.loads(ended.stdout))

    @property
    def settings(self) -> str:
        """Its version, and the settings that a reader would ask for."""
        names = ("fsync", "synchronous_commit", "full_page_writes", "shared_buffers", "max_wal_size")
        version, *values = (self.sql(f"SHOW {name}")[0][0] for name in ("server_version", *names))
        return version + "; " + ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))

    def _run(self, program: str, *arguments: str) -> str:
        command = [*self._as, str(self.bin / program), *arguments]
        # pg_ctl's server would inherit a pipe and hold it open for ever: output goes to a file.
        with open(self.home / "said", "w+") as said:
            ended = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, cwd="/")
            said.seek(0)
            text = said.read()
        if ended.returncode:
            raise RuntimeError(f"{program}: {text.strip()[-500:]}")
        return text


@contextmanager
def running(context: Context, sheet: Sheet) -> Iterator[Cluster | None]:
    """A cluster, or None if PostgreSQL is not there or was not asked for (the sheet says why)."""
    if "postgres" not in context.peers:
        yield None
        return
    with context.directory() as home:
        try:
            cluster = Cluster(home)
        except (NotThere, RuntimeError) as error:
            sheet.skip("postgres", str(error))
            yield None
            return
        sheet.versions["postgres"] = f"PostgreSQL {cluster.settings}"
        try:
            yield cluster
        finally:
            cluster.stop()


def copies(context: Context, sheet: Sheet, kind: str) -> None:
    """Many events a transaction, by COPY, with either trigger."""
    with running(context, sheet) as cluster:
        if cluster is None:
            return
        for (trigger, rows, clients), case in zip(_COPIES, COPIES_OF[kind], strict=True):
            _write_files(cluster, make(kind, rows, rows * _FILES))
            script = f"\\set f random(0, {_FILES - 1})\nCOPY events FROM '{cluster.home}/batch:f' (FORMAT binary);\n"
            cluster.prepare(trigger)
            count, rate = cluster.measured(script, clients, context.seconds, prepared=False)
            cluster.check(count * rows)
            sheet.record("postgres", case, rate * rows, "events/s")


def singles(context: Context, sheet: Sheet, kind: str) -> None:
    """One event a transaction, with the row trigger, with and without pipelines."""
    with running(context, sheet) as cluster:
        if cluster is None:
            return
        for clients, depth, driver in _SINGLES:
            cluster.prepare("row")
            if driver == "psycopg":
                try:
                    taken = cluster.psycopg(kind, clients, depth, context.seconds)
                except (environment.CannotInstall, PeerFailed) as error:
                    sheet.skip("psycopg", str(error))
                    continue
                committed, rate = taken.committed, taken.events / taken.seconds
                sheet.versions["psycopg"] = taken.about
            else:
                script = _pipeline(kind, depth) if driver else _ONE_EVENT[kind]
                count, scripts_s = cluster.measured(script, clients, context.seconds)
                committed, rate = count * depth, scripts_s * depth
            cluster.check_each(committed)
            sheet.record(
                "postgres", _single(kind, clients, depth, driver), rate, "events/s", outstanding=clients * depth
            )


def _pipeline(kind: str, depth: int) -> str:
    """A script of so many transactions that pgbench sends before it waits for an answer."""
    *variables, insert = _ONE_EVENT[kind].strip().splitlines()
    return "\n".join(["\\startpipeline", *[*variables, "BEGIN;", insert, "COMMIT;"] * depth, "\\endpipeline", ""])


def counters(context: Context, sheet: Sheet) -> None:
    """One row, incremented by one a transaction."""
    with running(context, sheet) as cluster:
        if cluster is None:
            return
        cluster.sql("CREATE TABLE counters (id bigint PRIMARY KEY, hits bigint NOT NULL)")
        for clients in COUNTER_CLIENTS:
            cluster.sql("TRUNCATE counters; INSERT INTO counters VALUES (1, 0)")
            count, rate = cluster.measured(_INCREMENT, clients, context.seconds)
            ((hits,),) = cluster.sql("SELECT hits FROM counters")
            if int(hits) != count:
                raise WrongTotals(f"postgres counted {hits}, and acknowledged {count:,}")
            sheet.record("postgres", f"one row, {clients} clients", rate, "transactions/s")


def percentiles(context: Context, sheet: Sheet, case: str, pool: Pool, endpoints: list[int]) -> None:
    """Reads a second: the p99 of the last slots of these endpoints, from the raw rows, by an index; one client."""
    with running(context, sheet) as cluster:
        if cluster is None:
            return
        _write_files(cluster, pool)
        cluster.prepare("statement")
        cluster.sql("ALTER TABLE events DISABLE TRIGGER add_events")
        for i in range(len(pool)):
            cluster.sql(f"COPY events FROM '{cluster.home}/batch{i}' (FORMAT binary)")
        cluster.sql("CREATE INDEX by_endpoint ON events (endpoint_id, ts)")
        cluster.sql("VACUUM ANALYZE events")
        ((stored, total),) = cluster.sql("SELECT count(*), sum(resp_time_us) FROM events")
        expected = pool.expected([1] * len(pool)).totals
        same("postgres", Totals(expected.rows, int(stored), int(total)), expected)
        _, rate = cluster.measured(
            _P99.format(ids=",".join(map(str, endpoints)), last=len(endpoints)), 1, context.seconds
        )
        sheet.record("postgres", case, rate, "reads/s")


def _write_files(cluster: Cluster, pool: Pool) -> None:
    """Batches in COPY's binary format: a header, then per row the number of fields, and each with its length."""
    row = np.dtype(
        [("fields", ">i2"), *((f"{part}{i}", kind) for i in range(3) for part, kind in (("n", ">i4"), ("v", ">i8")))]
    )
    for i in range(len(pool)):
        rows = np.zeros(pool.batch_rows, row)
        rows["fields"] = 3
        for j, column in enumerate((pool.endpoint, pool.ts_us, pool.resp_us)):
            rows[f"n{j}"], rows[f"v{j}"] = 8, pool.cut(column, i)
        body = b"PGCOPY\n\xff\r\n\0" + bytes(8) + rows.tobytes() + b"\xff\xff"
        (cluster.home / f"batch{i}").write_bytes(body)
