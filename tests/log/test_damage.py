"""A damaged log at open: a torn tail behind the mark is cut, all else is refused by file and offset."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kivi.errors import DataLoss, FormatTooNew, InvalidArgument, StoreInUse
from kivi.log import Entry, Ticket
from kivi.log.files import Files
from kivi.log.mark import MARK_NAME, MarkFile
from kivi.log.records import BLOCK_BYTES, HEADER_BYTES, SegmentHeader
from kivi.log.recovery import Cut
from tests.log.faults import STORE, append, body, contents, image, open_log, restore

COUNT = 8
Image = dict[str, bytes]


def written(path: Path, count: int = COUNT, unmarked: int = 0) -> Image:
    """A log as a kill leaves it; with ``unmarked``, as if the last records had not been acknowledged yet."""
    log = open_log(path)
    mark = b""
    for i in range(count):
        if i == count - unmarked:
            mark = (path / MARK_NAME).read_bytes()
        assert append(log, body(i))[1] is None
    log.abandon()
    made = {name: data for name, data in image(path).items() if not name.endswith(".tmp")}
    if mark:
        made[MARK_NAME] = mark
    return made


def only_segment(made: Image) -> str:
    (name,) = [name for name in made if name != MARK_NAME]
    return name


def bounds(last: int, count: int = COUNT) -> tuple[int, int]:
    """Where record number ``last`` of a one-segment log begins and ends."""
    offset = BLOCK_BYTES
    for i in range(count):
        end = offset + HEADER_BYTES + len(body(i))
        if i + 1 == last:
            return offset, end
        offset = end
    raise AssertionError


def check_cut(path: Path, made: Image, kept: int) -> tuple[Cut, ...]:
    """It opens with ``kept`` records, twice, the second time without changing a byte, and goes on."""
    restore(path, made)
    log = open_log(path)
    cut = log.recovered.cut
    assert contents(log) == [body(i) for i in range(kept)]
    log.abandon()
    before = image(path)
    log = open_log(path)
    assert (log.recovered.cut, log.recovered.rewritten, log.last) == ((), 0, kept)
    log.abandon()
    after = {name: data for name, data in image(path).items() if not name.endswith(".tmp")}
    assert after == {name: data for name, data in before.items() if not name.endswith(".tmp")}
    log = open_log(path)
    ticket, error = append(log, b"next")
    assert error is None
    assert ticket.first > COUNT
    assert contents(log) == [*(body(i) for i in range(kept)), b"next"]
    log.close()
    return cut


def check_refused(path: Path, made: Image, name: str, offset: int | None = None) -> None:
    """It does not open, names the file (and offset), and changes nothing."""
    restore(path, made)
    for _ in range(2):
        with pytest.raises(DataLoss) as caught:
            open_log(path)
        assert caught.value.path == str(path / name)
        assert str(path / name) in caught.value.message
        if offset is not None:
            assert caught.value.offset == offset
    assert image(path) == made


def cut_at(made: Image, name: str, offset: int, zeros: int = 0) -> Image:
    return {**made, name: made[name][:offset].ljust(offset + zeros, b"\0")}


def flipped(made: Image, name: str, offset: int, bit: int = 1) -> Image:
    data = bytearray(made[name])
    data[offset] ^= bit
    return {**made, name: bytes(data)}


@pytest.mark.parametrize("zeros", [0, 5000])
def test_a_torn_tail_is_cut_at_every_byte(tmp_path: Path, zeros: int) -> None:
    made = written(tmp_path / "made", unmarked=1)
    name = only_segment(made)
    start, end = bounds(COUNT)
    for offset in range(start, end + 1):
        cut = check_cut(tmp_path / "log", cut_at(made, name, offset, zeros), COUNT - (offset < end))
        if start < offset < end and any(made[name][start:offset]):  # zeros are what nothing was written to
            (report,) = cut
            assert (report.path, report.offset) == (str(tmp_path / "log" / name), start)
            assert report.bytes <= offset - start
        else:
            assert cut == ()


@pytest.mark.parametrize("zeros", [0, 5000])
def test_the_same_tear_in_an_acknowledged_record_is_refused(tmp_path: Path, zeros: int) -> None:
    made = written(tmp_path / "made")
    name = only_segment(made)
    start, end = bounds(COUNT)
    for offset in range(start, end):
        check_refused(tmp_path / "log", cut_at(made, name, offset, zeros), name, start)


def test_a_flipped_bit_anywhere_in_an_acknowledged_log_is_refused(tmp_path: Path) -> None:
    made = written(tmp_path / "made")
    name = only_segment(made)
    for offset in [*range(80), 2000, BLOCK_BYTES - 1]:
        check_refused(tmp_path / "log", flipped(made, name, offset), name, 0)
    for number in (1, 4, COUNT):
        start, end = bounds(number)
        for offset in range(start, end):
            check_refused(tmp_path / "log", flipped(made, name, offset, 1 << offset % 8), name, start)


def test_a_flipped_bit_behind_the_mark_is_cut(tmp_path: Path) -> None:
    made = written(tmp_path / "made", unmarked=3)
    name = only_segment(made)
    start, end = bounds(COUNT - 1)
    for offset in range(start, end):
        (report,) = check_cut(tmp_path / "log", flipped(made, name, offset, 128), COUNT - 2)
        assert report.offset == start
        assert report.bytes == bounds(COUNT)[1] - start


def test_garbage_behind_the_end_is_cut_and_reported(tmp_path: Path) -> None:
    made = written(tmp_path / "made")
    name = only_segment(made)
    end = bounds(COUNT)[1]
    made[name] = made[name][:end] + bytes(6000) + b"garbage" + bytes(3000)
    (report,) = check_cut(tmp_path / "log", made, COUNT)
    assert (report.offset, report.bytes) == (end, 6007)


def test_a_cut_at_a_record_boundary_is_refused(tmp_path: Path) -> None:
    made = written(tmp_path / "made")
    name = only_segment(made)
    for number in range(1, COUNT + 1):
        start = bounds(number)[0]
        for zeros in (0, 5000):
            check_refused(tmp_path / "log", cut_at(made, name, start, zeros), name, start)


def test_valid_records_behind_the_mark_are_rewritten_and_kept(tmp_path: Path) -> None:
    for unmarked in range(1, COUNT + 1):
        path = tmp_path / f"{unmarked}"
        made = written(path, unmarked=unmarked)
        restore(path, made)
        log = open_log(path)
        assert log.recovered.rewritten == unmarked
        assert log.recovered.cut == ()
        assert contents(log) == [body(i) for i in range(COUNT)]
        log.abandon()
        assert check_cut(path, made, COUNT) == ()


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    made = written(tmp_path / "made", count=2000)
    names = sorted(name for name in made if name != MARK_NAME)
    assert len(names) > 8
    for i in (0, 1, len(names) // 2, len(names) - 2, len(names) - 1):
        less = {name: data for name, data in made.items() if name != names[i]}
        blamed = names[0] if i == 0 else names[i - 1]
        check_refused(tmp_path / "log", less, blamed)
    check_refused(tmp_path / "log", {MARK_NAME: made[MARK_NAME]}, names[0])


def test_an_old_segment_in_place_of_another_is_refused(tmp_path: Path) -> None:
    made = written(tmp_path / "made", count=2000)
    names = sorted(name for name in made if name != MARK_NAME)
    check_refused(tmp_path / "log", {**made, names[3]: made[names[2]]}, names[3])
    other = written(tmp_path / "other", count=2001)  # the same bodies at other times
    if names[3] in other:
        swapped = {**made, names[3]: other[names[3]]}
        restore(tmp_path / "log", swapped)
        with pytest.raises(DataLoss):
            open_log(tmp_path / "log")


def test_damage_in_an_old_segment_is_refused(tmp_path: Path) -> None:
    made = written(tmp_path / "made", count=2000, unmarked=1999)
    names = sorted(name for name in made if name != MARK_NAME)
    for name in names[:-1]:
        check_refused(tmp_path / "log", flipped(made, name, 6000), name)
        check_refused(tmp_path / "log", cut_at(made, name, 9000), name)


def test_the_mark(tmp_path: Path) -> None:
    made = written(tmp_path / "made")
    without = {name: data for name, data in made.items() if name != MARK_NAME}
    check_refused(tmp_path / "log", without, MARK_NAME)
    check_refused(tmp_path / "log", {**made, MARK_NAME: b""}, MARK_NAME)
    both = flipped(flipped(made, MARK_NAME, 20), MARK_NAME, 4096 + 20)
    check_refused(tmp_path / "log", both, MARK_NAME)
    for slot in (0, 4096):
        for offset in range(72):
            check_cut(tmp_path / "log", flipped(made, MARK_NAME, slot + offset), COUNT)


def test_a_truncation_in_the_middle_of_a_roll_is_not_undone_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roll's mark named the first segment that it had seen a moment before; after a kill the log did not open."""
    log = open_log(tmp_path / "log")
    real = MarkFile.put
    truncated: list[int] = []

    def put(self: MarkFile, **fields: Any) -> None:
        if fields.get("in_use") and log.durable > 50:  # a roll
            thread = threading.Thread(target=log.truncate, args=(log.durable,))
            thread.start()
            thread.join()
            truncated.append(log.first)
        real(self, **fields)

    monkeypatch.setattr(MarkFile, "put", put)
    for i in range(200):
        append(log, body(i) * 20)
    assert len(set(truncated)) > 3
    last = log.last
    log.abandon()
    again = open_log(tmp_path / "log")
    assert again.last == last
    again.close()


