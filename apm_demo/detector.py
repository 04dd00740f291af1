"""Anomalies as they happen: follows an event table, whoever appends to it, and raises what breaks the rule.

``live_job`` finds anomalies in the transaction that brings a batch, so only in what comes through Spark. This process
finds them in what anybody appends: spans of OpenTelemetry (``kivi serve --otlp``), ``db.append``, Spark. It takes the
name of an aggregate by endpoint and slot, and learns the rest from its definition::

    python -m apm_demo.detector --endpoint localhost:7420 --aggregate invocations_endpoint_5m

**Invariant: each event is judged once, whatever is killed.** The events of (since, upto] are final and always the same
(``kivi.model.changes``). One transaction reads ``since`` from this detector's row in ``detectors``, appends the
anomalies and moves the row to ``upto``. So they are all there or none is, the next turn begins where the last one that
committed ended, and of two detectors of one place the second gets a conflict and looks again. A place is a name for one
aggregate and one table of anomalies: detectors of others never meet.

An event is measured against the average of its endpoint's previous slot as that transaction sees it, normally some
hundredths of a second after the event can be read; half a second, as long as the newest event is of a moment to come.
What arrives later for that slot changes no judgement. Where an average cannot be told, since the sum has outgrown its
column or the moment the calendar, nothing is an anomaly. A new detector begins with what comes from then on;
``--from-start`` judges what is there too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

import kivi
from apm_demo.children import end_with_parent
from apm_demo.rule import Totals, limit_us
from apm_demo.tables import micros, moment

__all__ = ["Watched", "main", "start", "step", "watched"]

LOOK_AT_LEAST_EVERY_S: Final = 0.5
AGAIN_AFTER_S: Final = 0.5  # when the server was away
_ROWS: Final = 50_000  # at a time, or one commit
_KEYS: Final = 10_000
_INT64_MAX: Final = 2**63 - 1
_JUDGED: Final = ("previous_sum_us", "previous_count")


@dataclass(frozen=True, slots=True)
class Watched:
    """What is followed: an event table, and an aggregate of it by ``key`` and a slot of its time."""

    aggregate: str
    events: str
    anomalies: str
    columns: dict[str, str]
    key: tuple[str, ...]
    time: str
    width_us: int
    duration: str
    total: str
    count: str

    def place(self, name: str) -> str:
        """Under what a detector of this name keeps how far it has come."""
        return f"{name}: {self.aggregate} -> {self.anomalies}"


def watched(db: Any, aggregate: str, anomalies: str | None = None) -> Watched:
    """From the aggregate's definition. Raises InvalidArgument for one that the rule cannot use."""
    found = db.describe(aggregate)
    slots = [group for group in found.get("group_by", ()) if not isinstance(group, str)]
    # Of all events: what has a ``where``, or a source that is computed, says nothing of how long calls took.
    told = {name: re.fullmatch(r"(\w+)\((\w*)\)", text) for name, text in found.get("measures", {}).items()}
    measures = {match.groups(): name for name, match in told.items() if match is not None}
    timed = [of for operator, of in measures if operator == "sum" and ("max", of) in measures]
    if (
        len(slots) != 1
        or found["group_by"][-1] != slots[0]
        or "slot_us" not in slots[0]
        or len(timed) != 1
        or ("count", "") not in measures
    ):
        raise kivi.InvalidArgument(
            f"{aggregate!r} does not say how long calls took: it should group by an endpoint's columns and last by a "
            "slot of time of a fixed width, and have count(), and sum() and max() of one column"
        )
    source = db.describe(found["source"])
    return Watched(
        aggregate,
        found["source"],
        anomalies or f"{found['source']}_anomalies",
        source["columns"],
        tuple(group for group in found["group_by"] if isinstance(group, str)),
        source["event_time"],
        slots[0]["slot_us"],
        timed[0],
        measures["sum", timed[0]],
        measures["count", ""],
    )


def start(db: Any, what: Watched, name: str, from_start: bool = False) -> None:
    """The tables that a detector writes, and its row; what is there already stays as it is."""
    columns = {**what.columns, **dict.fromkeys(_JUDGED, "int64")}
    with contextlib.suppress(kivi.AlreadyExists):
        db.create_event_table(what.anomalies, event_time=what.time, columns=columns)
    with contextlib.suppress(kivi.AlreadyExists):
        db.create_table(
            "detectors",
            key={"name": "string"},
            columns={"table_id": "int64", "upto": "int64"},
        )
    tail = db.tail_points(what.events, most=0)
    with contextlib.suppress(kivi.RowExists, kivi.Conflict), db.transaction() as tx:
        tx.insert("detectors", (what.place(name),), table_id=tail.table_id, upto=0 if from_start else tail.watermark)


def step(db: Any, what: Watched, name: str) -> int | None:
    """Judges the next events: how many of them are anomalies; None if there is nothing new."""
    with db.snapshot() as snapshot:
        held = snapshot.get("detectors", (what.place(name),))
    if held is None:
        raise kivi.NotFound("its place in 'detectors' is gone: start the detector again")
    tail = db.tail_points(what.events, held["upto"], _ROWS, most=1)
    since = held["upto"]
    if tail.table_id != held["table_id"]:  # dropped and created again
        since, tail = 0, db.tail_points(what.events, 0, _ROWS, most=1)
    if not tail.points:
        return None
    upto, rows = tail.points[0]
    with db.snapshot(min_snapshot=upto) as snapshot:
        # ``take`` counts what is left: if retention has dropped some of these meanwhile, it reaches into later commits.
        batches = list(snapshot.change_batches(what.events, since=since, take=rows, partial=True, retractions="ignore"))
    events = pa.Table.from_batches(batches) if batches else None
    if events is not None:
        events = events.filter(pc.less_equal(events["_commit_ts"], upto))

    def judge(tx: Any) -> int:
        if tx.get("detectors", (what.place(name),)) != held:
            return 0  # another one of this place was quicker
        found = _anomalies(tx, what, events) if events is not None and events.num_rows else None
        if found is not None:
            tx.append(what.anomalies, found)
        tx.put("detectors", (what.place(name),), table_id=tail.table_id, upto=upto)
        return 0 if found is None else found.num_rows

    raised: int = db.run(judge)
    return raised


