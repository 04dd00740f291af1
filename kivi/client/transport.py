"""The channel and its session stream, for threads.

Threads put encoded requests into a queue and wait for their own answers; gRPC's sending thread takes everything that is
queued each time the stream is ready for more, so the requests of many threads share messages. Answers are handed out
by the thread of gRPC that receives them, as the stream's deserializer. By the one that iterates over the stream they
came no later on an idle machine, but beside an append stream, where each hand-over waits for a processor, the slowest
hundredth of a reader's reads took 15.7 ms and not 13.1 (medians of four runs, alternately).

With many threads what costs is not a request but a message, and waking threads that then wait for the interpreter.
So while most of many threads still wait for their answers, a message waits a moment for the requests of those that are
just being answered, and threads whose answers came together wake each other, two at a time. 64 threads that commit
again and again: 3.1 times the rate of an echo instead of 2.6, medians of six runs; either alone changed nothing.

What is left is the processors. A thread that is woken on another one finds the interpreter's state in none of its
caches: a read took 54 us of the client's threads on two virtual cores, and 24 on one (``taskset``: 12 and 28 thousand
reads a second). 64 threads do 15 or 25 thousand commits a second, as those here happen to run on the processor that
serves the disk's interrupts, or on the other: kept there 13 to 16 thousand, on the other 24 to 30. Nothing here keeps
a caller's thread on a processor: what it starts would inherit that. Only while it waits, it gave reads a half more, and
took a tenth to a quarter from commits. Threads that wake the next just before they wait, pipes instead of locks, and a
server that polls gained nothing.

A lone request takes this way too. A unary call of its own would spare it two hand-overs between threads, and yet a row
took 0.93 ms so instead of 0.77, 12 slots 1.25 instead of 1.03: beginning a call costs more than they do.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import grpc

from kivi.client.calls import (
    Calls,
    Link,
    Queued,
    Session,
    answer,
    broken_by,
    encoded,
    failed,
    leaving,
    together,
    unreachable,
)
from kivi.client.core import Core
from kivi.client.lines import Lines
from kivi.client.steps import (
    Answer,
    Ask,
    Closed,
    CommitPlain,
    Do,
    Effect,
    Message,
    Receive,
    Sleep,
    Steps,
    Stream,
    Work,
    no_text,
    silent,
)
from kivi.errors import KiviError, Unavailable
from kivi.runtime.forks import register_fork_handler
from kivi.runtime.threads import Threads, close_at_exit
from kivi.wire.frames import joined
from kivi.wire.methods import Tls

__all__ = ["Transport"]

T = TypeVar("T")
_FINE: Final = object()
_COMPANY_S: Final = 0.0002
_COMPANY: Final = 64
_MANY: Final = 8
_GATHER_S: Final = 0.0004
_AWAKE: Final = 2  # how many of the threads whose answers came together are being woken at a time
_QUEUED_MAX: Final = 20_000


class _Waiter:
    """One thread waiting for one answer: a lock that is held until the answer is there.

    Threads that are all woken at once find one interpreter, and most of them go to sleep again. So those whose answers
    came together wake each other, a few at a time: who has been woken wakes the next of the ``others``.
    """

    __slots__ = ("error", "gate", "others", "reply")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.others: deque[_Waiter] = deque()
        self.reply: Answer | None = None
        self.error: KiviError | None = None


def _wake(waiting: deque[_Waiter]) -> None:
    """The next of them, if any. A loop takes it, as an interrupt comes after a call, and would lose it."""
    try:  # without a context manager: each answer passes here, and others wait for it
        for waiter in iter(waiting.popleft, None):
            waiter.gate.release()
            return
    except IndexError:
        pass


class _Session(Session):
    """One stream: a queue out, a reader thread in. Once broken it stays broken."""

    def __init__(self, transport: Transport, epoch: int, wait_for_ready: bool) -> None:
        super().__init__(transport.core, epoch, threading.Event())
        self._transport = transport
        self._out: queue.SimpleQueue[Queued | None] = queue.SimpleQueue()
        self._waiters: dict[int, _Waiter] = {}
        call = transport.calls.session(self._frames(), wait_for_ready=wait_for_ready, received=self._received)
        self._call = transport.threads.watch(call)
        transport.threads.start("kivi-session", self._read)

    def _frames(self) -> Iterator[bytes]:
        """gRPC's sending thread asks for the next message when the stream is ready for it."""
        self._transport.threads.met()
        out, held = self._out, None
        while first := [held] if held else self._first():
            if len(self._waiters) > max(
                _MANY, 2 * (out.qsize() + len(self._commits))
            ):  # answers are on their way: more will follow
                time.sleep(_GATHER_S)
            parts, held = together([leaving(queued) for queued in first], out, leaving)
            if any(parts):
                yield joined(parts)

    def _first(self) -> list[Queued]:
        """What the next message begins with; waits for it. Nothing: the end.

        What is made when it leaves waits a moment for company: most often the next request follows at once, and takes
        a Begin into itself, or a Release along.
        """
        found: list[Queued] = []
        queued = self._out.get()
        try:
            while type(queued) is list and len(found) < _COMPANY:
                found.append(queued)
                queued = self._out.get(timeout=_COMPANY_S)
        except queue.Empty:
            return found
        if queued is None:
            self._out.put(None)
            return found
        return [*found, queued]

    def put(self, request: Message, bodies: Sequence[Any] = ()) -> None:
        """Whoever queues bytes waits for their answer, and holds them meanwhile: they need no bound of their own.

        Nor does it wait: an interrupt then would keep back what others have gathered and rely on being queued.
        """
        self._out.put(request if isinstance(request, list) else encoded(request, bodies))

    @property
    def is_full(self) -> bool:
        return self._out.qsize() > _QUEUED_MAX and self.broken is None

    @property
    def is_awaited(self) -> bool:
        return bool(self._waiters)

    def ask(self, asked: Ask | CommitPlain, meanwhile: Callable[[], object] | None = None) -> Answer:
        """The answer; ``meanwhile`` is done while it is on its way."""
        number = next(self._ids)
        waiter = self._waiters[number] = _Waiter()
        try:
            if self.broken is not None:  # looked at after registering: whoever breaks the session sees the waiter
                raise self._lost(sent=False)
            self._queue(number, asked)
            if meanwhile is not None:
                meanwhile()
        except BaseException:
            self._leave(number, waiter)
            raise
        return answer(self._awaited(number, waiter, asked.timeout_s))

    def _awaited(self, number: int, waiter: _Waiter, timeout_s: float | None) -> Any:
        try:
            answered = waiter.gate.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            if answered:
                _wake(waiter.others)
        except BaseException:  # an interrupt
            self._leave(number, waiter)
            raise
        if not answered:
            self._leave(number, waiter)
            if waiter.reply is None and waiter.error is None:
                raise silent(self._core.endpoint, self._core.timeout_s)
        if waiter.error is not None:
            raise waiter.error
        return waiter.reply

    def _leave(self, number: int, waiter: _Waiter) -> None:
        """It waits no longer. If its answer has come at this very moment, it is to wake another all the same."""
        if self._waiters.pop(number, None) is None:
            _wake(waiter.others)

    def _read(self) -> None:
        """Asks for one message after the other; what is in it, ``_received`` has handed out before it comes here."""
        reason: KiviError = Unavailable("the server ended the session")
        try:
            for failed in self._call:
                if failed is not _FINE:
                    reason = failed
                    break
        except Exception as error:
            reason = broken_by(error, "the session")
        self.end(reason)

    def _received(self, data: bytes) -> object:
        """On the thread of gRPC that receives: who waits for an answer need not wait for another thread as well."""
        try:
            self._hand_out(self._answers(data))
        except Exception as error:
            return broken_by(error, "the session")
        return _FINE

    def _hand_out(self, replies: Iterable[tuple[int, Answer]]) -> None:
        awaited: deque[_Waiter] = deque()
        for number, reply in replies:
            waiter = self._waiters.get(number)
            if waiter is not None:
                waiter.reply = reply
                waiter.others = awaited  # before it is taken: who leaves now looks here
                if self._waiters.pop(number, None) is not None:
                    awaited.append(waiter)
        for _ in range(_AWAKE):
            _wake(awaited)

    def end(self, reason: KiviError) -> None:
        if self.broken is None:
            self.broken = reason
        self.hello.set()
        self._out.put(None)
        self._call.cancel()
        with contextlib.suppress(KeyError):
            lost = self._lost(sent=True)
            for _, waiter in iter(self._waiters.popitem, None):  # as in ``_wake``
                waiter.error = lost
                waiter.gate.release()
                lost = self._lost(sent=True)


