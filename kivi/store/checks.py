"""Limits of what a caller may send: tokens, and the events of one append."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from kivi.arrow.dictionaries import is_coded
from kivi.errors import InvalidArgument, ResourceExhausted
from kivi.model.schema import TableSchema
from kivi.model.tenants import Tenant
from kivi.runtime.settings import Settings

__all__ = ["check_batch_token", "check_events", "check_tenant", "check_token", "long_columns", "too_long"]


def check_token(token: str) -> None:
    if not token or len(token.encode()) > 1024:
        raise InvalidArgument("a token is a text of 1 to 1024 bytes")


def check_batch_token(batch: tuple[str, int] | None) -> None:
    if batch is not None:
        scope, sequence = batch
        if not isinstance(scope, str) or not 0 < len(scope.encode()) <= 1024:
            raise InvalidArgument("a batch token's scope is a text of 1 to 1024 bytes")
        if not isinstance(sequence, int) or not 0 <= sequence < 2**63:
            raise InvalidArgument(f"a batch token's sequence is a number from 0 on, not {sequence!r}")


def check_events(batch: pa.RecordBatch, settings: Settings) -> None:
    """Raises ResourceExhausted for more rows than one append may bring, or a value over max_value_bytes."""
    if batch.num_rows > settings.max_append_rows:
        raise ResourceExhausted(
            f"{batch.num_rows} events in one append pass the limit of {settings.max_append_rows}: send less"
        )
    for name, lengths in long_columns(batch, settings):
        raise too_long(name, pc.max(lengths).as_py(), settings)


def long_columns(batch: pa.RecordBatch, settings: Settings) -> Iterator[tuple[str, pa.Array]]:
    """The columns with a value over max_value_bytes, and how long each row's value is."""
    if batch.get_total_buffer_size() <= settings.max_value_bytes:  # most often; to look at each takes 20 us
        return
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = column.dictionary if is_coded(column) else column
        if values.type in (pa.string(), pa.binary()) and values.nbytes > settings.max_value_bytes:
            lengths = pc.binary_length(values)
            if is_coded(column):
                lengths = lengths.take(column.indices)
            if (pc.max(lengths).as_py() or 0) > settings.max_value_bytes:
                yield name, lengths


def check_tenant(tenant: Tenant | None, schema: TableSchema, batch: pa.RecordBatch) -> None:
    """Raises PermissionDenied for a row that is not the tenant's, also one with a null there, or without the column."""
    if tenant is None:
        return
    value = tenant.value(schema)
    if tenant.column not in batch.schema.names:
        raise tenant.foreign(schema)
    column = batch.column(tenant.column)
    distinct = (column.dictionary_decode() if is_coded(column) else column).unique()
    if distinct.to_pylist() not in ([], [value]):
        raise tenant.foreign(schema)


def too_long(column: str, length: int, settings: Settings) -> ResourceExhausted:
    return ResourceExhausted(
        f"a value of column {column!r} has {length} bytes, over the limit of {settings.max_value_bytes}", column=column
    )
