"""``kivi append T FILE``: events from CSV, JSON lines, Parquet or Arrow files, a batch a transaction.

An interruption leaves what was appended so far; the command says how many events that is.
"""

from __future__ import annotations

import contextlib
import csv
import decimal
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from kivi.errors import InvalidArgument, KiviError
from kivi.model.csv_texts import with_nulls
from kivi.model.json_texts import as_float, name_lines, read_json
from kivi.model.predicate_text import parse_value, type_names
from kivi.model.types import check_unit

__all__ = ["FORMATS", "MANY", "ZEROS", "Progress", "batches", "format_of", "located", "loses_digits", "reading"]

BATCH_ROWS: Final = 50_000
_LINE_ROWS: Final = 10_000
_POLL_S: Final = 0.2
_CELL_MAX: Final = 16 << 20
"""Characters of a cell: as many bytes as a value may have, unless the server is told otherwise."""
FORMATS: Final = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}


class Batch(NamedTuple):
    """Rows, and how much of the file has been read with them, of how much: bytes, rows or batches; None: it has no end.
    ``lines``: of a file of lines, those in which the rows end."""

    rows: Any
    done: int
    total: int | None
    lines: Sequence[int] = ()


def format_of(path: str) -> str:
    try:
        return FORMATS[Path(path).suffix.lower()]
    except KeyError:
        unpack = "unpack it first; " if Path(path).suffix.lower() in (".gz", ".zip", ".zst", ".bz2", ".xz") else ""
        raise InvalidArgument(f"{path}: {unpack}the name must end in one of {', '.join(FORMATS)}") from None


def batches(
    path: str, description: Mapping[str, Any], *, follow: bool = False, waits: bool = True, guessed: bool = False
) -> Generator[Batch]:
    """Batches of a file's rows.

    ``follow``: then those of the rows that are written to it later, until it is interrupted; without ``waits`` only
    those that are there, but for a last line that is still being written. ``guessed``: nobody has said the types of a
    file of lines, and a number that would lose digits is refused. Raises InvalidArgument, also for times in another
    unit (``check_unit``).
    """
    times = [name for name, type_ in type_names(description).items() if type_ == "timestamp"]
    for batch in _batches(path, description, follow, waits, guessed):
        for name in times:
            check_unit(_whole(batch.rows, name), f"{path}: column {name!r}")
        yield batch


def _batches(path: str, description: Mapping[str, Any], follow: bool, waits: bool, guessed: bool) -> Generator[Batch]:
    kind = format_of(path)
    with reading(path, kind):
        match kind:
            case "csv" | "json":
                yield from _lines(path, kind, description, follow, waits, guessed)
            case _ if follow:
                raise InvalidArgument(f"--follow reads lines: {path} must be CSV or JSON lines")
            case "parquet":
                yield from _parquet(path)
            case _:
                yield from _arrow(path)


@contextlib.contextmanager
def reading(path: str, kind: str) -> Iterator[None]:
    """What goes wrong with a file of this format is said as InvalidArgument."""
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}") from None
    except pa.ArrowInvalid as error:
        raise InvalidArgument(f"{path} is not a {kind} file: {error}") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8 text: {error}") from None


