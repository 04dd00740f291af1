"""The listener by itself, with a small application: its clocks, shortened, and what connections may hold."""

from __future__ import annotations

import asyncio
import gc
import selectors
import socket
import ssl
import struct
import time
from asyncio import selector_events
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kivi_server import limits
from kivi_server.http import listener
from kivi_server.http.held import Held
from kivi_server.http.listener import HttpListener
from starlette.requests import Request
from starlette.responses import Response

from tests.certificates import Authority
from tests.waiting import until

HEADERS_S: Final = 0.3
STALL_S: Final = 0.8
LARGE: Final = 8 << 20
CLOSES: Final = b"Connection: close\r\n"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_HEADERS_S", HEADERS_S)
    monkeypatch.setattr(limits, "STALL_S_MAX", STALL_S)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """As many bytes as the path says; a POST reads its body first."""
    request = Request(scope, receive)
    if request.method == "POST":
        await request.body()
    await Response(b"x" * int(request.url.path[1:]))(scope, receive, send)


@asynccontextmanager
async def serving(answers: Any = app, secure: ssl.SSLContext | None = None) -> AsyncIterator[HttpListener]:
    running = HttpListener(["localhost:0"], "--http", answers, secure)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def connected(served: HttpListener, *sent: bytes, room: int = 65_536) -> AsyncIterator[socket.socket]:
    """``room``: what the client's system takes for it."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", int(served.addresses[0].rpartition(":")[2])))
        for part in sent:
            await loop.sock_sendall(client, part)
        yield client


async def all_of(client: socket.socket, pause_s: float = 0.0, piece: int = 1 << 20) -> bytes:
    """Up to the end of the connection, whichever it is."""
    said = b""
    try:
        while more := await asyncio.get_running_loop().sock_recv(client, piece):
            said += more
            await asyncio.sleep(pause_s)
    except ConnectionError:
        pass
    return said


class Loop(asyncio.SelectorEventLoop):
    """Time, for all of its clocks, is what it waits for and what it works: none goes by while a busy machine keeps it
    waiting for a processor, in which the listener and its clients, who are of the same loop, do nothing either."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._own = selectors.DefaultSelector()
        self._look = self._own.select
        self._own.select = self._wait  # type: ignore[method-assign]
        super().__init__(self._own)

    def _wait(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began = time.monotonic()
        found = self._look(timeout)
        waited_s = time.monotonic() - began
        self._waited_s += waited_s if timeout is None else min(waited_s, max(0.0, timeout))
        return found

    def time(self) -> float:
        return self._waited_s + time.thread_time()


def now_s() -> float:
    return asyncio.get_running_loop().time()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(bounded())


def get(nbytes: int, more: bytes = b"") -> bytes:
    return b"GET /%d HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (nbytes, more)


def test_who_owes_a_request_is_closed_in_time() -> None:
    async def test() -> None:
        async with serving() as served:
            for sent, said in (
                (b"", b""),
                (b"GET / HTTP/1.1\r\nHos", b"HTTP/1.1 408"),
                (get(3), b"HTTP/1.1 200"),
                (get(3) + b"GE", b"HTTP/1.1 200"),
            ):
                began = now_s()
                async with connected(served, sent) as client:
                    answer = await all_of(client)
                assert answer.startswith(said) and bool(answer) == bool(said)
                assert b"408" in answer or not sent.endswith((b"Hos", b"GE"))
                assert now_s() - began >= HEADERS_S

    run(test)


@pytest.mark.parametrize("also", [b"", CLOSES])
def test_a_body_that_nobody_waits_for_holds_no_connection(also: bytes) -> None:
    """The answer did not wait for it: however it trickles on, it ends or the connection does."""

    async def test() -> None:
        async with serving() as served, connected(served, get(3, b"Content-Length: 1000000\r\n" + also)) as client:
            trickled = asyncio.create_task(trickle(client))
            answer = await all_of(client)
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"xxx")
            await trickled
        async with (
            serving() as served,
            connected(served, get(3, b"Content-Length: 2\r\n"), b"z", b"z", get(4)) as client,
        ):
            assert (await all_of(client)).endswith(b"xxxx")

    async def trickle(client: socket.socket) -> None:
        try:
            while True:
                await asyncio.get_running_loop().sock_sendall(client, b"z")
                await asyncio.sleep(HEADERS_S / 20)
        except OSError:
            pass

    run(test)


