"""The public interface: ``Database``, ``Transaction`` and ``Snapshot``, as they are for threads.

The store in this process (``kivi.embedded``) and the client of a server (``kivi.client``) are this interface over what
they stand on: here are the names, the arguments, the documentation, and everything that follows from the few methods
that each of them has of its own. ``kivi.aio`` has the same methods, awaited, and takes its documentation from here.
"""

from __future__ import annotations

import datetime as dt
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

from kivi.api.alerting import Alerting
from kivi.api.arguments import (
    NO_ARGUMENTS,
    AggregateArguments,
    AlterAggregateArguments,
    AlterTableArguments,
    AppenderArguments,
    BatchScanArguments,
    ChangesArguments,
    GetArguments,
    GetNowArguments,
    LevelsArguments,
    OrderedScanArguments,
    QuestionArguments,
    RollupArguments,
    ScanArguments,
    SnapshotArguments,
    SqlArguments,
    SubscribeArguments,
    SummaryArguments,
    TailArguments,
    TransactionArguments,
    ViewArguments,
    WholeArguments,
    check_done,
    check_work,
    patience_s,
    retract_arguments,
    summary_arguments,
    table_name,
    takes,
    windows_arguments,
)
from kivi.api.frames import frame_of
from kivi.api.hierarchies import HierarchyArguments
from kivi.api.match_arguments import AnswerArguments, MatchArguments, matches_arguments
from kivi.api.retry import Retries
from kivi.api.rules import RuleMethods
from kivi.api.topics import Topics
from kivi.api.writes import Write
from kivi.arrow.columns import rows_from_batch
from kivi.errors import NotFound, Retryable, SnapshotTooOld
from kivi.model.declarations import event_table_schema, row_table_schema
from kivi.model.given import flag

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.api.appender import Appender
    from kivi.api.dataset import Dataset
    from kivi.api.results import Result
    from kivi.api.subscription import Subscription
    from kivi.model.changes import TailPoints
    from kivi.model.outcomes import Outcome
    from kivi.model.schema import TableSchema

__all__ = ["BATCH_ROWS", "Database", "Snapshot", "Transaction", "documented_by", "rows_of"]

T = TypeVar("T")
Tx = TypeVar("Tx", bound="Transaction")
Snap = TypeVar("Snap", bound="Snapshot")
BATCH_ROWS: Final = 65_536  # of ``scan_batches``, at most


