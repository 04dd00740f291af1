"""Points of metrics as the events of ``kivi_server.otlp.metric_tables``: export requests as columns.

A point is of delta temporality, or of a gauge: what it says is added to what others said, in any order. A cumulative
point says again what those before it did, so adding it would count twice, and what lies between it and the one before
is known only to who has that one, since it began. Cumulative sums and histograms are therefore refused, and the answer
says what to set; but for sums that go up and down, which exporters send as cumulative whatever is set: they are values
at a moment, and go where gauges go.

**The identity of a point** is a hash of all that it says, but exemplars: resource, scope, name, unit, attributes (in
any order), times and values. Each event of it has that, and its number among them. So an export that is repeated,
regrouped or sent both as JSON and protobuf is found again by the same window as spans are (``kivi_server.otlp``); a
point that says something else of the same time, as two processes without a ``service.instance.id`` may send, is another
one and counts. All events of a point are in one commit, have one time, and so are stored, late or repeated together.

What cannot be used is refused alone, and told: no time, or such as no point has (``TIME_MIN_NS``, ``AHEAD_NS``), a
value that is not finite, buckets that do not add up to the count, more than 2**40 values in one bucket, scales below
-4, values beyond float64, names that are too long, a temporality that OTLP has not, summaries. A point that says that
nothing was recorded is passed over.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from kivi_server.otlp.metric_tables import BUCKETS_KIND, GAUGES_KIND, HISTOGRAMS_KIND, SCALE, SUMS_KIND
from kivi_server.otlp.spans import (
    AHEAD,
    AHEAD_NS,
    NAME_BYTES_MAX,
    TIME_MAX_NS,
    TIME_MIN_NS,
    TIMELESS,
    Spans,
)
from kivi_server.otlp.tables import Kind
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, DataPointFlags

from kivi.errors import InvalidArgument
from kivi.model.quantiles import bias_of, values_of

__all__ = ["Points", "decode_points", "points_of"]

_NOTHING: Final = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
_TEMPORALITIES: Final = frozenset(AggregationTemporality.values())
_DELTA: Final = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA
_SCALE_MIN: Final = -4
_COUNT_MAX: Final = 2**40
_EVENT_BYTES: Final = 120  # of an event, beside its names
_CUMULATIVE: Final = (
    "it is cumulative: set OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=delta, or put the processor "
    "cumulativetodelta into the collector"
)
_LONG: Final = f"a name, unit or attributes of more than {NAME_BYTES_MAX:,} bytes"


class Points(Spans):
    """The points of one request that go to one table: several events of each, where it has several parts."""

    __slots__ = ()

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)

    @property
    def items(self) -> int:
        return self.columns["part_id"].count(_FIRST)

    def are_items(self) -> npt.NDArray[np.bool_]:
        return np.array([part == _FIRST for part in self.columns["part_id"]], bool)


_FIRST: Final = bytes(8)


def decode_points(data: bytes) -> list[Points]:
    """An ``ExportMetricsServiceRequest``. Raises InvalidArgument if it is none."""
    try:
        request = ExportMetricsServiceRequest.FromString(data)
    except DecodeError:
        raise InvalidArgument("this is no ExportMetricsServiceRequest of OTLP") from None
    return points_of(request)


class _Fault(Exception):
    """Why a point cannot be used."""


def points_of(request: ExportMetricsServiceRequest) -> list[Points]:
    latest = time.time_ns() + AHEAD_NS
    histograms, buckets, sums, gauges = map(Points, (HISTOGRAMS_KIND, BUCKETS_KIND, SUMS_KIND, GAUGES_KIND))
    for resource_metrics in request.resource_metrics:
        said = {each.key: each.value.string_value for each in resource_metrics.resource.attributes}
        place = (said.get("service.namespace", ""), said.get("service.name") or "unknown_service",
                 said.get("service.instance.id", ""))  # fmt: skip
        resource = _plain(resource_metrics.resource.attributes)
        for scope_metrics in resource_metrics.scope_metrics:
            scope = scope_metrics.scope
            origin = f"{resource}\0{scope.name}\0{scope.version}\0{_plain(scope.attributes)}"
            for metric in scope_metrics.metrics:
                named = (*place, scope.name, metric.name, metric.unit)
                of = metric.WhichOneof("data")
                points = getattr(metric, of).data_points if of else ()
                temporality = _DELTA
                if of in ("sum", "histogram", "exponential_histogram"):
                    temporality = getattr(metric, of).aggregation_temporality
                cumulative, unknown = temporality != _DELTA, temporality not in _TEMPORALITIES
                if of == "exponential_histogram":
                    to, make = histograms, _exponential
                elif of == "histogram":
                    to, make = buckets, _explicit
                elif of == "sum" and not (cumulative and not metric.sum.is_monotonic):
                    to, make = sums, _sum
                else:
                    to, make, cumulative = gauges, _gauge, False
                for point in points:
                    try:
                        if of == "summary":
                            raise _Fault("it is a summary, whose quantiles cannot be combined: send a histogram")
                        if point.flags & _NOTHING:
                            to.passed_over += 1
                            continue
                        if unknown:
                            raise _Fault("its temporality is none that OTLP has, which are the numbers 0 to 2")
                        if cumulative:
                            raise _Fault(_CUMULATIVE)
                        series = f"{origin}\0{metric.name}\0{metric.unit}\0{of}"
                        _put(to, named, series, point, make(point), latest)
                    except _Fault as fault:
                        to.rejected[str(fault)] += 1
    return [histograms, buckets, sums, gauges]


def _put(
    to: Points, named: Sequence[str], origin: str, point: Any, parts: Iterable[dict[str, Any]], latest: int
) -> None:
    """``latest``: after which no point is."""
    attributes = _plain(point.attributes)
    names = (*named, attributes)
    lengths = [len(name.encode()) for name in names]
    if max(lengths) > NAME_BYTES_MAX:
        raise _Fault(f"it has {_LONG}")
    if not point.time_unix_nano:
        raise _Fault("it has no time")
    if not TIME_MIN_NS <= point.time_unix_nano <= TIME_MAX_NS:
        raise _Fault(f"its time is {TIMELESS}")
    if point.time_unix_nano > latest:
        raise _Fault(AHEAD)
    bare = type(point)()
    bare.CopyFrom(point)
    bare.ClearField("attributes")
    bare.ClearField("exemplars")
    hashed = blake2b(f"{origin}\0{attributes}\0".encode(), digest_size=16)
    hashed.update(bare.SerializeToString(deterministic=True))
    fixed = {**dict(zip(_NAMES, names, strict=True)), "ts": point.time_unix_nano // 1_000, "point_id": hashed.digest()}
    for number, part in enumerate(parts):
        event = {**fixed, "part_id": number.to_bytes(8, "big"), **part}
        for name, column in to.columns.items():
            column.append(event.get(name))
        to.nbytes += _EVENT_BYTES + sum(lengths)


_NAMES: Final = ("namespace", "service", "instance", "scope", "metric", "unit", "attributes")


def _exponential(point: Any) -> Iterator[dict[str, Any]]:
    """Its buckets, the most negative first."""
    values, counts = [], []
    for buckets, sign in ((point.negative, -1), (point.positive, 1)):
        found = np.array(buckets.bucket_counts, np.uint64)
        has = np.flatnonzero(found)
        if len(has) and int(found.max()) > _COUNT_MAX:
            raise _Fault(f"a bucket of it has more than {_COUNT_MAX:,} values")
        # kivi's bucket i ends at g**i, where OpenTelemetry's begins
        given, of = _values(has + (buckets.offset + 1), point.scale)
        summed = np.zeros(len(given), np.int64)
        np.add.at(summed, of, found[has].astype(np.int64))
        order = slice(None, None, sign)
        values += (sign * given)[order].tolist()
        counts += summed[order].tolist()
        if sign == -1 and point.zero_count:
            values.append(0.0)
            counts.append(point.zero_count)
    if sum(counts) != point.count or point.zero_count > _COUNT_MAX:
        raise _Fault("its buckets do not add up to its count")
    first = {name: _optional(point, field) for name, field in (("total", "sum"), ("least", "min"), ("most", "max"))}
    if not counts:
        values, counts = [0.0], [0]
    rows = [{"value": value, "n": n, "scale": point.scale} for value, n in zip(values, counts, strict=True)]
    rows[0] |= first
    return iter(rows)


def _values(buckets: npt.NDArray[np.int64], scale: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """What is given for the values in buckets of a scale, ascending, and which of that each bucket has.

    Of a scale beyond ours several have one: they are scaled down (R20). Raises _Fault.
    """
    if scale < _SCALE_MIN:
        raise _Fault(f"its scale is {scale}, below {_SCALE_MIN}: its buckets are too wide to say anything")
    if scale > SCALE:
        buckets = -(-buckets >> min(scale - SCALE, 62))
        scale = SCALE
    codes, of = np.unique(buckets + (bias_of(scale) + 1), return_inverse=True)
    if len(codes) and (codes[0] < 1 or codes[-1] > (bias_of(scale) + 1) + (1024 << max(scale, 0) >> max(-scale, 0))):
        raise _Fault("a bucket of it is of values that no float64 is")
    return values_of(codes, scale), of


def _explicit(point: Any) -> Iterator[dict[str, Any]]:
    """How many values are up to each bound, as Prometheus has it."""
    bounds, counts = list(point.explicit_bounds), list(point.bucket_counts) or [point.count]
    if len(counts) != len(bounds) + 1 or sum(counts) != point.count or point.count > _COUNT_MAX:
        raise _Fault("its buckets do not add up to its count")
    if not all(map(math.isfinite, bounds)) or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise _Fault("its bounds are not finite numbers that ascend")
    below, rows = 0, list[dict[str, Any]]()
    for le, count in zip([*map(repr, bounds), "+Inf"], counts, strict=True):
        below += count
        rows.append({"le": le, "n": below})
    rows[-1]["total"] = _optional(point, "sum")
    return iter(rows)


def _sum(point: Any) -> Iterator[dict[str, Any]]:
    whole = point.WhichOneof("value") == "as_int"
    return iter([{"whole": point.as_int} if whole else {"real": _number(point)}])


def _gauge(point: Any) -> Iterator[dict[str, Any]]:
    return iter([{"value": _number(point)}])


def _number(point: Any) -> float:
    if (of := point.WhichOneof("value")) is None:
        raise _Fault("it has no value")
    return _finite(float(getattr(point, of)))


def _optional(point: Any, field: str) -> float | None:
    return _finite(getattr(point, field)) if point.HasField(field) else None


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise _Fault("a value of it is not finite")
    return value


def _plain(attributes: Iterable[Any]) -> str:
    """As JSON by name; of a name that comes twice the last."""
    found = {each.key: _value(each.value) for each in attributes}
    return json.dumps(found, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _value(value: Any) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_value(each) for each in value.array_value.values]
        case "kvlist_value":
            return {each.key: _value(each.value) for each in value.kvlist_value.values}
        case "bytes_value":
            return value.bytes_value.hex()
        case "double_value" if not math.isfinite(value.double_value):
            return repr(value.double_value)
        case name:
            return getattr(value, name)
