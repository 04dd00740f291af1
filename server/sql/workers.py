"""The processes that answer questions: as many as may be there, one for each question, used again, killed in time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kivi_server.sql.pipe import Gone, Kind, receive, send

from kivi.errors import KiviError, ResourceExhausted, Unavailable
from kivi.sql import Limits
from kivi.wire.status import from_error, to_error
from kivi.wire.v1 import types_pb2

__all__ = ["Question", "Workers"]

_KEPT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_START_S: Final = 60.0
"""A process loads DuckDB and Arrow in a second or two, on a busy machine in more; no question's time is spent on it."""
_LATE_S: Final = 1.0
"""A process says by itself that its time is up; it is killed if it has not said so a little later."""


@dataclass(frozen=True, slots=True)
class Question:
    """``parameters``: an Arrow IPC stream, as the client sent it. ``table``: a name to an encoded kivi.v1.Table, None
    where there is none; ``tables``: the names of all. ``files``: an event table's name to its settled files
    (``encode_files``). ``scan``: an encoded kivi.v1.ScanSpec to its pages, each an Arrow IPC stream. All raise what the
    question fails with."""

    text: str
    parameters: bytes
    table: Callable[[str], bytes | None]
    tables: Callable[[], list[str]]
    files: Callable[[str], bytes]
    scan: Callable[[bytes], Iterator[Any]]


class Workers:
    """Thread safe. ``most``: how many there may be."""

    def __init__(self, limits: Limits, most: int) -> None:
        self._limits, self.most = limits, max(1, most)
        self._room = threading.Semaphore(self.most)
        self._idle = list[_Worker]()
        self._busy = set[_Worker]()
        self._lock = threading.Lock()
        self._closed = False
        self.killed = 0
        self.answered = 0

    def answer(
        self, question: Question, timeout_s: float | None = None, left: Future[None] | None = None
    ) -> Iterator[Any]:
        """Pages of the answer, each an Arrow IPC stream; at least one. ``timeout_s``: what is left for it. ``left`` is
        done once nobody waits for it any more, which ends it.

        Raises ResourceExhausted where a limit ends it, and what answering it raises.
        """
        until = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else max(0.0, timeout_s))
        if not self._room.acquire(timeout=min(self._limits.timeout_s, until - time.monotonic())):
            raise ResourceExhausted(
                f"{self.most} questions are being answered, and none ended in time: ask again later",
                limit="sql_processes",
                maximum=self.most,
                retry_s=1.0,
            )
        try:
            if left is not None and left.done():
                raise ResourceExhausted("nobody waits for the answer any more")
            worker = self._taken()
        except BaseException:
            self._room.release()
            raise
        left_s = max(0.001, min(self._limits.timeout_s, until - time.monotonic()))
        run = _Run(worker, replace(self._limits, timeout_s=left_s), self._ended)
        if left is not None:
            left.add_done_callback(lambda _: run.end())
        try:
            yield from run.pages(question)
        finally:
            run.end()

    def _taken(self) -> _Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                worker = _Worker()
            elif worker.process.poll() is not None:  # the system has ended it meanwhile
                worker.kill()
                continue
            with self._lock:
                if not self._closed:
                    self._busy.add(worker)
                    return worker
            worker.kill()
            raise Unavailable("the server is stopping: connect again in a moment", stopping=True)

    def _ended(self, worker: _Worker, whole: bool) -> None:
        """Once for each question: ``whole`` if its process waits for the next one."""
        with self._lock:
            self._busy.discard(worker)
            if whole and not self._closed:
                self.answered += 1
                self._idle.append(worker)
                worker = None  # type: ignore[assignment]
        if worker is not None:
            worker.kill()
            self.killed += 1
        self._room.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            left, self._idle = [*self._idle, *self._busy], []
        for worker in left:
            worker.kill()


class _Worker:
    """A process, and this end of its pipe. Raises Unavailable if the system has no room for another one."""

    def __init__(self) -> None:
        try:
            self.channel, theirs = socket.socketpair()
            with theirs:
                self.process = self._started(theirs.fileno())
        except OSError as error:
            raise Unavailable(
                f"no process could be started for a question: {error.strerror}; ask again later, and if that does not "
                "help, look at the memory of the server's machine and at how many processes and files it may have open"
            ) from None
        try:
            self.channel.settimeout(_START_S)
            receive(self.channel)  # it is there
            self.channel.settimeout(None)
        except Gone:
            self.kill()
            raise Unavailable("no process could be started for a question: the server's log may say why") from None

    def _started(self, channel: int) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # kivi is where it is for us
        command = [sys.executable, "-m", "kivi_server.sql.worker", str(channel)]
        try:
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[channel])
        except OSError:
            self.channel.close()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()


class _Run:
    """A question in its process, until its answer is read, its time is up, or nobody wants it any more."""

    def __init__(self, worker: _Worker, limits: Limits, ended: Callable[[_Worker, bool], None]) -> None:
        self._worker, self._limits, self._told = worker, limits, ended
        self._lock, self._over = threading.Lock(), False
        self._whole = self._timed_out = False
        self._scans = dict[bytes, Iterator[Any]]()
        self._timer = threading.Timer(limits.timeout_s + _LATE_S, self._time_is_up)
        self._timer.daemon = True
        self._timer.start()

    def _time_is_up(self) -> None:
        self._timed_out = True
        self.end()

    def end(self) -> None:
        """Harmless twice, from any thread."""
        with self._lock:
            over, self._over = self._over, True
        if not over:
            self._timer.cancel()
            self._told(self._worker, self._whole)

    def pages(self, question: Question) -> Iterator[Any]:
        channel = self._worker.channel
        try:
            send(channel, Kind.PARAMETERS, question.parameters)
            asked = {"text": question.text, "limits": asdict(self._limits)}
            send(channel, Kind.QUESTION, json.dumps(asked).encode())
            while True:
                kind, payload = receive(channel)
                if kind is Kind.RESULT:
                    yield payload
                elif kind is Kind.END:
                    self._whole = True
                    return
                elif kind is Kind.ERROR:
                    self._whole = True
                    raise from_error(types_pb2.Error.FromString(payload))
                else:
                    self._serve(channel, question, kind, payload)
        except Gone:
            raise self._lost() from None

    def _serve(self, channel: socket.socket, question: Question, kind: Kind, payload: bytes) -> None:
        """What the process asks for. An error is told to it, and comes back as what the question failed with."""
        try:
            if kind is Kind.TABLE:
                send(channel, Kind.VALUE, question.table(payload.decode()) or b"")
            elif kind is Kind.TABLES:
                send(channel, Kind.VALUE, json.dumps(question.tables()).encode())
            elif kind is Kind.FILES:
                send(channel, Kind.VALUE, question.files(payload.decode()))
            elif kind is Kind.SCAN:
                number = len(self._scans).to_bytes(4, "little")
                self._scans[number] = iter(question.scan(payload))
                send(channel, Kind.VALUE, number)
            elif kind is Kind.NEXT and payload in self._scans:
                send(channel, Kind.VALUE, next(self._scans[payload], b""))
            else:
                raise Gone
        except KiviError as error:
            send(channel, Kind.ERROR, to_error(error).SerializeToString())

    def _lost(self) -> KiviError:
        if self._timed_out:
            return ResourceExhausted(
                f"the question took longer than it may, {self._limits.timeout_s:.3g} s, and was ended: ask for less",
                limit="sql_timeout_s",
                maximum=self._limits.timeout_s,
            )
        return ResourceExhausted(
            "the process that computed this question has ended: it took more memory than it may, was killed, or nobody "
            "waits for the answer any more"
        )
