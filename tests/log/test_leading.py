"""A thread that writes and syncs by itself what it appends: when it does, when a writer does, and in which order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from kivi.log import Entry, Kind, LogFailed
from kivi.log.memory import MemoryLog
from kivi.log.segmented import SegmentedLog
from tests.log.faults import FaultyFiles, append, contents, is_now_and_then, open_log, settled
from tests.waiting import wait_until


class Slow(FaultyFiles):
    """Each sync waits for as long as the ``gate`` is closed, and ``takes`` some time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.takes = 0.0
        self.synced: list[tuple[int, int]] = []  # thread and file

    def fdatasync(self, fd: int) -> None:
        if is_now_and_then():
            return super().fdatasync(fd)
        self.synced.append((threading.get_ident(), fd))
        self.inside.set()
        assert self.gate.wait(20)
        time.sleep(self.takes)
        return super().fdatasync(fd)


@pytest.fixture
def files() -> Slow:
    return Slow()


@pytest.fixture
def log(tmp_path: Path, files: Slow) -> Iterator[SegmentedLog]:
    """With a record, and so a segment that is written to; idle."""
    made = open_log(tmp_path / "log", files, segment_bytes=4 << 20)
    append(made, b"first")
    settled(made)
    yield made
    files.gate.set()
    made.close()


Heard = list[tuple[str, int, BaseException | None]]


def add(log: SegmentedLog, name: str, heard: Heard) -> None:
    log.append([Entry(Kind.COMMIT, [name.encode()])], lambda error: heard.append((name, threading.get_ident(), error)))


def eventually(heard: Heard, count: int) -> Heard:
    wait_until(lambda: len(heard) >= count, pause_s=0.001)
    return heard


def test_it_writes_and_syncs_what_it_has_appended_and_says_so_as_it_leaves(log):
    heard: Heard = []
    me, before = threading.get_ident(), log.stats()["syncs"]
    with log.leading():
        add(log, "a", heard)
        add(log, "b", heard)
        time.sleep(0.05)
        assert heard == []
        assert log.durable == 1
    assert heard == [("a", me, None), ("b", me, None)]
    assert log.durable == 3
    assert log.stats()["syncs"] == before + 1
    assert contents(log) == [b"first", b"a", b"b"]


def test_without_an_append_there_is_nothing_to_sync(log):
    before = log.stats()["syncs"]
    with log.leading():
        pass
    assert log.stats()["syncs"] == before


def test_what_was_appended_is_synced_even_if_the_rest_fails(log):
    heard: Heard = []
    with pytest.raises(ZeroDivisionError), log.leading():
        add(log, "a", heard)
        raise ZeroDivisionError
    assert heard == [("a", threading.get_ident(), None)]


def test_the_first_record_of_a_segment_is_a_writers(tmp_path):
    """Making a segment takes several syncs."""
    log = open_log(tmp_path / "log")
    heard: Heard = []
    with log.leading():
        add(log, "a", heard)
    ((_, thread, error),) = eventually(heard, 1)
    assert (thread != threading.get_ident(), error) == (True, None)
    log.close()


def test_while_something_is_in_the_air_a_writer_writes(log, files):
    """Else its records would complete before those, or it would wait for them."""
    heard: Heard = []
    files.inside.clear()
    files.gate.clear()
    add(log, "slow", heard)
    assert files.inside.wait(10)
    with log.leading():
        add(log, "mine", heard)
    assert heard == []
    files.gate.set()
    (slow, _, none), (mine, thread, error) = eventually(heard, 2)
    assert (slow, mine, none, error) == ("slow", "mine", None, None)
    assert thread != threading.get_ident()


def test_what_others_append_meanwhile_is_not_its_own(log):
    """It may be large; and a writer was woken for it, who takes everything."""
    heard: Heard = []
    with log.leading():
        add(log, "mine", heard)
        other = threading.Thread(target=add, args=(log, "others", heard))
        other.start()
        other.join()
        eventually(heard, 2)  # it does not have to leave first
    assert [name for name, _, _ in heard] == ["mine", "others"]
    assert threading.get_ident() not in {thread for _, thread, _ in heard}


def test_what_comes_in_while_it_syncs_is_a_writers_and_completes_later(log, files):
    heard: Heard = []
    files.inside.clear()
    files.gate.clear()

    def lead() -> None:
        with log.leading():
            add(log, "led", heard)

    leader = threading.Thread(target=lead)
    leader.start()
    assert files.inside.wait(10)
    add(log, "later", heard)
    time.sleep(0.05)
    assert heard == []
    files.gate.set()
    leader.join()
    assert [name for name, _, _ in eventually(heard, 2)] == ["led", "later"]


def test_closing_waits_for_it(tmp_path, files):
    log = open_log(tmp_path / "log", files, segment_bytes=4 << 20)
    append(log, b"first")
    settled(log)
    heard: Heard = []
    files.inside.clear()
    files.gate.clear()

    def lead() -> None:
        with log.leading():
            add(log, "led", heard)

    leader, closer = threading.Thread(target=lead), threading.Thread(target=log.close)
    leader.start()
    assert files.inside.wait(10)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    files.gate.set()
    closer.join()
    leader.join()
    assert [error for _, _, error in heard] == [None]
    log = open_log(tmp_path / "log")
    assert contents(log) == [b"first", b"led"]
    log.close()


