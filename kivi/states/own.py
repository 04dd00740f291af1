"""Measures of one's own: a state of fixed width in NumPy, registered by a program under a permanent id.

    kivi.register_measure(
        "any_of", id=1001, state="<i8", init=lambda values: values, combine=lambda a, b: a | b,
        evaluate=lambda states: states, result="int64", takes=["int64"])

``init`` takes the values of some events (an array in stored form) and gives a state for each; ``combine`` takes two
arrays of states and gives an array of theirs, pair by pair; ``evaluate`` gives an array of results. All three take
arrays of any length. ``combine`` must be associative and commutative to the bit; an array of structured states that is
all zeros need not be neutral, as no state at all is. ``kivi.testing.check_measure`` holds a measure to these laws.

The server finds registrations through entry points of the group ``kivi.measures``: each names a callable without
arguments, which registers.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kivi.errors import FormatTooNew, InvalidArgument, Unavailable
from kivi.model.states import KINDS, OWN, OWN_ID_MIN, OwnSpec, State
from kivi.model.types import ColumnType
from kivi.states.kinds import Array, Items, Kind, Observed, check_lengths, offsets_of

__all__ = ["OwnKind", "OwnMeasure", "load_entry_points", "register_measure"]

_GROUP: Final = "kivi.measures"
_TAKES: Final = frozenset({"bool", "int64", "float64", "decimal", "timestamp", "string", "bytes"})
_registered: Final[dict[str, OwnMeasure]] = {}
_loaded = False


@dataclass(frozen=True, slots=True, eq=False)
class OwnMeasure:
    """A registration, checked."""

    name: str
    id: int
    dtype: np.dtype[Any]
    init: Callable[[Array], Array]
    combine: Callable[[Array, Array], Array]
    evaluate: Callable[[Array], Array]


def register_measure(
    name: str,
    *,
    id: int,  # the public name
    state: Any,
    init: Callable[[Array], Array],
    combine: Callable[[Array, Array], Array],
    evaluate: Callable[[Array], Array],
    result: str = "float64",
    takes: Sequence[str] = ("int64", "float64", "decimal", "timestamp"),
) -> None:
    """Registers a measure in this process: ``name`` and ``id`` (at least 1,000) are permanent, as they are written to
    disk. ``state``: a NumPy dtype of fixed width, as ``"<f8"`` or a list of fields; ``result``: the type of what is
    read; ``takes``: types of columns that it can observe. Raises InvalidArgument; again the same name and id replace.
    """
    if (
        not isinstance(name, str)
        or not name.isidentifier()
        or name in KINDS
        or name in ("sum", "min", "max", "count", "combine")
    ):
        raise InvalidArgument(f"a measure's name is an identifier that no measure of kivi has, not {name!r}")
    if isinstance(id, bool) or not isinstance(id, int) or not OWN_ID_MIN <= id < 2**31:
        raise InvalidArgument(f"measure {name!r}: id is permanent, and from {OWN_ID_MIN:,} to 2**31 - 1, not {id!r}")
    try:
        dtype = np.dtype(state)
    except TypeError:
        raise InvalidArgument(f"measure {name!r}: state {state!r} is no NumPy dtype") from None
    if dtype.hasobject or not 0 < dtype.itemsize <= 65_536:
        raise InvalidArgument(f"measure {name!r}: a state is of fixed width, 1 to 65,536 bytes, without objects")
    for what, function in (("init", init), ("combine", combine), ("evaluate", evaluate)):
        if not callable(function):
            raise InvalidArgument(f"measure {name!r}: {what} is a function over NumPy arrays, not {function!r}")
    if isinstance(takes, str) or not takes or not set(takes) <= _TAKES:
        raise InvalidArgument(f"measure {name!r}: takes is a list of {', '.join(sorted(_TAKES))}, not {takes!r}")
    type_ = ColumnType.parse(result)
    if type_.name in ("string", "bytes"):
        raise InvalidArgument(f"measure {name!r}: a result is a number, a bool or a timestamp, not {result}")
    for other in [*_registered.values()]:
        if (other.name == name) != (other.id == id):
            raise InvalidArgument(f"measure {name!r} with id {id}: {other.name!r} is registered with id {other.id}")
    _registered[name] = OwnMeasure(name, id, dtype, init, combine, evaluate)
    OWN[name] = OwnSpec(id, tuple(takes), type_)


def load_entry_points() -> None:
    """Registers what installed packages offer, once in a process. Raises Unavailable, which names the package."""
    global _loaded
    if _loaded:
        return
    for point in importlib.metadata.entry_points(group=_GROUP):
        try:
            point.load()()
        except Exception as error:
            raise Unavailable(f"the measure {point.name!r} ({point.value}) cannot be registered: {error}") from error
    _loaded = True


class OwnKind(Kind):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        measure = _registered.get(state.kind)
        if measure is None or measure.id != state.id:
            raise FormatTooNew(
                f"the store uses the measure {state.kind!r} with id {state.id}, which is not known here: install the "
                f"package that registers it (entry points of the group {_GROUP!r}) or use a version of kivi that has it"
            )
        self.measure = measure
        self.columns = (f"void{self.measure.dtype.itemsize}",)  # type: ignore[misc]

    def _states(self, made: Any, count: int, what: str) -> Array:
        states = np.asarray(made)
        if states.shape != (count,) or states.dtype != self.measure.dtype:
            raise InvalidArgument(
                f"measure {self.measure.name!r}: {what} of {count} gave an array of {states.dtype}{states.shape}, "
                f"not {count} of {self.measure.dtype}"
            )
        return np.ascontiguousarray(states)

    def _call(self, call: Callable[..., Any], what: str, *args: Array) -> Any:
        try:
            return call(*args)
        except Exception as error:
            raise InvalidArgument(f"measure {self.measure.name!r}: {what} failed: {error}") from error

    def of_events(self, seen: Observed) -> Items:
        states = self._states(self._call(self.measure.init, "init", seen.values), len(seen.values), "init")
        return (_as_bytes(states),)

    def refused(self, seen: Observed) -> Array:
        try:
            self.of_events(seen)
        except InvalidArgument:
            return np.array([i for i in range(len(seen.values)) if self._refuses(seen.values[i : i + 1])], np.int64)
        return super().refused(seen)

    def _refuses(self, value: Any) -> bool:
        try:
            self.of_events(Observed(value))
        except InvalidArgument:
            return True
        return False

    def reduce(self, items: Items, offsets: Array) -> tuple[Items, Array]:
        """Neighbours are combined in pairs until each state has one: as many calls as the longest has bits."""
        states, lengths = items[0].view(self.measure.dtype), np.diff(offsets)
        while len(lengths) and int(lengths.max()) > 1:
            begins = np.repeat(offsets[:-1], lengths)
            place = np.arange(len(states)) - begins
            left = np.flatnonzero((place % 2 == 0) & (place + 1 < np.repeat(lengths, lengths)))
            both = self._states(
                self._call(self.measure.combine, "combine", states[left], states[left + 1]), len(left), "combine"
            )
            states = states.copy()
            states[left] = both
            states = states[place % 2 == 0]
            lengths = (lengths + 1) // 2
            offsets = offsets_of(lengths)
        return (_as_bytes(states),), offsets

    def encode(self, items: Items, offsets: Array) -> list[bytes]:
        data, width = items[0].tobytes(), self.measure.dtype.itemsize
        bounds = (offsets * width).tolist()
        return [data[a:b] for a, b in itertools.pairwise(bounds)]

    def decode(self, states: Sequence[bytes]) -> tuple[Items, Array]:
        width = self.measure.dtype.itemsize
        lengths = np.fromiter(map(len, states), np.int64, len(states))
        check_lengths(self.state, lengths, width)
        return (np.frombuffer(b"".join(states), f"V{width}"),), offsets_of(lengths // width)

    def values(self, states: Sequence[bytes]) -> list[Any]:
        (items,), offsets = self.decode(states)
        made = np.asarray(self._call(self.measure.evaluate, "evaluate", items.view(self.measure.dtype)))
        if made.shape != (len(items),):
            raise InvalidArgument(f"measure {self.measure.name!r}: evaluate of {len(items)} gave {made.shape}")
        each = iter(made.tolist())
        return [next(each) if length else None for length in np.diff(offsets).tolist()]


def _as_bytes(states: Array) -> Array:
    return states.view(f"V{states.dtype.itemsize}")
