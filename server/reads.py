"""Reads that came together: rows by key, and snapshots by themselves, of the transactions of one session.

Dashboards ask for a row from many threads at once, each in a snapshot of its own, and these arrive together. Those of a
table with rows of fixed width are one group: one hold of the lease mutex, one look into the engine for all keys of a
table, one answer; but each snapshot is a lease of its own, released on its own. All that begin here begin on one
timestamp, the watermark of the moment, as they would one by one. Reads without a transaction share one snapshot, which
ends when they are answered.

Whatever is not just so is read by itself (``Requests._do_get``), which accepts it or says what is wrong with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from kivi_server.asked import Asked
from kivi_server.requests import Transaction
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


class Read(NamedTuple):
    """One request. ``begins``: ``transaction`` does, with it. Without a plan it only asks for the snapshot."""

    asked: Asked
    transaction: Transaction
    begins: bool
    plan: GetPlan | None
    keys: list[bytes]


class ReadGroups:
    """Bound to one store. Used by many threads."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._store: Store = translator.store
        # The tables as readers see them, and the plans by these: most requests are like those before them.
        self._plans: tuple[object, dict[tuple[Any, ...], GetPlan | None]] = (None, {})

    def read(self, asked: Asked, transaction: Transaction | None, alone: Transaction) -> Read | None:
        """``transaction``: the one that the request belongs to, as far as it is known. ``alone``: if it names none."""
        request = asked.request
        if not request.id or request.operations:
            return None
        body = request.WhichOneof("body")
        is_get, number = body == "get", request.txn
        if not is_get and body != "apply":
            return None
        begins = not number or request.HasField("first")
        if not number:
            if not is_get or not self.begins_on_newest(request.first):
                return None
            transaction = alone
        elif begins:
            if transaction is not None or not self.begins_on_newest(request.first):
                return None
            transaction = Transaction(number)
        elif transaction is None or transaction.busy or transaction.failed or transaction.txn or not transaction.lease:
            return None
        if request.timeout_ms and time.monotonic() - asked.received > request.timeout_ms / 1000:
            return None
        if not is_get:  # it asks for the snapshot
            return Read(asked, transaction, begins, None, [])
        get = request.get
        if not 0 < len(get.keys) <= _KEYS_MAX:
            return None
        plan = self._plan(get)
        if plan is None:
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
        """Answers, and to how many each is. Raises what the first of them that fails would be answered."""
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
            most = max(1, _CELLS_MAX // (_KEYS_MAX * max(1, len(plan.columns))))  # so that each fits a message
            for at in range(0, len(together), most):
                some = together[at : at + most]
                yield self._rows(plan, some), len(some)

    def _rows(self, plan: GetPlan, together: Sequence[Read]) -> session_pb2.Response:
        leases = [(each.transaction.lease, key) for each in together for key in each.keys]
        rows = self._store.get_each(plan, [(lease, key) for lease, key in leases if lease is not None])
        stamps = [each.transaction.start_ts for each in together]
        response = session_pb2.Response(start_ts=stamps[0])
        reply = response.get
        reply.keys = len(rows)
        reply.ids.extend([each.asked.request.id for each in together])
        if stamps.count(stamps[0]) < len(stamps):
            reply.start_ts.extend(stamps)
        if len(rows) > len(together):
            reply.counts.extend([len(each.keys) for each in together])
        if None in rows:
            reply.missing.extend([i for i, row in enumerate(rows) if row is None])
        if found := [row for row in rows if row is not None]:
            column_writer(plan.schema, plan.columns)(reply.columns, zip(*found, strict=True))
        return response