@pytest.mark.parametrize("also", [b"", CLOSES])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_that_did_not_wait_for_a_body_is_there_when_it_is_sent(
    chunked: bool, also: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many clients look for it only then, and would find a connection that was reset."""
    monkeypatch.setattr(listener, "_HEADERS_S", 20.0)  # they are as quick with megabytes as a machine is

    async def test() -> None:
        loop, size = asyncio.get_running_loop(), 9 << 20
        length = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % size
        async with serving() as served, connected(served, get(3, length + also)) as client:
            await asyncio.sleep(0.1)  # its answer is made
            await loop.sock_sendall(client, (b"%x\r\n" % size if chunked else b"") + bytes(size))
            assert served.held.nbytes <= 1 << 20
            if chunked:
                await loop.sock_sendall(client, b"\r\n0\r\n\r\n")
            if not also:
                await loop.sock_sendall(client, get(4, CLOSES))
            answer = await all_of(client)
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"xxx" if also else b"xxxx")

    run(test)


def test_a_flood_of_small_chunks_is_refused_and_thousands_of_lines_are_not() -> None:
    async def test() -> None:
        head = get(3, CLOSES + b"Transfer-Encoding: chunked\r\n").replace(b"GET", b"POST")
        async with serving() as served:
            for chunk, status in ((b"1\r\nx\r\n", b"400"), (b"50\r\n" + b"x" * 80 + b"\r\n", b"200")):
                async with connected(served, head, chunk * 5_000, b"0\r\n\r\n") as client:
                    assert (await all_of(client)).startswith(b"HTTP/1.1 " + status)

    run(test)


def test_a_flood_of_headers_is_refused_before_the_application_is_asked() -> None:
    async def test() -> None:
        most, chunked = listener._HEADERS_MAX, b"Transfer-Encoding: chunked\r\n"
        many = b"".join(b"X-%d: y\r\n" % i for i in range(most + 2))
        post = get(3, CLOSES + chunked).replace(b"GET", b"POST")
        async with serving() as served:
            for sent, status in (
                (get(3, CLOSES + many[: many.index(b"X-%d:" % (most - 2))]), b"200"),  # and Host
                (get(3, many), b"400"),
                (post + b"1\r\nx\r\n0\r\n" + many + b"\r\n", b"400"),
            ):
                async with connected(served, sent) as client:
                    said = await all_of(client)
                    assert said.startswith(b"HTTP/1.1 " + status)
                    assert status == b"200" or b"at most %d headers" % most in said

    run(test)


def test_what_many_bring_at_once_is_read_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them in each round of the event loop, where that takes all of the time; nothing is lost meanwhile."""
    monkeypatch.setattr(listener, "_TURN_S", 0.0)
    quick, body = get(3, CLOSES), b"x" * 300_000
    post = get(3, CLOSES + b"Content-Length: %d\r\n" % len(body)).replace(b"GET", b"POST")

    async def test() -> None:
        rounds, asked = 0, []

        async def counts(scope: Any, receive: Any, send: Any) -> None:
            asked.append(rounds)
            await app(scope, receive, send)

        async def go_round() -> None:
            nonlocal rounds
            while True:
                rounds += 1
                await asyncio.sleep(0)

        async with serving(counts) as served:
            going = asyncio.create_task(go_round())
            for sent, status, ends in (
                (quick, b"200", False),
                (post + body, b"200", False),
                (b"nonsense\r\n\r\n", b"400", True),
            ):
                asked.clear()
                clients = [
                    socket.create_connection(("127.0.0.1", int(served.addresses[0].rpartition(":")[2])))
                    for _ in range(40)
                ]
                for client in clients:  # all before the loop looks again
                    client.setblocking(False)
                    left = sent[client.send(sent) :]
                    if ends:
                        client.shutdown(socket.SHUT_WR)
                said = await asyncio.gather(*(rest(client, left) for client in clients))
                assert all(answer.startswith(b"HTTP/1.1 " + status) for answer in said)
                assert len(set(asked)) == len(asked) or sent is not quick
            going.cancel()

    async def rest(client: socket.socket, left: bytes) -> bytes:
        with client:
            if left:
                await asyncio.get_running_loop().sock_sendall(client, left)
            return await all_of(client)

    run(test)


def test_of_an_answer_that_nobody_takes_a_piece_is_copied_and_all_of_it_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And who takes theirs, meanwhile, gets it whole."""
    monkeypatch.setattr(limits, "STALL_S_MAX", 20.0)

    async def test() -> None:
        async with serving() as served:
            readers = [connected(served, get(LARGE, CLOSES), room=4_096) for _ in range(10)]
            for reader in readers:
                await reader.__aenter__()
            async with connected(served, get(LARGE, CLOSES)) as client:
                assert (await all_of(client)).endswith(b"\r\n\r\n" + b"x" * LARGE)
            connections: set[Any] = served._server.server_state.connections
            await until(lambda: all(each.transport.get_write_buffer_size() for each in connections))
            assert len(connections) == 10
            untaken = [each.transport.get_write_buffer_size() for each in connections]
            assert max(untaken) <= listener._PIECE
            rests = [LARGE - served.held._by[each] for each in connections]  # what the system has taken on itself
            assert served.held.nbytes > sum(untaken) and all(0 <= taken < LARGE - listener._PIECE for taken in rests)
            for reader in readers:
                await reader.__aexit__(None, None, None)
            await until(lambda: not connections)
            assert served.held.nbytes == 0

    run(test)


def test_a_request_that_waits_for_its_turn_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener._Turns, "_become_due", lambda turns: None)  # none comes before the clock

    async def test() -> None:
        async with serving() as served, connected(served, get(3, CLOSES)) as client:
            assert (await all_of(client)).endswith(b"xxx")

    run(test)


def test_of_what_one_connection_brings_a_turn_reads_some_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have come, and no more is taken from the system until they are read."""
    monkeypatch.setattr(listener, "_TURN_S", 0.0)
    rounds, chunks, most = 0, Counter[int](), 0

    async def go_round() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    class Counting(listener._Parser):
        def next_event(self) -> Any:
            nonlocal most
            most = max(most, self.nbytes)
            event = super().next_event()
            chunks[rounds] += isinstance(event, h11.Data)
            return event

    monkeypatch.setattr(listener, "_Parser", Counting)

    async def test() -> None:
        head = get(3, CLOSES + b"Transfer-Encoding: chunked\r\n").replace(b"GET", b"POST")
        async with serving() as served:
            going = asyncio.create_task(go_round())
            async with connected(served, head, (b"50\r\n" + b"x" * 80 + b"\r\n") * 20_000, b"0\r\n\r\n") as client:
                assert (await all_of(client)).endswith(b"xxx")
            going.cancel()
        assert sum(chunks.values()) >= 20_000 and max(chunks.values()) <= listener._EVENTS
        assert most < 1 << 20

    run(test)


def test_a_head_that_comes_at_once_is_no_longer_than_one_that_does_not() -> None:
    async def test() -> None:
        async with serving() as served:
            for nbytes, status in ((60_000, b"200"), (90_000, b"400")):
                port = int(served.addresses[0].rpartition(":")[2])
                with socket.create_connection(("127.0.0.1", port)) as client:  # all before the loop looks
                    client.setblocking(False)
                    assert client.send(head := get(3, CLOSES + b"X: %b\r\n" % (b"y" * nbytes))) == len(head)
                    assert (await all_of(client)).startswith(b"HTTP/1.1 " + status)

    run(test)


def test_a_request_that_waits_for_its_turn_when_the_server_stops_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener._Turns, "_become_due", lambda turns: None)  # none comes before that
    monkeypatch.setattr(listener, "_HEADERS_S", 20.0)

    async def test() -> None:
        async with serving() as served, connected(served, get(3)) as client:
            connections: set[Any] = served._server.server_state.connections
            await until(lambda: any(each._waits for each in connections))
            stopping = asyncio.create_task(served.stop())
            assert (await all_of(client)).endswith(b"xxx")
            await stopping

    run(test)


