"""``kivi create``, ``kivi drop``, and the table that ``kivi append TABLE FILE --create`` makes of a file.

::

    kivi create accounts id=int64 name=string 'balance=sum(int64)' --key id
    kivi create calls endpoint=string ts=timestamp resp_us=int64 --event-time ts --retention 30d
    kivi append calls calls.csv --create

A file's columns and types are those that Arrow reads of its first megabyte: Parquet and Arrow files say theirs. Where a
number would have less digits than the file, as a postal code of ``01234`` or a long id would, a column is text. Texts
of JSON that are all times are times, also those with fractions of seconds, which Arrow has for texts. The event time is
the column that is a time, if only one is; whole numbers (microseconds since 1970) and texts may be one too, if
``--event-time`` names them. Those that must be seconds or milliseconds are refused, so that nothing is made of
them. On a terminal the columns are shown and asked for before the table is there.

**Invariant.** No table is made for a file that has a row which does not fit it: ``create_for`` reads the file to its
end before, batch by batch, as it is read again to be appended. An append that fails after that leaves the table, which
others may have appended to since, and its error says that it is there.
"""

from __future__ import annotations

import argparse
import codecs
import io
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from kivi.cli.aggregate import pairs
from kivi.cli.alter import declared
from kivi.cli.append import MANY, ZEROS, Batch, Progress, Rows, batches, format_of, located, loses_digits, reading
from kivi.cli.text import print_value
from kivi.errors import InvalidArgument, KiviError, SchemaError
from kivi.model.declarations import event_table_schema
from kivi.model.names import is_name
from kivi.model.predicate_text import parse_moment
from kivi.model.schema import TableSchema
from kivi.model.types import shown

__all__ = ["create", "create_for", "drop"]

_LINES_MIN: Final = 2
_MOMENT: Final = r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[-+]\d\d:?\d\d)?)?"
_READ: Final = 1 << 20
"""Of a file of lines, to see its types by."""


def create(db: Any, args: argparse.Namespace) -> None:
    """Creates a row table, or with ``--event-time`` an event table, on ``db``."""
    columns = {name: declared(text) for name, text in pairs(args.columns, "a column is name=type, such as id=int64")}
    if len(columns) < len(args.columns):
        raise InvalidArgument("a column is named twice")
    if (args.key is None) == (args.event_time is None):
        raise InvalidArgument("say --key for a table of rows, or --event-time for a table of events")
    if args.key is None:
        _refuse(args, "--event-time", history=args.history)
        create_events(db, args.table, columns, args)
    else:
        options = {name: getattr(args, name) for name in ("retention", "index", "local", "cold", "expires")}
        _refuse(args, "--key", **options)
        names = [word.strip() for word in args.key.split(",")]
        if unknown := [name for name in names if name not in columns]:
            raise SchemaError(f"the key has {unknown[0]!r}, which is no column: there are {', '.join(columns)}")
        if len(set(names)) < len(names):
            raise SchemaError(f"the key names a column twice: {args.key}")
        key = {name: columns.pop(name) for name in names}
        db.create_table(args.table, key=key, columns=columns, history=args.history)
    print_value({"table": args.table}, args.output)


