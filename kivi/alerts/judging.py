"""What an evaluation makes of an instance: a pure function, which is the definition of an alert (see the room)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from kivi.model.alerts import FIRING, PENDING, RESOLVED
from kivi.model.event_clock import Clock
from kivi.model.slots import Slot

__all__ = ["RESOLVED_KEPT_US", "Clock", "Instance", "Span", "Told", "judged"]

RESOLVED_KEPT_US: Final = 24 * 3600 * 1_000_000
"""So long, of event time, an instance that is over can be seen."""


class Span(NamedTuple):
    """What one evaluation judges: the slots that begin in [``first``, ``over``), all of which are over at ``time_us``.

    The first of them was the newest one at the evaluation before.
    """

    slot: Slot
    first: int
    over: int
    time_us: int


@dataclass(frozen=True, slots=True)
class Instance:
    """Of one key. ``since_us``: when it came to be in its state; ``holds_us``: since when the condition holds, as long
    as it does. Both are event time; ``value`` is of the newest slot for which it held, as text; ``told``: whether
    somebody was told that it fires, and not yet that it does not."""

    state: str
    since_us: int
    holds_us: int | None
    value: str
    changed_us: int
    told: bool = False


class Told(NamedTuple):
    """A notification: that it fires since ``starts_us``, or has fired until ``ends_us``."""

    starts_us: int
    ends_us: int | None
    value: str


def judged(
    before: Instance | None,
    held: Iterable[tuple[int, str]],
    span: Span,
    *,
    for_us: int,
    now_us: int,
    silenced: bool,
) -> tuple[Instance | None, list[Told]]:
    """The instance after an evaluation, and who is to be told what. ``held``: the beginnings of the slots of the span
    for which the condition holds, in order, each with its row's value."""
    active = before is not None and before.holds_us is not None
    holds = before.holds_us if before is not None else None
    firing = active and before is not None and before.state == FIRING
    value, at = (before.value if before is not None else ""), span.first
    over: Told | None = None

    def ended() -> Told | None:
        """The condition does not hold for the slot at ``at``, which is over where the next one begins."""
        assert holds is not None
        end = span.slot.end(at)
        fires = before.since_us if firing and before is not None else holds + for_us
        return Told(fires, max(end, fires), value) if firing or fires < end else None

    for start, its_value in held:
        if holds is not None and start != at:
            over, holds, firing = ended() or over, None, False
        at, value = span.slot.end(start), its_value
        if holds is None:
            holds = at
    if holds is not None and at != span.over:
        over, holds, firing = ended() or over, None, False

    after = _state(before, over, holds, value, firing, span, for_us, now_us)
    return _told(before, after, over, silenced)


def _state(
    before: Instance | None,
    over: Told | None,
    holds: int | None,
    value: str,
    firing: bool,
    span: Span,
    for_us: int,
    now_us: int,
) -> Instance | None:
    if holds is not None:
        fires = firing or holds + for_us <= span.time_us
        if before is not None and before.holds_us == holds and (before.state == FIRING) == fires:
            return before
        since = holds + for_us if fires else holds
        return Instance(FIRING if fires else PENDING, since, holds, value, now_us)
    if over is not None:
        assert over.ends_us is not None
        return Instance(RESOLVED, over.ends_us, None, over.value, now_us)
    if before is not None and before.state == RESOLVED and span.time_us - before.since_us < RESOLVED_KEPT_US:
        return before
    return None


def _told(
    before: Instance | None, after: Instance | None, over: Told | None, silenced: bool
) -> tuple[Instance | None, list[Told]]:
    """Whoever was told that it fires is told that it does not, silenced or not. Of what fires, or has fired and ended
    since the evaluation before, somebody is told unless it is silenced."""
    told: list[Told] = []
    fired = before is not None and before.state == FIRING
    if over is not None and (before.told if before is not None and fired else not silenced):
        told.append(over)
    was_told = before is not None and before.told and over is None
    if after is not None and after.state == FIRING and not was_told and not silenced:
        told.append(Told(after.since_us, None, after.value))
        was_told = True
    if after is None:
        return None, told
    was_told = was_told and after.state == FIRING
    return (after if after.told == was_told else replace(after, told=was_told)), told
