"""The one writer, in this process: when exports are answered, with commits held; and what it recalls of the table."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kivi_server.auth import Grant
from kivi_server.otlp.exports import Exports
from kivi_server.otlp.intake import Intake, Taken
from kivi_server.otlp.recall import recall
from kivi_server.otlp.spans import decode, gathered
from kivi_server.otlp.tables import ensure
from kivi_server.sessions import Sessions
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan

import kivi
from kivi.arrow.id_window import SLOTS, Window
from kivi.arrow.records import event_batch
from kivi.log import segmented
from kivi.log.memory import MemoryLog
from kivi.store.facade import Store
from tests.log.faults import FaultyFiles
from tests.otlp import Recorder
from tests.waiting import until


@contextlib.asynccontextmanager
async def intake(store: Store, *, retention_s: float = 0, drop_late: bool = False) -> AsyncIterator[Intake]:
    sessions = Sessions(store, "0")
    made = Intake(sessions, "invocations", retention_s, 900, 1_000, drop_late=drop_late)
    await made.open()
    writing = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        writing.cancel()
        sessions.close()


def put(to: Intake, spans: list[ReadableSpan]) -> asyncio.Task[Taken]:
    data = encode_spans(spans).SerializeToString()
    return asyncio.create_task(to.put(decode(data)[0]))


def rows(store: Store) -> int:
    return store.statistics(store.table("invocations")).get("rows", 0)


def run(story: Callable[[Store], Coroutine[Any, Any, None]], path: Path | None = None) -> None:
    with contextlib.closing(Store.open(None if path is None else str(path))) as store:
        asyncio.run(story(store))


def test_an_export_and_one_that_repeats_it_wait_for_the_same_outcome() -> None:
    spans = list(Recorder().spans(50))

    async def story(store: Store) -> None:
        async with intake(store) as to:
            store.committer.hold = lambda commit: True
            first = put(to, spans[:40])
            await until(lambda: store.committer.held)
            again, other = put(to, spans[20:45]), put(to, spans[30:])
            for _ in range(50):
                await asyncio.sleep(0.001)
                assert not (first.done() or again.done() or other.done())
            assert len(store.committer.held) == 1 and rows(store) == 0
            store.committer.hold = None
            store.committer.finish_held(store.committer.held[0])
            taken = [await first, await again, await other]
            assert [(each.stored, each.repeated) for each in taken] == [(40, 0), (5, 20), (5, 15)]
            assert rows(store) == 50
            assert to.stats()["otlp_commits"] == 2, "what waited went together"
            assert to.sessions.commits_in_flight == 0

    run(story)


def test_a_commit_that_is_given_up_is_made_again_with_what_it_brought() -> None:
    spans = list(Recorder().spans(10))

    async def story(store: Store) -> None:
        async with intake(store) as to:
            store.committer.hold = lambda commit: True
            first = put(to, spans)
            await until(lambda: store.committer.held)
            store.committer.hold = None
            store.committer.abort_held(store.committer.held[0])
            assert (await first).stored == 10 and rows(store) == 10
            assert (await put(to, spans)).repeated == 10 and rows(store) == 10

    run(story)


def test_somebody_who_stops_waiting_changes_nothing() -> None:
    spans = list(Recorder().spans(10))

    async def story(store: Store) -> None:
        async with intake(store) as to:
            store.committer.hold = lambda commit: True
            gone = put(to, spans[:5])
            await until(lambda: store.committer.held)
            waiting = put(to, spans[5:])
            await asyncio.sleep(0)
            for task in (gone, waiting):
                task.cancel()
            store.committer.hold = None
            store.committer.finish_held(store.committer.held[0])
            assert (await put(to, spans)).repeated == 10 and rows(store) == 10
            assert to.sessions.commits_in_flight == 0

    run(story)


def test_after_an_unknown_outcome_nothing_is_taken_until_the_store_is_opened_again(tmp_path: Path) -> None:
    spans = list(Recorder().spans(10))
    files = FaultyFiles()

    def fault(name: str, number: int) -> None:
        if name == "fdatasync":
            raise OSError(errno.EIO, "injected")

    async def fails(store: Store) -> None:
        async with intake(store) as to:
            assert (await put(to, spans[:5])).stored == 5
            files.fault = fault
            for _ in range(2):
                with pytest.raises(kivi.Unavailable):
                    await put(to, spans)
            files.fault = lambda name, number: None
            with pytest.raises(kivi.Unavailable):
                await put(to, spans[:5])  # not even what is known

    async def goes_on(store: Store) -> None:
        async with intake(store) as to:
            taken = await put(to, spans)
            assert taken.stored + taken.repeated == 10 and rows(store) == 10

    with mock.patch.object(segmented, "Files", return_value=files):
        store = Store.open(str(tmp_path))
    asyncio.run(fails(store))
    store.crash()
    run(goes_on, tmp_path)


def test_a_restart_recalls_what_was_committed_within_the_window_and_how_long_ago() -> None:
    began, passed, recorder = 1e9, [0.0], Recorder()
    now = [began]
    log = MemoryLog(clock=lambda: int(now[0] * 1e9))
    with contextlib.closing(Store.open(None, log=log, clock=lambda: now[0])) as store:
        table = ensure(store, "invocations", 0)
        ids = []
        for at in (0, 400, 800):
            now[0] = began + at
            spans, of = gathered([decode(encode_spans(recorder.spans(40)).SerializeToString())[0]])
            ids.append(of)
            place = {"namespace": "", "service": "", "route": "", "method": "", "ts": int(now[0] * 1e6)}
            alien = event_batch(table, [{**place, "trace_id": b"short"}, {**place, "trace_id": None}])
            txn = store.blind_transaction()
            for batch in (event_batch(table, spans), alien):
                txn.append(table, batch)
            store.commit_wait(txn)
            if at == 400:
                store.consolidate()
        now[0] = began + 1_000
        window = Window(900, 1_000, clock=lambda: passed[0])
        recall(store, table, window)

    def known() -> list[bool]:
        window.expire()
        assert all(each.all() or not each.any() for each in map(window.known, ids))
        return [bool(window.known(each).all()) for each in ids]

    assert known() == [False, True, True] and len(window) == 80
    passed[0] = 300  # their ages are 900 and 500 s now
    assert known() == [False, True, True]
    passed[0] = 300 + 2 * 900 / SLOTS + 1
    assert known() == [False, False, True] and len(window) == 40


def test_more_than_may_wait_is_refused() -> None:
    async def story(store: Store) -> None:
        sessions = Sessions(store, "0")
        exports = Exports(sessions, "invocations", 0, 900, 1_000, drop_late=False)
        large = bytes([0x0A, 0x80, 0x80, 0x80, 0x1E, *bytes(60 << 20)])  # a field of 60 MiB, if it were one
        client = sessions.clients.of(Grant(), "")
        first = asyncio.create_task(exports.take(large, decode, lambda table: True, client))
        await asyncio.sleep(0)
        with pytest.raises(kivi.ResourceExhausted) as error:
            await exports.take(bytes(5 << 20), decode, lambda table: True, client)
        assert error.value.details["retry_s"] > 0 and exports.stats()["otlp_waiting_bytes"] == len(large)
        with pytest.raises(kivi.InvalidArgument):
            await first
        with pytest.raises(kivi.InvalidArgument):
            await exports.take(bytes(5 << 20), decode, lambda table: True, client)
        assert exports.stats()["otlp_waiting_bytes"] == 0
        sessions.close()

    run(story)


@pytest.mark.parametrize("drop", [False, True])
def test_late_spans_are_refused_or_dropped_and_counted(drop: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """Each alone, by the floor that their commit meets, and one that is sent again while it is remembered once."""
    day, recorder = 86_400_000_000_000, Recorder()
    zero, floors = 20_000, [5, 6]  # in days, since 1970 and since then

    def spans(*days: int) -> list[ReadableSpan]:
        recorder.memory.clear()
        for i in days:
            end = (zero + i) * day
            recorder.span("/r", start=end - 5_000, end=end)
        return list(recorder.memory.get_finished_spans())

    def said(taken: Taken) -> tuple[int, int, int, int]:
        assert all("retention floor" in why for why in taken.rejected)
        return taken.stored, taken.dropped, taken.repeated, taken.rejected.total()

    def set_floor(store: Store, days: int) -> None:
        store.retention.set_floor(store.table("invocations"), (zero + days) * day // 1_000)

    def dropped(store: Store) -> int:
        return store.statistics(store.table("invocations")).get("late_dropped", 0)

    async def first(store: Store) -> list[ReadableSpan]:
        some, others = spans(1, 2, 5, 6, 7, 8), spans(4, 9)
        async with intake(store, retention_s=30 * 86_400, drop_late=drop) as to:
            set_floor(store, 3)
            submit = store.committer.submit

            def moved(*arguments: Any, **how: Any) -> Any:
                if floors:
                    set_floor(store, floors.pop(0))
                return submit(*arguments, **how)

            monkeypatch.setattr(store.committer, "submit", moved)
            taken = await asyncio.gather(put(to, some), put(to, others), put(to, others))
            assert not floors and rows(store) == 4
            repeated = await put(to, [*some, *others])
            if drop:
                assert [said(each) for each in taken] == [(3, 3, 0, 0), (1, 1, 0, 0), (0, 0, 2, 0)]
                assert said(repeated) == (0, 0, 8, 0)
            else:
                assert [said(each) for each in taken] == [(3, 0, 0, 3), (1, 0, 0, 1), (0, 0, 1, 1)]
                assert said(repeated) == (0, 0, 4, 4)
            stats = to.stats()
            assert (stats["otlp_spans_stored"], stats["otlp_spans_dropped"]) == (4, 4 if drop else 0)
            assert said(await put(to, spans(1, 2))) == ((0, 2, 0, 0) if drop else (0, 0, 0, 2))  # and none is stored
        return some

    async def second(store: Store, some: list[ReadableSpan]) -> None:
        async with intake(store, drop_late=drop) as to:
            assert said(await put(to, some)) == ((0, 3, 3, 0) if drop else (0, 0, 3, 3))

    path = str(tmp_path / "data")
    store = Store.open(path)
    some = asyncio.run(first(store))
    monkeypatch.undo()
    assert (rows(store), dropped(store)) == (4, 6 if drop else 0)
    store.crash()
    store = Store.open(path)
    assert (rows(store), dropped(store)) == (4, 6 if drop else 0)
    asyncio.run(second(store, some))
    assert (rows(store), dropped(store)) == (4, 9 if drop else 0)  # what was dropped is not in the table to be recalled
    store.close()