def test_a_sync_that_fails_under_it_fails_the_log(tmp_path):
    def fault(name: str, number: int) -> None:
        if name == "fdatasync" and failing.is_set():
            raise OSError("injected")

    failing = threading.Event()
    log = open_log(tmp_path / "log", FaultyFiles(fault))
    append(log, b"first")
    settled(log)
    failing.set()
    heard: Heard = []
    with log.leading():
        add(log, "lost", heard)
        add(log, "too", heard)
    assert [(name, type(error)) for name, _, error in heard] == [("lost", LogFailed), ("too", LogFailed)]
    with pytest.raises(LogFailed), log.leading():
        add(log, "never", heard)
    log.close()


@pytest.mark.parametrize("where", ["pwritev", "fdatasync"])
def test_an_interrupt_while_it_writes_fails_the_log_and_leaves_nobody_waiting(tmp_path, where):
    """It may be the thread of a program's user. How far the record came is not known, as after an error."""

    def fault(name: str, number: int) -> None:
        if name == where and interrupting.is_set():
            interrupting.clear()
            raise KeyboardInterrupt

    interrupting = threading.Event()
    log = open_log(tmp_path / "log", FaultyFiles(fault))
    append(log, b"first")
    settled(log)
    interrupting.set()
    heard: Heard = []
    with pytest.raises(KeyboardInterrupt), log.leading():
        add(log, "unknown", heard)
        add(log, "too", heard)
    assert [(name, type(error)) for name, _, error in heard] == [("unknown", LogFailed), ("too", LogFailed)]
    with pytest.raises(LogFailed, match="KeyboardInterrupt"):
        add(log, "never", heard)
    log.close()


def test_an_interrupt_of_a_callback_fails_the_log_and_the_others_are_told(tmp_path):
    """What that callback has left undone nobody knows: its commit would be waited for for ever."""
    log = open_log(tmp_path / "log")
    append(log, b"first")
    settled(log)
    heard: Heard = []

    def interrupted(error: BaseException | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), log.leading():
        log.append([Entry(Kind.COMMIT, [b"led"])], interrupted)
        add(log, "too", heard)
    assert [(name, error) for name, _, error in heard] == [("too", None)]
    with pytest.raises(LogFailed):
        add(log, "never", heard)
    log.close()
    log = open_log(tmp_path / "log")
    assert contents(log) == [b"first", b"led", b"too"]
    log.close()


def test_what_interrupts_the_writer_is_told_to_those_behind(log, files):
    files.gate.clear()
    files.inside.clear()
    heard: Heard = []

    def interrupted(error: BaseException | None) -> None:
        raise SystemExit

    log.append([Entry(Kind.COMMIT, [b"written"])], interrupted)
    assert files.inside.wait(10)
    add(log, "behind", heard)
    files.gate.set()
    ((name, _, error),) = eventually(heard, 1)
    assert (name, type(error)) == ("behind", LogFailed)


def test_it_is_quick_as_long_as_syncs_are(log, files):
    for _ in range(50):  # whatever the disk of the tests took until now
        append(log, b"x", leading=True)
        log._sync_s = 0.0
    settled(log)
    assert log.is_quick()
    files.takes = 0.05
    append(log, b"slow")
    settled(log)
    files.takes = 0.0
    assert not log.is_quick()
    log._sync_s = 0.0
    files.gate.clear()
    files.inside.clear()
    heard: Heard = []
    add(log, "in the air", heard)
    assert files.inside.wait(10)
    assert not log.is_quick()
    files.gate.set()
    eventually(heard, 1)


def test_it_is_not_quick_where_a_segment_is_about_to_end(tmp_path):
    log = open_log(tmp_path / "log", segment_bytes=64 << 10)
    append(log, b"x")
    settled(log)
    log._sync_s = 0.0
    assert not log.is_quick()
    log.close()


def test_a_log_in_memory_takes_the_hint_and_is_never_said_to_be_quick():
    log = MemoryLog()
    with log.leading():
        pass
    assert not log.is_quick()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("takes", [0.0, 0.003], ids=["as quick as the disk", "a slow disk"])
def test_many_threads_some_of_them_leading_complete_once_each_and_in_log_order(tmp_path, files, takes):
    files.takes = takes
    log = open_log(tmp_path / "log", files, segment_bytes=32 * 1024)
    completed: list[bytes] = []
    sent: set[bytes] = set()
    led: list[bytes] = []

    def add(body: bytes) -> None:
        me = threading.get_ident()
        sent.add(body)

        def done(error: BaseException | None) -> None:
            assert error is None
            completed.append(body)
            if threading.get_ident() == me:
                led.append(body)

        log.append([Entry(Kind.COMMIT, [body])], done)

    def rest() -> None:
        """What all wait for now and then: on a slow disk something is in the air at all other times."""
        settled(log)
        with log.leading():
            add(b"%d;" % len(sent))

    together = threading.Barrier(5, rest)

    def work(name: int) -> None:
        rng = random.Random(name)
        for i in range(300):
            ways: list[Callable[[], AbstractContextManager[object]]] = [log.leading, nullcontext]
            way = rng.choice(ways)
            with way():
                for j in range(rng.randrange(1, 4)):
                    add(b"%d %d %d;" % (name, i, j) * rng.choice([1, 1, 20]))
            if rng.random() < 0.1:
                time.sleep(0.002)
            if i % 20 == 19:
                together.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    log = open_log(tmp_path / "log")
    assert contents(log) == completed  # in log order, once each
    assert set(completed) == sent
    assert led
    log.close()
