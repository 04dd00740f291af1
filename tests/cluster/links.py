"""Links between processes on loopback that can be cut: an asyncio proxy with one listener for each.

::

    node 1 ----- ("node-1", "n0") -----> nats-server n0      one link for each pair, and so one address
    n1, n2 ----- (whoever, "n0") ------> nats-server n0      one address for all peers, who say their names

A link that is *cut silently* takes no more bytes, and loses none: what was under way arrives when it is mended, as TCP
has it. One that is *reset* ends every connection, and each new one, until it is mended.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["Links"]

_NAMED = re.compile(rb'"server_name":"([^"]+)"')
_CHUNK = 1 << 18


@dataclass(eq=False)
class _Connection:
    """``source`` is "" until whoever connected has said its name."""

    source: str
    target: str
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def end(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Links:
    """The proxy, in a thread of its own while this is entered."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._cut: Callable[[str, str], bool] = lambda source, target: False
        self._resets = False
        self._mended = asyncio.Event()
        self._mended.set()
        self._open: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []

    def __enter__(self) -> Links:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        if carrying := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in carrying:
                task.cancel()
            await asyncio.wait(carrying)

    def link(self, source: str, target: str, address: str) -> str:
        """Where ``source`` reaches ``target``, which listens at an address. ``source`` is "" for several."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._accept(_Connection(source, target, [writer]), reader, address)

        async def listen() -> str:
            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            self._servers.append(server)
            return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

        return asyncio.run_coroutine_threadsafe(listen(), self._loop).result(10)

    @contextlib.contextmanager
    def cut(self, between: Callable[[str, str], bool], *, resets: bool = False) -> Iterator[None]:
        """Cuts all links for which ``between(source, target)`` holds, in both directions, until the end."""
        asyncio.run_coroutine_threadsafe(self._begin(between, resets), self._loop).result(10)
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._begin(lambda source, target: False, False), self._loop).result(10)

    async def _begin(self, between: Callable[[str, str], bool], resets: bool) -> None:
        self._cut, self._resets = between, resets
        for connection in self._open:
            if resets and self._is_cut(connection):
                connection.end()
        self._mended.set()  # those of another cut; who is cut now waits again
        self._mended = asyncio.Event()

    def _is_cut(self, connection: _Connection) -> bool:
        return self._cut(connection.source, connection.target)

    async def _accept(self, connection: _Connection, reader: asyncio.StreamReader, address: str) -> None:
        self._open.add(connection)
        try:
            host, _, port = address.rpartition(":")
            there, away = await asyncio.open_connection(host, int(port))
            connection.writers.append(away)
            await asyncio.gather(
                self._carry(connection, reader, away, names=not connection.source),
                self._carry(connection, there, connection.writers[0]),
            )
        except (OSError, EOFError):
            pass
        finally:
            connection.end()
            self._open.discard(connection)

    async def _carry(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        names: bool = False,
    ) -> None:
        while data := await reader.read(_CHUNK):
            if names and not connection.source and (found := _NAMED.search(data)):
                connection.source = found[1].decode()
            while self._is_cut(connection):
                if self._resets:
                    raise ConnectionResetError
                await self._mended.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # one end has closed it; so does the other
