"""Prometheus' query API, for Grafana and whoever else asks it: ``/api/v1/...``, over aggregates.

================================ ==================================================================
``query``, ``query_range``       PromQL, a part of it (``kivi_server.http.promql``); the rest is 422
``series``, ``labels``,          what there is, of the series that ``match[]`` selects, or of all
``label/NAME/values``
``metadata``                     the type and the help of each metric
``status/buildinfo``             what Grafana asks first
``rules``, ``alerts``            none: what Grafana's list of alert rules asks of each source
================================ ==================================================================

Which series there are: ``kivi_server.http.prom_series``. Answers and errors have the form that Prometheus gives them.
Needs ``promql-parser``, of the extra ``kivi[http]``.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from kivi_server.auth import Grant
from kivi_server.http.prom_series import NAME, Counter, Labels, Reading, Series, Unanswerable, counters, selected
from kivi_server.http.promql import Evaluation, Selection, Value, matching_of, parsed, selections
from kivi_server.sessions import Sessions

from kivi.errors import InvalidArgument, KiviError, OutOfRange, PermissionDenied, ResourceExhausted, Unauthenticated
from kivi.model.given import shown
from kivi.model.predicate_text import parse_moment

__all__ = ["PATHS", "POINTS_MAX", "Parameters", "Prometheus", "failure"]

Parameters = Mapping[str, Sequence[str]]
PATHS: Final = ("query", "query_range", "series", "labels", "label/{name}/values", "metadata", "status/buildinfo",
               "rules", "alerts")  # fmt: skip
_STEPS_MAX: Final = 11_000
POINTS_MAX: Final = 2_000_000
_LABEL: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
_DAY_MS: Final = 86_400_000
_UNITS_MS: Final = {
    "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": _DAY_MS, "w": 7 * _DAY_MS, "y": 365 * _DAY_MS,
}  # fmt: skip


class Prometheus:
    """Each method answers the ``data`` of one path, in a thread. They raise what the question deserves."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions, self._store = sessions, sessions.store

    def answer(self, path: str, name: str, given: Parameters, grant: Grant) -> Any:
        """``path``: of ``PATHS``; ``name``: of a label."""
        asked = _Asked(given)
        match path:
            case "query":
                return self._instant(asked, grant)
            case "query_range":
                return self._range(asked, grant)
            case "series":
                if not asked.several("match[]"):
                    raise InvalidArgument("match[] is required: say which series")
                return asked.limited(self._series(asked, grant))
            case "labels":
                return asked.limited(sorted({label for each in self._series(asked, grant) for label in each}))
            case "label/{name}/values":
                if not _LABEL.match(name):
                    raise InvalidArgument(f"{shown(name)} is no name of a label")
                if name == NAME and not asked.several("match[]"):
                    return asked.limited(sorted({each.name for each in counters(self._store, grant.sees)}))
                return asked.limited(sorted({each[name] for each in self._series(asked, grant) if each.get(name)}))
            case "metadata":
                wanted, limit = asked.one("metric"), int(asked.number("limit", -1))
                described = dict[str, list[Any]]()
                for each in counters(self._store, grant.sees):
                    if wanted in ("", _family(each)):
                        described.setdefault(_family(each), []).append(_described(each))
                return dict(list(described.items())[: limit if limit >= 0 else None])
            case "rules":
                return {"groups": []}
            case "alerts":
                return {"alerts": []}
        # With "features" in it, even with none, Grafana takes it for Mimir's.
        return {"version": "2.42.0", "application": f"kivi {self._sessions.version}"}

    def decided_by(self, path: str, given: Parameters, grant: Grant) -> tuple[int, int] | None:
        """What an answer depends on beside what is asked: the newest change of the tables that it is about, or of what
        tables there are, and the last moment at which one of their slots ended, in microseconds. None where it is of
        the moment at which it is asked. Raises as ``answer`` does."""
        asked = _Asked(given)
        if path == "query" and not asked.one("time"):
            return None
        known, texts = counters(self._store, grant.sees), asked.several("match[]")
        if path in ("query", "query_range"):
            texts = [asked.required("query")]
        wanted = [matching for text in texts for matching in selections(parsed(text))]
        about = [each for matching in wanted for each in selected(known, matching)] if texts else known
        upto, now_us = self._store.watermark(), self._store.committer.now_us()
        changes = (self._store.last_change(each.table, upto) for each in about)
        changed = max([min(upto, self._store.changed_at), *changes])
        return changed, max((each.slot.start(now_us) for each in about), default=0)

    def _evaluated(self, asked: _Asked, times_ms: Any, end_ms: int, grant: Grant) -> Value:
        node = parsed(asked.required("query"))
        if asked.one("lookback_delta"):
            raise Unanswerable("lookback_delta is not supported here: samples are looked back for as long as a slot")
        lease = self._store.begin(tenant=grant.tenant)
        known = counters(self._store, grant.sees)
        now_us = self._store.committer.now_us()
        reading, cache = Reading(self._store, lease), dict[tuple[Any, ...], list[Series]]()

        def select(
            matching: Selection, since_ms: int, until_ms: int, bounding: Sequence[Selection]
        ) -> Sequence[Series]:
            asked = matching, since_ms, until_ms, bounding
            if (found := cache.get(asked)) is None:
                span_us = since_ms * 1_000, min(until_ms * 1_000, now_us)
                among = [(each, by) for by in bounding for each in selected(known, by)]
                every = [
                    reading.series(each, matching, span_us, among or [(each, matching)])
                    for each in selected(known, matching)
                ]
                found = cache[asked] = [each for each in every if len(each.ends_ms)]
            return found

        try:
            return Evaluation(times_ms, select, (int(times_ms[0]), end_ms)).value(node)
        except RecursionError:
            raise Unanswerable("the question is nested too deeply: ask for its parts") from None
        finally:
            self._store.release(lease)

    def _instant(self, asked: _Asked, grant: Grant) -> Any:
        time_ms = asked.moment_ms("time", time.time() * 1_000)
        value = self._evaluated(asked, np.array([time_ms], np.int64), time_ms, grant)
        if value.labels is None:
            return {"resultType": "scalar", "result": _point(time_ms, value.numbers[0, 0])}
        rows = [i for i in range(len(value.labels)) if value.there[i, 0]]
        result = [{"metric": value.labels[i], "value": _point(time_ms, value.numbers[i, 0])} for i in rows]
        return {"resultType": "vector", "result": result}

    def _range(self, asked: _Asked, grant: Grant) -> Any:
        start, end, step = asked.moment_ms("start"), asked.moment_ms("end"), asked.duration_ms("step")
        if end < start:
            raise InvalidArgument("end comes before start")
        if (end - start) // step > _STEPS_MAX:  # Grafana asks for so many, and the point at the start
            raise InvalidArgument(f"more than {_STEPS_MAX:,} steps of each series: give a larger step, or less time")
        times_ms = np.arange(start, end + 1, step, dtype=np.int64)
        value = self._evaluated(asked, times_ms, end, grant)
        if np.count_nonzero(value.there) > POINTS_MAX:
            raise Unanswerable(f"the answer has more than {POINTS_MAX:,} points: ask for fewer series or steps")
        result = []
        for labels, numbers, there in zip(
            [{}] if value.labels is None else value.labels, value.numbers, value.there, strict=True
        ):
            if there.any():
                points = [_point(int(times_ms[t]), numbers[t]) for t in np.flatnonzero(there)]
                result.append({"metric": labels, "values": points})
        return {"resultType": "matrix", "result": sorted(result, key=lambda each: sorted(each["metric"].items()))}

    def _series(self, asked: _Asked, grant: Grant) -> list[Labels]:
        """Of all slots that are kept: an aggregate has a series as long as it has a row."""
        for name in ("start", "end"):
            asked.moment_ms(name, 0)
        known = counters(self._store, grant.sees)
        texts = asked.several("match[]")
        selectors = [_selector(text) for text in texts] or [()]
        lease, found = self._store.begin(tenant=grant.tenant), dict[tuple[tuple[str, str], ...], Labels]()
        reading = Reading(self._store, lease)
        try:
            for matching in selectors:
                for counter in selected(known, matching):
                    for labels in reading.labelled(counter, matching):
                        found[tuple(sorted(labels.items()))] = labels
        finally:
            self._store.release(lease)
        return list(found.values())


