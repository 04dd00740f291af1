"""What a view reads of settled files: row groups pruned, cut by the names of their events, and put into an order.

A row group is the unit: read whole where its facts do not decide, passed over where they exclude it, and summed up by
its facts where they say all (R23, R24). Whether an event is seen depends on its name alone: its CTS against ``after``
and ``upto``, its name against those of retractions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from kivi.arrow.columns import picked, stored_array
from kivi.arrow.dictionaries import narrowed, plain
from kivi.arrow.predicates import filter_batch
from kivi.encoding.event_names import POSITION, STAMP, EventNames
from kivi.errors import InvalidArgument
from kivi.events.blocks import Blocks, Counts
from kivi.events.commit_order import Source, in_commit_order
from kivi.events.pruning import always, never, outside
from kivi.events.settled_files import Group, SettledFile, SettledFiles, StoredGroup, Stretch
from kivi.events.summing import Sums
from kivi.model.changes import COMMIT_TS
from kivi.model.event_files import EventFiles
from kivi.model.expressions import Expr, names
from kivi.runtime.ahead import in_order

__all__ = ["SettledView", "Wanted"]

_NONE: Final = np.zeros(0, np.int64)
_GROUPS_MAX: Final = 4
_BYTES_MAX: Final = 32 << 20
"""So many row groups are read at a time, if all their columns take so many bytes (decision 0049)."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events, and which of their columns (the names of events, and ``COMMIT_TS``, may be among these).

    ``first`` (inclusive) and ``beyond`` (exclusive) are names. ``named``: only these. ``retracted_at``: only those that
    the retraction at that CTS removed; otherwise, and without ``named``, none that a retraction has removed.
    ``coded``: text may come in codes. ``stored_bytes``: where it makes no difference to the events, row groups of up to
    so many bytes come as they are stored.
    """

    outputs: list[str]
    low_us: int | None = None
    high_us: int | None = None
    where: Expr | None = None
    after: int = 0
    upto: int = 0
    first: tuple[int, int] = (0, 0)
    beyond: tuple[int, int] = (2**64, 0)
    named: EventNames | None = None
    retracted_at: int | None = None
    may_have: Callable[[int, int], bool] | None = None
    coded: bool = False
    stored_bytes: int = 0

    @property
    def first_cts(self) -> int:
        return max(self.after + 1, self.first[0])

    @property
    def last_cts(self) -> int:
        return min(self.upto, self.beyond[0])


class Owner(Protocol):
    """The view that this is the settled part of."""

    files: list[SettledFile]
    upto: int
    erased_at: int
    names: EventNames
    is_partial: bool

    @property
    def closed(self) -> bool: ...

    def spans(self, first_cts: int, last_cts: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]: ...

    def names_at(self, cts: int) -> EventNames: ...


@dataclass(slots=True)
class SettledView:
    base: Blocks
    files: SettledFiles
    owner: Owner
    _erased: dict[tuple[int, int | None], Counts] = field(default_factory=dict)
    _named: dict[tuple[int, int | None], EventNames] = field(default_factory=dict)

    def ordered(self, wanted: Wanted, *, reverse: bool = False) -> Iterator[Any]:
        """Record batches in commit order."""
        own = COMMIT_TS in self.files.schema.by_name
        asked = [STAMP if name == COMMIT_TS and not own else name for name in wanted.outputs]
        columns = list(dict.fromkeys(asked)) or [STAMP]
        read = partial(self._read, replace(wanted, outputs=columns, coded=True), [*{*columns, STAMP, POSITION}])
        sources = [
            Source(
                group.first_cts, group.last_cts, group.position_max, partial(read, file, group), _is_cold((file, group))
            )
            for file, group in self._groups(wanted)
        ]
        bounds = {"first_cts": wanted.first_cts, "last_cts": wanted.last_cts}
        for batch in in_commit_order(sources, columns, **bounds, reverse=reverse):
            found = dict(zip(columns, plain(batch).columns, strict=True))
            if not own and STAMP in found:
                found[COMMIT_TS] = found[STAMP].view(pa.int64())
            yield pa.RecordBatch.from_arrays([found[name] for name in wanted.outputs], wanted.outputs)

    def _read(self, wanted: Wanted, columns: list[str], file: SettledFile, group: Group) -> Any:
        return self._selected(file, Stretch((group,)), wanted, named=True).select(columns)

    def as_it_lies(self, wanted: Wanted) -> Iterator[Any]:
        """Record batches, and if ``stored_bytes`` allows it ``StoredGroup``, by files, in each by event time."""
        outputs = list(wanted.outputs)
        most = 1 if wanted.stored_bytes else _GROUPS_MAX
        for part in in_order(_stretches(self._groups(wanted), most), lambda part: self._part(*part, wanted), _is_cold):
            if isinstance(part, StoredGroup):
                yield part
            elif part.num_rows:
                yield part.select(outputs)

    def is_shareable(self, file: SettledFile) -> bool:
        """Whether all of its events are seen, but for those that bounds of CTS or event time leave out."""
        return (
            self.files.path(file) is not None
            and not len(self._erased_rows(file))
            and not _meets(file, self._hidden(file))
        )

    def shared(self, files: Sequence[SettledFile], floor_us: int | None) -> list[EventFiles]:
        """Verified files, those together that have the same columns and bounds. Raises DataLoss."""
        found = defaultdict[tuple[int, int | None, int | None], list[str]](list)
        for file in files:
            if floor_us is not None and file.time_max < floor_us:
                continue
            upto = self.owner.upto if file.last_cts > self.owner.upto else None
            floor = floor_us if floor_us is not None and file.time_min < floor_us else None
            found[file.stored, upto, floor].append(self.files.sound(file))
        schema = self.files.schema
        return [
            EventFiles(tuple(paths), *self.files.columns(stored), schema.event_time or "", upto, floor)
            for (stored, upto, floor), paths in found.items()
        ]

    def sum_up(self, into: Sums, wanted: Wanted) -> tuple[int, int]:
        """Adds the events to ``into``. (row groups whose facts were enough, row groups that were read)"""
        known, cut = 0, list[tuple[SettledFile, Group]]()
        for file in self.owner.files:
            if self._whole(file, file, wanted):
                into.add_known(file.rows, file.columns)
                known += len(file.groups)
                continue
            for group in self._groups_of(file, wanted):
                if self._whole(file, group, wanted):
                    into.add_known(group.rows, group.columns)
                    known += 1
                else:
                    cut.append((file, group))

        parts = _stretches(iter(cut))
        for facts in in_order(parts, lambda part: into.facts_of(self._selected(*part, wanted)), _is_cold):
            into.add_known(*facts)
        return known, len(cut)

    def _groups(self, wanted: Wanted) -> Iterator[tuple[SettledFile, Group]]:
        """The row groups that may have some of the events."""
        for file in self.owner.files:
            for group in self._groups_of(file, wanted):
                yield file, group

    def rows_perhaps(self, wanted: Wanted) -> int:
        """Events of the row groups that may have some that are wanted."""
        return sum(group.rows for _, group in self._groups(wanted))

    def _groups_of(self, file: SettledFile, wanted: Wanted) -> list[Group]:
        low, high, where = wanted.low_us, wanted.high_us, wanted.where
        if self._beside(file, wanted) or outside(file, low, high) or (where is not None and never(where, file)):
            return []
        groups = [g for g in file.groups if not (self._beside(g, wanted) or outside(g, low, high))]
        if wanted.may_have is not None:
            groups = [group for group in groups if wanted.may_have(group.time_min, group.time_max)]
        if where is None:
            return groups
        return self.files.may_have(file, [group for group in groups if not never(where, group)], where)

    def _beside(self, part: SettledFile | Group, wanted: Wanted) -> bool:
        """Whether all its commits are others."""
        if part.last_cts < wanted.first_cts or part.first_cts > wanted.last_cts:
            return True
        return wanted.named is not None and not _meets(part, wanted.named)

    def _whole(self, file: SettledFile, part: SettledFile | Group, wanted: Wanted) -> bool:
        """Whether all events of the file, or of one of its row groups, are asked for, and there."""
        if part.first_cts < wanted.first_cts or part.last_cts > wanted.upto:
            return False
        if _meets(part, self._hidden(file)):
            return False
        if (wanted.low_us is not None and part.time_min < wanted.low_us) or (
            wanted.high_us is not None and part.time_max >= wanted.high_us
        ):
            return False
        if wanted.where is not None and not always(wanted.where, part):
            return False
        erased = self._erased_rows(file)
        return not len(erased if isinstance(part, SettledFile) else self.files.rows_at(erased, part))

    def _part(self, file: SettledFile, part: Stretch, wanted: Wanted) -> Any:
        """A row group as it is stored, or some of them as a batch."""
        if wanted.stored_bytes and (stored := self._stored(file, part.groups[0], wanted)) is not None:
            return stored
        return self._selected(file, part, wanted)

    def _stored(self, file: SettledFile, group: Group, wanted: Wanted) -> StoredGroup | None:
        """A row group as it is stored; None if some of its events are not asked for, or not there."""
        if self.owner.is_partial or not self._whole(file, group, wanted):
            return None
        self._check_open()
        return self.files.stored(file, group, wanted.outputs, wanted.stored_bytes)

    def _check_open(self) -> None:
        if self.owner.closed:
            raise InvalidArgument("this view of an event table is closed: take another one")

    def _selected(self, file: SettledFile, part: Stretch, wanted: Wanted, named: bool = False) -> Any:
        """Of a row group the events that are asked for, with these columns and perhaps others."""
        self._check_open()
        schema, where = self.files.schema, wanted.where
        low = wanted.low_us if wanted.low_us is not None and part.time_min < wanted.low_us else None
        high = wanted.high_us if wanted.high_us is not None and part.time_max >= wanted.high_us else None
        is_cut = low is not None or high is not None
        asked = names(where) if where is not None else set()
        used = {*wanted.outputs, *asked, *([schema.event_time] if is_cut else [])}
        columns = [c.name for c in schema.columns if c.name in used] or [schema.event_time or ""]
        batch = self._seen(file, part, wanted, columns, columns if wanted.coded else asked, named)
        if is_cut:  # they are in the order of event time
            times = stored_array(schema.column(schema.event_time or "").type, batch.column(schema.event_time))
            start = 0 if low is None else int(np.searchsorted(times, low))
            stop = len(times) if high is None else int(np.searchsorted(times, high))
            batch = batch.slice(start, max(0, stop - start))
        kept = [name for name in batch.schema.names if name in wanted.outputs or name in (STAMP, POSITION)]
        kept = kept or batch.schema.names[:1]  # a batch of no columns has no rows
        if where is None:
            batch = batch.select(kept)
        else:
            batch = filter_batch(batch, where, {c.name: c.type for c in schema.columns}, kept)
        if named:  # codes as the file has them
            return batch
        return narrowed(batch) if wanted.coded else plain(batch)

    def _seen(
        self, file: SettledFile, part: Stretch, wanted: Wanted, columns: list[str], coded: Collection[str], named: bool
    ) -> Any:
        """Of a row group the events that are there for this view, between the bounds of names."""
        stamped = COMMIT_TS in wanted.outputs and COMMIT_TS not in columns
        cut = part.first_cts < wanted.first_cts or part.last_cts > wanted.upto or part.last_cts >= wanted.beyond[0]
        cut = cut or part.first_cts <= wanted.first[0]
        picks = wanted.named is not None or wanted.retracted_at is not None
        hidden = not picks and _meets(part, self._hidden(file))
        gone = self.owner.is_partial
        named = named or stamped or cut or picks or hidden or gone or STAMP in wanted.outputs
        coded = [name for name in coded if name in columns]
        batch = self.files.read(file, part, columns, named=named, coded=coded)
        if stamped:
            batch = batch.append_column(COMMIT_TS, batch.column(STAMP).view(pa.int64()))
        erased = _NONE if picks else self.files.rows_at(self._erased_rows(file), part)
        if not (len(erased) or picks or hidden or cut or gone):
            return batch
        left = np.ones(part.rows, np.bool_)
        left[erased] = False
        if picks:
            left[:] = False
            left[self._picked(file, part, wanted, batch)] = True
        if hidden:
            left[self._hidden(file).rows_among(*_names(batch))] = False
        if cut:
            left &= _between(*_names(batch), wanted)
        if gone:
            left &= self._is_kept(part, *_names(batch))
        return batch if left.all() else picked(batch, np.flatnonzero(left))

    def _is_kept(self, part: Stretch, stamps: Any, positions: Any) -> Any:
        """Which of the names are of commits whose headers are there."""
        kept = np.zeros(part.rows, np.bool_)
        for (first, at), (last, to) in self.owner.spans(part.first_cts, part.last_cts):
            begins = (stamps > np.uint64(first)) | ((stamps == np.uint64(first)) & (positions >= at))
            kept |= begins & ((stamps < np.uint64(last)) | ((stamps == np.uint64(last)) & (positions <= to)))
        return kept

    def _picked(self, file: SettledFile, part: Stretch, wanted: Wanted, batch: Any) -> Counts:
        if wanted.named is not None:
            return wanted.named.rows_among(*_names(batch))
        assert wanted.retracted_at is not None
        known = self.files.rows_at(self._erased_rows(file, wanted.retracted_at), part)
        pending = EventNames.union(
            [self.owner.names_at(wanted.retracted_at), self._names_of(file, wanted.retracted_at)]
        )
        return np.union1d(known, pending.rows_among(*_names(batch))) if pending.size else known

    def _erased_rows(self, file: SettledFile, cts: int | None = None) -> Counts:
        """The rows of a file that retractions removed, of those that the view knows; ``cts``: of that one alone."""
        key = file.number, cts
        if (found := self._erased.get(key)) is None:
            every = [one for one in file.erased if cts is None or one.cts == cts]
            rows = self.base.erased(every, self.owner.erased_at)
            found = self._erased[key] = np.zeros(0, np.int64) if rows is None else rows
        return found

    def _hidden(self, file: SettledFile) -> EventNames:
        """Events that the view leaves out, and of which it is not known in which rows of the file they are."""
        return EventNames.union([self.owner.names, self._names_of(file)]) if file.named else self.owner.names

    def _names_of(self, file: SettledFile, cts: int | None = None) -> EventNames:
        key = file.number, cts
        if (found := self._named.get(key)) is None:
            every = [one for one in file.named if one.cts <= self.owner.erased_at and cts in (None, one.cts)]
            found = self._named[key] = EventNames.union(map(self.base.names_erased, every))
        return found


def _stretches(
    parts: Iterator[tuple[SettledFile, Group]], most: int = _GROUPS_MAX
) -> Iterator[tuple[SettledFile, Stretch]]:
    """Row groups that follow each other together: the first by itself, then two, then up to ``most``.

    A question of little is not kept waiting, and one of much passes the interpreter's lock on less often.
    """
    held, wanted = list[tuple[SettledFile, Group]](), 1
    for file, group in parts:
        if held:
            before, last = held[-1]
            rows = group.start + group.rows - held[0][1].start
            follows = before is file and last.start + last.rows == group.start and file.cold is None
            if len(held) == wanted or not follows or rows * file.raw_bytes > _BYTES_MAX * file.rows:
                yield before, Stretch([each for _, each in held])
                held, wanted = [], min(most, 2 * wanted)
        held.append((file, group))
    if held:
        yield held[0][0], Stretch([group for _, group in held])


def _is_cold(part: tuple[SettledFile, Group | Stretch]) -> bool:
    return part[0].cold is not None


def _names(batch: Any) -> tuple[Any, Any]:
    return batch.column(STAMP).to_numpy(), batch.column(POSITION).to_numpy()


def _meets(part: SettledFile | Group | Stretch, found: EventNames) -> bool:
    """Whether one of the names is of a commit of its range."""
    low, high = np.searchsorted(found.stamps, np.array([part.first_cts, part.last_cts + 1], np.uint64))
    return bool(low < high)


def _between(stamps: Any, positions: Any, wanted: Wanted) -> Any:
    """Which of the names lie between the bounds."""
    low, high = np.uint64(max(0, wanted.first_cts)), np.uint64(min(2**64 - 1, max(0, wanted.last_cts)))
    inside = (stamps >= low) & (stamps <= high)
    for (cts, position), before in ((wanted.first, True), (wanted.beyond, False)):
        if cts < 2**64:
            at = stamps == np.uint64(cts)
            inside &= ~at | ((positions >= position) if before else (positions < position))
    return inside
