"""Reading plain commits out of a session's frames: see ``kivi.store.plans``.

They come in columns, as one ``CommitEach``, or each as a request of its own: a Commit without a transaction, under a
request token. Plain are those whose operations are deltas and puts, each of another row. Anything else is for the
translator, which says what is wrong with it, if something is.

Applications that count send the same operations again and again (this page, one more view). What operations are is
remembered by their bytes: those of a commit that comes again are read, checked, encoded and digested once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from kivi_server import limits

from kivi.errors import InvalidArgument
from kivi.store.facade import Store, WritePlan, WriteSet
from kivi.wire.codec import from_values
from kivi.wire.v1 import session_pb2

__all__ = ["Commits", "PlainReader", "count_of", "each_of"]

_OPERATIONS_MAX: Final = 16
_TOKEN_CHARACTERS_MAX: Final = 256
_REMEMBERED_MAX: Final = 4_096
_REMEMBERED_BYTES_MAX: Final = 512
_DELTA: Final = session_pb2.Operation.KIND_DELTA
_PLAIN: Final = frozenset({_DELTA, session_pb2.Operation.KIND_PUT})
MayWrite = Callable[[Iterable[str]], bool]
"""Whether tables may be written, by their names."""


class Commits:
    """Plain commits that are entered together: what each ``does``, its token and its number, as they were read by the
    catalog of this ``version``. ``source`` is the CommitEach that they came in, or each one's own request."""

    __slots__ = ("_source", "does", "numbers", "received", "tokens", "version")

    def __init__(
        self,
        does: Sequence[WriteSet],
        tokens: Sequence[str],
        numbers: Sequence[int],
        version: int,
        received: float,
        source: session_pb2.Request | Sequence[session_pb2.Request],
    ) -> None:
        self.does = does
        self.tokens = tokens
        self.numbers = numbers
        self.version = version
        self.received = received
        self._source = source

    def __len__(self) -> int:
        return len(self.does)

    @property
    def rows(self) -> int:
        """How many they write."""
        return sum([len(each.rows) for each in self.does])

    @property
    def requests(self) -> Sequence[session_pb2.Request]:
        """Each as a request of its own."""
        return each_of(self._source) if isinstance(self._source, session_pb2.Request) else self._source

    def answers(self, numbers: Sequence[int], first: int) -> session_pb2.ServerFrame:
        """To those with these numbers, which were entered and have the CTS from ``first`` on."""
        frame = session_pb2.ServerFrame()
        if isinstance(self._source, session_pb2.Request):
            response = frame.responses.add(start_ts=first - 1)
            response.commit_each.ids.extend(numbers)
            response.commit_each.commit_ts = first
            response.commit_each.blind = True
            return frame
        for cts, number in enumerate(numbers, first):
            response = frame.responses.add(id=number, start_ts=cts - 1)
            response.commit.commit_ts = cts
        return frame


def count_of(request: session_pb2.Request) -> int:
    """How many answers it wants."""
    if request.id:
        return 1
    return sum(map(bool, request.commit_each.ids)) if request.HasField("commit_each") else 0


def each_of(request: session_pb2.Request) -> list[session_pb2.Request]:
    """The transactions of a CommitEach, each as a request of its own. Raises InvalidArgument."""
    each = request.commit_each
    ids, tokens = each.ids, each.tokens
    does: Sequence[int] = each.does or [0] * len(ids)
    if len(ids) > limits.COMMIT_EACH_MAX:
        most = limits.COMMIT_EACH_MAX
        raise limits.exceeded("commit_each_max", most, len(ids), "transactions of one CommitEach")
    if not len(ids) == len(tokens) == len(does) or not all(ids) or not all(tokens):
        raise InvalidArgument("a CommitEach has as many numbers as tokens, none of them 0 or empty")
    if request.id or request.txn or request.operations or request.HasField("first"):
        raise InvalidArgument("a CommitEach has no number, no transaction and no operations but those in its `writes`")
    if max(does, default=0) >= len(each.writes):
        raise InvalidArgument("a transaction of a CommitEach does something that is not in its `writes`")
    longest, most = max(map(len, each.writes), default=0), limits.COMMIT_EACH_BYTES_MAX
    if longest > most:
        raise limits.exceeded(
            "commit_each_bytes_max", most, longest, "bytes of what a transaction of a CommitEach does"
        )
    try:
        writes = [session_pb2.Writes.FromString(encoded).operations for encoded in each.writes]
    except DecodeError:
        raise InvalidArgument("what a transaction of a CommitEach does is not an encoded Writes") from None
    count, most = max(map(len, writes), default=0), limits.COMMIT_EACH_OPERATIONS_MAX
    if count > most:  # each transaction gets its own, which a few bytes may say of all
        raise limits.exceeded("commit_each_operations_max", most, count, "operations of a transaction of a CommitEach")
    return [
        session_pb2.Request(
            id=number,
            operations=writes[place],
            commit=session_pb2.Commit(token=token),
            timeout_ms=request.timeout_ms,
        )
        for number, token, place in zip(ids, tokens, does, strict=True)
    ]