def test_a_stop_waits_for_no_rest_of_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its answer, and goes on sending what nobody wanted; one is answered when the server stops already."""
    monkeypatch.setattr(listener, "_HEADERS_S", 30.0)
    late = asyncio.Event()

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/late":
            await late.wait()
        await Response(b"no", status_code=401)(scope, receive, send)

    async def goes_on(path: str, served: HttpListener, answered: asyncio.Semaphore) -> bytes:
        reader, writer = await asyncio.open_connection("localhost", int(served.addresses[0].rpartition(":")[2]))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 1000000000\r\n\r\n"
        writer.write(head.encode())
        reading = asyncio.create_task(reader.read(64))
        while not reader.at_eof() and not writer.is_closing():
            writer.write(b"x" * 100)
            await asyncio.sleep(0.05)
            if reading.done() and not reading.get_name().startswith("told"):
                reading.set_name("told")
                answered.release()
        with suppress(ConnectionError):
            await writer.drain()
        return await reading

    async def test() -> None:
        answered, n = asyncio.Semaphore(0), 50
        async with serving(answers) as served:
            each = [asyncio.create_task(goes_on("/", served, answered)) for _ in range(n)]
            for _ in range(n):
                await answered.acquire()
            last = asyncio.create_task(goes_on("/late", served, answered))
            await asyncio.sleep(0.2)
            began = now_s()
            asyncio.get_running_loop().call_later(0.3, late.set)
            await served.stop()
            assert 0.3 <= now_s() - began < 3
            for one in (*each, last):
                assert (await one).startswith(b"HTTP/1.1 401")

    run(test)


def test_those_that_take_more_at_once_are_written_to_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_TURN_S", 0.0)
    monkeypatch.setattr(limits, "STALL_S_MAX", 20.0)
    rounds, pieces = 0, Counter[int]()

    async def go_round() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def test() -> None:
        async with serving() as served, AsyncExitStack() as entered:
            readers = [await entered.enter_async_context(connected(served, get(LARGE, CLOSES))) for _ in range(10)]
            connections: set[Any] = served._server.server_state.connections
            await until(lambda: len(connections) == 10 and all(each.flow.write_paused for each in connections))

            def counted(self: Any, data: bytes) -> None:
                pieces[rounds] += len(data) == listener._PIECE
                write(self, data)

            going = asyncio.create_task(go_round())
            transports: Any = vars(selector_events)["_SelectorSocketTransport"]
            write = transports.write
            monkeypatch.setattr(transports, "write", counted)
            for reader in readers:  # all before the loop looks again
                with suppress(BlockingIOError):
                    while reader.recv(1 << 20):
                        pass
            await until(lambda: pieces)
            await asyncio.sleep(0.2)
            going.cancel()
        assert pieces and max(pieces.values()) <= 2  # whose turns came one after the other

    run(test)


def test_who_has_gone_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    async def own(turns: Any) -> None:
        nonlocal taken
        taken += 1
        await asyncio.sleep(0)

    monkeypatch.setattr(listener._Turns, "own", own)

    async def test() -> None:
        async with serving() as served:
            async with connected(served, get(8 * LARGE), room=4_096) as client:
                connections: set[Any] = served._server.server_state.connections
                await until(lambda: any(each.flow.write_paused for each in connections))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await until(lambda: not served._server.server_state.tasks)
            assert taken < 4 * LARGE // listener._PIECE

    run(test)


def test_who_has_said_all_that_it_will_gets_the_whole_answer() -> None:
    async def test() -> None:
        async with serving() as served, connected(served, get(8 << 20)) as client:
            head = await asyncio.get_running_loop().sock_recv(client, 1)
            client.shutdown(socket.SHUT_WR)
            answer = await all_of(client)
            assert head == b"H" and len(answer.partition(b"\r\n\r\n")[2]) == 8 << 20

    run(test)


def test_who_takes_nothing_is_dropped_and_who_takes_little_is_not() -> None:
    async def test() -> None:
        async with serving() as served:
            async with connected(served, get(LARGE)) as client:
                began = now_s()
                said = await all_of(client, pause_s=0.015)
                assert said.endswith(b"\r\n\r\n" + b"x" * LARGE)
                assert now_s() - began > STALL_S
            for closes in (b"", CLOSES):
                async with connected(served, get(LARGE, closes), room=4_096) as client:
                    await asyncio.sleep(3 * STALL_S)
                    assert served.held.nbytes == 0
                    assert len(await all_of(client)) < LARGE

    run(test)


async def streams(scope: Any, receive: Any, send: Any) -> None:
    """Some KiB now and then, as a live query has."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(1_000):
        await send({"type": "http.response.body", "body": b"x" * 20_000, "more_body": True})
        await asyncio.sleep(0.005)