class Transport(Link[_Session]):
    """The channel and the current session; performs effects on the calling thread."""

    def __init__(self, core: Core, access_token: str | None, tls: Tls | None) -> None:
        super().__init__(core, lambda endpoint: Calls(grpc, endpoint, access_token, tls), _Session)
        self._lock = threading.Lock()
        self.threads = Threads()
        self._lines: dict[str, Lines] = {}
        self.is_parents = False
        close_at_exit(self)
        register_fork_handler(self)

    def forked(self) -> None:
        """This is a child, and the session its parent's."""
        self._lock, self.core.begins = threading.Lock(), threading.Lock()
        self.is_parents = self._closed = True
        self._why_closed = "this client was connected before os.fork(), and is the parent's: connect again here"
        self._current = None
        self._lines = {}  # whose lines and locks are the parent's, too

    def connect(self) -> None:
        """The first session; closes this client if there is none."""
        try:
            self.reach(self.core.timeout_s)
        except BaseException:  # an interrupt, too: nobody else has it to close
            self.close()
            raise

    def reach(self, timeout_s: float | None) -> None:
        """A session: fails at once if nothing listens there; of several servers each may die meanwhile."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def hears(session: _Session) -> Any:
            return session.hello.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

        left = self.core.endpoint.count(",")
        session = self.open(wait_for_ready=False)
        while hears(session) and isinstance(session.broken, Unavailable) and left:
            left -= 1
            session = self.open(wait_for_ready=False)
        if not session.hello.is_set():
            raise silent(self.core.endpoint, self.core.timeout_s)
        if session.broken is not None:
            raise unreachable(self.core.endpoint, session.broken)

    def open(self, wait_for_ready: bool = True) -> _Session:
        session = self._current
        if session is not None and session.broken is None and not session.left:
            return session
        with self._lock:
            return super().open(wait_for_ready)

    def tell(self, request: Message, epoch: int | None = None) -> int:
        while (session := self._current) is not None and session.is_full:  # no answer holds up who asks for none
            time.sleep(0.001)
        return super().tell(request, epoch)

    def lines_at(self, address: str) -> Lines:
        """Subscriptions at the server there; "" is the one of the session."""
        with self._lock:
            if address not in self._lines:
                self._lines[address] = Lines(self.threads, partial(self._begin, address))
            return self._lines[address]

    def _begin(self, address: str, requests: Iterator[bytes]) -> Any:
        """The stream of subscriptions, which somebody else reads. Raises Closed."""
        self.open()
        with self._lock:
            self.check_open()
            # Where that one has ended, another is to be asked: of a cluster, or the server for its process of these.
            return self.threads.watch(self._calls_at(address).subscriptions(requests, wait_for_ready=not address))

    def perform(self, effect: Effect) -> Any:
        if isinstance(effect, (Ask, CommitPlain)):
            return self.of(effect.epoch).ask(effect)
        if isinstance(effect, Work):
            asked = effect.asked
            return effect.work() if asked is None else self.of(asked.epoch).ask(asked, effect.work)
        if isinstance(effect, Sleep):
            return time.sleep(effect.seconds)
        if isinstance(effect, Do):
            return effect.call()
        if isinstance(effect, Receive):
            try:
                return effect.inbox.get(timeout=effect.timeout_s)
            except queue.Empty:
                raise silent(self.core.endpoint, self.core.timeout_s) from None
        self.open()  # raises once closed
        try:
            call = self.calls.start(effect)
            if not isinstance(effect, Stream):
                return call
            self.threads.watch(call)
            try:
                for message in call:
                    effect.on_message(message)
            finally:
                call.cancel()
        except grpc.RpcError as error:
            raise failed(error, self.core.endpoint, effect.timeout_s and self.core.timeout_s) from None
        except ValueError:  # gRPC's way to say that another thread has closed the channel in between
            if not self._closed:
                raise
            raise Closed(self._why_closed) from None

    def run(self, steps: Steps[T]) -> T:
        try:
            effect = next(steps)
            while True:
                try:
                    result = self.perform(effect)
                except KiviError as error:
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        except UnicodeEncodeError as error:
            raise no_text(error) from None
        finally:
            steps.close()

    def close(self) -> None:
        if self.is_parents:
            return
        with self._lock:
            self._closed = True
            session = self._current
        if session is not None:
            session.end(Closed("this client is closed"))
        for calls in self._at.values():
            calls.channel.close()
        self.threads.join()
