"""How nodes ask one another for what they do not hold (``kivi.store.spanning``): over the log's servers, page by page.

::

    asker   O id request -->                                                   one subject for each node
            <-- F frame                or, of a frame that is larger than a message: P part ... F part
            N id ------->              sent before the frame is looked at, so the next one is made meanwhile
            <-- E                      the end, or X [error, message, details]
            C id ------->              nobody wants the rest

A node reaches the others by the connection that it has to the log's servers anyway, over a second one of its own, so
that no page is in the way of what is being committed: who may read the log, which has every event, may ask. Nothing of
it is kept by a stream. With ``--peers`` a node's server of the log is on its own machine, and a page goes from there
straight to the other node's.

An answer has no time limit of its own while the node that makes it is heard. It is given up when that node is silent,
when its process is gone, or is another one by now, and when the time of whoever asked is over. What nobody asks for any
more an owner forgets.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, Final

from kivi import errors
from kivi.errors import KiviError, Unavailable
from kivi.log.natslink import Nats
from kivi.log.replicated import ReplicatedLog
from kivi.runtime import deadlines

__all__ = ["Asking"]

_log = logging.getLogger("kivi.cluster")
_THREADS: Final = 4
_IDLE_S: Final = 30.0
_LOOK_S: Final = 0.25
_ANSWER_S: Final = 300.0
_SETUP_S: Final = 10.0
_ID_BYTES: Final = 12
_HEADER_BYTES: Final = 4 << 10


@dataclass(slots=True)
class _Answer:
    """One that is being given."""

    frames: Iterator[bytes]
    parts: deque[bytes] = field(default_factory=deque)
    used_at: float = field(default_factory=time.monotonic)
    is_busy: bool = False


class Asking:
    """One node's way to the others. ``serve`` gives the frames of an answer. Thread safe."""

    def __init__(self, nats: Nats, prefix: str, log: ReplicatedLog, serve: Callable[[bytes], Iterator[bytes]]) -> None:
        self._nats, self._prefix, self._log, self._serve = nats, prefix, log, serve
        self._part_bytes = nats.link.open.max_payload - _HEADER_BYTES
        self._answers: dict[bytes, _Answer] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kivi-owner")
        self.asked = self.served = self.asked_bytes = 0
        nats.call(self._listen(), _SETUP_S)

    async def _listen(self) -> None:
        client = self._nats.link.open
        await client.subscribe(self._subject(self._log.node), cb=self._heard)
        await client.flush()

    def _subject(self, node: int) -> str:
        return f"{self._prefix}.{node:x}"

    # -- who asks ---------------------------------------------------------------------------------

    def plan(self, shards: int, without: frozenset[int], ts: int) -> list[tuple[int, int]]:
        """As of ``kivi.store.spanning.Owners``."""
        log = self._log
        return log.members.owners(shards, besides=log.node, time_us=log.place.time_us, without=without, ts=ts)

    def ask(self, node: int, request: bytes) -> Iterator[bytes]:
        """As of ``kivi.store.spanning.Owners``."""
        if len(request) > self._part_bytes:
            raise errors.ResourceExhausted(
                f"what this read asks other nodes for takes {len(request):,} bytes, and a message at most "
                f"{self._part_bytes:,}: ask for less at a time",
                maximum=self._part_bytes,
            )
        id_ = secrets.token_bytes(_ID_BYTES)
        self.asked += 1
        boot = self._log.boot_of(node)
        return self._frames(node, boot, id_, self._begin(node, b"O" + id_ + request))

    def _begin(self, node: int, payload: bytes) -> Future[Any]:
        return self._nats.start(self._nats.link.request(self._subject(node), payload, _ANSWER_S))

    def _frames(self, node: int, boot: int, id_: bytes, page: Future[Any]) -> Iterator[bytes]:
        parts, is_over = list[bytes](), False
        try:
            while True:
                reply = self._awaited(node, boot, page)
                kind, body = reply[:1], reply[1:]
                if kind in (b"F", b"P"):
                    page = self._begin(node, b"N" + id_)
                    parts.append(body)
                    self.asked_bytes += len(body)
                    if kind == b"F":
                        yield parts[0] if len(parts) == 1 else b"".join(parts)
                        parts = []
                    continue
                is_over = True
                if kind == b"X":
                    raise _error(body)
                return
        finally:
            if not is_over:
                page.cancel()
                with contextlib.suppress(KiviError):
                    self._nats.start(self._send(self._subject(node), b"C" + id_))

    async def _send(self, subject: str, payload: bytes) -> None:
        await self._nats.link.open.publish(subject, payload)

    def _awaited(self, node: int, boot: int, page: Future[Any]) -> bytes:
        """Raises Unavailable if nothing comes."""
        while True:
            try:
                data: bytes = page.result(min(_LOOK_S, deadlines.left_s())).data
                return data
            except FutureTimeout:
                if page.done():  # it was its own
                    raise Unavailable(f"node {node:x} has not answered in {_ANSWER_S:.0f} s") from None
                if not deadlines.left_s():
                    raise Unavailable(f"node {node:x} has not answered in time") from None
                if not self._log.members.answers(node, self._log.place.time_us):
                    raise Unavailable(f"node {node:x} is silent") from None
                if self._log.boot_of(node) != boot:  # what it was asked, nobody there knows of
                    raise Unavailable(f"node {node:x} was started again") from None
            except Unavailable as error:
                raise Unavailable(f"node {node:x} is not there: {error.message}") from None
            except Exception as error:
                raise Unavailable(f"node {node:x} cannot be asked: {error!r}") from error

    # -- who is asked -----------------------------------------------------------------------------

    async def _heard(self, message: Any) -> None:
        kind, id_, body = message.data[:1], message.data[1 : 1 + _ID_BYTES], message.data[1 + _ID_BYTES :]
        with contextlib.suppress(RuntimeError):  # the pool is shut down
            if kind == b"C":
                self._pool.submit(self._forget, id_)
            else:
                self._pool.submit(self._answer, id_, body if kind == b"O" else None, message.reply)

    def _answer(self, id_: bytes, request: bytes | None, reply: str) -> None:
        with self._lock:
            if request is not None:
                self._answers[id_] = _Answer(self._serve(request))
                self.served += 1
            if (answer := self._answers.get(id_)) is not None:
                answer.is_busy = True
        try:
            payload = self._next(answer)
        except Exception as error:
            if not isinstance(error, KiviError):
                _log.exception("a read for another node has failed")
                error = Unavailable(f"it has failed there: {error!r}")
            payload = b"X" + json.dumps([type(error).__name__, error.message, error.details], default=str).encode()
        if answer is not None:
            answer.used_at, answer.is_busy = time.monotonic(), False
        if payload[:1] in (b"E", b"X"):
            self._forget(id_)
        with contextlib.suppress(KiviError):
            self._nats.start(self._send(reply, payload))

    def _next(self, answer: _Answer | None) -> bytes:
        if answer is None:
            raise Unavailable("this answer was forgotten")
        if not answer.parts:
            frame = next(answer.frames, None)
            if frame is None:
                return b"E"
            size = self._part_bytes
            answer.parts.extend(frame[at : at + size] for at in range(0, len(frame), size))
        part = answer.parts.popleft()
        return (b"P" if answer.parts else b"F") + part

    def _forget(self, id_: bytes) -> None:
        with self._lock:
            answer = self._answers.pop(id_, None)
        if answer is not None:
            with contextlib.suppress(ValueError, KiviError):  # it is running: then it ends by being dropped
                answer.frames.close()  # type: ignore[attr-defined]

    def sweep(self) -> None:
        """Forgets what nobody has asked for lately."""
        before = time.monotonic() - _IDLE_S
        with self._lock:
            idle = [id_ for id_, one in self._answers.items() if one.used_at < before and not one.is_busy]
        for id_ in idle:
            self._forget(id_)

    def close(self) -> None:
        """Gives no answers any more. Harmless twice."""
        self._nats.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for id_ in list(self._answers):
            self._forget(id_)


def _error(body: bytes) -> KiviError:
    name, message, details = json.loads(body)
    kind: Any = getattr(errors, name, None)
    if kind in (errors.SnapshotTooOld, errors.NotFound, errors.InvalidArgument, errors.OutOfRange, errors.DataLoss):
        found: KiviError = kind(message, **details)
        return found
    return Unavailable(message, **details)
