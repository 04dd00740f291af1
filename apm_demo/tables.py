"""The demonstration's tables: what is declared once, and read by the jobs, the console and the proof.

::

    invocations      event table: every call of the web service, as measured
      customer_5s    customer_5m    customer_1h       (customer, slot)
      application_5s ...                              (customer, application, slot)
      server_5s      ...                              (customer, application, server, slot)
      endpoint_5s    endpoint_5m    endpoint_1h       (customer, application, server, endpoint_id, slot)
    anomalies        event table: the invocations that a rule has found slow, with what they were measured against
      anomalies_per_endpoint                          (customer, application, server, endpoint_id, slot of 5 s)
    endpoints        row table: which server, application and customer an endpoint belongs to, and what it is called
    batches          row table: which files each micro-batch of the live job held; written by that batch
    llm_requests     event table: the real trace
      llm_5m         llm_1h                           (service, slot)

The first four have percentiles and Apdex of their response times, the share of calls that failed, and the trace id of
the slowest; the real trace has percentiles of its tokens, the same share, and the trace id of the longest answer.
Aggregates follow in the commit that appends to their source: at every snapshot all levels and widths agree.

Measures have the names that the console knows, and ``ROLES`` says which tables it shows as what: it goes down from
customers to an endpoint, which it calls by its name in ``endpoints``.
"""

from __future__ import annotations

import datetime as dt
from typing import Any, Final

import kivi

__all__ = [
    "ACCURACY",
    "APDEX_US",
    "FACTOR",
    "FAILED",
    "HISTORY",
    "LEVELS",
    "LLM_WIDTHS",
    "ROLES",
    "WIDTHS",
    "aggregate",
    "create",
    "create_rules",
    "described",
    "micros",
    "moment",
    "percentiles",
]

# Width of a slot -> microseconds. Five minutes and an hour are what an operator looks at; the short slot exists
# because this demonstration lasts less than a minute, and both its charts and its rule need slots that pass.
WIDTHS: Final = {"5s": 5_000_000, "5m": 300_000_000, "1h": 3_600_000_000}
LLM_WIDTHS: Final = {"5m": 300_000_000, "1h": 3_600_000_000}

# How far back the console can show these tables as they were. Events keep their own history.
HISTORY: Final = "1h"

# Level -> the columns that name one thing of that level.
LEVELS: Final = {
    "customer": ("customer",),
    "application": ("customer", "application"),
    "server": ("customer", "application", "server"),
    "endpoint": ("customer", "application", "server", "endpoint_id"),
}
# Percentiles are within it, relative to the value; so is the bound that Apdex counts below.
ACCURACY: Final = 0.01
# Who waits less is satisfied, and who waits less than four times as long tolerates it: this service answers quickly.
APDEX_US: Final = 10_000
# Slower than so many times its endpoint's average of the previous slot: that is an anomaly.
FACTOR: Final = 2
# An answer with this status or a higher one is an error: the service has failed, not its caller.
FAILED: Final = 500
_PERCENTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
# What the console shows as what. The demonstration is short, so its slots are.
ROLES: Final = {
    "server_5s": "services",
    "endpoint_5s": "endpoints",
    "endpoints": "names",
    "anomalies_per_endpoint": "anomalies",
    "llm_5m": "models",
    "invocations": "traces",
    "llm_requests": "traces",
}

_INVOCATION: Final = {
    "customer": "string",
    "application": "string",
    "server": "string",
    "endpoint_id": "int64",
    "ts": "timestamp",
    "duration_us": "int64",
    "status": "int64",
    "trace_id": "string",
}


def aggregate(level: str, width: str) -> str:
    """The table of a level at a width."""
    return f"{level}_{width}"


def percentiles(measure: str, named: str) -> dict[str, str]:
    """Derived columns: p50, p95 and p99 of a quantiles measure, ``named`` as ``{}_us``, for example."""
    return {named.format(name): f"quantile({measure}, {q})" for name, q in _PERCENTILES.items()}


def described(endpoint: Any) -> dict[str, str]:
    """An ``apm_demo.endpoints.Endpoint`` as the columns of its row in ``endpoints``."""
    return {name: getattr(endpoint, name) for name in ("customer", "application", "server", "name")}


