"""Commits of deltas and puts, read out of a CommitEach by the plans of ``kivi.store.plans``.

Those whose operations are more than that are taken apart, and are for ``Requests._do_commit``, which says what is wrong
with them, if something is.

Applications that count send the same operations again and again (this page, one more view). What operations are is
remembered by their bytes: those of a commit that comes again are read, checked, encoded and digested once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from kivi_server import limits
from kivi_server.asked import Asked

from kivi.errors import InvalidArgument, ResourceExhausted
from kivi.store.facade import Store, WritePlan, WriteSet
from kivi.wire.codec import from_values
from kivi.wire.v1 import session_pb2

__all__ = ["CommitReader", "Commits", "answer_to", "count_of", "each_of"]

_OPERATIONS_MAX: Final = 16
_TOKEN_CHARACTERS_MAX: Final = 256
_REMEMBERED_MAX: Final = 4_096
_REMEMBERED_BYTES_MAX: Final = 512
_DELTA: Final = session_pb2.Operation.KIND_DELTA
_KINDS: Final = frozenset({_DELTA, session_pb2.Operation.KIND_PUT})
MayWrite = Callable[[Iterable[str]], bool]
"""Whether tables may be written, by their names."""


class Commits(NamedTuple):
    """Transactions of deltas and puts that are entered together: the write set, token and number of each, as they were
    read by the tables as of ``derived_at``. ``source`` is the CommitEach that they came in."""

    write_sets: Sequence[WriteSet]
    tokens: Sequence[str]
    numbers: Sequence[int]
    derived_at: int
    received: float
    source: Asked


def answer_to(numbers: Sequence[int], first: int) -> session_pb2.Response:
    """To those with these numbers, which were entered and have the CTS from ``first`` on."""
    reply = session_pb2.CommitEachReply(ids=numbers, commit_ts=first, blind=True)
    return session_pb2.Response(start_ts=first - 1, commit_each=reply)


def count_of(request: session_pb2.Request) -> int:
    """How many answers it wants."""
    if request.id:
        return 1
    return sum(map(bool, request.commit_each.ids)) if request.HasField("commit_each") else 0


def _places(request: session_pb2.Request) -> Sequence[int]:
    """Of each transaction of a CommitEach the place of what it does. Raises InvalidArgument, ResourceExhausted."""
    each = request.commit_each
    ids, tokens = each.ids, each.tokens
    if len(ids) > (most := limits.COMMIT_EACH_MAX):
        raise limits.exceeded("commit_each_max", most, len(ids), "transactions of one CommitEach")
    places: Sequence[int] = each.does or [0] * len(ids)
    if not 0 < len(ids) == len(tokens) == len(places) or not all(ids) or not all(tokens):
        raise InvalidArgument("a CommitEach has as many numbers as tokens, none of them 0 or empty")
    if request.id or request.txn or request.operations or request.HasField("first"):
        raise InvalidArgument("a CommitEach has no number, no transaction and no operations but those in its `writes`")
    if max(places) >= len(each.writes):
        raise InvalidArgument("a transaction of a CommitEach does something that is not in its `writes`")
    if (longest := max(map(len, each.writes))) > (most := limits.COMMIT_EACH_BYTES_MAX):
        raise limits.exceeded(
            "commit_each_bytes_max", most, longest, "bytes of what a transaction of a CommitEach does"
        )
    return places


def each_of(asked: Asked) -> list[Asked]:
    """The transactions of a CommitEach, each as a request of its own. Raises InvalidArgument, ResourceExhausted."""
    request = asked.request
    places, each = _places(request), request.commit_each
    try:
        writes = [session_pb2.Writes.FromString(encoded).operations for encoded in each.writes]
    except DecodeError:
        raise InvalidArgument("what a transaction of a CommitEach does is not an encoded Writes") from None
    count, most = max(map(len, writes)), limits.COMMIT_EACH_OPERATIONS_MAX
    if count > most:  # each transaction gets its own, which a few bytes may say of all
        raise limits.exceeded("commit_each_operations_max", most, count, "operations of a transaction of a CommitEach")
    apart = []
    for number, token, place in zip(each.ids, each.tokens, places, strict=True):
        commit = session_pb2.Commit(token=token)
        one = session_pb2.Request(id=number, operations=writes[place], commit=commit, timeout_ms=request.timeout_ms)
        apart.append(Asked(one, asked.received))
    return apart


class _Known(NamedTuple):
    """What some operations do, and the tables that they name."""

    write_set: WriteSet
    tables: Sequence[str]


class _Read(NamedTuple):
    """When the tables were as its plans say, these, and what operations are by these, by the bytes of their Writes."""

    derived_at: int
    plans: Mapping[str, WritePlan] | None
    remembered: dict[bytes, _Known]


class CommitReader:
    """Bound to one store. Used by many threads, which may each look at the catalog anew.

    What is committed together is read by one catalog, which another thread may replace meanwhile, even by an older one:
    so it is taken once, and the commits say which.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read_by = _Read(*store.write_plans(), {})

    def _current(self) -> _Read:
        by = self._read_by
        if by.derived_at != self._store.changed_at or by.plans is None:
            by = self._read_by = _Read(*self._store.write_plans(), {})
        return by

    def each(self, asked: Asked, may_write: MayWrite) -> Commits | None:
        """Those of a CommitEach, or None if one of them is more than deltas and puts, or it is not as it should be."""
        request = asked.request
        each = request.commit_each
        try:
            places = _places(request)
        except (InvalidArgument, ResourceExhausted):
            return None
        if max(map(len, each.tokens)) > _TOKEN_CHARACTERS_MAX or asked.is_late():
            return None
        by, found = self._current(), list[WriteSet]()
        for writes in each.writes:
            known = self._read(by, writes)
            if known is None or not may_write(known.tables):
                return None
            found.append(known.write_set)
        write_sets = [found[place] for place in places]
        return Commits(write_sets, [*each.tokens], [*each.ids], by.derived_at, asked.received, asked)

    def _read(self, by: _Read, writes: bytes) -> _Known | None:
        """What an encoded Writes does; None if that is more than deltas and puts, or it has too many operations."""
        _, plans, remembered = by
        known = remembered.get(writes)
        if known is not None or plans is None:
            return known
        try:
            operations = session_pb2.Writes.FromString(writes).operations
            write_set = self._written(plans, operations) if 0 < len(operations) <= _OPERATIONS_MAX else None
        except (DecodeError, InvalidArgument):
            return None
        if write_set is None:
            return None
        known = _Known(write_set, tuple(dict.fromkeys(operation.table for operation in operations)))
        if len(writes) <= _REMEMBERED_BYTES_MAX:
            if len(remembered) >= _REMEMBERED_MAX:
                remembered.clear()
            remembered[writes] = known
        return known

    def _written(self, plans: Mapping[str, WritePlan], operations: Iterable[session_pb2.Operation]) -> WriteSet | None:
        rows = []
        for operation in operations:
            if operation.kind not in _KINDS:
                return None
            plan = plans.get(operation.table)
            names, values = operation.columns, from_values(operation.values)
            if plan is None or operation.table_id not in (0, plan.origin) or len(names) != len(values):
                return None
            key = plan.key(from_values(operation.key))
            cells = (plan.deltas if operation.kind == _DELTA else plan.puts)(names, values)
            if key is None or cells is None:
                return None
            rows.append((plan, key, cells))
        return self._store.write_set(rows)
