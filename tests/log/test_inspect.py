"""The read-only walk agrees with what an open would say, and never writes."""

from __future__ import annotations

import os
from pathlib import Path

from kivi.log import Record
from kivi.log.inspect import Damage, inspect, read_mark
from kivi.log.mark import MARK_NAME
from tests.log.faults import append, body, image, open_log, restore
from tests.log.test_damage import bounds, cut_at, flipped, only_segment, written


def damages(path: Path) -> list[tuple[str, int, Damage]]:
    return [
        (os.path.basename(file), offset, item) for file, offset, item in inspect(str(path)) if isinstance(item, Damage)
    ]


def test_a_whole_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = open_log(path)
    for i in range(500):
        append(log, body(i))
    for _ in range(2):  # in use, and closed
        found = [item for _, _, item in inspect(str(path))]
        assert [item.body for item in found if isinstance(item, Record)] == [body(i) for i in range(500)]
        assert damages(path) == []
        log.close()
    mark = read_mark(str(path))
    assert mark is not None
    assert (mark.sequence, mark.in_use) == (500, False)
    open_log(path).abandon()
    log = open_log(path)
    append(log, b"after a gap or not")
    log.truncate(300)
    log.abandon()
    log = open_log(path)
    append(log, b"after a gap")
    log.close()
    assert damages(path) == []


def test_damage_is_named_and_judged_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    made = written(tmp_path / "made")
    unmarked = written(tmp_path / "unmarked", unmarked=1)
    name = only_segment(made)
    start, _ = bounds(8)
    middle, _ = bounds(3)
    cases = [
        (flipped(made, name, middle + 40), name, middle, True),
        (flipped(unmarked, name, start + 20), name, start, False),
        (cut_at(made, name, start), name, start, True),
        (flipped(made, name, 30), name, 0, True),
        ({name: made[name]}, MARK_NAME, 0, True),
        ({MARK_NAME: made[MARK_NAME]}, name, 0, True),
    ]
    for files, blamed, offset, fatal in cases:
        restore(path, files)
        (found,) = damages(path)
        assert (*found[:2], found[2].fatal) == (blamed, offset, fatal)
        assert image(path) == files


def test_a_missing_segment_and_damage_in_two(tmp_path: Path) -> None:
    made = written(tmp_path / "made", count=2000)
    names = sorted(name for name in made if name != MARK_NAME)
    less = {name: data for name, data in made.items() if name != names[2]}
    restore(tmp_path / "log", less)
    assert [(file, item.fatal) for file, _, item in damages(tmp_path / "log")] == [(names[1], True)]
    restore(tmp_path / "log", flipped(flipped(made, names[1], 6000), names[4], 6000))
    assert {file for file, _, item in damages(tmp_path / "log") if item.fatal} == {names[1], names[4]}