def create(db: Any) -> list[str]:
    """Creates all tables on ``db`` (of ``kivi.open`` or ``kivi.connect``); their names."""
    db.create_event_table("invocations", event_time="ts", columns=_INVOCATION)
    for level, columns in LEVELS.items():
        for width in WIDTHS:
            db.create_aggregate(
                aggregate(level, width),
                source="invocations",
                group_by=[*columns, kivi.time_slot("ts", width, name="slot")],
                measures={
                    "sum_resp_time": kivi.sum("duration_us"),
                    "calls": kivi.count(),
                    "slowest_us": kivi.max("duration_us"),
                    "latency": kivi.quantiles("duration_us", accuracy=ACCURACY),
                    "errors": kivi.count(where=kivi.col("status") >= FAILED),
                    "slowest_trace_id": kivi.argmax("trace_id", by="duration_us"),
                },
                derived={
                    "avg_resp_time": "sum_resp_time / calls",
                    "error_rate": "errors / calls",
                    **percentiles("latency", "{}_us"),
                    "apdex": f"(fraction_below(latency, {APDEX_US}) + fraction_below(latency, {4 * APDEX_US})) / 2",
                },
                history=HISTORY,
            )
    db.create_event_table(
        "anomalies",
        event_time="ts",
        columns={**_INVOCATION, "previous_sum_us": "int64", "previous_count": "int64"},
    )
    db.create_aggregate(
        "anomalies_per_endpoint",
        source="anomalies",
        group_by=[*LEVELS["endpoint"], kivi.time_slot("ts", "5s", name="slot")],
        measures={"anomalies": kivi.count(), "slowest_us": kivi.max("duration_us")},
        history=HISTORY,
    )
    db.create_table(
        "endpoints",
        key={"endpoint_id": "int64"},
        columns={"customer": "string", "application": "string", "server": "string", "name": "string"},
        history=HISTORY,
    )
    db.create_table(
        "batches",
        key={"batch_id": "int64"},
        columns={"files": "string", "events": "int64"},
        history=HISTORY,
    )
    db.create_event_table(
        "llm_requests",
        event_time="ts",
        columns={
            "service": "string",
            "ts": "timestamp",
            "context_tokens": "int64",
            "generated_tokens": "int64",
            "status": "int64",
            "trace_id": "string",
        },
    )
    for width in LLM_WIDTHS:
        db.create_aggregate(
            aggregate("llm", width),
            source="llm_requests",
            group_by=["service", kivi.time_slot("ts", width, name="slot")],
            measures={
                "requests": kivi.count(),
                "context_tokens": kivi.sum("context_tokens"),
                "generated_tokens": kivi.sum("generated_tokens"),
                "context_tokens_max": kivi.max("context_tokens"),
                "generated_tokens_max": kivi.max("generated_tokens"),
                "context": kivi.quantiles("context_tokens", accuracy=ACCURACY),
                "generated": kivi.quantiles("generated_tokens", accuracy=ACCURACY),
                "errors": kivi.count(where=kivi.col("status") >= FAILED),
                "longest_trace_id": kivi.argmax("trace_id", by="generated_tokens"),
            },
            derived={
                "avg_context_tokens": "context_tokens / requests",
                "avg_generated_tokens": "generated_tokens / requests",
                "error_rate": "errors / requests",
                **percentiles("context", "context_{}"),
                **percentiles("generated", "generated_{}"),
            },
            history=HISTORY,
        )
    for name, role in ROLES.items():
        db.alter_table(name, role=role)
    names: list[str] = db.tables()
    return names


def create_rules(db: Any, width: str = "5s") -> None:
    """The rule that raises anomalies, whoever appends invocations: its slots are those of a key of ``WIDTHS``. And an
    alert for an endpoint that fails.

    An invocation is an anomaly if it was slower than twice the average of its endpoint in the previous slot, which the
    commit's own events count in. With slots of five minutes, one at 17:55:03 is measured against [17:50, 17:55): if
    endpoint 251 took 10 and 20 ms then, its average is 15 ms, and 121 ms is an anomaly, as everything above 30 ms is.
    An endpoint that was not called then has no average, and nothing is an anomaly. All numbers are whole, so none is
    rounded: ``time * count > 2 * sum``.
    """
    db.create_rule(
        "slow",
        source="invocations",
        against=kivi.previous_slot(aggregate("endpoint", width), by=LEVELS["endpoint"]),
        where=kivi.col("duration_us") * kivi.ref("calls") > FACTOR * kivi.ref("sum_resp_time"),
        into="anomalies",
        select={"previous_sum_us": kivi.ref("sum_resp_time"), "previous_count": kivi.ref("calls")},
        own_events=True,
    )
    db.create_alert("failing", on=aggregate("endpoint", width), where=kivi.col("errors") * 10 > kivi.col("calls"))


def moment(us: int) -> dt.datetime:
    """Microseconds since the epoch as an aware datetime, exactly."""
    return dt.datetime.fromtimestamp(0, dt.UTC) + dt.timedelta(microseconds=us)


def micros(value: dt.datetime) -> int:
    """An aware datetime as microseconds since the epoch, exactly."""
    return (value - dt.datetime.fromtimestamp(0, dt.UTC)) // dt.timedelta(microseconds=1)
