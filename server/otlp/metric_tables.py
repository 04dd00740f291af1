"""The tables that points of metrics go to, and their aggregates of five minutes: made by the first point of their kind.

::

    metric_histograms   exponential histograms: an event for each bucket that has any values, with the value that is
                        given for the bucket and how many there were
    metric_buckets      explicit-bucket histograms: an event for each bound, with how many values were up to it
    metric_sums         sums of delta temporality
    metric_gauges       gauges, and sums that go up and down (which are of cumulative temporality)

    metric_histograms_5m   (namespace, service, metric, attributes, slot)      distribution, count, total, least, most,
                                                                               scale; mean, p50, p95, p99
    metric_buckets_5m      (namespace, service, metric, attributes, le, slot)  count, total
    metric_sums_5m         (namespace, service, metric, attributes, slot)      whole, real, points; total
    metric_gauges_5m       (namespace, service, metric, attributes, slot)      last, least, most, mean, points

``distribution`` has the buckets of ``kivi.quantiles`` within 1 % (scale 6; R20). A histogram of a larger scale is
scaled down, exactly. One of a smaller scale keeps its buckets: each becomes one value, the one within its accuracy of
all that the bucket holds. ``scale`` is the least scale of what a row holds, and so says how accurate its quantiles are:
from 6 on 0.6 %, and below it those of the scale and 0.6 % together: 5: 1.7 %, 4: 2.8 %, 3: 4.9 %, 2: 9.2 %.

``attributes`` are those of the point as JSON, by name: ``{"http.route":"/find"}``. ``le`` is as Prometheus has it, so
that ``histogram_quantile`` takes ``metric_buckets_5m_count`` as it is. ``whole`` adds whole numbers, exactly, and
``real`` others.
"""

from __future__ import annotations

from typing import Final

from kivi_server.otlp.tables import LLM_KIND, OUTGOING_KIND, Kind

from kivi.model import surface

__all__ = ["BUCKETS_KIND", "GAUGES_KIND", "HISTOGRAMS_KIND", "NAMED_KINDS", "SCALE", "SUMS_KIND"]

SCALE: Final = 6
"""Of the states: that of an accuracy of 1 %."""
_ACCURACY: Final = 0.01

_NAMED: Final = {
    "namespace": "string",  # service.namespace
    "service": "string",  # service.name
    "instance": "string",  # service.instance.id
    "scope": "string",  # of the instrumentation
    "metric": "string",
    "unit": "string",
    "attributes": "string",
}
_POINT: Final = {
    "ts": "timestamp",  # its time: the end of what it is about
    "point_id": "bytes",  # 16: a hash of all that makes it
    "part_id": "bytes",  # 8: which part of it
}
_GROUPS: Final = {"5m": ("namespace", "service", "metric", "attributes")}
_IDS: Final = ("point_id", "part_id")

HISTOGRAMS_KIND: Final = Kind(
    "metric_histograms",
    # total, least and most: of all of the point, in its first event; null in the others
    {**_NAMED, **_POINT, "value": "float64", "n": "int64", "scale": "int64",
     "total": "float64", "least": "float64", "most": "float64"},
    _GROUPS,
    {
        "distribution": surface.weighted_quantiles("value", by="n", accuracy=_ACCURACY),
        "count": surface.sum("n"),
        "total": surface.sum("total"),
        "least": surface.min("least"),
        "most": surface.max("most"),
        "scale": surface.min("scale"),
    },
    {},
    {
        "mean": "total / count",
        "p50": "quantile(distribution, 0.5)",
        "p95": "quantile(distribution, 0.95)",
        "p99": "quantile(distribution, 0.99)",
    },
    role="", ids=_IDS, item="point",
)  # fmt: skip
BUCKETS_KIND: Final = Kind(
    "metric_buckets",
    {**_NAMED, "le": "string", **_POINT, "n": "int64", "total": "float64"},  # total: where le is +Inf
    {"5m": (*_GROUPS["5m"], "le")},
    {"count": surface.sum("n"), "total": surface.sum("total")},
    {}, {}, role="", ids=_IDS, item="point",
)  # fmt: skip
SUMS_KIND: Final = Kind(
    "metric_sums",
    {**_NAMED, **_POINT, "whole": "int64", "real": "float64"},  # one of them is null
    _GROUPS,
    {"whole": surface.sum("whole"), "real": surface.sum("real"), "points": surface.count()},
    {}, {"total": "whole + real"}, role="", ids=_IDS, item="point",
)  # fmt: skip
GAUGES_KIND: Final = Kind(
    "metric_gauges",
    {**_NAMED, **_POINT, "value": "float64"},
    _GROUPS,
    {
        "last": surface.last("value"),
        "least": surface.min("value"),
        "most": surface.max("value"),
        "mean": surface.avg("value"),
        "points": surface.count(),
    },
    {}, {}, role="", ids=_IDS, item="point",
)  # fmt: skip
NAMED_KINDS: Final = (OUTGOING_KIND, LLM_KIND, HISTOGRAMS_KIND, BUCKETS_KIND, SUMS_KIND, GAUGES_KIND)
"""Those whose table always has the kind's name."""
