"""The laws of measures (R20), tried on random events.

A state is bytes. With ``of`` that makes one of events, ``+`` that combines two, and ``of([]) = b""``::

    identity            of([]) + a == a == a + of([])
    commutative         a + b == b + a
    associative         (a + b) + c == a + (b + c)
    split-invariant     of(events) == of(some of them) + of(the rest), whatever their order, and beside other states
    canonical           encode(decode(a)) == a, and reducing what is reduced changes nothing
    a pure function     what is read of equal states is equal, alone as among others
    an inverse          of(events) + inverse(of(some of them)) == of(the rest), where the measure says that it has one

Sums of floats are added in commit order (R10): of those, only what holds in that order is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import arrow_type
from kivi.errors import InvalidArgument, KiviError
from kivi.model.measuring import TIMED, measured
from kivi.model.schema import Column, OperatorCall, TableSchema
from kivi.model.states import OWN, State
from kivi.model.surface import measure as registered
from kivi.model.types import INT64_MAX, INT64_MIN, ColumnType
from kivi.states.kinds import Items, Kind, Observed, joined, offsets_of
from kivi.states.registry import kind_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["check_measure"]

_COMMITS: Final = 3
_EVENTS_MAX: Final = 8


def check_measure(
    measure: OperatorCall | str,
    values: SearchStrategy[Any] | Sequence[Any] | None = None,
    *,
    type: str | None = None,  # the public name
    by: str = "int64",
    examples: int = 200,
) -> None:
    """Holds a measure to the laws, with ``examples`` random sets of events.

    ``measure``: one of a column, such as ``kivi.quantiles("x", 0.01)``, or the name of a registered one. ``values``
    of that column: a strategy of hypothesis, or a sequence to draw from; by default all that the type has. ``type``:
    the column's type, by default int64, or the first that a registered measure takes; ``by``: the type of what argmax
    and argmin compare.

    Raises AssertionError, which shows the smallest set of events that breaks a law; InvalidArgument or SchemaError for
    a measure that cannot be checked.
    """
    try:
        from hypothesis import Phase, given, settings
        from hypothesis import strategies as st
    except ImportError:
        raise InvalidArgument("kivi.testing needs the package hypothesis: pip install hypothesis") from None

    call = registered(measure, "value") if isinstance(measure, str) else measure
    column = _column(call, type, by)
    laws = _Laws(str(call), column.state)  # type: ignore[arg-type]
    seen = laws.state.value
    drawn = (
        _values(seen)
        if values is None
        else values
        if isinstance(values, st.SearchStrategy)
        else st.sampled_from(values)
    )
    compared = _values(laws.state.by) if laws.state.by is not None else st.none()
    event = st.tuples(drawn, compared, st.integers(0, 3), st.integers(1, _COMMITS))
    events = st.lists(event, max_size=_EVENTS_MAX)

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(events, st.integers(0, 1_000))
    def hold(listed: list[tuple[Any, ...]], seed: int) -> None:
        made = [
            _Event(
                seen.to_stored(value), None if laws.state.by is None else laws.state.by.to_stored(other), time, cts, i
            )
            for i, (value, other, time, cts) in enumerate(listed)
            if value is not None
        ]
        try:
            laws.check(sorted(made, key=lambda each: (each.cts, each.place)), Random(seed))
        except KiviError as error:
            raise AssertionError(f"{call}: of the events {_shown(made)}: {error.message}") from error

    hold()


class _Event(NamedTuple):
    """In stored form. ``cts`` and ``place``, its position in the commit, tell it from others."""

    value: Any
    by: Any
    time: int
    cts: int
    place: int


def _column(call: OperatorCall, type_: str | None, by: str) -> Column:
    if not isinstance(call, OperatorCall):
        raise InvalidArgument(f"check_measure takes a measure, like kivi.quantiles('x'), or a name, not {call!r}")
    if call.expression is not None or call.where is not None or call.argument is None:
        raise InvalidArgument(f"{call}: the laws are of a measure of a column, without an expression or where")
    own = OWN.get(call.operator)
    of = type_ or (own.takes[0] if own is not None else "int64")
    types = {call.argument: of if of != "decimal" else "decimal(9,2)"}
    types |= {dict(call.options)["by"]: by} if "by" in dict(call.options) else {}
    columns = [Column(name, ColumnType.parse(text)) for name, text in types.items()]
    source = TableSchema("events", "event", (), tuple(columns), event_time="event time")
    (column,), _ = measured(source, {"measure": call}, checked=False)
    if column.state is None:
        raise InvalidArgument(f"{call} is a number, which has no state: its laws are those of {call.operator}")
    return column


class _Laws:
    def __init__(self, name: str, state: State) -> None:
        self.name, self.state = name, state
        self.kind: Kind = kind_of.__wrapped__(state)  # not a kind from before it was registered again
        self._text = state.value.name in ("string", "bytes")

    # -- states -------------------------------------------------------------------------------------

    def items(self, events: Sequence[_Event]) -> Items:
        """One item for each event."""
        values: Any = [event.value for event in events]
        values = pa.array(values, arrow_type(self.state.value)) if self._text else _numbers(self.state.value, values)
        observed = Observed(values)
        if self.state.by is not None:
            observed = observed._replace(by=_numbers(self.state.by, [event.by for event in events]))
        if self.state.kind in TIMED:
            observed = observed._replace(
                times=np.array([event.time for event in events], np.int64),
                places=np.array([event.place for event in events], np.int64),
                stamps=np.array([event.cts for event in events], np.uint64),
            )
        return self.kind.of_events(observed)

    def together(self, groups: Sequence[Sequence[_Event]]) -> list[bytes]:
        """The state of each group, made at once."""
        items = joined([self.items(group) for group in groups])
        return self.kind.encode(*self.kind.reduce(items, offsets_of(np.array([len(group) for group in groups]))))

    def of(self, events: Sequence[_Event]) -> bytes:
        return self.together([events])[0]

    def plus(self, *states: bytes) -> bytes:
        """Combined, as states of commits that come one after the other. Of none but empty ones: empty."""
        filled = [(0, state) for state in states if state]
        return self.kind.combined(filled) if filled else b""

    def read(self, states: Sequence[bytes]) -> list[Any]:
        return [repr(value) for value in self.kind.values(states)]

    # -- laws ---------------------------------------------------------------------------------------

    def check(self, events: list[_Event], chance: Random) -> None:
        a, b, c = ([event for event in events if event.cts == cts] for cts in range(1, _COMMITS + 1))
        x, y, z = self.of(a), self.of(b), self.of(c)
        self._same("the state of no events is not empty", [], self.of([]), b"")
        for part, state in ((a, x), (b, y), (c, z)):
            self._same("a state changes when it is combined with an empty one", part, self.plus(b"", state, b""), state)
            self._same("a state changes when it is combined with an empty one", part, self.plus(state), state)
            self._canonical(part, state)
        self._same("states made at once are not those made one by one", events, self.together([a, b, c]), [x, y, z])
        alone = [value for state in (x, y, z) for value in self.read([state])]
        self._same("a value changes with the states beside it", events, self.read([x, y, z]), alone)
        self._same("(a + b) + c is not a + b + c", events, self.plus(self.plus(x, y), z), self.plus(x, y, z))
        if not self.kind.ordered:
            self._in_any_order(events, (x, y, z), chance)
        if self.kind.invertible:
            left = joined([self.items(events), self.kind.inverted(self.items(b))])
            without = self.kind.encode(*self.kind.reduce(left, np.array([0, len(events) + len(b)])))[0]
            self._same("what is taken away is not gone", events, without, self.of([*a, *c]))

    def _in_any_order(self, events: list[_Event], states: tuple[bytes, bytes, bytes], chance: Random) -> None:
        x, y, z = states
        whole = self.of(events)
        self._same("not commutative: a + b is not b + a", events, self.plus(x, y), self.plus(y, x))
        left, right = self.plus(self.plus(x, y), z), self.plus(x, self.plus(y, z))
        self._same("not associative: (a + b) + c is not a + (b + c)", events, left, right)
        self._same("not split-invariant: of all events is not a + b + c", events, whole, self.plus(x, y, z))
        shuffled = list(events)
        chance.shuffle(shuffled)
        cut = chance.randint(0, len(events))
        self._same("the order of events shows", events, self.of(shuffled), whole)
        parts = self.together([shuffled[:cut], shuffled[cut:]])
        self._same("not split-invariant", events, self.plus(*parts), whole)

    def _canonical(self, events: list[_Event], state: bytes) -> None:
        items, offsets = self.kind.decode([state])
        self._same("encode(decode(state)) is not the state", events, self.kind.encode(items, offsets), [state])
        again = self.kind.encode(*self.kind.reduce(items, offsets))
        self._same("a reduced state is reduced to another", events, again, [state])

    def _same(self, law: str, events: Sequence[_Event], found: Any, expected: Any) -> None:
        if found != expected:
            raise AssertionError(
                f"{self.name}: {law}: of the events {_shown(events)} they are {self._told(found)} and "
                f"{self._told(expected)}"
            )

    def _told(self, found: Any) -> str:
        try:
            return f"{self.read([found])[0]} ({found.hex()})" if isinstance(found, bytes) else repr(found)
        except Exception:  # a state that cannot be read is shown all the same
            return repr(found)


def _shown(events: Sequence[_Event]) -> str:
    listed = [f"{event.value!r} in commit {event.cts}" for event in events]
    return f"[{', '.join(listed)}]"


# -- values -----------------------------------------------------------------------------------------


def _numbers(type_: ColumnType, values: list[Any]) -> Any:
    dtype: Any = {"float64": np.float64, "bool": np.bool_}.get(type_.name, np.int64)
    return np.array(values, dtype)


def _values(type_: ColumnType | None) -> Any:
    """All that a column of the type may hold, as a caller gives it; small and equal values are frequent."""
    from hypothesis import strategies as st

    assert type_ is not None
    few = st.integers(-3, 3)
    of: dict[str, Callable[[], Any]] = {
        "bool": st.booleans,
        "int64": lambda: few | st.integers(INT64_MIN, INT64_MAX),
        "timestamp": lambda: few | st.integers(INT64_MIN, INT64_MAX),
        "float64": lambda: few.map(float) | st.floats(allow_nan=False, allow_infinity=False),
        "decimal": lambda: st.integers(type_.stored_min, type_.stored_max).map(lambda n: type_.from_stored(n)) | few,
        "string": lambda: st.text(st.characters(codec="utf-8"), max_size=3),
        "bytes": lambda: st.binary(max_size=3),
    }
    return of[type_.name]()