def _parquet(path: str) -> Iterator[Batch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        done = 0
        for batch in file.iter_batches(BATCH_ROWS):
            done += batch.num_rows
            yield Batch(batch, done, file.metadata.num_rows)


def _arrow(path: str) -> Iterator[Batch]:
    with pa.memory_map(path) as source:
        if bytes(source.read(6)) == b"ARROW1":
            source.seek(0)
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                yield Batch(reader.get_batch(i), i + 1, reader.num_record_batches)
            return
        source.seek(0)
        for batch in pa.ipc.open_stream(source):
            yield Batch(batch, source.tell(), source.size())


def _lines(
    path: str, kind: str, description: Mapping[str, Any], follow: bool, waits: bool, guessed: bool
) -> Iterator[Batch]:
    """Rows of CSV (with a header) or JSON lines, as dicts."""
    parse = Rows(kind, description, path, guessed)
    rows, numbers = list[dict[str, Any]](), list[int]()
    begun, done, total = "", 0, None if follow else os.path.getsize(path)
    with open(path, encoding="utf-8-sig", newline="") as file:
        while True:
            line = file.readline()
            done += len(line)
            if follow and line and not line.endswith("\n"):
                begun += line  # it is still being written
                continue
            if line:
                row, begun = parse(begun + line), ""
                if row is not None:
                    rows.append(row)
                    numbers.append(parse.number)
                if len(rows) < _LINE_ROWS:
                    continue
            if rows:
                yield Batch(rows, done, total, numbers)
                rows, numbers = [], []
            elif follow and not waits:
                return
            elif follow:
                time.sleep(_POLL_S)
            if not line and not follow:
                return parse.end()


def located(error: KiviError, path: str, batch: Batch) -> None:
    """What an error says of one of a batch's records, it says of the line that it is in."""
    if batch.lines:
        name_lines(error, lambda index: f"{path}, line {batch.lines[index]}")


def _whole(rows: Any, name: str) -> list[Any]:
    """A column's values, if they may be whole numbers."""
    if not isinstance(rows, pa.RecordBatch):
        return [row.get(name) for row in rows]
    is_whole = name in rows.schema.names and pa.types.is_integer(rows.schema.field(name).type)
    return rows.column(name).to_pylist() if is_whole else []


ZEROS: Final = r"^\s*[-+]?0\d"
MANY: Final = r"\d[\d.]{15,}"
_LONG: Final = r"^\s*[-+]?\d{16,}\s*$"
_EXACT: Final = decimal.Context(prec=2_000)
"""Of more digits than a float64 has, all written out."""


def loses_digits(type_: str, value: Any, kind: str) -> bool:
    """Whether a number of this type is less than what a file says: a postal code has zeros in front, and an id or a
    decimal more digits than a float64."""
    if kind == "json":
        return type_ == "float64" and type(value) is int and abs(value) > 1 << 53
    if type_ not in ("int64", "float64"):
        return False
    return bool(re.match(ZEROS, value) or (type_ == "float64" and (re.match(_LONG, value) or _is_rounded(value))))


def _is_rounded(text: str) -> bool:
    """Whether a float64, written with as many digits, is another number."""
    if not re.search(MANY, text):
        return False
    try:
        given = decimal.Decimal(text)
        return decimal.Decimal(float(given)).quantize(given, context=_EXACT) != given
    except (ValueError, ArithmeticError):
        return True


class Rows:
    """Lines to rows, one at a time. A CSV file's first line names the columns; a quoted cell may have several lines."""

    def __init__(self, kind: str, description: Mapping[str, Any], path: str, guessed: bool = False) -> None:
        self.kind = kind
        self.guessed = guessed
        self.path = path
        self.number = 0
        self.types = type_names(description)
        self.names: list[str] | None = None
        is_exact = any(type_.startswith("decimal") for type_ in self.types.values())
        self._how: dict[str, Any] = {"parse_float": decimal.Decimal} if is_exact else {}
        self._open: list[str] = []  # the lines of a CSV record whose last quote is not closed yet
        csv.field_size_limit(_CELL_MAX)

    def end(self) -> None:
        """There are no more lines. Raises InvalidArgument in the middle of a quoted cell."""
        if self._open:
            began = self.number - len(self._open) + 1
            raise InvalidArgument(
                f"{self.path} ends at line {self.number} inside a quoted cell of the record in line {began}"
            )

    def __call__(self, line: str) -> dict[str, Any] | None:
        self.number += 1
        if not self._open and not line.strip():
            return None
        where = f"{self.path}, line {self.number}"
        if self.kind == "csv":
            try:
                cells = self._cells(line)
            except csv.Error as error:
                raise InvalidArgument(f"{where}: {error}") from None
            if cells is None:
                return None
            if self.names is None:
                self.names = [(cell or "").strip() for cell in cells]
                if twice := {name for name in self.names if self.names.count(name) > 1}:
                    raise InvalidArgument(f"{self.path} has several columns that are called {min(twice)!r}: rename one")
                return None
            if len(cells) != len(self.names):
                raise InvalidArgument(f"{where} has {len(cells)} cells; the header names {len(self.names)}")
            row: dict[str, Any] = dict(zip(self.names, cells, strict=True))
        else:
            try:
                found = read_json(line, where, **self._how)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise InvalidArgument(f"{where} is not a JSON object: write one object a line")
            row = found
        for name, value in row.items():
            if isinstance(value, decimal.Decimal) and self.types.get(name) == "float64":
                row[name] = float(value)
            if self.guessed and value is not None and loses_digits(self.types.get(name, ""), value, self.kind):
                raise InvalidArgument(
                    f"{where}, column {name!r}: {value} has more digits than {self.types[name]} keeps"
                )
            if type(value) is int and self.types.get(name) == "float64":
                row[name] = as_float(value)
            if isinstance(value, str) and self.types.get(name, "string") != "string":  # a text is what it is, also null
                if self.kind == "csv" and value == "":  # in quotes, as some put all cells
                    row[name] = None
                    continue
                try:
                    row[name] = parse_value(self.types[name], value, f"{where}, column {name!r}")
                except InvalidArgument as error:
                    error.message += ": leave the cell empty if there is no value" if self.kind == "csv" else ""
                    raise
        return row

    def _cells(self, line: str) -> list[str | None] | None:
        """Those of the record that ends in this line, None if it goes on."""
        cells = _closed('"' + line if self._open else line)
        if cells is None or self._open:
            self._open.append(line)
        if cells is None:
            return None
        if self._open:
            line = "".join(self._open)
            (cells,) = csv.reader(self._open)
            self._open = []
        return with_nulls(cells, line)


def _closed(text: str) -> list[str] | None:
    """The cells of a text; None if its last quote is open, as csv asks for a further line then."""
    lines = iter((text, ""))
    cells = next(csv.reader(lines))
    return None if next(lines, None) is None else cells


class Progress:
    """A bar on a terminal; elsewhere a plain line now and then, and one at the end."""

    def __init__(self, what: str, unit: str = "events", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._what = what
        self._unit = unit
        self._total: int | None = None
        self._began = self._said = clock()
        self._done = self._count = 0
        self._draws = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._say()
        if self._draws:
            print(file=sys.stderr)

    def update(self, done: int, count: int, total: int | None = None) -> None:
        """``done`` of the total, which may become known (or grow) on the way; ``count`` events so far."""
        self._done, self._count = done, count
        self._total = self._total if total is None else total
        if self._clock() - self._said > (0.1 if self._draws else 2.0):
            self._said = self._clock()
            self._say(f" ({100 * done // self._total}%)" if self._total else "")

    def _say(self, share: str = "") -> None:
        rate = self._count / max(1e-6, self._clock() - self._began)
        line = f"{self._what}: {self._count:,} {self._unit}, {rate:,.0f}/s{share}"
        if self._draws:
            bar = "\u2501" * (30 * self._done // self._total) if self._total else ""
            print(f"\r\x1b[K{line} {bar}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
