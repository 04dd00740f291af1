"""Goal 18: publish and subscribe, with a million subscriptions stored, beside repeated queries and PostgreSQL.

The published workloads: subscriptions and publications come three to one and one to three, for single topics (*flat*)
and for topics with all that lies below them (*deep*: five levels, ten below each). Topics are zipf (s = 1.2) over the
111,110 of the hierarchy, for both. Half of the million that are stored before ask for single topics, half for what lies
below. An operation is a subscription that is stored, or a publication that is appended and is told how many it reached.
Both come in commits of 10,000 at all systems, by one client, which waits for each. The published size is 15 million
operations (``--operations 15000000``); the default is what three minutes take.

*Repeated queries* are what users do without stored subscriptions: each asks for what is new of its topic, after each
commit. A sample of them is measured, at the same server; what all of them would take is computed, for as many as were
stored before.

PostgreSQL has an index by topic, COPY, and a trigger for each statement that counts whom each topic of the commit
reaches and notifies the topic's channel; what lies above a topic it finds by a recursive query. It does less than
kivi: its subscriptions have no key by which one is replaced, no position and no end, its rows come from a file that
the server reads, nobody listens, and the numbers are fetched after its clock has stopped.

No rate is believed before every publication's number is that of a recount. kivi's server is killed at the end, and has
to give the same numbers, and a user the same events, each once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

import kivi
from bench.context import Context
from bench.past import START_US
from bench.peers.postgres import Cluster, running
from bench.server import Server
from bench.sheet import Figures, Ratio, Sheet
from bench.verify import WrongTotals

__all__ = ["sheet", "take"]

_STORED: Final = 1_000_000
_QUICK_STORED: Final = 20_000
_ROWS: Final = 10_000
_TOPICS: Final = 111_111
"""1 + 10 + ... + 10**5; the first is no topic."""
_POLLED: Final = 200
_KINDS: Final = ("flat", "deep")
_MIXES: Final = {"3:1": "sssp", "1:3": "sppp"}
_STORING: Final = "subscriptions stored before"
_MEMORY: Final = "memory of the server, peak"


def sheet() -> Sheet:
    ratios = [Ratio(f"{_MEMORY}, GiB", lambda figures: figures["kivi", _MEMORY], at_most=1.5)]
    for kind, mix in itertools.product(_KINDS, _MIXES):
        case = f"{kind}, {mix}"
        ratios.append(Ratio(f"{case}: kivi / repeated queries", _over(case, "repeated"), at_least=10))
        ratios.append(Ratio(f"{case}: kivi / PostgreSQL", _over(case, "postgres"), at_least=10))
    return Sheet("goal18", f"Topics: {_STORED:,} subscriptions stored", ratios)


def _over(case: str, other: str) -> Any:
    def value(figures: Figures) -> float:
        return figures["kivi", case] / figures[other, case]

    return value


_Operation = Callable[[], tuple[float, Any]]
"""Does it, and says in how many seconds; and what each publication reached, where it is told at once."""


def _timed(operation: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = operation()
    return time.perf_counter() - began, found


class _Topics:
    """What is drawn, from a seed, and how many subscriptions each topic has. Topic ``i`` is below ``(i - 1) // 10``."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(18)
        self._order = self._rng.permutation(_TOPICS - 1) + 1
        weights = np.arange(1, _TOPICS) ** -1.2
        self._weights = weights / weights.sum()
        self._users = itertools.count()
        self.counts = {kind: np.zeros(_TOPICS, np.int64) for kind in _KINDS}

    def drawn(self) -> Any:
        return self._order[self._rng.choice(_TOPICS - 1, _ROWS, p=self._weights)]

    def subscribed(self, kind: str, topics: Any) -> list[int]:
        """Their users, each a new one."""
        np.add.at(self.counts[kind], topics, 1)
        return list(itertools.islice(self._users, len(topics)))

    def reached(self, kind: str, topics: Any) -> Any:
        """How many subscriptions each of these publications reaches now."""
        return sum(self.counts[kind][at] for at in _above(kind, topics))


def _above(kind: str, topics: Any) -> Iterator[Any]:
    """The topics whose subscriptions these publications reach, level by level; 0 where there are no more."""
    yield topics
    while kind == "deep" and topics.any():
        topics = np.maximum(topics - 1, 0) // 10
        yield topics