class Database(RuleMethods, Alerting, Topics, ABC, Generic[Tx, Snap]):
    """A store, wherever it is. Safe to use from many threads."""

    _timeout_s: float | None
    """For how long ``run`` tries, unless it is told."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Ends the use of it; what was committed stays. Harmless twice."""

    @abstractmethod
    def _schema(self, table: str) -> TableSchema:
        """A table's schema. Raises NotFound."""

    @property
    @abstractmethod
    def _value_bytes_max(self) -> int:
        """How long a value may be."""

    # -- schema ---------------------------------------------------------------------------------

    @takes(row_table_schema)
    def create_table(self, schema: TableSchema) -> None:
        """A row table; ``history`` keeps older versions for ``as_of``. Raises AlreadyExists, SchemaError."""
        self._create(schema)

    @takes(event_table_schema)
    def create_event_table(self, schema: TableSchema) -> None:
        """An append-only event table. Raises AlreadyExists, SchemaError.

        ``index=["user"]``: columns of text, bytes or integers by whose values events are looked for. Of text and of
        values that hardly repeat, such as trace ids, nothing need be said.

        ``shard_by=["customer"]``: a node of a cluster may hold the events of some values of these columns alone, and
        the rows of the table's aggregates, which group by them first.

        ``local="30d", cold="s3://bucket/prefix"``: settled files whose events are all older than that move to this
        object store, any URL that ``pyarrow.fs`` knows, and are read there. Unavailable if it cannot be reached now;
        InvalidArgument for a URL that cannot be, or has a secret in it, and in a store in memory.

        ``expires="until"``: a timestamp column that says of each event when it ends; null is never. Within some seconds
        of that moment the store retracts it: from then on everything answers as if it had never been, and its disk is
        given back. Tails of such a table pass over what is gone, as with ``retractions="ignore"``.
        """
        self._create(schema)

    @abstractmethod
    @takes(AggregateArguments)
    def create_aggregate(self, wanted: AggregateArguments) -> None:
        """An aggregate of an event table, or of another aggregate; returns when it can be read.

        Of an aggregate: ``group_by`` names its key columns, and slots made of its slots; measures are ``kivi.combine``
        of its measures (or ``kivi.sum`` of sums and counts, ``min`` of minima, ``max`` of maxima), without ``measures``
        all of them. It is derived from the events that are kept, in their own commit, and holds what one declared over
        the events would; ``source`` cannot be dropped before it. ``progress(done_rows, total_rows)``.

        Until then ``describe`` says that its ``state`` is ``building``. If the store is stopped meanwhile, it begins
        again in the background when it is opened, and tells the logger ``kivi.store`` how far it is.

        ``retention`` ("400d", a timedelta, microseconds): its rows are forgotten when their time slot, the last in the
        key, ended so long before the newest event of the source. Later snapshots do not see them, and events that come
        for them are left out of this aggregate and counted: ``describe`` has ``late_dropped``, and ``floor_us``, from
        which on it is complete. Other aggregates of the source are not touched. SchemaError without a time slot.
        """

    @abstractmethod
    @takes(LevelsArguments)
    def create_aggregates(self, wanted: LevelsArguments) -> list[str]:
        """An aggregate for each of ``levels`` and ``slots``, all in one commit or none; their names.

        A level is a column, or a list of columns, to group by besides the slot of the event time; ``slots`` are widths
        as of ``kivi.time_slot``, in the time zone ``tz``. They are called like ``calls_customer_5m``, after ``name``,
        the columns and the width. ``retention`` is of all of them, or a dict by the widths of slots: ``{"5m": "30d"}``.
        Everything else is as of ``create_aggregate``: events that are there already are read once for all of them.
        """

    @abstractmethod
    @takes(ViewArguments)
    def create_view(self, wanted: ViewArguments) -> None:
        """A secondary view of a row table: its rows under another key, for lookups by it; returns when it can be read.

        ``key`` names the view's key columns: value columns of ``source``, and columns of its key, all of which are
        among them unless the view is ``unique``. A row that is null in one of them is not in the view. ``columns``: the
        others that the view has, None for all that there are now; columns that are added to the source later are not
        among them. The source's key columns are always there.

        It is written by what writes the source, in the same commit, and is exact at every snapshot; nothing else writes
        to it. A commit that writes a column of the view's key has read the row, and one that brings two rows under one
        key of a unique view is refused: RowExists names the view and the key. Deltas of the view's columns still never
        conflict with each other. It keeps history as the source does, and is dropped before it.

        The source goes on being read and written meanwhile; ``describe`` says that the view's ``state`` is ``building``
        until then. Raises AlreadyExists, NotFound, SchemaError, and RowExists where a view cannot be unique.
        """

    @abstractmethod
    @takes(HierarchyArguments)
    def create_hierarchy(self, wanted: HierarchyArguments) -> None:
        """Makes a row table a hierarchy, for ``kivi.col(...).under(value)`` and ``.covers(value)``.

        ``name`` is that of a row table with one key column, and ``parent`` its value column of the same type, which
        names the row above; null at the top. A table that is not there is made: ``name`` and ``parent``, both strings.
        A view of it by the parent is made, too, with the name ``NAME_by_PARENT``: drop that, and it is a plain table
        again.

        Rows are written as any others; a row that is above itself ends nowhere, and is found once. Raises
        AlreadyExists, SchemaError.
        """

    @abstractmethod
    @takes(AlterTableArguments)
    def alter_table(self, wanted: AlterTableArguments) -> None:
        """Adds columns to a row table or an event table, while it is read and written; nothing is rewritten.

        In rows and events of before they are null; those with an operator have its identity. Snapshots of before do not
        see them. ``role`` says what a table of any kind is of, for consoles: "services", "endpoints", "dependencies" or
        "models" of aggregates with a time slot, "traces" of events with a trace_id, "names" of rows that name
        keys, "" of none; ``describe`` tells it.
        Raises NotFound, SchemaError, InvalidArgument.
        """

    @abstractmethod
    @takes(AlterAggregateArguments)
    def alter_aggregate(self, wanted: AlterAggregateArguments) -> None:
        """Adds measures to an aggregate, while it is read and written; returns when they can be read.

        ``backfill``: they are what they would be if they had been declared at first, as far as events are still there;
        otherwise they have the events committed from now on. ``describe(name)["measures_since"]`` says since when each
        is complete. ``derived``: columns computed of them. ``progress(done_rows, total_rows)``. If the store is stopped
        meanwhile, it goes on when it is opened again. Where ``source`` was an aggregate, they are ``kivi.combine`` of
        its measures, as of ``create_aggregate``. Raises NotFound, SchemaError, InvalidArgument.
        """

    @abstractmethod
    def _create(self, schema: TableSchema) -> None: ...

    @abstractmethod
    def tables(self) -> list[str]:
        """The names of all tables, in order."""

    @abstractmethod
    def describe(self, name: str) -> dict[str, Any]:
        """A table's definition and what is cheap to know about its contents, as plain data.

        ``state`` is ``building`` for an aggregate whose earlier events are still being summed, else ``ready``.
        ``lateness`` of an event table says how late the events of the last eight days came, by the day (UTC) of their
        commits: ``{"2026-03-01": {"events": 1_000, "p50_us": ..., "p99_us": ..., "p999_us": ..., "max_us": ...}}``,
        commit time minus event time in microseconds, quantiles within 1 %. A process counts each event once, when it
        is asked for the first time after that.
        """

    @abstractmethod
    def split_points(self, table: str, rows: int = 500_000) -> list[tuple[Any, ...]]:
        """Points that cut a table into parts of about ``rows`` rows, for many readers: bounds for ``scan``, in order.

        Keys, and of event tables moments, ``(event time,)``. Estimates: whatever they are, the parts from each to the
        next, with the one before the first and the one after the last, are the whole table at any snapshot.
        """

    @abstractmethod
    @takes(TailArguments)
    def tail_points(self, wanted: TailArguments) -> TailPoints:
        """Points that cut the commits in (``since``, ``upto``] of an event table, or of an aggregate's source.

        Into parts of at most ``rows`` events, or one commit; the first ``most`` of them. ``upto`` is the watermark
        unless it is given. No event is read. ``shards``, a bit for each: a node of a cluster that holds these answers,
        about all that it has.
        """

    @abstractmethod
    def drop(self, name: str) -> None:
        """Drops a table and its rows. InvalidArgument while aggregates depend on it."""

    # -- transactions ---------------------------------------------------------------------------

    @abstractmethod
    @takes(TransactionArguments, NO_ARGUMENTS)
    def transaction(self, wanted: TransactionArguments) -> Tx:
        """``with db.transaction() as tx``: commits on success, rolls back on an exception.

        ``deferred``: a strict insert waits for no answer. A client sends it with what it asks next, with the commit if
        that is all, and so a transaction that inserts takes one message there and one back. RowExists comes from the
        commit, and from nothing before; reads of the transaction see its own writes meanwhile. A commit that comes
        again under its token is answered as the first one was: its own row is no other's.
        """

    @abstractmethod
    @takes(SnapshotArguments)
    def snapshot(self, wanted: SnapshotArguments) -> Snap:
        """A read-only view. ``as_of``: a commit timestamp, or a moment. ``ttl_s``: how long it lasts unless renewed.

        ``max_staleness``: how old it may be ("5s"), which matters in a cluster: where a node cannot say that it has
        every commit that was acknowledged so long ago, a client asks the one that it names, and raises Unavailable if
        that cannot say so, either. 0 waits for all that was acknowledged by now.
        """

    def get(
        self,
        table: str,
        key: Sequence[Any],
        columns: Sequence[str] | None = None,
        *,
        max_staleness: str | int | dt.timedelta | None = None,
    ) -> dict[str, Any] | None:
        """The row as it is now, as a dict of key, columns and derived columns, or None.

        A snapshot for this read alone, of everything that was committed when it was called: to a server one message
        there and one back. What belongs together is read by one ``get_many``, or in a ``snapshot``, which says what
        ``max_staleness`` is.
        """
        return self._get(GetNowArguments(table, (key,), columns, max_staleness=max_staleness))[0]

    @takes(GetNowArguments)
    def get_many(self, wanted: GetNowArguments) -> list[dict[str, Any] | None]:
        """One row or None per key, in the order of the keys, all of them in one snapshot: see ``get``."""
        return self._get(wanted)

    def _get(self, wanted: GetNowArguments) -> list[dict[str, Any] | None]:
        with self.snapshot(max_staleness=wanted.max_staleness) as snapshot:
            return snapshot._get(wanted)

    def run(self, fn: Callable[[Tx], T], timeout: float | None = None, *, deferred: bool = False) -> T:
        """``fn(tx)`` in a transaction; after a conflict again, on a new snapshot, until ``timeout`` (seconds).

        The function is rerun from the start, so what it read is never written back stale. It must not
        have effects outside the transaction. CommitUnknown is never rerun. Without ``timeout`` it is the
        client's; in process, 10 s. ``deferred``: as for ``transaction``.
        """
        check_work(fn)
        retries = Retries(patience_s(timeout) if timeout is not None else self._timeout_s)
        while True:
            try:
                with self.transaction(deferred=deferred) as tx:
                    result = fn(tx)
                    check_done(result)
                return result
            except (Retryable, SnapshotTooOld, NotFound) as error:
                if (pause := retries.pause_s(error)) is None:
                    raise
            time.sleep(pause)

    # -- bulk -----------------------------------------------------------------------------------

    @abstractmethod
    def append(
        self,
        table: str,
        records: Any,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
        late: str = "fail",
    ) -> int:
        """Events (dicts, an Arrow table or batch) in one transaction; its commit timestamp.

        ``late``: as of ``Transaction.append``. An append whose events are all left out commits too: its timestamp is
        that of the commit that counted them. Whoever repeats an append under its ``token`` gets the first timestamp,
        and nothing is counted twice, whatever is late by then; ``late`` is no part of what a token stands for.
        """

    @abstractmethod
    def write(
        self,
        table: str,
        records: Any,
        deletes: str | None = None,
        insert: bool = False,
        token: str | None = None,
        batch: tuple[str, int] | None = None,
    ) -> int:
        """Rows (dicts, an Arrow table or batch) in one transaction, as of ``Transaction.write``; its commit timestamp.

        Whoever repeats it under its ``token`` gets the first timestamp, and nothing is written twice.
        """

    @abstractmethod
    def _append(self, table: str, events: Any, token: str, late: str, *, each: bool) -> int:
        """For the appender: ``events`` in one transaction, or ``each`` in one of its own; the (first) timestamp."""

    @abstractmethod
    def outcome(self, token: str, place: int | None = None) -> Outcome:
        """The commit timestamp, kivi.ABORTED (final) or kivi.UNKNOWN.

        ``place``: which member of the token, where one token stands for many transactions, as those of an appender with
        ``each`` do; their futures, and a CommitUnknown, carry both. None: the first. Raises InvalidArgument for a place
        that the token has no member at.
        """

    @takes(AppenderArguments)
    def appender(self, wanted: AppenderArguments) -> Appender:
        """Events one at a time, sent together: see ``kivi.api.appender.Appender``.

        What is sent together is one transaction; with ``each`` every event is a transaction of its own, with its own
        commit timestamp and outcome. Its future carries ``token`` and ``place``, for ``outcome``.
        """
        from kivi.api.appender import Appender

        return Appender(self, wanted)

    @abstractmethod
    def stage(self, table: str, records: Any, owner: str = "", deletes: str | None = None) -> bytes:
        """Events, or rows of a row table, made durable and invisible for ``tx.append_stages``; the stage's id.

        Rows have their key and some columns: value columns will be put, delta columns added to; a delta that is null
        is none. ``deletes``: as of ``Transaction.write``.
        """

    @abstractmethod
    def discard_stages(self, ids: Iterable[bytes]) -> None:
        """Gives stages up. Those that were committed are passed over."""

    @abstractmethod
    def batch_scopes(self, prefix: str = "") -> list[str]:
        """The scopes of batch tokens that were ever committed, by prefix."""

    # -- subscriptions --------------------------------------------------------------------------

    @abstractmethod
    def _subscribe(self, wanted: SubscribeArguments) -> Subscription: ...

    @takes(SubscribeArguments)
    def subscribe(self, wanted: SubscribeArguments) -> Subscription:
        """The result of a query, and then how it changes, as commits come: see ``kivi.api.subscription``.

        Of rows: the result at a snapshot, and then its changes, from one snapshot to a later one, at most one update in
        each interval of ``interval_ms`` (whole milliseconds). Intervals count from one origin for all, so that what
        several queries give can be put together: those of equal ones, and of multiples, are told of the same snapshots.
        What changes right after an update may so be told up to two intervals later. ``order_by`` names columns,
        "-slowest" from the largest down; ``limit`` and ``offset`` are kept up too. With ``since``, the ``ts`` of an
        update whose state the caller has, and ``rows``, that state, it goes on from there, as far back as the table
        keeps; else the first update has ``reset``.

        Of an event table without an order or a limit: its events, each once, in commit order, those committed after
        ``since`` only, if that is given. ``from_time`` and ``until_time`` bound their event times; once the moment
        ``until_time`` is over and what was committed by then is delivered, it ends.

        With a ``name`` a subscription to events is durable: the store remembers, for each ``user``, its query and what
        was delivered, and goes on behind that whenever it is subscribed to again by that name, until it has not been
        heard of for ``expires_in``. An update counts as delivered when the next one is asked for, or the ``with`` block
        ends without an error: see ``acknowledge``. ``unseen`` leaves out what other durable subscriptions of the same
        user on the same table select and have been handed.

        ``rollup``, of an aggregate: a dict of the arguments of ``Snapshot.rollup``; every state is what that gives at
        its snapshot. ``last="15m"`` is a range that moves with the newest slot: rows that leave it are removed.

        Raises SchemaError, InvalidArgument, and ResourceExhausted for results of more than 100,000 rows.
        """
        return self._subscribe(wanted)

    @takes(matches_arguments)
    def subscribe_matches(self, wanted: SubscribeArguments) -> Subscription:
        """The matches of a pattern over an event table, each once it can change no more: see ``match``.

        ``db.subscribe_matches("calls", kivi.pattern(...), lateness="5s")`` tells those that come to be decided from now
        on, as changes of kind "add", with the columns that ``match`` gives. A match is decided when every event that
        could still change it, or a match before it, would be late: event time, which the newest event moves and which
        goes on by itself where none comes, has passed what it depends on by ``lateness``: its last row, or as long as
        more rows might follow, the end of ``within``. "auto" takes the lateness that ``describe`` tells. Events that
        come later still are matched, too: the matches that they change come as "remove", with their values, and "add".
        So what was told, taken together, is what ``match`` gives of the events before the moment that was passed.

        ``since=live.ts, skip=live.skip`` goes on exactly there; ``since=0`` begins with all of history. ``where``
        selects events before they are matched. The pattern has a ``within``, and its definitions look at rows of the
        match alone. Raises NotFound, SchemaError, InvalidArgument; later EventsRetracted, SnapshotTooOld where the
        table was overwritten, and ResourceExhausted where the events to match again take more than ``query_bytes``.
        """
        return self._subscribe(wanted)

    @abstractmethod
    def subscriptions(self, user: str = "") -> list[dict[str, Any]]:
        """A user's durable subscriptions: name, table, ts and skip (what was delivered), expires (a moment)."""

    @abstractmethod
    def unsubscribe(self, name: str, user: str = "") -> None:
        """Forgets a durable subscription. Raises NotFound."""

    # -- operation ------------------------------------------------------------------------------

    @abstractmethod
    def watermark(self) -> int:
        """The snapshot a new reader gets."""

    @abstractmethod
    def consolidate(self) -> None:
        """Folds everything up to the watermark into base rows now."""

    @abstractmethod
    def stats(self) -> dict[str, int | float]:
        """Counters and sizes, as flat names."""

    @abstractmethod
    def cluster_status(self) -> dict[str, Any]:
        """The cluster that this server is a node of, as it sees it: nodes, log, and "problems", a sentence for each
        thing that somebody has to do. See ``kivi.cluster.status``. Raises InvalidArgument if it is no node."""

    @abstractmethod
    def move_shards(self, shards: str, to: str, *, source: str | None = None, copy: bool = False) -> str:
        """Has a node of the cluster take the shards of sharded tables, like "0-15,40", and another one give them up
        when it has them; returns the id of the move, which goes on by itself (``cluster_status()["moves"]``).

        Nodes are named by address or number. ``source`` is the one that gives them up, by default the only other one
        that holds some of them; ``copy=True``: both keep them. Raises InvalidArgument if that cannot be.
        """

    @abstractmethod
    def rebalance_shards(
        self,
        *,
        copies: int | None = None,
        away_from: Sequence[str] = (),
        keep: Sequence[str] | None = None,
        dry_run: bool = False,
    ) -> list[dict[str, str]]:
        """Orders the moves after which the nodes of the cluster hold equally many shards, each of them ``copies`` times
        (by default as often as it is held now), with as little as possible to be copied.

        Returns all of them: ``shards``, ``to``, ``source`` ("" if nobody gives them up) and ``move``, the id, which is
        "" for those that have to wait for others. Ask again when these are over (``cluster_status()["moves"]``), until
        nothing is returned.

        ``away_from``: nodes that are to hold none. ``keep``: nodes that are left as they are, and not counted; by
        default those that hold all shards while others hold a part. ``dry_run``: nothing is ordered. Raises
        InvalidArgument if that cannot be.
        """

    @abstractmethod
    def cancel_move(self, move: str) -> None:
        """Ends a move of shards, by its id, whose new owner has not got them yet. Harmless if it is over. Raises
        InvalidArgument if it is too late."""

    @abstractmethod
    def forget_node(self, node: str) -> None:
        """Goes on without a node of the cluster, named by address or number, that is gone for good: the log is not kept
        for it any longer, and its server of the log (``--peers``) has no vote, and no copy: another one gets that.

        Harmless if it was forgotten. Raises InvalidArgument for a node that was heard in the last ten seconds, that
        alone holds some shards, or whose server has to be replaced first; Unavailable if the log does not take it.
        """

    @abstractmethod
    def verify_cluster(self) -> int:
        """Has all nodes of the cluster compare what they store, at the commit timestamp that is returned. It goes on by
        itself: ``cluster_status()["content"]`` says what was found, and a node that differs from most of those that
        hold the same stops. Raises InvalidArgument if this is no node."""

    @abstractmethod
    def checkpoint(self, path: Any) -> None:
        """A consistent copy of the store in a new directory ``path``, on the machine where the store is.

        The directory in which it is made is there already (InvalidArgument); a copy that fails leaves nothing.
        """

    @abstractmethod
    def backup(self, repository: Any, *, keep: int | None = None) -> dict[str, Any]:
        """A backup of what is visible now, in the directory ``repository`` of the machine where the store is.

        The store goes on meanwhile. Each backup opens by itself, and shares with the one before what did not change;
        ``keep`` of them stay, the oldest go. Gives name, path, watermark, files, copied_bytes and shared_bytes. Raises
        NotAStore for a directory of something else, StoreInUse while another backup runs there, InvalidArgument, and
        DiskFull without space; nothing is left of one that fails.
        """