def _anomalies(tx: Any, what: Watched, events: pa.Table) -> pa.Table | None:
    """Those of the events that are slower than they may be, with what they were measured against; None if none is."""
    time_us = events[what.time].cast(pa.int64()).to_numpy()
    judged = events.append_column("_slot_us", pa.array(time_us - time_us % what.width_us))
    group = [*what.key, "_slot_us"]
    slowest = judged.group_by(group).aggregate([(what.duration, "max")])
    keys = list(zip(*(slowest[name].to_pylist() for name in group), strict=True))
    before: list[Any] = []
    for at in range(0, len(keys), _KEYS):
        before += _previous(tx, what, keys[at : at + _KEYS])
    totals = [None if row is None else Totals(row[what.total], row[what.count]) for row in before]
    slowest = slowest.append_column("_limit_us", pa.array(map(_limit_us, totals), pa.int64()))
    for name, values in zip(_JUDGED, zip(*(each or (None, None) for each in totals), strict=True), strict=True):
        slowest = slowest.append_column(name, pa.array(values, pa.int64()))
    slowest = slowest.filter(pc.greater(slowest[f"{what.duration}_max"], slowest["_limit_us"]))
    if not slowest.num_rows:
        return None
    # Only rows of such endpoints and slots are joined: few, even in a bad hour.
    both = judged.join(slowest.drop_columns([f"{what.duration}_max"]), group, join_type="inner")
    return both.filter(pc.greater(both[what.duration], both["_limit_us"])).select([*what.columns, *_JUDGED])


def _previous(tx: Any, what: Watched, keys: list[tuple[Any, ...]]) -> list[Any]:
    """The rows of the slots before; None where there is none, or none that can be told."""
    lowest, highest = micros(dt.datetime.min.replace(tzinfo=dt.UTC)), micros(dt.datetime.max.replace(tzinfo=dt.UTC))
    found: list[Any] = [None] * len(keys)
    asked = {
        i: (*key[:-1], moment(key[-1] - what.width_us))
        for i, key in enumerate(keys)
        if lowest <= key[-1] - what.width_us <= highest
    }
    try:
        for i, row in zip(asked, tx.get_many(what.aggregate, list(asked.values())), strict=True):
            found[i] = row
    except kivi.OutOfRange:
        if len(keys) == 1:
            return [None]
        half = len(keys) // 2
        return _previous(tx, what, keys[:half]) + _previous(tx, what, keys[half:])
    return found


def _limit_us(previous: Totals | None) -> int | None:
    limit = limit_us(previous)
    return None if limit is None else min(limit, _INT64_MAX)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", default="localhost:7420", metavar="HOST:PORT")
    parser.add_argument("--access-token", metavar="TOKEN")
    parser.add_argument("--aggregate", default="invocations_endpoint_5m", metavar="TABLE")
    parser.add_argument("--anomalies", metavar="TABLE", help="where they go; default: the events' table, _anomalies")
    parser.add_argument("--name", default="anomalies", help="whose place is kept; default %(default)s")
    parser.add_argument("--from-start", action="store_true", help="a new one judges the events that are there, too")
    args = parser.parse_args()
    end_with_parent()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return _follow(args, stop)
    except kivi.KiviError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _follow(args: argparse.Namespace, stop: threading.Event) -> int:
    with kivi.connect(args.endpoint, access_token=args.access_token) as db:
        what = watched(db, args.aggregate, args.anomalies)
        start(db, what, args.name, args.from_start)
        print(f"ready {what.events} -> {what.anomalies}", flush=True)
        while not stop.is_set():
            try:
                with _newest(db, what) as news:
                    while not stop.is_set():
                        _judge_all(db, what, args.name, stop)
                        news.next(LOOK_AT_LEAST_EVERY_S)
            except (kivi.Unavailable, kivi.CommitUnknown, kivi.Retryable, kivi.SnapshotTooOld) as error:
                print(f"again in a moment: {error}", file=sys.stderr, flush=True)
                stop.wait(AGAIN_AFTER_S)  # the row says how far it came
            except kivi.NotFound as error:  # the events' table was dropped, and may be made again
                print(f"nothing to judge: {error}", file=sys.stderr, flush=True)
                stop.wait(AGAIN_AFTER_S)
    return 0


def _newest(db: Any, what: Watched) -> Any:
    """A subscription that says when there is a newer event. Those that come late are found a little later."""
    lately = moment(int((time.time() - 3_600) * 1_000_000))
    return db.subscribe(
        what.events, order_by=f"-{what.time}", limit=1, columns=[what.duration], from_time=lately, interval_ms=20
    )


def _judge_all(db: Any, what: Watched, name: str, stop: threading.Event) -> None:
    while not stop.is_set() and (raised := step(db, what, name)) is not None:
        if raised:
            print(f"raised {raised}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
