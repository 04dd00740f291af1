"""Event tables at a snapshot for a reader that reads Parquet by itself: settled files, and a scan of all else.

Both are of one view of the table, so each event is in one of them, wherever settling has moved it meanwhile; and the
files are there until the view is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pyarrow as pa

from kivi.model.event_files import EventFiles
from kivi.model.questions import seen_schema
from kivi.model.scans import Scan
from kivi.model.schema import TableSchema
from kivi.mvcc.timeline import Timeline
from kivi.store.event_selection import Captured, shown_events

__all__ = ["SharedEvents", "SharedTable"]


@dataclass(frozen=True, slots=True)
class SharedTable:
    """``files`` have some of the events. ``check`` raises where the snapshot has ended or the table is gone."""

    files: Sequence[EventFiles]
    _captured: Captured
    _timeline: Timeline
    check: Callable[[], None]

    def scan(self, wanted: Scan) -> Iterator[pa.RecordBatch]:
        """The events that no file has, in any order; as often as wanted. Hidden columns may be asked for."""
        schema = self._captured.schema
        outputs = seen_schema(schema).output_columns(wanted.columns)
        for batch in shown_events(self._timeline, self._captured, wanted.where, outputs, wanted.times, ordered=False):
            self.check()
            yield batch


@dataclass(slots=True)
class SharedEvents:
    """The event tables of one question. ``take``: the events that its snapshot sees. Not thread safe."""

    take: Callable[[TableSchema], tuple[Captured, Callable[[], None]]]
    timeline: Timeline
    _tables: dict[str, SharedTable] = field(default_factory=dict)
    _views: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Files may go. Harmless twice."""
        for view in self._views:
            view.close()

    def of(self, schema: TableSchema) -> SharedTable:
        """The same whenever it is asked for. Raises DataLoss for a damaged file, and what reading the table raises."""
        if schema.name not in self._tables:
            captured, check = self.take(schema)
            self._views.append(captured.view)
            self._tables[schema.name] = SharedTable(captured.view.take_files(), captured, self.timeline, check)
        return self._tables[schema.name]

    def get(self, name: str) -> SharedTable | None:
        """A table that was asked for."""
        return self._tables.get(name)

    def check(self) -> None:
        """Raises what reading any of the tables would raise now."""
        for table in self._tables.values():
            table.check()
