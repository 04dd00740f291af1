"""Messages of kivi.v1 made of what a caller wrote, and read: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kivi import expr
from kivi.client_codec import fill_values, new_token, to_expr, type_of
from kivi.errors import InvalidArgument
from kivi.wire.v1 import session_pb2, types_pb2

if TYPE_CHECKING:
    import pyarrow as pa

    from kivi.schema import TableSchema

__all__ = ["append_parts", "batch_token", "commit", "number", "read_batches", "request_token", "scan_spec"]

_APPEND_BYTES: Final = 24 << 20  # a larger append travels in several messages of one transaction


def request_token(token: str | None, batch: tuple[str, int] | None) -> str:
    """The request token of a commit. A batch token is one already: a repeat is answered with its first timestamp."""
    return token or ("" if batch is not None else new_token())


def commit(token: str, batch: tuple[str, int] | None) -> session_pb2.Commit:
    batch = batch_token(batch)
    if batch is None:
        return session_pb2.Commit(token=token)
    return session_pb2.Commit(token=token, batch=session_pb2.BatchToken(scope=batch[0], sequence=batch[1]))


def batch_token(batch: tuple[str, int] | None) -> tuple[str, int] | None:
    if batch is None:
        return None
    if not (
        isinstance(batch, tuple)
        and len(batch) == 2
        and isinstance(batch[0], str)
        and isinstance(batch[1], int)
        and not isinstance(batch[1], bool)
        and batch[1] >= 0
    ):
        raise InvalidArgument(f"a batch token is (scope, number from 0), not {batch!r}")
    return batch


def number(value: float) -> int | float:
    return int(value) if abs(value) < 2**63 and value == int(value) else value  # NaN is not below anything


def append_parts(schema: TableSchema, records: Any) -> list[bytes]:
    """Records as Arrow IPC streams, each small enough for one message."""
    from kivi.arrow.ipc import encode_ipc
    from kivi.arrow.records import event_batch

    if schema.kind != "event":
        raise InvalidArgument(f"{schema.name!r} is not an event table: write its rows in a transaction")
    batch = event_batch(schema, records)
    data = encode_ipc(batch)
    if len(data) <= _APPEND_BYTES or batch.num_rows <= 1:
        return [bytes(data)]
    rows = max(1, batch.num_rows // (-(-len(data) // _APPEND_BYTES)))
    return [bytes(encode_ipc(batch.slice(i, rows))) for i in range(0, batch.num_rows, rows)]


def read_batches(data: bytes) -> list[pa.RecordBatch]:
    if not data:
        return []
    import pyarrow as pa

    with pa.ipc.open_stream(data) as reader:
        return list(reader)


def scan_spec(
    schema: TableSchema,
    prefix: Sequence[Any] = (),
    start: Sequence[Any] | None = None,
    end: Sequence[Any] | None = None,
    where: expr.Expr | None = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    reverse: bool = False,
) -> types_pb2.ScanSpec:
    """The arguments of scan(), validated against the schema, as a message."""
    spec = types_pb2.ScanSpec(table=schema.name, table_id=schema.id, reverse=bool(reverse))
    if prefix:
        fill_values(spec.prefix.values, schema.stored_bound(prefix))
    if start is not None:
        spec.start.SetInParent()
        fill_values(spec.start.values, schema.stored_bound(start))
    if end is not None:
        spec.end.SetInParent()
        fill_values(spec.end.values, schema.stored_bound(end))
    if where is not None:
        spec.where.CopyFrom(to_expr(expr.bind(where, lambda name: type_of(schema, name))))
    if columns is not None:
        spec.columns.extend(schema.output_columns(columns))
    if limit is not None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
            raise InvalidArgument(f"limit is a number of rows, not {limit!r}")
        spec.limit = limit
    return spec