def _workload(operations: int, mix: str) -> Iterator[str]:
    return itertools.islice(itertools.cycle(mix), max(len(mix), operations // _ROWS))


def _names(topics: Any) -> list[str]:
    return [f"t{topic}" for topic in topics.tolist()]


class _Kivi:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._db = server.connect()
        for kind in _KINDS:
            self._db.create_event_table(kind, event_time="ts", columns={"ts": "timestamp", "topic": "string"})
        self._db.create_hierarchy("topics", parent="parent")
        for first in range(1, _TOPICS, _ROWS):
            with self._db.transaction() as tx:
                for topic in range(first, min(first + _ROWS, _TOPICS)):
                    tx.put("topics", (f"t{topic}",), parent=f"t{(topic - 1) // 10}" if topic > 10 else None)
        self._published: dict[str, list[tuple[int, Any]]] = {kind: [] for kind in _KINDS}
        self._asked = dict.fromkeys(_KINDS, (-1, 0))

    def subscribing(self, kind: str, users: list[int], topics: Any) -> _Operation:
        column = kivi.col("topic")
        asked = [column == name if kind == "flat" else column.under(name) for name in _names(topics)]
        wanted = [{"user": f"u{u}", "name": "s", "where": where} for u, where in zip(users, asked, strict=True)]
        self._asked[kind] = users[0], int(topics[0])
        return lambda: _timed(lambda: self._db.store_subscriptions(kind, wanted))

    def publishing(self, kind: str, topics: Any) -> _Operation:
        first = START_US + len(self._published[kind]) * _ROWS
        times = pa.array(np.arange(first, first + len(topics)), pa.timestamp("us", "UTC"))
        events = pa.table({"ts": times, "topic": _names(topics)})

        def publish() -> Any:
            ts = self._db.append(kind, events)
            self._published[kind].append((ts, topics))
            return self._db.reached(kind, ts)

        return lambda: _timed(publish)

    def polled_s(self, kind: str, topics: Any) -> float:
        """Seconds that a user takes who asks for what is new of its topic. Checks what they get."""
        ts, published = self._published[kind][-1]
        column, got = kivi.col("topic"), []
        began = time.perf_counter()
        with self._db.snapshot() as snap:
            for name in _names(topics):
                where = column == name if kind == "flat" else column.under(name)
                got.append(sum(1 for _ in snap.changes(kind, since=ts - 1, where=where)))
        took = (time.perf_counter() - began) / len(topics)
        for topic, count in zip(topics.tolist(), got, strict=True):
            _same(f"t{topic}, repeated", count, _selected(kind, published, topic))
        return took

    def killed(self, topics: _Topics) -> float:
        """Seconds until it is there again. The last publications reach whom they did, and users get each event once."""
        took = self._server.reopened_s()
        with self._server.connect() as db:
            for kind in _KINDS:
                user, topic = self._asked[kind]
                ts, published = self._published[kind][-1]
                _same(f"{kind}, after a kill", db.reached(kind, ts), topics.reached(kind, published))
                wanted, got = sum(_selected(kind, each, topic) for _, each in self._published[kind]), []
                with db.subscribe(kind, user=f"u{user}", name="s", interval_ms=0, heartbeat_ms=20) as live:
                    while live.ts < ts:
                        if (update := live.next(0.05)) is not None:
                            got += [change.row["ts"] for change in update.changes]
                _same(f"{kind}: events of u{user}", len(got), wanted)
                _same(f"{kind}: distinct events of u{user}", len(set(got)), wanted)
        return took


def _selected(kind: str, published: Any, topic: int) -> int:
    return sum(int((at == topic).sum()) for at in _above(kind, published))


def _same(who: str, found: Any, wanted: Any) -> None:
    if not np.array_equal(found, wanted):
        raise WrongTotals(f"{who}: {np.sum(found):,} where a recount has {np.sum(wanted):,}")


_TABLES: Final = """
    CREATE TABLE {kind}_subscriptions (client bigint NOT NULL, topic text NOT NULL);
    CREATE INDEX ON {kind}_subscriptions (topic);
    CREATE TABLE {kind} (ts bigint NOT NULL, topic text NOT NULL);
    CREATE TABLE {kind}_reached (topic text NOT NULL, events bigint NOT NULL, reached bigint NOT NULL);
    CREATE FUNCTION {kind}_tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO {kind}_reached
        SELECT topic, n, (SELECT count(*) FROM {kind}_subscriptions s WHERE s.topic {above})
        FROM (SELECT topic, count(*) AS n FROM added GROUP BY topic) p;
        PERFORM pg_notify(topic, count(*)::text) FROM added GROUP BY topic;
        RETURN NULL;
    END $$;
    CREATE TRIGGER tell AFTER INSERT ON {kind} REFERENCING NEW TABLE AS added
        FOR EACH STATEMENT EXECUTE FUNCTION {kind}_tell();
"""
_ABOVE: Final = {
    "flat": "= p.topic",
    "deep": """IN (
        WITH RECURSIVE up (name, parent) AS (
            SELECT t.name, t.parent FROM topics t WHERE t.name = p.topic
            UNION ALL SELECT t.name, t.parent FROM topics t JOIN up ON t.name = up.parent)
        SELECT name FROM up)""",
}


class _Postgres:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        cluster.sql(
            f"""CREATE TABLE topics (name text PRIMARY KEY, parent text);
            INSERT INTO topics SELECT 't' || i, CASE WHEN i > 10 THEN 't' || (i - 1) / 10 END
            FROM generate_series(1, {_TOPICS - 1}) i;
            ANALYZE topics"""
        )
        for kind in _KINDS:
            cluster.sql(_TABLES.format(kind=kind, above=_ABOVE[kind]))
        self._file = cluster.home / "rows"

    def analyze(self) -> None:
        for kind in _KINDS:
            self._cluster.sql(f"VACUUM ANALYZE {kind}_subscriptions")

    def subscribing(self, kind: str, users: list[int], topics: Any) -> _Operation:
        self._write(users, topics)
        return lambda: (self._cluster.took_s(f"COPY {kind}_subscriptions FROM '{self._file}'"), None)

    def publishing(self, kind: str, topics: Any) -> _Operation:
        self._write([START_US] * len(topics), topics)
        self._cluster.sql(f"TRUNCATE {kind}_reached")

        return lambda: (self._cluster.took_s(f"COPY {kind} FROM '{self._file}'"), None)

    def told(self, kind: str, topics: Any) -> Any:
        found = {topic: int(reached) for topic, _, reached in self._cluster.sql(f"SELECT * FROM {kind}_reached")}
        return [found[name] for name in _names(topics)]

    def _write(self, numbers: list[int], topics: Any) -> None:
        self._file.write_text("".join(f"{n}\t{name}\n" for n, name in zip(numbers, _names(topics), strict=True)))


def _run(system: Any, topics: _Topics, kind: str, mix: Iterator[str]) -> tuple[float, int, int]:
    """Seconds of the system's own, subscriptions and publications. Raises WrongTotals."""
    took, rows = 0.0, {"s": 0, "p": 0}
    for each in mix:
        drawn = topics.drawn()
        if each == "s":
            operation = system.subscribing(kind, topics.subscribed(kind, drawn), drawn)
        else:
            operation = system.publishing(kind, drawn)
        seconds, found = operation()
        took += seconds
        rows[each] += len(drawn)
        if each == "p":
            _same(
                f"{kind}, publications",
                system.told(kind, drawn) if found is None else found,
                topics.reached(kind, drawn),
            )
    return took, rows["s"], rows["p"]


def take(context: Context, sheet: Sheet) -> None:
    """One run."""
    stored = _QUICK_STORED if context.quick else min(_STORED, context.events)
    operations = 4 * _ROWS if context.quick else context.operations
    with context.server() as server:
        system, topics = _Kivi(server), _Topics()
        took = sum(_run(system, topics, kind, _workload(stored // 2, "s"))[0] for kind in _KINDS)
        sheet.record("kivi", _STORING, stored / took, "subscriptions/s", subscriptions=stored)
        for kind, (mix, of) in itertools.product(_KINDS, _MIXES.items()):
            took, subscribed, published = _run(system, topics, kind, _workload(operations, of))
            rows = subscribed + published
            sheet.record("kivi", f"{kind}, {mix}", rows / took, "operations/s")
            polled_s = system.polled_s(kind, topics.drawn()[:_POLLED])
            polling_s = published / _ROWS * stored / 2 * polled_s
            sheet.record("repeated", f"{kind}, {mix}", rows / polling_s, "operations/s", computed=f"{polled_s} s each")
        sheet.record("kivi", _MEMORY, server.peak_rss_bytes / 2**30, "GiB")
        sheet.record("kivi", "open after kill -9", system.killed(topics), "s")
    with running(context, sheet) as cluster:
        if cluster is None:
            return
        peer, topics = _Postgres(cluster), _Topics()
        took = sum(_run(peer, topics, kind, _workload(stored // 2, "s"))[0] for kind in _KINDS)
        sheet.record("postgres", _STORING, stored / took, "subscriptions/s")
        peer.analyze()
        for kind, (mix, of) in itertools.product(_KINDS, _MIXES.items()):
            took, subscribed, published = _run(peer, topics, kind, _workload(operations, of))
            sheet.record("postgres", f"{kind}, {mix}", (subscribed + published) / took, "operations/s")
