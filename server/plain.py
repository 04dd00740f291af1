"""Reading plain commits out of a session's frames: see ``kivi.plain``.

A request is plain if it is a Commit without a transaction, under a request token, whose operations are deltas and puts,
each of another row. Anything else is for the translator, which says what is wrong with it, if something is.

Applications that count send the same operations again and again (this page, one more view). What operations are is
remembered by their bytes: those of a commit that comes again are read, checked, encoded and digested once. 64 commits
in a frame, everything but gRPC, medians of three: 17 us each where all are alike, 46 where none is like another.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

from kivi.client_codec import from_values
from kivi.store import Plain, PlainRows, Store, WritePlan
from kivi.wire.v1 import session_pb2

__all__ = ["PlainReader"]

_OPERATIONS_MAX: Final = 16
_TOKEN_CHARACTERS_MAX: Final = 256
_REMEMBERED_MAX: Final = 4_096
_REMEMBERED_BYTES_MAX: Final = 512
_DELTA: Final = session_pb2.Operation.KIND_DELTA
_PLAIN: Final = frozenset({_DELTA, session_pb2.Operation.KIND_PUT})


class PlainReader:
    """Bound to one store. Used by many threads, which may each look at the catalog anew."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # The catalog's version, its plans, and what operations are by these, by the operations' bytes.
        self._plans: tuple[int, Mapping[str, WritePlan] | None, dict[bytes, PlainRows]] = (*store.write_plans(), {})

    def version(self) -> int:
        """Of the catalog that requests are read by from now on."""
        version, plans, _ = self._plans
        if version != self._store.catalog_version or plans is None:
            version, plans = self._store.write_plans()
            self._plans = version, plans, {}
        return version

    def read(self, request: session_pb2.Request, received: float) -> Plain | None:
        """The transaction, tagged with both arguments, or None if it is not plain."""
        if request.txn or not request.id or not request.HasField("commit"):
            return None
        commit, operations = request.commit, request.operations
        token = commit.token
        if not token or len(token) > _TOKEN_CHARACTERS_MAX or commit.HasField("batch"):
            return None
        if not 0 < len(operations) <= _OPERATIONS_MAX:
            return None
        if request.timeout_ms and time.monotonic() - received > request.timeout_ms / 1000:
            return None
        _, plans, remembered = self._plans
        if plans is None:
            return None
        if any([operation.kind not in _PLAIN for operation in operations]):  # noqa: C419 (there is one)
            return None  # before its bytes are looked at, which may be megabytes of events
        name = b"".join([operation.SerializeToString() for operation in operations])
        does = remembered.get(name)
        if does is None:
            does = self._does(plans, operations)
            if does is None:
                return None
            if len(name) <= _REMEMBERED_BYTES_MAX:
                if len(remembered) >= _REMEMBERED_MAX:
                    remembered.clear()
                remembered[name] = does
        return self._store.plain(does, token, (request, received))

    def _does(self, plans: Mapping[str, WritePlan], operations: Iterable[session_pb2.Operation]) -> PlainRows | None:
        rows = []
        for operation in operations:
            plan = plans.get(operation.table)
            names, values = operation.columns, from_values(operation.values)
            if plan is None or operation.table_id not in (0, plan.origin) or len(names) != len(values):
                return None
            key = plan.key(from_values(operation.key))
            cells = (plan.deltas if operation.kind == _DELTA else plan.puts)(names, values)
            if key is None or cells is None:
                return None
            rows.append((plan, key, cells))
        return self._store.plain_rows(rows)