class Reads(ABC):
    """The reads of transactions and snapshots."""

    def get(self, table: str, key: Sequence[Any], columns: Sequence[str] | None = None) -> dict[str, Any] | None:
        """The row as a dict of key, columns and derived columns, or None. Own writes included."""
        return self._get(GetArguments(table, (key,), columns))[0]

    @takes(GetArguments)
    def get_many(self, wanted: GetArguments) -> list[dict[str, Any] | None]:
        """One row or None per key, in the order of the keys."""
        return self._get(wanted)

    @takes(OrderedScanArguments)
    def scan(self, wanted: ScanArguments) -> Iterator[dict[str, Any]]:
        """Rows in key order; ``end`` is exclusive. Events come in commit order, bounded by event time.

        They are read as they are asked for, some thousands at a time. ``order_by`` is a column or several, "-slowest"
        from the largest down, nulls last; ``limit`` rows are given from the ``offset``-th on. In such an order all rows
        are looked at first, and as many held as are given or skipped: ResourceExhausted, if these take more than the
        setting ``query_bytes``.
        """
        return self._rows(wanted)

    @takes(BatchScanArguments)
    def scan_batches(self, wanted: ScanArguments) -> Iterator[pa.RecordBatch]:
        """A scan as Arrow record batches, in its order; at most 65,536 rows each, and none of no rows.

        ``shards``, a bit for each: of a sharded table only rows of these, so that many readers read each at a node of a
        cluster that holds it; of disjoint sets that are all shards together each row comes once, at one snapshot.

        With ``any_order`` events come as they lie, unless an order or a limit is asked for: this takes less time. Each
        is read when it is asked for, and at a server one before that: nothing ever holds the table.
        """
        return self._batches(wanted, BATCH_ROWS)

    @takes(summary_arguments)
    def summary(self, wanted: SummaryArguments) -> dict[str, Any]:
        """Measures of an event table's events at once: ``{"n": kivi.count(), "total": kivi.sum("resp_time_us")}``.

        Exact, and answered from what block headers know where that is enough: blocks that a bound, a predicate or the
        snapshot cuts are read, and so are all for sums of floats, which are added in commit order. Nulls are skipped;
        of no values the sum is 0, the least and the largest are None. A name may be any text. Raises OutOfRange for a
        sum that does not fit.
        """
        (row,) = rows_of(self._batches(wanted, None))
        return wanted.row(row)

    @abstractmethod
    def renew(self, ttl_s: float | None = None) -> None:
        """Keeps the snapshot, a transaction's too, for ``ttl_s`` from now. Raises SnapshotTooOld if it has ended."""

    @abstractmethod
    def _get(self, wanted: GetArguments) -> list[dict[str, Any] | None]: ...

    def _rows(self, wanted: ScanArguments) -> Iterator[dict[str, Any]]:
        """The scan's rows; it begins now."""
        return rows_of(self._batches(wanted, None))

    @abstractmethod
    def _batches(self, wanted: ScanArguments | QuestionArguments, rows: int | None) -> Generator[pa.RecordBatch]:
        """The scan, begun now, in batches of about ``rows`` at most, each read when it is asked for."""


