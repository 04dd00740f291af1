"""Offsets of streams, and what they are checked against before anything is read from one.

An offset is a commit timestamp, with what is needed to know that it still means the same: the table's generation (a
table that was dropped and created again is another one) and the store's name (a backup that was restored has another
name: its commits after the backup are others). ``floor``, of a stream that begins with what is there: the snapshot
which it began with; events up to it are read as far as that snapshot remembers them.

What cannot be read any more is a StreamDataLoss, and ends the query. With ``option("failOnDataLoss", "false")`` it goes
on with what there is, and the log says what happened.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kivi.errors import EventsRetracted, InvalidArgument, KiviError

if TYPE_CHECKING:
    from kivi.model.changes import TailPoints

__all__ = ["Offset", "StreamDataLoss", "check_offset", "forgotten", "lost", "retracted"]

_log = logging.getLogger(__name__)


_said: Final = deque[str](maxlen=100)
"""A stream asks many times a second where it is."""


class StreamDataLoss(KiviError):
    """A stream cannot go on from where it is without leaving something out."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Everything committed at or below ``ts`` has been read."""

    ts: int
    table: int
    store: str
    floor: int | None = None

    @staticmethod
    def of(given: Mapping[str, Any]) -> Offset:
        """From Spark's checkpoint. Raises InvalidArgument for what cannot be one."""
        try:
            return Offset(int(given["ts"]), int(given["table"]), str(given["store"]), given.get("floor"))
        except (KeyError, TypeError, ValueError):
            raise InvalidArgument(f"{given!r} is not an offset of kivi: the checkpoint is another source's") from None

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"ts": self.ts, "table": self.table, "store": self.store}
        return out if self.floor is None else {**out, "floor": self.floor}


def check_offset(name: str, offset: Offset, found: TailPoints, *, fail: bool) -> int | None:
    """The timestamp from which on to read; None: the table is another one, so from its beginning.

    ``found`` is what the store says about the table now. Raises StreamDataLoss if ``fail``.
    """
    if found.table_id != offset.table:
        lost(fail, f"table {name!r} was dropped and created again since the stream read it", "reads the new one")
        return None
    if offset.ts > found.watermark:
        what = f"the stream has read {name!r} up to commit {offset.ts}, and the store only goes to {found.watermark}"
        lost(fail, f"{what}: it was restored from an older backup", "reads what is committed from now on")
        return found.watermark
    if found.store != offset.store:
        what = (
            f"the store with {name!r} is not the one that the stream has read: a backup was restored, or the endpoint"
        )
        lost(fail, f"{what} is another server. Commits up to {offset.ts} may be others", "goes on from there")
    return offset.ts


def forgotten(name: str, error: KiviError) -> StreamDataLoss | None:
    """The error that a stream raises if a read has found events dropped; None for any other error."""
    if "kept_since" not in error.details:
        return None
    return StreamDataLoss(_sentence(dropped(name, int(error.details["kept_since"])), _LEFT), **error.details)


def retracted(name: str, error: KiviError) -> EventsRetracted:
    """The error that a stream raises if events that it has not read yet were retracted, and a read finds them gone."""
    at = error.details["retracted_at"]
    return EventsRetracted(
        f"events of {name!r} were retracted by the commits up to {at}, and are there no more, before the stream read "
        'them: option("retractions", "ignore") reads what is left',
        table=name,
        retracted_at=at,
    )


_LEFT: Final = "reads what is left"


def dropped(name: str, kept_since: int) -> str:
    return f"retention has dropped events of {name!r}, committed up to {kept_since}, before the stream read them"


def lost(fail: bool, what: str, instead: str = _LEFT) -> None:
    """Raises StreamDataLoss, or writes to the log."""
    if fail:
        raise StreamDataLoss(_sentence(what, instead))
    if what in _said:
        return
    _said.append(what)
    _log.warning("%s; failOnDataLoss is false: the stream %s", what, instead)


def _sentence(what: str, instead: str) -> str:
    way_out = 'Begin with a new checkpoint, or set option("failOnDataLoss", "false"), with which the stream'
    return f"{what}. {way_out} {instead}"
