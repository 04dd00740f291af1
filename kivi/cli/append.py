"""``kivi append T FILE``: events from CSV, JSON lines, Parquet or Arrow files, a batch a transaction.

An interruption leaves what was appended so far; the command says how many events that is.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa

from kivi.errors import InvalidArgument
from kivi.model.predicate_text import parse_value, type_names

__all__ = ["Progress", "batches", "format_of", "reading"]

BATCH_ROWS: Final = 50_000
_LINE_ROWS: Final = 10_000
_POLL_S: Final = 0.2
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


Batch: TypeAlias = tuple[Any, int, int | None]
"""Rows, and how much of the file has been read with them, of how much: bytes, rows or batches; None: it has no end."""


def format_of(path: str) -> str:
    try:
        return FORMATS[Path(path).suffix.lower()]
    except KeyError:
        raise InvalidArgument(f"{path}: the name must end in one of {', '.join(FORMATS)}") from None


def batches(path: str, description: dict[str, Any], *, follow: bool = False) -> Iterator[Batch]:
    """Batches of a file's rows.

    ``follow``: then those of the rows that are written to it later, until it is interrupted. Raises InvalidArgument.
    """
    kind = format_of(path)
    with reading(path, kind):
        match kind:
            case "csv" | "json":
                yield from _lines(path, kind, description, follow)
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
            yield batch, done, file.metadata.num_rows


def _arrow(path: str) -> Iterator[Batch]:
    with pa.memory_map(path) as source:
        if bytes(source.read(6)) == b"ARROW1":
            source.seek(0)
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i), i + 1, reader.num_record_batches
            return
        source.seek(0)
        for batch in pa.ipc.open_stream(source):
            yield batch, source.tell(), source.size()


def _lines(path: str, kind: str, description: dict[str, Any], follow: bool) -> Iterator[Batch]:
    """Rows of CSV (with a header) or JSON lines, as dicts."""
    parse = Rows(kind, description, path)
    rows: list[dict[str, Any]] = []
    begun, done, total = "", 0, None if follow else os.path.getsize(path)
    with open(path, encoding="utf-8", newline="") as file:
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
                if len(rows) < _LINE_ROWS:
                    continue
            if rows:
                yield rows, done, total
                rows = []
            elif follow:
                time.sleep(_POLL_S)
            if not line and not follow:
                return parse.end()


class Rows:
    """Lines to rows, one at a time. A CSV file's first line names the columns; a quoted cell may have several lines."""

    def __init__(self, kind: str, description: dict[str, Any], path: str) -> None:
        self.kind = kind
        self.path = path
        self.number = 0
        self.types = type_names(description)
        self.names: list[str] | None = None
        self._open = ""  # a CSV record whose last quote is not closed yet

    def end(self) -> None:
        """There are no more lines. Raises InvalidArgument in the middle of a quoted cell."""
        if self._open:
            raise InvalidArgument(f"{self.path} ends at line {self.number} inside a quoted cell")

    def __call__(self, line: str) -> dict[str, Any] | None:
        self.number += 1
        if not self._open and not line.strip():
            return None
        where = f"{self.path}, line {self.number}"
        if self.kind == "csv":
            line = self._open + line
            if line.count('"') % 2:  # a quote inside a cell is written twice, so an odd one is open
                self._open = line
                return None
            self._open = ""
            (cells,) = csv.reader(io.StringIO(line.rstrip("\r\n"), newline=""))
            if self.names is None:
                self.names = [cell.strip() for cell in cells]
                return None
            if len(cells) != len(self.names):
                raise InvalidArgument(f"{where} has {len(cells)} cells; the header names {len(self.names)}")
            row: dict[str, Any] = dict(zip(self.names, cells, strict=True))
        else:
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise InvalidArgument(f"{where} is not a JSON object: write one object a line")
            row = found
        for name, value in row.items():
            if isinstance(value, str) and name in self.types:
                if self.kind == "csv" and value == "":
                    row[name] = None
                elif self.kind == "csv" or self.types[name] != "string":
                    row[name] = parse_value(self.types[name], value, f"{where}, column {name!r}")
        return row


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
