"""Plans: by what each part of the time is answered, the coarsest aggregate that says the same, or the events.

::

    asked        10:02                    12:00                  13:30
    app_1h                 [11:00         12:00        13:00)
    app_5m          [10:05        11:00)               [13:00    13:30)
    events       [10:02 10:05)

An aggregate takes the whole slots within what is left, and others what remains on either side. Slots below its floor,
or from before it is complete, are not whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kivi.delta.combine import commutes
from kivi.model.expressions import Expr, names
from kivi.model.questions import SESSION, Question, asked_of
from kivi.model.rollups import stored_slot
from kivi.model.schema import TableSchema
from kivi.model.slots import Slot

__all__ = ["Candidate", "Part", "Times", "planned"]

Times = tuple[int | None, int | None]
"""From which event time on, and before which, in microseconds; None is no bound."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An aggregate that a snapshot sees. ``complete_us``: from which event time on it has all events; None: always."""

    schema: TableSchema
    complete_us: int | None


class Part(NamedTuple):
    """A part of the time, answered by rows of an aggregate, ``keys`` and ``cells`` of them (``asked_of``), or, where
    there is none, by events."""

    times: Times
    aggregate: TableSchema | None = None
    keys: Sequence[tuple[int, Slot | None]] = ()
    cells: Sequence[int] = ()


class _Server(NamedTuple):
    part: Part
    slot: Slot | None
    complete_us: int | None


def planned(question: Question, where: Expr | None, times: Times, candidates: Iterable[Candidate]) -> list[Part]:
    """The parts, in the order of time. ``times``: of the events that are asked for and not below a floor."""
    servers = [found for each in candidates if (found := _server(question, where, each)) is not None]
    servers.sort(key=lambda server: (_keys(server), -_length(server)))
    return _parts(times, servers)


def _keys(server: _Server) -> int:
    assert server.part.aggregate is not None
    return len(server.part.aggregate.key)


def _length(server: _Server) -> int:
    return server.slot.nominal_us if server.slot is not None else 2**62


def _parts(times: Times, servers: Sequence[_Server]) -> list[Part]:
    if None not in times and times[0] >= times[1]:  # type: ignore[operator]
        return []
    for i, server in enumerate(servers):
        inside = _whole_slots(server, times)
        if inside is not None:
            low, high = inside
            rest = servers[i + 1 :]
            before = [] if low is None or low == times[0] else _parts((times[0], low), rest)
            after = [] if high is None or high == times[1] else _parts((high, times[1]), rest)
            return [*before, server.part._replace(times=inside), *after]
    return [Part(times)]


def _whole_slots(server: _Server, times: Times) -> Times | None:
    """Of some time the whole slots for which an aggregate has all events; None: there are none."""
    low, high = times
    if server.complete_us is not None:
        low = server.complete_us if low is None else max(low, server.complete_us)
    if server.slot is None:
        return times if (low, high) == (None, None) else None
    try:
        if low is not None and (start := server.slot.start(low)) != low:
            low = server.slot.end(start)
        high = None if high is None else server.slot.start(high)
    except OverflowError:
        return None
    return None if low is not None and high is not None and low >= high else (low, high)


def _server(question: Question, where: Expr | None, candidate: Candidate) -> _Server | None:
    """How an aggregate answers; None: it has not what is asked for, or not the same."""
    schema, target = candidate.schema, question.target
    if question.computed or any(group.source == SESSION for group in target.group_by):
        return None
    if not all(map(commutes, target.columns)):
        return None
    if where is not None and not names(where) <= {group.source for group in schema.group_by if group.slot is None}:
        return None
    since = {i: schema.measures_since[name] for name, i in schema.index_of.items()}
    usable = [i for i, begun in since.items() if begun is None or "event_time_us" in begun]
    asked = asked_of(schema, target, usable)
    if asked is None:
        return None
    begins = [begun["event_time_us"] for i in asked[1] if (begun := since[i]) is not None]
    complete_us = max([*begins, *([] if candidate.complete_us is None else [candidate.complete_us])], default=None)
    stored = stored_slot(schema)
    slot = None if stored is None or stored[1].source != target.event_time else stored[2]
    return _Server(Part((None, None), schema, *asked), slot, complete_us)
