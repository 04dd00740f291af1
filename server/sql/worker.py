"""The process of a question: ``python -m kivi_server.sql.worker FD``. It answers one question after another.

It is told what may take how much, asks its server for tables and rows, and sends the answer back. When its server is
gone, so is it.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from kivi_server.sql.pipe import Gone, Kind, receive, send

from kivi.api.arguments import ScanArguments
from kivi.api.dataset import Dataset, hidden_in
from kivi.arrow.columns import FAILURES, reason
from kivi.arrow.ipc import encode_ipc
from kivi.client.messages import read_batches, scan_spec
from kivi.errors import InvalidArgument, KiviError, ResourceExhausted
from kivi.model.event_files import EventFiles, can_be_shared, decode_files
from kivi.model.schema import TableSchema
from kivi.runtime.imports import do_without_pandas
from kivi.runtime.scheduling import use_batch_scheduling
from kivi.sql import Limits, answer
from kivi.sql.engine import Parameters
from kivi.sql.parameters import from_batch
from kivi.wire.codec import from_table
from kivi.wire.status import from_error, to_error
from kivi.wire.v1 import types_pb2

__all__ = ["main"]

PAGE_BYTES: Final = 4 << 20  # a page of the answer is cut at about this, unless it is one row ...
ROW_BYTES_MAX: Final = 48 << 20  # ... which may be so long
BESIDE_BYTES: Final = 2 << 30  # of address space, for what is no memory of DuckDB's: batches, threads, the interpreter
_LOOK_S: Final = 1.0


class _Server:
    """The server's end of the pipe, for the threads of DuckDB that read tables, and the one that sends the answer."""

    def __init__(self, channel: socket.socket, text: str) -> None:
        self._channel, self._lock, self._over = channel, threading.Lock(), False
        self._hidden = hidden_in(text)

    def tell(self, kind: Kind, payload: Any = b"") -> None:
        """Part of the answer, or with END or ERROR the last word: what then still reads ahead would ask as part of the
        next question."""
        with self._lock:
            self._over = kind is not Kind.RESULT
            send(self._channel, kind, payload)

    def ask(self, kind: Kind, payload: bytes) -> bytes:
        """Raises Gone after the last word."""
        with self._lock:
            if self._over:
                raise Gone
            send(self._channel, kind, payload)
            kind, answered = receive(self._channel)
        if kind is Kind.ERROR:
            raise from_error(types_pb2.Error.FromString(answered))
        return answered

    def find(self, name: str) -> Dataset | None:
        found = self.ask(Kind.TABLE, name.encode())
        if not found:
            return None
        schema = from_table(types_pb2.Table.FromString(found))
        files = list[EventFiles]()
        if can_be_shared(schema, self._hidden):
            files = decode_files(self.ask(Kind.FILES, schema.name.encode()))
        return Dataset(schema, lambda wanted: self._batches(schema, wanted), self._hidden, files)

    def every(self) -> Iterator[tuple[str, pa.Schema]]:
        for name in json.loads(self.ask(Kind.TABLES, b"")):
            if found := self.ask(Kind.TABLE, name.encode()):
                schema = from_table(types_pb2.Table.FromString(found))
                yield name, Dataset(schema, lambda _: ()).schema

    def _batches(self, schema: TableSchema, wanted: ScanArguments) -> Iterator[pa.RecordBatch]:
        number = self.ask(Kind.SCAN, scan_spec(schema, wanted.bound(schema)).SerializeToString())
        while data := self.ask(Kind.NEXT, number):
            yield from read_batches(data)


def main() -> None:
    do_without_pandas()
    channel = socket.socket(fileno=int(sys.argv[1]))
    use_batch_scheduling()  # which the threads of DuckDB inherit
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    address_space = _address_space()
    try:
        send(channel, Kind.END)  # it is there
        while True:
            _, parameters = receive(channel)
            _, question = receive(channel)
            asked = json.loads(question)
            _answer(_Server(channel, asked["text"]), asked, parameters, address_space)
    except Gone:  # the server has closed its end
        os._exit(0)


def _answer(server: _Server, question: dict[str, Any], parameters: bytes, address_space: int) -> None:
    limits = Limits(**question["limits"])
    try:
        most = address_space + limits.memory_bytes + BESIDE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        schema, batches = answer(question["text"], _given(parameters), server.find, server.every, limits)
        first = next(batches, None)
        if first is None:
            server.tell(Kind.RESULT, encode_ipc(schema.empty_table()))
        else:
            for batch in itertools.chain([first], batches):
                for page in _pages(batch):
                    server.tell(Kind.RESULT, encode_ipc(page))
        server.tell(Kind.END)
    except KiviError as error:
        server.tell(Kind.ERROR, to_error(error).SerializeToString())
    except MemoryError:
        beyond = ResourceExhausted("the question needs more memory than it may take: ask for less, or by parts")
        server.tell(Kind.ERROR, to_error(beyond).SerializeToString())


def _given(parameters: bytes) -> Parameters:
    """Raises InvalidArgument for what a client of another make has not written as ``kivi.sql.parameters`` does."""
    try:
        batch = next(iter(read_batches(parameters)), None)
        if batch is not None:
            batch.validate(full=True)
    except FAILURES as error:
        raise InvalidArgument(f"the parameters are no Arrow IPC stream: {reason(error)}") from None
    if batch is not None and batch.num_rows != 1:
        raise InvalidArgument(f"the parameters are a record batch of one row, not of {batch.num_rows}")
    return from_batch(batch)


def _pages(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Of a size that a message holds. Raises ResourceExhausted for a row that none does."""
    left = [batch]
    while left:
        part = left.pop()
        if part.nbytes > ROW_BYTES_MAX and part.num_rows == 1:
            raise ResourceExhausted(
                f"a row of the answer has {part.nbytes:,} bytes, and {ROW_BYTES_MAX:,} can be sent: ask for less of it",
                maximum=ROW_BYTES_MAX,
            )
        if part.nbytes <= PAGE_BYTES or part.num_rows == 1:
            yield part
            continue
        half = part.num_rows // 2
        left += [part.slice(half), part.slice(0, half)]


def _address_space() -> int:
    """Of this process, in bytes, before a question is asked."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # a system without it, which has no use for the limit either
        return 1 << 40


def _end_with(server: int) -> None:
    """A server that is killed takes along what computes for it."""
    while os.getppid() == server:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
