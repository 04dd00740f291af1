"""The crash of the memory engine: the state of the last flush, plus a prefix of the batches since."""

from __future__ import annotations

import pytest

from kivi.engine import WriteBatch
from kivi.engine.memory import MemoryEngine


def write(engine: MemoryEngine, number: int) -> None:
    made = WriteBatch()
    made.put(b"number", b"%d" % number)
    made.put(b"%d" % number, b"")
    made.delete(b"%d" % (number - 2))
    engine.write(made)


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 99])
def test_crash_keeps_a_prefix(keep: int) -> None:
    engine, expected = MemoryEngine(), MemoryEngine()
    for number in range(5):
        write(engine, number)
    engine.flush()
    for number in range(5, 8):
        write(engine, number)
    engine.crash(keep)
    for number in range(min(5 + keep, 8)):
        write(expected, number)
    assert list(engine.scan(b"", None)) == list(expected.scan(b"", None))
    engine.crash()  # what survived a crash is on disk
    assert list(engine.scan(b"", None)) == list(expected.scan(b"", None))
    write(engine, 9)
    engine.crash()
    assert list(engine.scan(b"", None)) == list(expected.scan(b"", None))