def test_a_log_that_has_been_used_for_another_store(tmp_path: Path) -> None:
    from kivi.log.segmented import SegmentedLog

    open_log(tmp_path / "log").close()
    with pytest.raises(DataLoss):
        SegmentedLog(str(tmp_path / "log"), store_id=b"f" * 16)


def test_a_log_that_starts_after_a_number(tmp_path: Path) -> None:
    from kivi.log.segmented import SegmentedLog

    path = tmp_path / "log"
    SegmentedLog.start_after(str(path), store_id=STORE, last=700, time_us=5)
    with pytest.raises(InvalidArgument):
        SegmentedLog.start_after(str(path), store_id=STORE, last=700, time_us=5)
    for _ in range(2):
        log = open_log(path, clock=lambda: 0)
        assert (log.last, log.durable, log.first, log.last_time_us) == (700, 700, 701, 5)
        assert list(log.replay(700)) == []
        with pytest.raises(DataLoss):
            log.replay(699)
        log.abandon()
    log = open_log(path, clock=lambda: 0)
    assert append(log, b"x")[0] == Ticket(701, 701, 5)
    log.abandon()
    made = {name: data for name, data in image(path).items() if not name.endswith(".tmp")}
    log = open_log(path)
    assert contents(log, 700) == [b"x"]
    log.close()
    (name,) = [name for name in made if name != MARK_NAME]
    check_refused(path, {MARK_NAME: made[MARK_NAME]}, name)


