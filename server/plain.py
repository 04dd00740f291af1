"""Reading plain commits out of a session's frames: see ``kivi.plain``.

A request is plain if it is a Commit without a transaction, under a request token, whose operations are deltas, each of
another row. Anything else is for the translator, which says what is wrong with it, if something is.
"""

from __future__ import annotations

import time
from typing import Final

from kivi.client_codec import from_values
from kivi.store import Plain, Store
from kivi.wire.v1 import session_pb2

__all__ = ["PlainReader"]

_OPERATIONS_MAX: Final = 16
_TOKEN_CHARACTERS_MAX: Final = 256
_DELTA: Final = session_pb2.Operation.KIND_DELTA


class PlainReader:
    """Bound to one store. Used by many threads, which may each look at the catalog anew."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._plans = store.delta_plans()

    def version(self) -> int:
        """Of the catalog that requests are read by from now on."""
        version, plans = self._plans
        if version != self._store.catalog_version or plans is None:
            self._plans = version, _ = self._store.delta_plans()
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
        plans = self._plans[1]
        if plans is None:
            return None
        rows = []
        for operation in operations:
            plan = plans.get(operation.table)
            names, values = operation.columns, from_values(operation.values)
            if operation.kind != _DELTA or plan is None or operation.table_id not in (0, plan.id):
                return None
            key = plan.key(from_values(operation.key))
            deltas = plan.deltas(names, values) if len(names) == len(values) else None
            if key is None or deltas is None:
                return None
            rows.append((plan, key, deltas))
        return self._store.plain(rows, token, (request, received))