def rows_of(batches: Generator[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    """The rows of a scan's batches, one by one."""
    with closing(batches):
        for batch in batches:
            yield from rows_from_batch(batch)


class Transaction(Reads):
    """Reads one snapshot and its own writes; commits all or nothing. Not for several threads at once."""

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.rollback()
        elif not self._ended:
            self.commit()

    @abstractmethod
    def _begin(self) -> None: ...

    @property
    @abstractmethod
    def _ended(self) -> bool: ...

    @abstractmethod
    def commit(self) -> int:
        """Commits now; the ``with`` block does it at its end otherwise. Returns the commit timestamp."""

    @abstractmethod
    def rollback(self) -> None:
        """Gives the transaction up."""

    @property
    @abstractmethod
    def start_ts(self) -> int:
        """The snapshot: the commit timestamp up to which everything is seen."""

    @property
    @abstractmethod
    def commit_ts(self) -> int | None:
        """The commit timestamp once committed; for a transaction that wrote nothing, its snapshot if it was read."""

    def put(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """Upsert of the named columns."""
        self._write(table, Write("put", key, values))

    def delta(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """Updates delta columns by their operators; never conflicts with other deltas."""
        self._write(table, Write("delta", key, values))

    def insert(self, table: str, key: Sequence[Any], /, **values: Any) -> None:
        """A new row. Raises RowExists here if it is there, and the transaction may go on, unless it is ``deferred``."""
        self._write(table, Write("insert", key, values))

    def delete(self, table: str, key: Sequence[Any]) -> None:
        """The row is gone; harmless if it is not there."""
        self._write(table, Write("delete", key))

    def guard(self, table: str, key: Sequence[Any], column: str | None = None) -> None:
        """Makes a read of this cell (or of the row's existence) conflict like a write."""
        self._write(table, Write("guard", key, column=column))

    @abstractmethod
    def _write(self, table: str, write: Write) -> None: ...

    @abstractmethod
    def append(self, table: str, records: Any, late: str = "fail") -> None:
        """Events: dicts, an Arrow table or record batch.

        ``late``: what becomes of events below the table's retention floor. With "fail" they fail the commit, which then
        applies nothing: InvalidArgument says where the floor is (``floor_us``) and how many they are (``late``). With
        "drop" the commit leaves them out and applies the others. It counts them in its own record, so exactly once:
        ``describe``, ``statistics``, ``late_dropped``. Which are late is decided where the commit enters the log.
        """

    @abstractmethod
    def write(self, table: str, records: Any, deletes: str | None = None, insert: bool = False) -> None:
        """Rows of a row table: dicts, an Arrow table or record batch, with its key and some of its columns.

        They are written in their order, as by ``put`` and ``delta``: value columns are put, and delta columns added to,
        where they are not null. A column that is not there stays as it is. ``deletes`` names a boolean column of the
        records, which is none of the table's: rows where it is true are deleted. ``insert``: the others are strict
        inserts. Raises RowExists, naming the first that is there, SchemaError, InvalidArgument. It is all or nothing.
        """

    @abstractmethod
    def append_stages(self, table: str, stages: Iterable[bytes], late: str = "fail") -> None:
        """Events, or rows, that were staged before. ``late``: as of ``append``."""

    @abstractmethod
    @takes(retract_arguments)
    def retract(self, wanted: ScanArguments) -> int:
        """Removes the events that match: of this snapshot, whose event time is in [``start``, ``end``), and for which
        ``where`` is true; without any of these all. Returns how many that are, without those retracted before here.

        From the commit timestamp on everything answers as if these events had never been; every snapshot below it
        keeps its answers. Events that are committed after this transaction's snapshot stay. Appends go on meanwhile:
        they neither wait for a retraction, nor abort it, nor does it abort them. Of two concurrent retractions of one
        table the second gets Conflict.

        Aggregates change in the same commit. Exact sums and counts get the inverse; every other measure is computed
        again, as of the commit, from the events that remain of the rows concerned, and a row of which no event remains
        is absent. If some of the events that this takes may lie below the table's retention floor, the commit raises
        InvalidArgument, which names the ``aggregates``, and nothing is applied. Unavailable while an aggregate is being
        built. The transaction must not write to the same table, nor read its aggregates afterwards: InvalidArgument.

        What lies in the log and in blocks goes later: ``describe``, ``statistics``, ``retracted_in_log`` and
        ``retracted_in_blocks``.
        """

    @abstractmethod
    def overwrite(self, table: str) -> None:
        """The table is empty from here on: what this transaction writes to it then is its whole new content.

        Every snapshot below the commit timestamp keeps the old content (or gets SnapshotTooOld), every one from it on
        has the new; the aggregates of an event table then hold the sums of the new events. A transaction that wrote
        the old content and enters the log later gets Conflict. So does this one, if it has read anything, guards or
        writes other tables, and somebody has written to the table since it began. Raises InvalidArgument for an
        aggregate.
        """


class Snapshot(Reads):
    """A read-only view at one timestamp."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Ends it."""

    @property
    @abstractmethod
    def ts(self) -> int:
        """The commit timestamp up to which everything is seen."""

    @takes(WholeArguments)
    def to_arrow(self, wanted: ScanArguments) -> pa.Table:
        """A scan as one Arrow table. Events come in no order that counts, unless ``order_by``, ``limit``, ``offset`` or
        ``reverse`` asks for one, or ``any_order=False``, which is commit order."""
        return self._table(wanted)

    @abstractmethod
    def _table(self, wanted: ScanArguments) -> pa.Table: ...

    @takes(RollupArguments)
    def rollup(self, wanted: RollupArguments) -> Result:
        """An aggregate's rows, their states combined to a coarser level: p99 of an application from those of endpoints.

        ``by``: key columns that are no time slot, in the order of the result; none: all rows are one. ``step``: the
        width of its slots ("1h", "1month", in the time zone ``tz`` or that of the table's slots), made of whole slots
        of the table; without it the result has no slot. ``start`` and ``end`` (exclusive) are moments where slots of
        the table begin; ``last="15m"``: the whole slots of the result that make up about that time, up to the end of
        the newest one, which is there at least. ``prefix`` as of a scan; ``where`` selects the table's rows before they
        are combined. ``measures``: which measures and derived columns to give, declared or named by their text like
        "quantile(latency, 0.999)"; derived columns are computed from the combined row.

        It equals what an aggregate declared at that level would hold over the same events, bit for bit; sums of floats
        up to the order of addition. Rows come in the order of ``by`` and slot. Raises SchemaError, InvalidArgument.
        """
        return self._answer(wanted)

    @takes(QuestionArguments)
    def query(self, wanted: QuestionArguments) -> Result:
        """A question of events, declared nowhere, or of an aggregate's rows: see ``kivi.model.questions``.

        ``start`` and ``end`` (exclusive) bound the event time, and ``where`` selects events; it may also ask about the
        hidden columns ``_commit_ts`` and ``_commit_time``. ``group_by``: columns, ``kivi.time_slot(...)``, and pairs of
        a name and an expression, ``("slow", kivi.col("us") > 1000)``; without it all events are one row, which is there
        also if there are none. Null is a group of its own. ``measures``: as of ``create_aggregate``. ``derived``: named
        expressions over these. ``having`` selects rows of the answer; ``order_by`` is a column or several, "-p99" from
        the largest down, nulls last; then rows from the ``offset``-th on, ``limit`` at most. Without an order rows come
        in that of their groups. ``columns``: which to give.

        Of an aggregate: ``group_by`` names its key columns, or slots made of its slots; ``measures`` are
        ``kivi.combine`` of its measures, without them all; ``start`` and ``end`` are moments where its slots begin.

        The answer is what an aggregate declared so would hold over the same events. Aggregates and headers of blocks
        are read instead of events where they say exactly the same: ``explain()`` tells. Raises SchemaError,
        InvalidArgument, OutOfRange, and ResourceExhausted where the groups take more than the setting ``query_bytes``.
        """
        return self._answer(wanted)

    @takes(windows_arguments)
    def windows(self, wanted: QuestionArguments) -> Result:
        """``query``, for each window of event time: rows have ``window_start`` and ``window_end`` after their groups.

        ``size="5m"``: windows [start, start + 5 minutes), aligned as time slots are, also by calendar and in the time
        zone ``tz``. With ``slide="1m"`` one begins every minute, and an event is in several. ``session="30m"``: windows
        are made of events of which none comes more than 30 minutes after the one before; ``window_end`` is then the
        time of the last event, inclusive, and otherwise exclusive. Windows without an event have no row; those that
        ``start`` or ``end`` cut have the events within these bounds.

        A sliding window is made of parts that are summed once each: over aggregates whose slots fit it reads no event.
        """
        return self._answer(wanted)

    @takes(MatchArguments)
    def match(self, wanted: MatchArguments) -> Result:
        """The matches of a pattern over an event table, one row each: ``snap.match("calls", kivi.pattern("A B+ C"))``.

        What a pattern means, and what its rows are, ``kivi.model.patterns`` says: SQL's MATCH_RECOGNIZE with one row
        per match. ``start`` and ``end`` (exclusive) bound the event time, and ``where`` selects events: what they leave
        out is no row of any partition. At most ``limit`` matches, the first ones in the order of their first rows.

        Events that take more than the setting ``query_bytes`` are matched in slices of time, if the pattern has a
        ``within`` and its definitions look at rows of the match alone.

        Raises SchemaError, InvalidArgument, OutOfRange for a sum that does not fit, and ResourceExhausted where the
        events to match at once take more than ``query_bytes``, or the pattern has too many states.
        """
        return self._answer(wanted)

    @abstractmethod
    def _answer(self, wanted: AnswerArguments) -> Result: ...

    @takes(SqlArguments)
    def sql(self, wanted: SqlArguments) -> pa.Table:
        """A question in SQL, DuckDB's, over this snapshot's tables: ``"select host, avg(x) from calls group by all"``.

        Tables are named as they are, and so are columns, derived ones included; moments are in UTC. A statement that
        names ``_commit_ts`` or ``_commit_time`` finds that in every event table. ``parameters``: a list for ``?``, or a
        dict for ``$name``. One statement that reads: DuckDB sees this snapshot's tables and nothing else, no files, no
        network, no settings. Float sums are up to the order of addition. In process it runs in this process; a server
        runs it in another one. Raises InvalidArgument with DuckDB's words, NotFound for a table, and ResourceExhausted
        beyond the settings ``sql_memory_bytes``, ``sql_timeout_s``, ``sql_rows``. Needs the extra ``kivi[sql]`` where
        the store is.
        """
        return self._sql(wanted)

    @abstractmethod
    def _sql(self, wanted: SqlArguments) -> pa.Table: ...

    def dataset(self, table: str, *, commits: bool = False) -> Dataset:
        """The table as a pyarrow Dataset: for DuckDB, Polars, and all that reads those, while this snapshot is open.

        Columns and filters that a reader asks for are pushed into the scan. See ``kivi.api.dataset``. ``commits``: of
        events also the columns ``_commit_ts`` and ``_commit_time``.
        """
        return self._dataset(table_name(table), commits=flag(commits, "commits"))

    def _dataset(self, table: str, *, commits: bool | str) -> Dataset:
        """A text: with those of the hidden columns that it names."""
        from kivi.api.dataset import HIDDEN, Dataset, hidden_in

        hidden = hidden_in(commits) if isinstance(commits, str) else HIDDEN if commits else ()
        return Dataset(self._table_schema(table), lambda wanted: self._batches(wanted, BATCH_ROWS), hidden)

    def relation(self, table: str, connection: Any = None, *, commits: bool = False) -> Any:
        """The table as a relation of DuckDB, of ``connection`` or of its default one; see ``dataset``.

        Needs DuckDB: ``kivi[sql]``.
        """
        from kivi.sql import relation

        return relation(self.dataset(table, commits=commits), connection)

    @abstractmethod
    def _table_schema(self, table: str) -> TableSchema:
        """As this snapshot sees it. Raises NotFound."""

    @takes(WholeArguments)
    def to_pandas(self, wanted: ScanArguments) -> Any:
        """A scan as a pandas DataFrame; moments are in UTC. Needs pandas."""
        return frame_of("pandas", self._table(wanted))

    @takes(WholeArguments)
    def to_polars(self, wanted: ScanArguments) -> Any:
        """A scan as a Polars DataFrame. Needs the extra ``kivi[polars]``; ``kivi.polars.scan`` reads lazily."""
        return frame_of("polars", self._table(wanted))

    @takes(ChangesArguments)
    def changes(self, wanted: ChangesArguments) -> Iterator[dict[str, Any]]:
        """Rows that were committed after ``since``, up to this snapshot, with the commit's timestamp in ``_commit_ts``.

        Of an event table its events, in commit order, retention notwithstanding. Of an aggregate the rows that such
        events belong to, each once, as they are in this snapshot; all rows if it was not complete at ``since`` yet. A
        row that retention has taken away since has its key, and null in every other column; ``removed`` adds the column
        ``_removed``, which is true of these.
        ``kivi.model.changes`` explains the rest. Raises SnapshotTooOld if retention has dropped some of these events or
        rows, unless ``partial``; InvalidArgument for a row table.
        """
        return self._rows(wanted)

    @takes(ChangesArguments)
    def change_batches(self, wanted: ChangesArguments) -> Iterator[pa.RecordBatch]:
        """``changes`` as Arrow record batches, in its order; at most 65,536 rows each, and none of no rows."""
        return self._batches(wanted, BATCH_ROWS)


C = TypeVar("C", bound=type)


def documented_by(model: type) -> Callable[[C], C]:
    """A class decorator: methods without documentation have that of the method of the same name of ``model``."""

    def decorate(kind: C) -> C:
        for name, member in vars(kind).items():
            if not name.startswith("_") and not member.__doc__ and hasattr(model, name):
                member.__doc__ = getattr(model, name).__doc__
        return kind

    return decorate
