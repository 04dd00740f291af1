"""One suite, three databases: embedded, the client for threads, the client for asyncio.

``db`` is a database with nothing in it. The asyncio client is driven by a loop in the test's own
thread: ``Driven`` turns every awaitable, asynchronous
context manager and iterator into its plain form, and adds nothing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import kivi
from tests.serverproc import ServerProcess
from tests.waiting import PATIENCE_S


class Driven:
    """An object of the asyncio client, driven to completion call by call."""

    def __init__(self, target: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._target, self._loop = target, loop

    def _finish(self, value: Any) -> Any:
        if inspect.isawaitable(value):

            async def wait() -> Any:
                return await value

            value = self._loop.run_until_complete(wait())
        if hasattr(value, "__anext__"):
            return self._iterate(value)
        if type(value).__module__.startswith("kivi.aio"):
            return Driven(value, self._loop)
        return value

    def _iterate(self, values: Any) -> Iterator[Any]:
        while True:
            try:
                yield self._loop.run_until_complete(values.__anext__())
            except StopAsyncIteration:
                return

    def __getattr__(self, name: str) -> Any:
        if name == "start_ts":  # an attribute cannot be awaited: before the first answer, started() asks for it
            return self._finish(self._target.started())
        value = getattr(self._target, name)
        if name == "run":
            return lambda function, **how: self._run(function, **how)
        if callable(value):
            return lambda *args, **kwargs: self._finish(value(*args, **kwargs))
        return self._finish(value)

    def _run(self, function: Any, **how: Any) -> Any:
        """``db.run(fn)``: the function's calls happen inside the loop, so it is written as the suite writes it and
        replayed as a coroutine that awaits each of them in a worker."""
        target, loop = self._target, self._loop

        async def call() -> Any:
            async def body(tx: Any) -> Any:
                return await asyncio.to_thread(function, _Threaded(tx, loop))

            return await target.run(body, **how)

        return loop.run_until_complete(call())

    def __enter__(self) -> Driven:
        entered = self._loop.run_until_complete(self._target.__aenter__())
        return Driven(entered, self._loop)

    def __exit__(self, *exc: Any) -> Any:
        return self._loop.run_until_complete(self._target.__aexit__(*exc))


class _Threaded:
    """A transaction inside ``run``: each call is made on the loop from the worker thread."""

    def __init__(self, tx: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._tx, self._loop = tx, loop

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            async def wait() -> Any:
                value = getattr(self._tx, name)(*args, **kwargs)
                return await value if inspect.isawaitable(value) else value

            return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(60)

        return call


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("api") / "data") as running:
        yield running


@pytest.fixture(scope="package")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One loop for all: grpc.aio's poller belongs to the first loop that uses it."""
    made = asyncio.new_event_loop()
    yield made
    made.close()


def _clean(db: Any) -> None:
    for rule in db.rules():
        db.drop_rule(rule["name"])
    described = [db.describe(name) for name in db.tables()]
    for found in sorted(described, key=lambda found: ("source" not in found, -found["id"])):  # before their sources
        db.drop(found["name"])


@pytest.fixture(params=["memory", "sync", "asyncio"])
def db(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What is embedded is in memory; the store of the server, which the others ask, is on disk."""
    if request.param == "memory":
        with kivi.open() as embedded:
            yield embedded
    elif request.param == "sync":
        with request.getfixturevalue("server").connect() as client:
            _clean(client)
            yield client
    else:
        loop = request.getfixturevalue("loop")
        driven = Driven(
            loop.run_until_complete(kivi.aio.connect(request.getfixturevalue("server").endpoint, timeout=PATIENCE_S)),
            loop,
        )
        _clean(driven)
        yield driven
        driven.close()
