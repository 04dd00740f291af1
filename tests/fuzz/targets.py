"""What is fuzzed: a reader of bytes, and what holds of each of its answers.

Of a stranger's bytes: they are read, or refused with a typed error that is for the stranger. Of bytes that the store
wrote itself: they are read, or are DataLoss; and what was read and is written again reads as the same. A target that
raises anything else has found a bug.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from kivi_server.asked import parsed as parsed_frame
from kivi_server.http.prom_series import NAME, Series, holding
from kivi_server.http.promql import Evaluation
from kivi_server.http.promql import parsed as parsed_promql
from kivi_server.otlp import spans
from kivi_server.otlp.over_http import decode_json, decode_points_json
from kivi_server.otlp.points import decode_points

import kivi
from kivi.arrow.ipc import decode_ipc, encode_ipc
from kivi.arrow.predicates import attempted
from kivi.encoding.base_rows import RowLayout, Version
from kivi.encoding.keys import decode_key, decode_key_columns, encode_key
from kivi.errors import DataLoss, FormatTooNew, InvalidArgument, KiviError, ResourceExhausted, SchemaError
from kivi.log.frames import decode_message
from kivi.model.declarations import row_table_schema
from kivi.model.expressions import bind, bind_value
from kivi.model.expressions.plain import from_plain, to_plain
from kivi.model.measure_text import operator_call
from kivi.model.pattern_text import parsed as parsed_pattern
from kivi.model.predicate_text import expression, where
from kivi.model.types import ColumnType
from kivi.mvcc import record
from kivi.mvcc.record import Commit, decode_commit
from kivi.runtime.checksum import crc32

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """``read`` raises what is not allowed. ``seeds`` are where the search begins."""

    read: Callable[[bytes], None]
    seeds: Sequence[bytes] = field(default=(b"",))


_TYPES: Final = [ColumnType.parse(name) for name in ("bool", "int64", "float64", "string", "bytes", "timestamp")]
_COLUMNS: Final = {
    "n": "int64", "x": "float64", "name": "string", "raw": "bytes", "ok": "bool", "ts": "timestamp",
    "cost": "decimal(12,2)", "lat": "float64", "lon": "float64",
}  # fmt: skip


def _keys(data: bytes) -> None:
    """The first two bytes choose the key's types."""
    types = [_TYPES[byte % len(_TYPES)] for byte in data[:2]]
    key = data[2:]
    try:
        values = decode_key(types, key)
    except DataLoss:
        return
    again = encode_key(types, values)
    assert encode_key(types, decode_key(types, again)) == again  # of NaN too
    if types:
        columns = decode_key_columns(types, pa.array([key], pa.large_binary()))
        assert len(columns) == len(types) and all(len(column) == 1 for column in columns)


_ROWS: Final = row_table_schema(
    "rows",
    {"id": "int64"},
    {**_COLUMNS, "total": kivi.sum("int64"), "spent": kivi.sum("decimal(12,2)"), "most": kivi.max("float64")},
)


def _rows(data: bytes) -> None:
    layout = RowLayout.of(_ROWS)
    try:
        version = layout.decode(data)
    except DataLoss:
        return
    assert repr(layout.decode(layout.encode(version))) == repr(version)  # of two NaN too


def _records(data: bytes) -> None:
    """The bodies of the log's records; the first byte chooses which."""
    readers = (
        decode_commit, record.decode_events, record.decode_stage, record.decode_abort, record.decode_floor,
        record.decode_gather, record.decode_pin,
    )  # fmt: skip
    with contextlib.suppress(DataLoss):
        readers[data[0] % len(readers) if data else 0](data[1:])


def _frames(data: bytes) -> None:
    """Messages of the replicated log, under a checksum that is right."""
    with contextlib.suppress(DataLoss, FormatTooNew):
        decode_message(struct.pack("<I", crc32(data)) + data)


def _arrow(data: bytes) -> None:
    with contextlib.suppress(InvalidArgument, ResourceExhausted):
        table = decode_ipc(data, max_bytes=1 << 22, max_rows=10_000)
        table.validate(full=True)
        assert table.num_rows <= 10_000


def _otlp(data: bytes) -> None:
    """Spans as protobuf, or as JSON behind a first byte of 1; metrics behind one of 2 or 3."""
    readers: dict[bytes, Callable[[bytes], Sequence[spans.Spans]]] = {
        b"\1": decode_json,
        b"\2": decode_points,
        b"\3": decode_points_json,
    }
    try:
        export = readers.get(data[:1], spans.decode)(data[1:])
    except InvalidArgument:
        return
    for part in export:
        events, ids = spans.gathered([part])
        assert events.num_rows == len(ids)
        assert part.items == part.are_items().sum() <= len(ids)
        grouped = {name for groups in part.kind.groups.values() for name in groups}
        assert all(events.column(name).null_count == 0 for name in (*grouped, *part.kind.ids, "ts"))


_TIMES: Final = np.arange(0, 3_600_000, 300_000, dtype=np.int64)


def _series(matching: Any, since_ms: int, until_ms: int, bounding: Any) -> list[Series]:
    """Two counters and a histogram, whatever time is asked for."""
    labels = [{NAME: "calls", "host": "a"}, {NAME: "calls", "host": "b"}]
    labels += [{NAME: "latency_bucket", "le": bound} for bound in ("0.5", "1.0", "+Inf")]
    chosen = [labels[i] for i in holding(matching, labels)]
    values = np.cumsum(np.ones((len(chosen), len(_TIMES))), axis=1)
    return [Series(chosen, _TIMES, values, np.zeros(len(chosen), np.int64), 300_000)] if chosen else []