def test_of_an_answer_that_goes_on_what_nobody_takes_is_counted_from_its_first_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        monkeypatch.setattr(limits, "STALL_S_MAX", 20.0)
        async with serving(streams) as served, connected(served, get(1), room=4_096):
            connections, untaken = served._server.server_state.connections, 0
            while not untaken:
                await asyncio.sleep(0)
                untaken = sum(each.transport.get_write_buffer_size() for each in connections)
            assert untaken < 64_000 and served.held.nbytes >= untaken

    run(test)


def test_over_tls_who_takes_nothing_is_dropped_and_who_takes_little_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncio.constants.SSL_SHUTDOWN_TIMEOUT", HEADERS_S)
    authority = Authority(tmp_path)
    pair = authority.signs("server")
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(pair.cert, pair.key)
    trusting = ssl.create_default_context(cafile=authority.ca)

    async def test() -> None:
        async with serving(secure=secure) as served:
            for closes in (b"", CLOSES):
                async with connected(served, room=65_536) as client:
                    reader, writer = await asyncio.open_connection(
                        sock=client, ssl=trusting, server_hostname="localhost", limit=4_096
                    )
                    writer.write(get(LARGE, closes))
                    began, said = now_s(), 0
                    while more := await reader.read(1 << 16):
                        said += len(more)
                        await asyncio.sleep(0.015)
                    assert said > LARGE and now_s() - began > 2 * HEADERS_S
                    writer.close()
                async with connected(served, room=4_096) as client:
                    _, writer = await asyncio.open_connection(
                        sock=client, ssl=trusting, server_hostname="localhost", limit=4_096
                    )
                    writer.write(get(LARGE, closes))
                    most = 0
                    while not most or served._server.server_state.connections:
                        await asyncio.sleep(0.01)
                        most = max(most, served.held.nbytes)
                    assert most > LARGE // 4 and served.held.nbytes == 0
                    writer.transport.abort()

    run(test)


