"""Appends and writes of rows, outside of a caller's own transaction: one transaction, or one for each event."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kivi import errors
from kivi.api.arguments import TransactionArguments, drops_late
from kivi.client.core import Core
from kivi.client.messages import append_parts, commit, encoding, request_token, write_parts
from kivi.client.steps import Steps
from kivi.client.transaction import TransactionCore
from kivi.errors import InvalidArgument
from kivi.model.given import flag
from kivi.model.schema import TableSchema
from kivi.wire.v1 import session_pb2

__all__ = ["append", "append_batch", "write"]

Kind = session_pb2.Operation


def append(
    core: Core,
    table: str,
    records: Any,
    token: str | None = None,
    batch: tuple[str, int] | None = None,
    late: str = "fail",
) -> Steps[int]:
    """One transaction."""
    return append_batch(core, table, records, token, late, batch)


def append_batch(
    core: Core,
    table: str,
    events: Any,
    token: str | None,
    late: str,
    batch: tuple[str, int] | None = None,
    *,
    each: bool = False,
) -> Steps[int]:
    """One transaction, or with ``each`` one for each event."""
    drop_late, wanted = drops_late(late), TransactionArguments(token, batch)

    def ask(bound: tuple[TableSchema, list[Any]]) -> Steps[int]:
        schema, parts = bound
        if each and len(parts) > 1:
            raise InvalidArgument("events that are each a transaction travel in one message: append fewer at a time")
        kind = Kind.KIND_APPEND_EACH if each else Kind.KIND_APPEND
        committed = yield from _commit(core, schema, parts, wanted, kind, drop_late=drop_late)
        core.saw(committed + (events.batch.num_rows - 1 if each else 0))
        return committed

    return core.asked(table, encoding(events, append_parts), ask)


def write(
    core: Core,
    table: str,
    records: Any,
    deletes: str | None = None,
    insert: bool = False,
    token: str | None = None,
    batch: tuple[str, int] | None = None,
) -> Steps[int]:
    """Rows, in one transaction."""
    wanted = TransactionArguments(token, batch)
    ask = partial(_commit, core, wanted=wanted, kind=Kind.KIND_WRITE, insert=flag(insert, "insert"))
    return core.asked(table, encoding(records, partial(write_parts, deletes=deletes)), lambda bound: ask(*bound))


def _commit(
    core: Core,
    schema: TableSchema,
    parts: Sequence[Any],
    wanted: TransactionArguments,
    kind: session_pb2.Operation.Kind,
    **options: bool,
) -> Steps[int]:
    """Encoded events or rows, in one message if they fit."""
    if len(parts) > 1:
        transaction = TransactionCore(core, wanted)
        transaction.begin()
        try:
            for part in parts:
                transaction.send_part(kind, schema, part, **options)
                yield from transaction.flush()
        except BaseException:
            transaction.release()
            raise
        return (yield from transaction.commit())
    token = request_token(wanted.token, wanted.batch)
    request = session_pb2.Request(commit=commit(token, wanted.batch))
    request.operations.add(kind=kind, table=schema.name, table_id=schema.id, arrow_bytes=len(parts[0]), **options)
    reply = yield from core.repeat(request, lambda: errors.CommitUnknown(token=token or None), parts)
    core.saw(reply.commit.commit_ts)
    return int(reply.commit.commit_ts)
