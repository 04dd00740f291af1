"""Which kind of state a column has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

from kivi.model.states import KINDS, OWN_ID_MIN, State
from kivi.states.distinct import DistinctKind
from kivi.states.kinds import Kind
from kivi.states.moments import moments_kind
from kivi.states.own import OwnKind
from kivi.states.quantiles import QuantilesKind, WeightedQuantilesKind
from kivi.states.top import TopKind
from kivi.states.winners import ExtremesKind, WinnerKind

__all__ = ["check_known", "kind_of"]

_MAKERS: Final[dict[str, Callable[[State], Kind]]] = {
    "quantiles": QuantilesKind,
    "weighted_quantiles": WeightedQuantilesKind,
    "distinct": DistinctKind,
    **dict.fromkeys(("avg", "var", "stddev"), moments_kind),
    **dict.fromkeys(("first", "last", "argmax", "argmin"), WinnerKind),
    **dict.fromkeys(("largest", "smallest"), ExtremesKind),
    "top": TopKind,
}


def check_known(states: Iterable[State]) -> None:
    """Raises FormatTooNew, which names it, for one of a kind that is not known here."""
    for state in states:
        kind_of(state)


@lru_cache(maxsize=4_096)
def kind_of(state: State) -> Kind:
    """The kind of a column's state. Raises FormatTooNew, which names it, for one that is not known here."""
    if state.id < OWN_ID_MIN and KINDS.get(state.kind) == state.id:
        return _MAKERS[state.kind](state)
    return OwnKind(state)