def _refuse(args: argparse.Namespace, what: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise InvalidArgument(f"--{name} is not for a table with {what}")


def create_events(db: Any, name: str, columns: Mapping[str, Any], args: argparse.Namespace) -> None:
    index = [word.strip() for word in args.index.split(",")] if args.index else []
    db.create_event_table(
        name, event_time=args.event_time, columns=columns,
        retention=args.retention, index=index, local=args.local, cold=args.cold, expires=args.expires,
    )  # fmt: skip


def drop(db: Any, args: argparse.Namespace) -> None:
    """Drops a table with all that it has, after a question."""
    found = db.describe(args.table)
    if not args.yes:
        _ask(f"Drop the {found['kind']} table {args.table} and all that it has, for good?", "nothing was dropped")
    db.drop(args.table)
    print_value({"dropped": args.table}, args.output)


def _ask(question: str, otherwise: str) -> None:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InvalidArgument(f"{otherwise}: answer y, or give --yes")


# -- a table for a file ------------------------------------------------------------------------------------


def create_for(db: Any, args: argparse.Namespace) -> None:
    """Creates the event table ``args.table`` with the columns of ``args.file``; on a terminal only after a yes.

    Raises InvalidArgument where no event time can be told, or it is in another unit, and SchemaError for columns of
    types that kivi does not have.
    """
    columns = columns_of(args.file)
    if args.event_time is None:
        times = [name for name, type_ in columns.items() if type_ == "timestamp"]
        if len(times) != 1:
            raise InvalidArgument(
                f"{args.file}: {'no column is a time' if not times else f'{chr(44).join(times)} are times'}: "
                f"say --event-time, with one of {', '.join(columns)}"
            )
        (args.event_time,) = times
    elif columns.get(args.event_time) in ("int64", "string"):
        columns[args.event_time] = "timestamp"
    words = " ".join(f"{name}={type_}" for name, type_ in columns.items())
    print(f"kivi create {args.table} {words} --event-time {args.event_time}", file=sys.stderr)
    if sys.stdin.isatty() and sys.stderr.isatty() and not args.yes:
        _ask("Create this table?", "no table was created, and nothing was appended")
    _check(args, columns)
    db.create_event_table(args.table, event_time=args.event_time, columns=columns)


def _check(args: argparse.Namespace, columns: Mapping[str, str]) -> None:
    """Raises InvalidArgument, SchemaError for the first row that does not fit."""
    schema, count = event_table_schema(args.table, args.event_time, columns), 0
    try:
        with Progress(f"{args.file} is checked") as progress:
            for batch in batches(args.file, schema.description(), follow=args.follow, waits=False, guessed=True):
                _check_batch(schema, args.file, batch)
                count += len(batch.rows)
                progress.update(batch.done, count, batch.total)
    except KiviError as error:
        error.message += "; no table was created: change the file, or say the columns' types with kivi create"
        raise


def _check_batch(schema: TableSchema, path: str, batch: Batch) -> None:
    from kivi.arrow.records import event_batch

    try:
        event_batch(schema, batch.rows)
    except KiviError:
        for line, row in zip(batch.lines, batch.rows, strict=False):  # the first of a file of lines
            one = Batch([row], 0, None, [line])
            try:
                event_batch(schema, one.rows)
            except KiviError as error:
                before = error.message
                located(error, path, one)
                if error.message == before:  # it is about the columns
                    error.message = f"{path}, line {line}: {error.message}"
                raise error from None
        raise


def columns_of(path: str) -> dict[str, str]:
    """The columns of a file's rows and their types as kivi's. Raises InvalidArgument, SchemaError."""
    kind = format_of(path)
    with reading(path, kind):
        schema = _SCHEMAS[kind](path)
    if twice := {name for name in schema.names if schema.names.count(name) > 1}:
        raise InvalidArgument(f"{path} has several columns that are called {min(twice)!r}: rename one")
    if not schema.names:
        raise InvalidArgument(f"{path} has no rows to see the types of: create the table with kivi create")
    for name in schema.names:
        if not is_name(name):
            raise SchemaError(
                f"{path}: {shown(name)} is no name of a column, which has letters of ASCII, digits and '_', and begins "
                "with none of the digits: rename it in the file, whose first line has the names if it is CSV"
            )
    return {field.name: _type_of(field, path) for field in schema}


def _type_of(field: pa.Field, path: str) -> str:
    type_ = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if pa.types.is_decimal(type_):
        return f"decimal({type_.precision},{type_.scale})"
    for is_one, name in _TYPES:
        if is_one(type_):
            return name
    raise SchemaError(f"{path}: column {field.name!r} is {type_}, which kivi has no type for: leave it out")


_TYPES: Final = (
    (pa.types.is_boolean, "bool"),
    (pa.types.is_integer, "int64"),
    (pa.types.is_floating, "float64"),
    (pa.types.is_timestamp, "timestamp"),
    (pa.types.is_date, "timestamp"),
    (pa.types.is_string, "string"),
    (pa.types.is_large_string, "string"),
    (pa.types.is_null, "string"),  # nothing was there to tell by
    (pa.types.is_binary, "bytes"),
    (pa.types.is_large_binary, "bytes"),
)


def _of_csv(path: str) -> pa.Schema:
    import pyarrow.csv as reader

    lines = _first_lines(path, b'"')
    header = lines.partition(b"\n")[0]
    if b"," not in header and (other := next((each for each in (";", "\t") if each.encode() in header), None)):
        raise InvalidArgument(
            f"{path}: its cells are separated by {other!r}, and kivi reads commas: write it with these"
        )
    # threads of Arrow may outlive a command that ends at once
    alone = reader.ReadOptions(use_threads=False, block_size=len(lines) + 1)
    table = reader.read_csv(io.BytesIO(lines), alone)
    names = [name.strip() for name in table.column_names]  # as ``kivi append`` has them
    if not table.num_rows:
        return pa.schema([])
    texts = reader.ConvertOptions(column_types=dict.fromkeys(table.column_names, pa.string()))
    cells = reader.read_csv(io.BytesIO(lines), alone, convert_options=texts)
    types = [
        pa.string() if _loses_digits(field.type, column) else field.type
        for field, column in zip(table.schema, cells.columns, strict=True)
    ]
    return pa.schema(zip(names, types, strict=True))


def _loses_digits(type_: pa.DataType, cells: pa.ChunkedArray) -> bool:
    """``kivi.cli.append.loses_digits`` of any of them."""
    if not pa.types.is_integer(type_) and not pa.types.is_floating(type_):
        return False
    name = "int64" if pa.types.is_integer(type_) else "float64"
    some = cells.filter(pc.match_substring_regex(cells, f"{ZEROS}|{MANY}")).to_pylist()
    return any(loses_digits(name, cell, "csv") for cell in some)


def _of_json(path: str) -> pa.Schema:
    import pyarrow.json as reader

    lines = _first_lines(path).removeprefix(codecs.BOM_UTF8)
    check = Rows("json", {"key": {}, "columns": {}}, path)
    long, moments = dict[str, int](), dict[str, bool]()
    for line in io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8", newline=""):
        row = check(line)  # Arrow takes what is no line, and what is nested too deeply is the end of the process
        for name, value in (row or {}).items():
            if type(value) is int and abs(value) > 1 << 53:
                long[name] = value
            elif isinstance(value, str):
                moments[name] = moments.get(name, True) and _is_moment(value)
    if not lines.strip():
        return pa.schema([])
    alone = reader.ReadOptions(use_threads=False, block_size=len(lines) + 1)
    schema = reader.read_json(io.BytesIO(lines), alone).schema
    for name, value in long.items():
        if pa.types.is_floating(schema.field(name).type):
            raise InvalidArgument(
                f"{path}: column {name!r} would be float64, which has less digits than {shown(value)}: write it as text"
            )
    times = [
        pa.field(f.name, pa.timestamp("us")) if moments.get(f.name) and pa.types.is_string(f.type) else f
        for f in schema
    ]
    return pa.schema(times)


def _is_moment(text: str) -> bool:
    if not re.fullmatch(_MOMENT, text):
        return False
    try:
        return bool(parse_moment(text, ""))
    except InvalidArgument:
        return False


def _of_parquet(path: str) -> pa.Schema:
    import pyarrow.parquet as pq

    return pq.read_schema(path)


def _of_arrow(path: str) -> pa.Schema:
    with pa.memory_map(path) as source:
        is_file = bytes(source.read(6)) == b"ARROW1"
        source.seek(0)
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source)
        return reader.schema


def _first_lines(path: str, quote: bytes | None = None) -> bytes:
    """Whole ones: the header and a row at least, if there are any. Within two of ``quote`` no line ends."""
    with open(path, "rb") as file:
        read = more = file.read(_READ)
        while len(more) == _READ:
            ends = list(itertools.islice(_ends(read, quote), _LINES_MIN))
            if len(ends) == _LINES_MIN:
                return read[: ends[0]]
            read += (more := file.read(_READ))
        return read


def _ends(lines: bytes, quote: bytes | None) -> Iterator[int]:
    """Where lines end, the last first."""
    end, is_open = len(lines), quote is not None and lines.count(quote) % 2 == 1
    while (line := lines.rfind(b"\n", 0, end)) >= 0:
        is_open ^= quote is not None and lines.count(quote, line, end) % 2 == 1
        if not is_open:
            yield line + 1
        end = line


_SCHEMAS: Final = {"csv": _of_csv, "json": _of_json, "parquet": _of_parquet, "arrow": _of_arrow}
