"""The options of ``format("kivi")``, and the client that they ask for.

=============== ====================================================================================================
endpoint        host:port of the server; default localhost:7420
table           the table (required)
accessToken     the access token; Spark redacts it in its plans
tls             "true" for the system's authorities, or the path of a CA file
timeout         how long a server that is away or full is waited for, in seconds; default 60
applicationId   streams: whose batches these are; default the query's id, which lives in the checkpoint
lateEvents      writes: events below the retention floor "fail" the job or batch (default), or are counted and "drop"ped
columns         reads: the columns wanted, separated by commas
asOf            reads: a commit timestamp, or a moment as ISO 8601 with its zone
aggregate       reads: events as one row of measures, "count(), max(ts) as newest" (``kivi.spark.summary``)
start, end      with aggregate: events from this moment on, and before that one; ISO 8601 with its zone
where           with aggregate: which events, like "endpoint_id == 251 & resp_time_us > 1000"
partitionRows   reads: about how many rows a task reads; default 1000000
leaseTtl        reads: how long the job's snapshot is kept without a task that reads it ("10m")
=============== ====================================================================================================

Streams that read have these besides:

================= ==================================================================================================
startingOffsets   earliest (what the table holds, then the rest; the default), latest, or a commit timestamp
startingTimestamp instead: a moment as ISO 8601 with its zone, or a commit timestamp: what was committed after it
maxRowsPerTrigger event tables: the most events of a batch, unless they are of one commit
commitTs          "true" adds the column _commit_ts
retractions       event tables: where events that the stream has read were retracted, "fail" (default), "ignore" that,
                  or "deliver" them again: the column _retracted is true of these
failOnDataLoss    "false": go on, with a warning, where events are gone or the table is another one; default true
================= ==================================================================================================

Names are taken without regard to case, as everywhere in Spark. Names that are not listed are left to Spark.
"""

from __future__ import annotations

import datetime as dt
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import kivi.client
from kivi.client.database import reached_first
from kivi.errors import InvalidArgument, KiviError, Retryable, SnapshotTooOld, Unavailable
from kivi.model.declarations import parse_duration_us
from kivi.model.predicate_text import split_names

if TYPE_CHECKING:
    from kivi.client.database import Database

__all__ = ["Options"]

T = TypeVar("T")
_clients: dict[tuple[int, str, str | None, bool | str | None], Database] = {}