def test_who_resets_a_connection_leaves_nothing_behind() -> None:
    async def test() -> None:
        async with serving() as served:
            for _ in range(5):
                async with connected(served, get(3)) as client:
                    await asyncio.get_running_loop().sock_recv(client, 1_000)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(2 * HEADERS_S)
            gc.collect()
            found = [each for each in gc.get_objects() if type(each) is listener._Connection]
            assert not [each for each in found if each.server_state is served._server.server_state]

    run(test)


def test_a_rest_of_a_body_that_is_none_ends_quietly() -> None:
    async def test() -> None:
        said: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: said.append(what))
        head = get(3, b"Transfer-Encoding: chunked\r\n")
        async with serving() as served, connected(served, head) as client:
            answer = await asyncio.get_running_loop().sock_recv(client, 1_000)
            await asyncio.get_running_loop().sock_sendall(client, b"this is no chunk\r\n")
            assert (answer + await all_of(client)).endswith(b"xxx")
        assert said == []

    run(test)


def test_a_body_without_chunks_may_come_in_small_pieces() -> None:
    async def test() -> None:
        count = listener._CHUNKS + 200
        head = get(3, CLOSES + b"Content-Length: %d\r\n" % count).replace(b"GET", b"POST")
        async with serving() as served, connected(served, head) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(count):
                await asyncio.get_running_loop().sock_sendall(client, b"x")
                await asyncio.sleep(0.001)
            assert (await all_of(client)).startswith(b"HTTP/1.1 200")

    run(test)


def test_what_connections_hold_is_bounded_and_who_holds_little_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_HEADERS_S", 20.0)
    monkeypatch.setattr(limits, "STALL_S_MAX", 20.0)

    async def test() -> None:
        async with serving() as served:
            served.held._bytes_max = 3 * LARGE
            async with connected(served, b"GET /3 HT") as small:
                readers = [connected(served, get(LARGE, CLOSES), room=4_096) for _ in range(12)]
                clients = [await reader.__aenter__() for reader in readers]
                while served.held.given_up < 7:
                    assert served.held.nbytes <= 3 * LARGE
                    await asyncio.sleep(0.01)
                await asyncio.get_running_loop().sock_sendall(small, get(3, CLOSES).partition(b"HT")[2])
                assert (await all_of(small)).endswith(b"xxx")
                last = await all_of(clients[-1], piece=LARGE)
                assert last.endswith(b"x" * LARGE)
                for reader in readers:
                    await reader.__aexit__(None, None, None)

    run(test)


class Client:
    def __init__(self, held: Held) -> None:
        self.held, self.nbytes, self.is_open = held, 0, True

    def holds(self) -> int:
        return self.nbytes

    def give_up(self) -> None:
        self.nbytes, self.is_open = 0, False


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.booleans()), max_size=80))
def test_the_sum_is_right_and_below_the_limit_whatever_is_told(steps: list[tuple[int, int, bool]]) -> None:
    """What is not told is found out before anybody is given up for it."""
    held = Held(100)
    clients = [Client(held) for _ in range(10)]
    for i, nbytes, is_told in steps:
        client = clients[i]
        if not client.is_open:
            continue
        grows, client.nbytes = nbytes > client.nbytes, nbytes
        is_little, were_open = sum(client.nbytes for client in clients) <= 75, [client.is_open for client in clients]
        if is_told or grows:  # the listener is told of everything but what the system has taken
            held.look(client)
            assert sum(client.nbytes for client in clients) <= held.nbytes <= 100
        assert not is_little or [client.is_open for client in clients] == were_open
    for client in clients:
        held.look(client)
    assert held.nbytes == sum(client.nbytes for client in clients)