def _promql(data: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        Evaluation(_TIMES[:4] + 600_000, _series, (600_000, 1_500_000)).value(
            parsed_promql(data.decode(errors="replace"))
        )


_BATCH: Final = pa.record_batch(
    {
        "n": pa.array([1, None, -(1 << 62)], pa.int64()),
        "x": pa.array([0.5, None, 1e300]),
        "name": pa.array(["ada", None, ""]),
        "raw": pa.array([b"\0\xff", None, b""]),
        "ok": pa.array([True, None, False]),
        "ts": pa.array([0, None, 1 << 60], pa.timestamp("us", "UTC")),
        "cost": pa.array([Decimal("0.01"), None, Decimal(-1)], pa.decimal128(12, 2)),
        "lat": pa.array([48.9, None, -90.0]),
        "lon": pa.array([2.4, None, 180.0]),
    }
)


def _type_of(name: str) -> ColumnType:
    if name not in _COLUMNS:
        raise SchemaError(f"no column {name!r}")
    return ColumnType.parse(_COLUMNS[name])


def _expressions(data: bytes) -> None:
    """Predicates, expressions, measures, patterns and plain forms; what binds is evaluated; the first byte chooses."""
    how, text = data[0] % 5 if data else 0, data[1:].decode(errors="replace")
    types = {name: ColumnType.parse(type_) for name, type_ in _COLUMNS.items()}
    with contextlib.suppress(KiviError):
        match how:
            case 0:
                bound = bind(where(text, _COLUMNS), _type_of)
                attempted(_BATCH, bound, types)
            case 1:
                bound, _ = bind_value(expression(text, _COLUMNS, "it"), _type_of)
                attempted(_BATCH, bound, types)
            case 2:
                operator_call("m", text, _COLUMNS)
            case 3:
                parsed_pattern(text)
            case _:
                with contextlib.suppress(ValueError, RecursionError):
                    plain = json.loads(text)
                    found = from_plain(plain)
                    assert from_plain(to_plain(found)) is not None
                    attempted(_BATCH, bind(found, _type_of), types)


def _sessions(data: bytes) -> None:
    """A frame of a client."""
    with contextlib.suppress(InvalidArgument, ResourceExhausted, DecodeError):
        parsed_frame(data)


def _arrow_seed() -> bytes:
    return bytes(encode_ipc(_BATCH))


def _row_seed() -> bytes:
    cells = (7, 0.5, "ada", b"\1", True, 1, 100, 1.0, 2.0, 5, 700, 9.5)
    return RowLayout.of(_ROWS).encode(Version(3, True, cells))


def _commit_seed() -> bytes:
    return b"\0" + b"".join(map(bytes, Commit(5, request=("token", bytes(16))).encode()))


def _span_seed() -> bytes:
    times = {"startTimeUnixNano": "1767225600000000000", "endTimeUnixNano": "1767225600000000001"}
    span = {"traceId": "01" * 16, "spanId": "01" * 8, "name": "GET /", "kind": 2, **times}
    said = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"spans": [span]}]}]}
    return b"\1" + json.dumps(said).encode()


def _point_seed() -> bytes:
    buckets = {"offset": 3, "bucketCounts": ["1", "0", "2"]}
    point = {
        "timeUnixNano": "1767225600000000000",
        "count": "4",
        "zeroCount": "1",
        "scale": 7,
        "positive": buckets,
        "sum": 9.5,
    }
    metric = {"name": "m", "exponentialHistogram": {"aggregationTemporality": 1, "dataPoints": [point]}}
    said = {"resourceMetrics": [{"resource": {}, "scopeMetrics": [{"metrics": [metric]}]}]}
    return b"\3" + json.dumps(said).encode()


TARGETS: Final[dict[str, Target]] = {
    "keys": Target(_keys, [b"\1\3" + encode_key([_TYPES[1], _TYPES[3]], (251, "a\0b"))]),
    "rows": Target(_rows, [_row_seed()]),
    "records": Target(_records, [_commit_seed()]),
    "frames": Target(_frames),
    "arrow": Target(_arrow, [_arrow_seed()]),
    "otlp": Target(_otlp, [_span_seed(), b"\0", _point_seed(), b"\2"]),
    "promql": Target(
        _promql,
        [
            b'sum by (host) (rate(calls{host=~"a|b"}[10m] offset 5m)) / on (host) calls > bool 3',
            b"histogram_quantile(0.9, sum by (le) (increase(latency_bucket[15m])))",
            b"topk(1, clamp_max(calls, 3)) or vector(1) unless absent(calls)",
            b'max_over_time((calls * on () group_left (le) latency_bucket{le="0.5"})[9m:2m] @ end()) - calls @ 600',
            b'count_values by (x) ("n", label_replace(calls, "x", "$1-${2}$$", "host", "(a)?(.*)")) offset -1m',
            b'timestamp(calls offset -1m) atan2 on (x) group_right () label_join(calls, "x", "-", "host")',
            b"quantile_over_time(0.3, calls[20m]) != bool stddev_over_time((calls % 2)[20m:])",
        ],
    ),
    "expressions": Target(
        _expressions,
        [
            b"\0n * 2 > x & name.startswith('a') | ts.hour() < 6 | within_km(lat, lon, 48.9, 2.4, 5)",
            b"\1coalesce(n, 0) + case((ok == true, 1), otherwise=2)",
            b"\2argmax(name, by=n) where n > 3",
            b"\3A (B | C)+? D{2,3}",
            b'\4["and", ["==", "n", 5], ["isin", "name", ["a", "b"]]]',
        ],
    ),
    "sessions": Target(_sessions),
}
