"""One question: DuckDB behind locked doors, the tables that it names, its answer in batches, its errors as ours."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import pyarrow as pa

from kivi.errors import DataLoss, InvalidArgument, KiviError, NotFound, ResourceExhausted
from kivi.model.changes import COMMIT_TS
from kivi.model.event_files import EventFiles
from kivi.model.names import is_text
from kivi.model.types import shown
from kivi.sql.spare import Spare
from kivi.sql.states import StateTable, write_columns
from kivi.sql.tables import (
    check_no_file,
    check_reads,
    is_of_snapshot,
    lists_tables,
    quoted_name,
    quoted_text,
    table_names,
    view_of,
)

__all__ = ["Limits", "Parameters", "Source", "answer", "as_table", "check_text", "relation", "resolve"]

BATCH_ROWS: Final = 65_536
_LISTED: Final = "listed:"
_LOCKED: Final = {
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "temp_directory": "",
}
_spare: Final = Spare(_LOCKED)
Parameters = Sequence[Any] | Mapping[str, Any] | None
Every = Callable[[], Iterable[tuple[str, pa.Schema]]]
"""The names of tables, and their columns."""


class Source(StateTable, Protocol):
    """A table: a pyarrow Dataset, which remembers why reading it failed. ``files`` have more of its rows."""

    failure: KiviError | None

    @property
    def name(self) -> str: ...
    @property
    def files(self) -> Sequence[EventFiles]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one question: bytes of DuckDB's memory, its threads, seconds, and rows of the answer."""

    memory_bytes: int
    threads: int
    timeout_s: float
    rows: int