@dataclass(frozen=True, slots=True)
class Options:
    """The options that the user gave, checked. Pickles; has no connection in it."""

    table: str
    endpoint: str = "localhost:7420"
    access_token: str | None = field(default=None, repr=False)
    tls: bool | str | None = None
    timeout_s: float = 60.0
    application_id: str | None = None
    columns: tuple[str, ...] | None = None
    as_of: int | dt.datetime | None = None
    lease_ttl_s: float = 600.0
    partition_rows: int = 1_000_000
    late_events: str = "fail"
    aggregate: str | None = None
    start: dt.datetime | None = None
    end: dt.datetime | None = None
    where: str | None = None
    stream_start: str | int | dt.datetime = "earliest"
    """"earliest", "latest", a commit timestamp or a moment."""
    stream_rows_max: int | None = None
    commit_ts: bool = False
    fail_on_data_loss: bool = True
    retractions: str = "fail"
    deletes: str | None = None
    """The column of bool of a data frame whose true rows are deleted from a row table."""

    @staticmethod
    def of(given: Mapping[str, str]) -> Options:
        """From Spark's options. Raises InvalidArgument."""
        values = {name.lower(): text.strip() for name, text in given.items()}
        if not values.get("table"):
            raise InvalidArgument('format("kivi") needs option("table", name)')
        application_id = values.get("applicationid") or None
        if application_id is not None and (len(application_id) > 200 or not application_id.isprintable()):
            raise InvalidArgument("option applicationId is at most 200 printable characters")
        if application_id is not None and application_id.startswith("*"):
            raise InvalidArgument("option applicationId must not begin with *, which marks foreachBatch")
        aggregate = values.get("aggregate") or None
        for name in ("start", "end", "where"):
            if values.get(name) and aggregate is None:
                raise InvalidArgument(f"option {name} belongs to option aggregate: else filter the data frame")
        if aggregate is not None and values.get("columns"):
            raise InvalidArgument("option aggregate gives its measures and no columns: leave out option columns")
        tls = values.get("tls", "false")
        return Options(
            table=values["table"],
            endpoint=values.get("endpoint") or "localhost:7420",
            access_token=values.get("accesstoken") or None,
            tls={"": None, "false": None, "true": True}.get(tls.lower(), tls),
            timeout_s=_seconds(values.get("timeout", "60")),
            application_id=application_id,
            columns=_columns(values["columns"]) if "columns" in values else None,
            as_of=_as_of(values["asof"], "asOf") if "asof" in values else None,
            lease_ttl_s=parse_duration_us(values.get("leasettl", "10m"), "option leaseTtl") / 1e6,
            partition_rows=_rows(values.get("partitionrows", "1000000"), "partitionRows"),
            late_events=_choice(values, "lateEvents", "fail", "drop"),
            aggregate=aggregate,
            start=_moment(values["start"], "start") if values.get("start") else None,
            end=_moment(values["end"], "end") if values.get("end") else None,
            where=values.get("where") or None,
            stream_start=_stream_start(values.get("startingoffsets"), values.get("startingtimestamp")),
            stream_rows_max=_rows(values["maxrowspertrigger"], "maxRowsPerTrigger")
            if "maxrowspertrigger" in values
            else None,
            commit_ts=_choice(values, "commitTs", "false", "true") == "true",
            fail_on_data_loss=_choice(values, "failOnDataLoss", "true", "false") == "true",
            retractions=_choice(values, "retractions", "fail", "ignore", "deliver"),
            deletes=values.get("deletes") or None,
        )

    def client(self) -> Database:
        """This process's client of that server: made once, kept for the tasks that follow. Waits for the server."""
        key = (os.getpid(), self.endpoint, self.access_token, self.tls)
        if key not in _clients:
            _clients[key] = self._patiently(
                lambda: kivi.client.connect(
                    self.endpoint, access_token=self.access_token, tls=self.tls, timeout=self.timeout_s
                )
            )
        return _clients[key]

    def client_at(self, nodes: Sequence[str]) -> Database:
        """A client of the first of these nodes that is reached now, if one is; else ``client``."""
        db = self.client()
        return reached_first(db, nodes) or db

    def ask(self, call: Callable[[Database], T], *also: type[KiviError]) -> T:
        """``call(db)``, again while it did nothing and may yet succeed, or failed with ``also``, for ``timeout_s``."""
        return self._patiently(lambda: call(self.client()), *also)

    def _patiently(self, call: Callable[[], T], *also: type[KiviError]) -> T:
        deadline, pause_s = time.monotonic() + self.timeout_s, 0.05
        while True:
            try:
                return call()
            except KiviError as error:
                again = isinstance(error, (Unavailable, Retryable, SnapshotTooOld, *also))
                if not again or time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(random.uniform(0.5, 1.0) * pause_s)
            pause_s = min(2.0, pause_s * 2)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise InvalidArgument(f"option timeout is a number of seconds, not {text!r}")
    return seconds


def _choice(values: Mapping[str, str], name: str, default: str, *others: str) -> str:
    text, choices = values.get(name.lower(), default), (default, *others)
    if text.lower() not in choices:
        *first, last = (f'"{choice}"' for choice in choices)
        raise InvalidArgument(f"option {name} is {', '.join(first)} or {last}, not {text!r}")
    return text.lower()


def _rows(text: str, name: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**63:
        raise InvalidArgument(f"option {name} is a number of rows from 1 on, not {text!r}")
    return int(text)


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(split_names(text))
    if not all(names) or len(set(names)) < len(names):
        raise InvalidArgument(f"option columns is a list of different names with commas, not {text!r}")
    return names


def _as_of(text: str, name: str) -> int | dt.datetime:
    """A commit timestamp or a moment."""
    if text.isdecimal():
        return int(text)
    return _moment(text, name, "a commit timestamp or ")


def _stream_start(offsets: str | None, timestamp: str | None) -> str | int | dt.datetime:
    if offsets is not None and timestamp is not None:
        raise InvalidArgument("give one of the options startingOffsets and startingTimestamp, not both")
    if timestamp is not None:
        return _as_of(timestamp, "startingTimestamp")
    if offsets is None or offsets.lower() in ("earliest", "latest"):
        return (offsets or "earliest").lower()
    if offsets.isdecimal():
        return int(offsets)
    raise InvalidArgument(f"option startingOffsets is earliest, latest or a commit timestamp, not {offsets!r}")


def _moment(text: str, option: str, also: str = "") -> dt.datetime:
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"option {option} is {also}a moment in ISO 8601, not {text!r}") from None
    if moment.tzinfo is None:
        raise InvalidArgument(f"option {option} {text!r} has no time zone: write it like 2026-07-01T12:00:00Z")
    return moment
