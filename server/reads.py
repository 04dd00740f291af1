"""Reads that came together: rows by key, and snapshots by themselves, of the transactions of one session.

Dashboards ask for a row from many threads at once, each in a snapshot of its own, and these arrive together. Those of a
table are one group: one hold of the lease mutex, one look into the engine for all keys of a table, one answer; but each
snapshot is a lease of its own, released on its own. All that begin here begin on one timestamp, the watermark of the
moment, as they would one by one. Reads without a transaction share one snapshot, which ends when they are answered.

Rows with text may be of any size, which is known once they are read. A few of them at a time are read here, of tables
whose rows have been short (``kivi_server.row_sizes``); where one is long all the same, these reads are for a pool.

Whatever is not just so is read by itself (``Requests._do_get``), which accepts it or says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from kivi_server.asked import Asked
from kivi_server.requests import Transaction
from kivi_server.row_sizes import RowSizes
from kivi_server.translate import Translator

from kivi.errors import KiviError
from kivi.store.facade import GetPlan, Store
from kivi.wire.codec import from_values
from kivi.wire.columns import column_writer
from kivi.wire.v1 import session_pb2

__all__ = ["Read", "ReadGroups"]

_KEYS_MAX: Final = 16
_PLANS_MAX: Final = 256
_COLUMNS_MAX: Final = 64
_CELLS_MAX: Final = 100_000
_UNBOUNDED_KEYS: Final = 8
"""Of rows of no bounded size so many are read at a time."""


class Read(NamedTuple):
    """One request. ``begins``: ``transaction`` does, with it. Without a plan it only asks for the snapshot."""

    asked: Asked
    transaction: Transaction
    begins: bool
    plan: GetPlan | None
    keys: list[bytes]


class _LongRows(Exception):
    """These reads are for a pool."""


class ReadGroups:
    """Bound to one store. Used by many threads."""

    def __init__(self, translator: Translator, sizes: RowSizes) -> None:
        self._translator = translator
        self._store: Store = translator.store
        # The tables as readers see them, and the plans by these: most requests are like those before them.
        self._plans: tuple[object, dict[tuple[Any, ...], GetPlan | None]] = (None, {})
        self._sizes = sizes

    def read(self, asked: Asked, is_get: bool, transaction: Transaction | None, alone: Transaction) -> Read | None:
        """A Get, or else an Apply. ``transaction``: the one that it belongs to, as far as it is known. ``alone``: if it
        names none."""
        request, number = asked.request, asked.request.txn
        if not request.id or request.operations:
            return None
        begins = not number or request.HasField("first")
        if not number:
            if not is_get or not self.begins_on_newest(request.first):
                return None
            transaction = alone
        elif begins:
            if transaction is not None or not self.begins_on_newest(request.first):
                return None
            transaction = Transaction(number, deferred=request.first.deferred)
        elif transaction is None or transaction.busy or transaction.failed or transaction.txn or not transaction.lease:
            return None
        if asked.is_late():
            return None
        if not is_get:  # it asks for the snapshot
            return Read(asked, transaction, begins, None, [])
        get = request.get
        if not 0 < len(get.keys) <= _KEYS_MAX:
            return None
        plan = self._plan(get)
        if plan is None or not (plan.is_bounded or self._are_short(plan, len(get.keys))):
            return None
        seen_ts = transaction.lease.ts if transaction.lease else self._store.watermark()
        if plan.schema.alterations and seen_ts < plan.schema.altered_ts:  # it reads another definition
            return None
        keys = []
        for key in get.keys:
            encoded = plan.key(from_values(key.values))
            if encoded is None:
                return None
            keys.append(encoded)
        if self._store.shards.lacks(plan.schema, keys, seen_ts):  # other nodes are asked, in a pool
            return None
        return Read(asked, transaction, begins, plan, keys)

    def _plan(self, get: session_pb2.Get) -> GetPlan | None:
        """By which it is read; None if it is not for here."""
        tables = self._store.tables_as_seen()
        seen, plans = self._plans
        if seen is not tables:
            plans = {}
            self._plans = tables, plans
        if len(get.columns) > _COLUMNS_MAX:  # ``_do_get`` says whether these are so many
            return None
        name = (get.table, get.table_id, get.known_columns, *get.columns)
        try:
            return plans[name]
        except KeyError:
            pass
        try:
            schema = self._translator.schema(get.table, get.table_id)
            plan = self._store.get_plan(schema, self._translator.columns(schema, get.columns, get.known_columns))
        except KiviError:
            return None
        if len(plans) >= _PLANS_MAX:
            plans.clear()
        plans[name] = plan
        return plan

    def _are_short(self, plan: GetPlan, keys: int) -> bool:
        """Whether rows of no bounded size are read here: few, whole, of a table whose rows have been short."""
        is_whole = plan.columns == plan.schema.output_names
        return is_whole and keys <= _UNBOUNDED_KEYS and self._sizes.are_short(plan.schema.id)

    def begins_on_newest(self, begin: session_pb2.Begin) -> bool:
        """Whether it wants one snapshot, the newest, which is there, kept as long as any."""
        if begin.ttl_ms or begin.shared or begin.lease:
            return False
        if begin.HasField("as_of_ts") or begin.HasField("as_of_us"):
            return False
        if begin.fresh or begin.HasField("max_staleness_us"):
            return False
        return begin.min_snapshot <= self._store.watermark()

    def begin(self, wanted: Sequence[Read]) -> list[Transaction]:
        """Opens the snapshots of those that begin; these."""
        begun = list(dict.fromkeys([each.transaction for each in wanted if each.begins]))
        for transaction, lease in zip(begun, self._store.begin_together(len(begun)), strict=True):
            transaction.lease = lease
        return begun

    def answers(self, wanted: Sequence[Read]) -> Iterator[tuple[session_pb2.Response, int]]:
        """Answers, and to how many each is. Raises what the first of them that fails would be answered, or
        ``_LongRows``."""
        gathered: dict[GetPlan | None, list[Read]] = {}
        for each in wanted:
            gathered.setdefault(each.plan, []).append(each)
        for plan, together in gathered.items():
            if plan is None:
                of: dict[int, list[int]] = {}
                for each in together:
                    of.setdefault(each.transaction.start_ts, []).append(each.asked.request.id)
                for ts, ids in of.items():
                    yield session_pb2.Response(start_ts=ts, begin=session_pb2.BeginReply(ids=ids)), len(ids)
                continue
            for some in _portions(plan, together):
                response = self._rows(plan, some)
                if not plan.is_bounded and not self._sizes.answered(
                    plan.schema.id, response.get.keys, response.ByteSize()
                ):
                    raise _LongRows
                yield response, len(some)

    def _rows(self, plan: GetPlan, together: Sequence[Read]) -> session_pb2.Response:
        leases = [(lease, key) for each in together if (lease := each.transaction.lease) for key in each.keys]
        missing, columns = self._store.get_each(plan, leases)
        stamps = [each.transaction.start_ts for each in together]
        response = session_pb2.Response(start_ts=stamps[0])
        reply = response.get
        reply.keys = len(leases)
        reply.ids.extend([each.asked.request.id for each in together])
        if stamps.count(stamps[0]) < len(stamps):
            reply.start_ts.extend(stamps)
        if len(leases) > len(together):
            reply.counts.extend([len(each.keys) for each in together])
        if missing:
            reply.missing.extend(missing)
        if columns:
            column_writer(plan.schema, plan.columns)(reply.columns, columns)
        return response


def _portions(plan: GetPlan, together: Sequence[Read]) -> Iterator[Sequence[Read]]:
    """So many at a time that their answer fits a message, where rows are of fixed width, or takes no long time."""
    most = _CELLS_MAX // max(1, len(plan.columns)) if plan.is_bounded else _UNBOUNDED_KEYS
    some, keys = list[Read](), 0
    for each in together:
        if some and keys + len(each.keys) > most:
            yield some
            some, keys = [], 0
        some.append(each)
        keys += len(each.keys)
    yield some