class _Known(NamedTuple):
    """What some operations do, and the tables that they name."""

    does: WriteSet
    tables: Sequence[str]


class _Read(NamedTuple):
    """A catalog's version, its plans, and what operations are by these, by the bytes of their Writes."""

    version: int
    plans: Mapping[str, WritePlan] | None
    remembered: dict[bytes, _Known]


class PlainReader:
    """Bound to one store. Used by many threads, which may each look at the catalog anew.

    What is committed together is read by one catalog, which another thread may replace meanwhile, even by an older one:
    so it is taken once, and the commits carry its version.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read_by = _Read(*store.write_plans(), {})

    def _current(self) -> _Read:
        by = self._read_by
        if by.version != self._store.catalog_version or by.plans is None:
            by = self._read_by = _Read(*self._store.write_plans(), {})
        return by

    def each(self, request: session_pb2.Request, received: float, may_write: MayWrite) -> Commits | None:
        """Those of a CommitEach, or None if one of them is not plain, or it is not as it should be."""
        each = request.commit_each
        tokens, numbers, places = [*each.tokens], [*each.ids], each.does
        if not 0 < len(tokens) == len(numbers) <= limits.COMMIT_EACH_MAX or not all(numbers):
            return None
        if request.id or request.txn or request.operations or request.HasField("first"):
            return None
        if not all(tokens) or max(map(len, tokens)) > _TOKEN_CHARACTERS_MAX or _is_late(request, received):
            return None
        if max(map(len, each.writes), default=0) > limits.COMMIT_EACH_BYTES_MAX:
            return None
        by, found = self._current(), list[WriteSet]()
        for writes in each.writes:
            known = self._read(by, writes)
            if known is None or not may_write(known.tables):
                return None
            found.append(known.does)
        if not places:
            does = found[:1] * len(tokens)
        elif max(places) < len(found):
            does = [found[place] for place in places]
        else:
            return None
        if len(does) != len(tokens):
            return None
        return Commits(does, tokens, numbers, by.version, received, request)

    def together(self, requests: Iterable[session_pb2.Request], received: float, may_write: MayWrite) -> Commits | None:
        """The requests at the head of these that are plain commits, at most as many as may be of one CommitEach."""
        by, does, kept = self._current(), list[WriteSet](), list[session_pb2.Request]()
        for request in requests:
            known = self._alone(by, request, received)
            if known is None or not may_write(known.tables) or len(does) == limits.COMMIT_EACH_MAX:
                break
            does.append(known.does)
            kept.append(request)
        if not does:
            return None
        tokens, numbers = [request.commit.token for request in kept], [request.id for request in kept]
        return Commits(does, tokens, numbers, by.version, received, kept)

    def _alone(self, by: _Read, request: session_pb2.Request, received: float) -> _Known | None:
        """What a commit that came by itself does; None if it is not plain."""
        if request.txn or not request.id or not request.HasField("commit"):
            return None
        token = request.commit.token
        if not token or len(token) > _TOKEN_CHARACTERS_MAX or request.commit.HasField("batch"):
            return None
        operations = request.operations
        if len(operations) > _OPERATIONS_MAX or _is_late(request, received):
            return None
        if not all([operation.kind in _PLAIN for operation in operations]):  # noqa: C419 (there is one)
            return None  # before they are copied, which may be megabytes of events
        return self._read(by, session_pb2.Writes(operations=operations).SerializeToString())

    def _read(self, by: _Read, writes: bytes) -> _Known | None:
        """What an encoded Writes does; None if that is not plain."""
        _, plans, remembered = by
        known = remembered.get(writes)
        if known is not None or plans is None:
            return known
        try:
            operations = session_pb2.Writes.FromString(writes).operations
        except DecodeError:
            return None
        if not 0 < len(operations) <= _OPERATIONS_MAX:
            return None
        does = self._does(plans, operations)
        if does is None:
            return None
        known = _Known(does, tuple(dict.fromkeys(operation.table for operation in operations)))
        if len(writes) <= _REMEMBERED_BYTES_MAX:
            if len(remembered) >= _REMEMBERED_MAX:
                remembered.clear()
            remembered[writes] = known
        return known

    def _does(self, plans: Mapping[str, WritePlan], operations: Iterable[session_pb2.Operation]) -> WriteSet | None:
        rows = []
        for operation in operations:
            if operation.kind not in _PLAIN:
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


def _is_late(request: session_pb2.Request, received: float) -> bool:
    return bool(request.timeout_ms) and time.monotonic() - received > request.timeout_ms / 1000