def test_a_newer_format_is_not_damage(tmp_path: Path) -> None:
    made = written(tmp_path / "made")
    name = only_segment(made)
    header = SegmentHeader(STORE, 1, 0, 0, 0, version=2)
    restore(tmp_path / "log", {**made, name: header.pack() + made[name][BLOCK_BYTES:]})
    with pytest.raises(FormatTooNew):
        open_log(tmp_path / "log")


def test_a_log_in_use(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    with pytest.raises(StoreInUse):
        open_log(tmp_path / "log")
    log.close()
    open_log(tmp_path / "log").close()


def test_damage_that_comes_while_the_log_is_open(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    for i in range(COUNT):
        append(log, body(i))
    (path,) = (tmp_path / "log").glob("*.log")
    start, end = bounds(5)
    with path.open("r+b") as file:
        file.seek(end - 1)
        file.write(b"?")
    for call in (lambda: log.read(5), lambda: list(log.replay(0)), lambda: list(log.replay(4))):
        with pytest.raises(DataLoss) as caught:
            call()
        assert caught.value.offset == start
    assert bytes(log.read(4).body) == body(3)
    log.close()


def test_a_restart_after_a_crash_never_uses_a_number_again(tmp_path: Path) -> None:
    """A number that was in flight when the process died is not given to another record."""

    class Lost(Files):
        def pwritev(self, fd: int, buffers: object, offset: int) -> int:
            raise OSError("gone")

    used: set[int] = set()
    log = open_log(tmp_path / "log")
    for _ in range(4):
        used |= set(range(append(log, b"a", b"b")[0].first, log.last + 1))
        log._files = Lost()
        ticket = log.append([Entry(log.read(1).kind, [b"lost"])] * 5, lambda error: None)
        lost = set(range(ticket.first, ticket.last + 1))
        assert not lost & used
        used |= lost
        log.abandon()
        log = open_log(tmp_path / "log")
    log.close()