def failure(error: KiviError) -> tuple[int, dict[str, str]]:
    """The status and the body of an answer that is an error."""
    if isinstance(error, Unanswerable):
        return 422, {"status": "error", "errorType": "execution", "error": error.message}
    if isinstance(error, (Unauthenticated, PermissionDenied)):
        status = 401 if isinstance(error, Unauthenticated) else 403
        return status, {"status": "error", "errorType": "unauthorized", "error": error.message}
    if isinstance(error, ResourceExhausted) and "retry_s" in error.details:  # a quota, and no limit of a question
        return 429, {"status": "error", "errorType": "unavailable", "error": error.message}
    if isinstance(error, (ResourceExhausted, OutOfRange)):
        return 422, {"status": "error", "errorType": "execution", "error": error.message}
    if isinstance(error, InvalidArgument):
        return 400, {"status": "error", "errorType": "bad_data", "error": error.message}
    return 503, {"status": "error", "errorType": "unavailable", "error": error.message}


class _Asked:
    """The parameters of a request. Raises InvalidArgument."""

    def __init__(self, given: Parameters) -> None:
        self._given = given

    def several(self, name: str) -> Sequence[str]:
        return self._given.get(name, ())

    def one(self, name: str) -> str:
        found = self._given.get(name, ())
        return found[0] if found else ""  # as Prometheus does

    def limited(self, found: list[Any]) -> list[Any]:
        """The first so many that ``limit`` says; all of them without one, and for 0."""
        text = self.one("limit")
        if text and not re.fullmatch(r"\d{1,15}", text):
            raise InvalidArgument(f"parameter limit is a whole number, 0 for no limit, not {shown(text)}")
        return found[: int(text or 0) or None]

    def required(self, name: str) -> str:
        if not (text := self.one(name)):
            raise InvalidArgument(f"parameter {name} is required")
        return text

    def number(self, name: str, otherwise: float) -> float:
        text = self.one(name)
        try:
            number = _float(text) if text else otherwise
        except ValueError:
            number = math.nan
        if not abs(number) < 1e15:
            raise InvalidArgument(f"parameter {name} is a number, not {shown(text)}")
        return number

    def moment_ms(self, name: str, otherwise_ms: float | None = None) -> int:
        text = self.one(name) if otherwise_ms is not None else self.required(name)
        if not text:
            return int(otherwise_ms or 0)
        try:
            number = _float(text) * 1_000
        except ValueError:
            number = (parse_moment(text, f"parameter {name}") - _EPOCH) / dt.timedelta(milliseconds=1)
        if not abs(number) < 1e14:
            raise InvalidArgument(f"parameter {name} is a moment, not {shown(text)}")
        return round(number)

    def duration_ms(self, name: str) -> int:
        text = self.required(name)
        try:
            number = _float(text) * 1_000
        except ValueError:
            parts = re.fullmatch(r"(\d+(?:ms|s|m|h|d|w|y))+", text) and re.findall(r"(\d+)(ms|s|m|h|d|w|y)", text)
            number = float(sum(int(count[:12]) * _UNITS_MS[unit] for count, unit in parts or ()))
        if not 1 <= number < 1e14:
            raise InvalidArgument(f"parameter {name} is a time span, such as 60 or 1m, not {shown(text)}")
        return round(number)


def _float(text: str) -> float:
    """Raises ValueError, also for what only Python takes for a number."""
    if "_" in text or text != text.strip():
        raise ValueError
    return float(text)


_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _selector(text: str) -> Selection:
    node = parsed(text)
    if type(node).__name__ != "VectorSelector" or node.offset is not None or node.at is not None:
        raise InvalidArgument(f"match[] selects series, like calls_5m_n{{endpoint='1'}}, and is {shown(text)}")
    return matching_of(node)


def _family(counter: Counter) -> str:
    return counter.name.removesuffix("_bucket") if counter.is_histogram else counter.name


def _described(counter: Counter) -> dict[str, str]:
    kind = "histogram" if counter.is_histogram else "counter"
    return {"type": kind, "help": f"{counter.measure} of {counter.table.name}, summed up by slots.", "unit": ""}


def _point(time_ms: int, number: float) -> list[Any]:
    return [time_ms / 1_000, _number(float(number))]


def _number(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return str(int(number)) if number == int(number) and abs(number) < 1e21 else repr(number)
