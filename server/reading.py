"""Plain reads: rows by key, and snapshots by themselves, many at a time, of the transactions of one session.

Dashboards ask for a row from many threads at once, each in a snapshot of its own, and these arrive together. Begin
and Get in one request, of a table with rows of fixed width, are answered together: one hold of the lease mutex, one
look into the engine for all keys of a table, one message of answers; but each snapshot is a lease of its own, released
on its own. All that begin here begin on one timestamp, the watermark of the moment, as they would one by one.

Reads without a transaction share one snapshot, which ends when they are answered.

Whatever is not just so goes the general way, which accepts it or says what is wrong with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kivi_server.requests import Transaction
from kivi_server.translate import Translator

from kivi.errors import KiviError
from kivi.store.facade import GetPlan, Lease, Store
from kivi.wire.codec import fill_row, from_values, integers_of
from kivi.wire.v1 import session_pb2

__all__ = ["PlainGet", "PlainGets"]

_KEYS_MAX: Final = 16
_PLANS_MAX: Final = 256
_COLUMNS_MAX: Final = 64
_INTEGERS_MAX: Final = 100_000


class PlainGet(NamedTuple):
    """One request. ``begins``: ``transaction`` does, with it. Without a plan it only asks for the snapshot."""

    request: session_pb2.Request
    received: float
    transaction: Transaction
    begins: bool
    plan: GetPlan | None
    keys: list[bytes]


class PlainGets:
    """Bound to one store. Used by many threads."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator
        self._store: Store = translator.store
        # The tables as readers see them, and the plans by these: most requests are like those before them.
        self._plans: tuple[object, dict[tuple[Any, ...], GetPlan | None]] = (None, {})

    def read(
        self, request: session_pb2.Request, received: float, transaction: Transaction | None, alone: Transaction
    ) -> PlainGet | None:
        """``transaction``: the one that the request belongs to, as far as it is known. ``alone``: if it names none."""
        if not request.id or request.operations:
            return None
        body = request.WhichOneof("body")
        is_get, number = body == "get", request.txn
        if not is_get and body != "apply":
            return None
        begins = not number or request.HasField("first")
        if not number:
            if not is_get or not self.begins_plainly(request.first):
                return None
            transaction = alone
        elif begins:
            if transaction is not None or not self.begins_plainly(request.first):
                return None
            transaction = Transaction(number)
        elif transaction is None or transaction.busy or transaction.failed or transaction.txn or not transaction.lease:
            return None
        if request.timeout_ms and time.monotonic() - received > request.timeout_ms / 1000:
            return None
        if not is_get:  # it asks for the snapshot
            return PlainGet(request, received, transaction, begins, None, [])
        get = request.get
        if not 0 < len(get.keys) <= _KEYS_MAX:
            return None
        plan = self._plan(get)
        if plan is None:
            return None
        keys = []
        for key in get.keys:
            encoded = plan.key(integers_of(key.values) or from_values(key.values))
            if encoded is None:
                return None
            keys.append(encoded)
        return PlainGet(request, received, transaction, begins, plan, keys)

    def _plan(self, get: session_pb2.Get) -> GetPlan | None:
        """By which it is read; None if it is not for here."""
        tables = self._store.tables_as_seen()
        seen, plans = self._plans
        if seen is not tables:
            plans = {}
            self._plans = tables, plans
        if len(get.columns) > _COLUMNS_MAX:  # it is for the general way to say whether these are so many
            return None
        name = (get.table, get.table_id, *get.columns)
        try:
            return plans[name]
        except KeyError:
            pass
        plan: GetPlan | None = None
        try:
            schema = self._translator.schema(get.table, get.table_id)
            plan = self._store.get_plan(schema, self._translator.columns(schema, get.columns))
        except KiviError:
            return None
        if len(plans) >= _PLANS_MAX:
            plans.clear()
        plans[name] = plan
        return plan

    def begins_plainly(self, begin: session_pb2.Begin) -> bool:
        """Whether it wants one snapshot, the newest, which is there, kept as long as any."""
        if begin.count > 1 or begin.ttl_ms or begin.shared or begin.lease:
            return False
        if begin.HasField("as_of_ts") or begin.HasField("as_of_us"):
            return False
        return begin.min_snapshot <= self._store.watermark()

    def begin(self, wanted: Sequence[PlainGet]) -> list[Transaction]:
        """Opens the snapshots of those that begin; these."""
        begun = list(dict.fromkeys([each.transaction for each in wanted if each.begins]))
        for transaction, lease in zip(begun, self._store.begin_together(len(begun)), strict=True):
            transaction.lease = lease
        return begun

    def answers(self, wanted: Sequence[PlainGet]) -> session_pb2.ServerFrame:
        """All of them. Raises what the first of them that fails would be answered."""
        gathered: dict[GetPlan | None, list[PlainGet]] = {}
        for each in wanted:
            gathered.setdefault(each.plan, []).append(each)
        frame = session_pb2.ServerFrame()
        for plan, together in gathered.items():
            keys: list[tuple[Lease, bytes]] = []
            for each in together:
                lease = each.transaction.lease
                assert lease is not None
                keys += [(lease, key) for key in each.keys]
            if plan is None:
                for each in together:
                    lease = each.transaction.lease
                    frame.responses.add(id=each.request.id, start_ts=lease.ts if lease is not None else 0)
                continue
            found = self._store.get_each(plan, keys)
            if len(found) == len(together) and plan.integers:  # a row each
                together, found = _in_columns(frame, together, found)
            rows = iter(found)
            for each in together:
                lease = each.transaction.lease
                assert lease is not None
                response = frame.responses.add(id=each.request.id, start_ts=lease.ts)
                add, packed = response.get.rows.add, plan.integers and each.request.get.packed
                for _, values in zip(each.keys, rows, strict=False):
                    if values is None:
                        add()
                    else:
                        fill_row(add(found=True), values, packed)
        return frame


def _in_columns(
    frame: session_pb2.ServerFrame, together: list[PlainGet], rows: Sequence[Any]
) -> tuple[list[PlainGet], list[Any]]:
    """Answers gets of one row of integers each, where these are and their clients allow it. The others, and theirs.

    An answer that has grown large is followed by another: each has to fit into a message.
    """
    ids, stamps, integers = list[int](), list[int](), list[int]()
    left, theirs = list[PlainGet](), list[Any]()
    for each, values in zip(together, rows, strict=True):
        lease = each.transaction.lease
        if values is None or None in values or lease is None or not each.request.get.each:
            left.append(each)
            theirs.append(values)
            continue
        ids.append(each.request.id)
        stamps.append(lease.ts)
        integers += values
        if len(integers) > _INTEGERS_MAX:
            _add_columns(frame, ids, stamps, integers)
            ids, stamps, integers = [], [], []
    if ids:
        _add_columns(frame, ids, stamps, integers)
    return left, theirs


def _add_columns(frame: session_pb2.ServerFrame, ids: list[int], stamps: list[int], integers: list[int]) -> None:
    response = frame.responses.add(start_ts=stamps[0])
    reply = response.get_each
    reply.ids.extend(ids)
    reply.integers.extend(integers)
    if stamps.count(stamps[0]) < len(stamps):
        reply.start_ts.extend(stamps)