def answer(
    text: str, parameters: Parameters, find: Callable[[str], Source | None], every: Every, limits: Limits
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The answer's schema, and its batches of at most 65,536 rows, computed as they are asked for.

    ``find`` gives the table of a name, None if there is none; the error that it raises is raised if the text cannot do
    without that table. ``every`` gives all tables that may be named.

    Raises InvalidArgument with DuckDB's words for what it does not accept, NotFound, ResourceExhausted, and what
    reading a table raises.
    """
    asked = _Asked(_duckdb(), limits)
    try:
        reader = asked.begin(check_text(text), parameters, find, every)
    except BaseException:
        asked.close()
        raise
    return reader.schema, asked.batches(reader)


def as_table(found: tuple[pa.Schema, Iterator[pa.RecordBatch]]) -> pa.Table:
    schema, batches = found
    return pa.Table.from_batches(batches, schema)


def relation(dataset: Any, connection: Any = None) -> Any:
    """A table as a relation of a DuckDB connection of the caller's; None: DuckDB's default one."""
    if connection is None:
        connection = _duckdb()
    elif not hasattr(connection, "execute"):
        raise InvalidArgument(f"connection is one of DuckDB, or None for its default one, not {shown(connection)}")
    return connection.from_arrow(dataset)


def check_text(text: object) -> str:
    """Raises InvalidArgument for what is no text."""
    if not is_text(text) or not text.strip():
        raise InvalidArgument(f"a question in SQL is a text, like 'select count(*) from calls', not {shown(text)}")
    return text


def resolve(name: str, known: Iterable[str]) -> str | None:
    """Which of the tables a text means: SQL does not tell large letters from small ones, and we do.

    The one of this very name, else the only one that is equal to it but for that.
    """
    known = list(known)
    if name in known:
        return name
    alike = [each for each in known if each.lower() == name.lower()]
    return alike[0] if len(alike) == 1 else None


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise InvalidArgument("SQL needs DuckDB, which is not installed: pip install 'kivi[sql]'") from None
    return duckdb


class _Asked:
    """A database for one question."""

    def __init__(self, duckdb: Any, limits: Limits) -> None:
        self._duckdb, self._limits = duckdb, limits
        self._sources: dict[str, Source] = {}
        self._spelled: dict[str, str] = {}
        self._missing: dict[str, KiviError] = {}
        self._paths: list[str] = []
        self._read: list[Any] = []
        self._timed_out = False
        self._connection = _spare.take(duckdb)
        self._connection.execute(f"set memory_limit = '{limits.memory_bytes}B'")
        self._connection.execute(f"set threads = {limits.threads}")
        self._timer = threading.Timer(limits.timeout_s, self._interrupt)
        self._timer.daemon = True

    def _interrupt(self) -> None:
        self._timed_out = True
        self._connection.interrupt()

    def close(self) -> None:
        self._timer.cancel()
        self._read.clear()
        self._connection.close()
        _spare.prepare(self._duckdb)

    def begin(self, text: str, parameters: Parameters, find: Callable[[str], Source | None], every: Every) -> Any:
        self._timer.start()
        with self._told():
            statement = self._one_statement(text)
            tree = self._tree(statement.query)
            check_reads(tree)
            named = list(table_names(tree))
            for name in sorted({name for catalog, schema, name in named if is_of_snapshot(catalog, schema)}):
                self._find(name, find)
            for catalog, schema, name in named:
                if not is_of_snapshot(catalog, schema) or self._spelled.get(name, name) not in self._sources:
                    check_no_file(catalog, schema, name)
            if write_columns(tree, {name.lower(): source for name, source in self._sources.items()}):
                statement = self._one_statement(self._text(tree))
            if lists_tables(tree):
                self._list(every)
            self._lock()
            return self._connection.sql(statement, params=parameters).to_arrow_reader(BATCH_ROWS)

    def _one_statement(self, text: str) -> Any:
        statements = self._connection.extract_statements(text)
        kinds = self._duckdb.StatementType
        if len(statements) != 1:
            raise InvalidArgument(f"a question is one statement, and this has {len(statements)}: ask them one by one")
        if statements[0].type != kinds.SELECT:
            kind = str(statements[0].type).rpartition(".")[2]
            raise InvalidArgument(
                f"only a statement that reads is answered (select, with, from, values), and no {kind}"
            )
        return statements[0]

    def _tree(self, query: str) -> Any:
        """The statement, as DuckDB parses it: nothing of it has run."""
        ((serialized,),) = self._connection.execute("select json_serialize_sql(?)", [query]).fetchall()
        return json.loads(serialized)

    def _text(self, tree: Any) -> str:
        ((text,),) = self._connection.execute("select json_deserialize_sql(?)", [json.dumps(tree)]).fetchall()
        return str(text)

    def _find(self, name: str, find: Callable[[str], Source | None]) -> None:
        try:
            source = find(name)
        except KiviError as error:  # a common table expression may have this name
            self._missing[name] = error
            return
        if source is None:
            self._missing[name] = NotFound(f"there is no table {shown(name)}", table=name)
            return
        for spelled, other in self._sources.items():  # which are one name to DuckDB
            if spelled.lower() == name.lower():
                if other.name != source.name:
                    raise InvalidArgument(
                        f"SQL does not tell {other.name!r} from {source.name!r}: ask about one of them in a statement"
                    )
                self._spelled[name] = spelled
                return
        self._sources[name] = source

    def _list(self, every: Every) -> None:
        """Makes an empty table for each that the statement does not name, so that it is listed."""
        named = {name.lower() for name in self._sources}
        for name, schema in every():
            if name.lower() not in named:
                self._connection.register(_LISTED, schema.empty_table())
                self._connection.execute(
                    f"create table if not exists {quoted_name(name)} as from {quoted_name(_LISTED)}"
                )
                self._connection.unregister(_LISTED)

    def _lock(self) -> None:
        """Lets the tables in, and nothing else any more."""
        self._paths = [path for source in self._sources.values() for each in source.files for path in each.paths]
        self._connection.execute(f"set allowed_paths = [{', '.join(map(quoted_text, self._paths))}]")
        self._connection.execute("set enable_external_access = false")
        for name, source in self._sources.items():
            read = self._connection.from_arrow(source)
            self._read.append(read)  # a view by itself does not keep what it reads
            if not source.files:
                read.create_view(name)
                continue
            rest = f"{name}: what no file has"  # a name that a statement cannot ask for
            read.create_view(rest)
            self._connection.execute(view_of(name, rest, source.schema.names, source.files, COMMIT_TS))
        self._connection.execute("set lock_configuration = true")

    def batches(self, reader: Any) -> Iterator[pa.RecordBatch]:
        rows = 0
        try:
            while True:
                with self._told():
                    batch = next(reader, None)
                if batch is None:
                    return
                rows += batch.num_rows
                if rows > self._limits.rows:
                    raise ResourceExhausted(
                        f"the answer has more than sql_rows = {self._limits.rows:,} rows: aggregate, or set a limit",
                        limit="sql_rows",
                        maximum=self._limits.rows,
                    )
                if batch.num_rows:
                    yield batch
        finally:
            self.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """DuckDB's errors as ours."""
        try:
            yield
        except KiviError:
            raise
        except (self._duckdb.Error, pa.ArrowException, OSError, ValueError, RuntimeError) as error:
            raise self._error(error) from None

    def _error(self, error: Exception) -> KiviError:
        """Out of a reader of Arrow every one is an OSError, with the same words."""
        said, limits = str(error), self._limits
        if (failure := next((s.failure for s in self._sources.values() if s.failure is not None), None)) is not None:
            return failure
        if self._timed_out:
            return ResourceExhausted(
                f"the question took longer than sql_timeout_s = {limits.timeout_s:g}: ask for less",
                limit="sql_timeout_s",
                maximum=limits.timeout_s,
            )
        if "Out of Memory Error" in said or isinstance(error, pa.ArrowMemoryError):
            return ResourceExhausted(
                f"the question needs more than sql_memory_bytes = {limits.memory_bytes:,}: ask for less, or by parts",
                limit="sql_memory_bytes",
                maximum=limits.memory_bytes,
            )
        if (path := next((path for path in self._paths if path in said), None)) is not None:
            return DataLoss(f"{path} could not be read ({said.strip()}): restore a backup", path=path)
        if isinstance(error, self._duckdb.CatalogException):
            for name, missing in self._missing.items():
                if f"Table with name {name} does not exist" in said:
                    return missing
        return InvalidArgument(said.strip())
