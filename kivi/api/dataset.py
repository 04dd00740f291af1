"""A table at a snapshot as a pyarrow Dataset: for DuckDB, Polars, and whatever else reads those.

::

    DuckDB, Polars --- columns, a filter --->  scanner  --- a scan --->  the snapshot
                   <-- record batches -------            <-- batches ---

Columns and filters are pushed into the scan, where headers of blocks, key ranges and slots leave out what no row of the
answer is in. What of a filter cannot be said in our words is applied here, by Arrow, to what was read: the rows are the
same. Each scanner reads anew, as often as wanted, while the snapshot is open.

Who reads it is C++, to which an error of ours is a text. So a dataset remembers the last one (``failure``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset

from kivi.api.arguments import OrderedScanArguments, ScanArguments, type_of
from kivi.arrow.filters import read_filter
from kivi.errors import InvalidArgument, KiviError
from kivi.model.changes import COMMIT_TS
from kivi.model.event_files import EventFiles
from kivi.model.questions import COMMIT_TIME, seen_schema
from kivi.model.schema import TableSchema

__all__ = ["HIDDEN", "Dataset", "hidden_in"]

HIDDEN: Final = (COMMIT_TS, COMMIT_TIME)


def hidden_in(text: str) -> list[str]:
    """The hidden columns that a text of SQL names: to those who name none they are not there."""
    return [name for name in HIDDEN if name in text.lower()]


class Dataset(pa.dataset.Dataset):  # type: ignore[misc]
    """``read`` gives the batches of a scan of the table. ``hidden``: which of an event table's hidden columns it has.
    ``files``: what ``read`` leaves out, for a reader that reads those by itself (``kivi.sql``).

    Safe to read from many threads, if ``read`` is.
    """

    def __init__(
        self,
        table: TableSchema,
        read: Callable[[ScanArguments], Iterable[pa.RecordBatch]],
        hidden: Sequence[str] = (),
        files: Sequence[EventFiles] = (),
    ) -> None:
        self._table = table
        self._read = read
        self.files = files
        self._seen = seen_schema(table)
        columns = [*table.output_names, *(name for name in hidden if name in self._seen.by_name)]
        self._schema = OrderedScanArguments(table.name, columns=tuple(dict.fromkeys(columns))).arrow_schema(table)
        self.failure: KiviError | None = None

    @property
    def name(self) -> str:
        """Of the table."""
        return self._table.name

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    @property
    def states(self) -> dict[str, str]:
        """Its columns that are states of measures, and what to name in their place."""
        return {column.name: column.type.advice(column.name) for column in self._seen.columns if column.type.is_state}

    def compute(self, columns: Sequence[str]) -> None:
        """Adds columns, each the text of a function of a state, as far as it has that state. Raises SchemaError."""
        ours = [each for each in columns if each.partition("(")[2].partition(",")[0] in self.states]
        named = tuple(dict.fromkeys([*self._schema.names, *ours]))
        self._schema = OrderedScanArguments(self.name, columns=named).arrow_schema(self._table)

    def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> pa.dataset.Scanner:
        """``columns``: names, or a dict of pyarrow expressions, None for all; ``filter``: a pyarrow expression."""
        said = read_filter(filter, lambda name: type_of(self._seen, name))
        wanted = columns if isinstance(columns, Sequence) else None
        if wanted is not None and not said.is_exact:
            wanted = None if said.columns is None else [*wanted, *(said.columns - {*wanted})]
        if wanted is not None and not wanted:
            wanted = self._schema.names[:1]  # a batch of no columns has no rows
        if wanted is None:
            wanted = self._schema.names
        scan = OrderedScanArguments(self._table.name, where=said.where, columns=wanted, any_order=True)
        with self._remembering():
            batches = self._read(scan)
        return pa.dataset.Scanner.from_batches(
            self._batches(batches),
            schema=scan.arrow_schema(self._table),
            columns=columns,
            filter=None if said.is_exact else filter,
        )

    def _batches(self, read: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with self._remembering():
            yield from read

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except KiviError as error:
            self.failure = error
            raise

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise InvalidArgument("a table at a snapshot has no fragments: use scanner, to_table, to_batches or head")

    # What the class above would ask of its own C++.
    filter = sort_by = join = join_asof = get_fragments = _get_fragments = replace_schema = __reduce__ = _refuse
    partition_expression = property(_refuse)
