"""A process that writes numbered batches is killed; what is left must be exactly a prefix of them.

Batch n puts ``n`` in a counter, in a slot that later batches overwrite, and in a key of its own, and
deletes the key of batch n - 50. Some batches carry a large value, which goes to a blob file. Small
memtables make RocksDB flush all the time by itself. ``kill -9`` loses no page cache, so this proves
the *prefix* (the order in which memtables reach files), not that `flush` syncs.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kivi.engine import WriteBatch
from kivi.engine.rocks import RocksEngine

SLOTS = 97
KEPT = 50
BLOB_BYTES = 70_000


def numbered(n: int) -> WriteBatch:
    made = WriteBatch()
    made.put(b"count", b"%d" % n)
    made.put(b"slot%02d" % (n % SLOTS), b"%d" % n)
    made.put(b"key%09d" % n, random.Random(n).randbytes(200))
    if n % 7 == 0:
        made.put(b"blob%09d" % n, random.Random(n).randbytes(1000) * (BLOB_BYTES // 1000))
    made.delete(b"key%09d" % (n - KEPT))
    made.delete(b"blob%09d" % (n - KEPT))
    return made


def prefix(n: int) -> dict[bytes, bytes]:
    state: dict[bytes, bytes] = {}
    for i in range(max(1, n - SLOTS - KEPT), n + 1):
        for key, value in numbered(i):
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
    return state


def child(path: str) -> None:
    engine = RocksEngine(path, memtable_bytes=256 * 1024)
    found = engine.get(b"count")
    n = int(found) if found else 0
    if n % 3 == 0:
        threading.Thread(target=flush_always, args=(engine,), daemon=True).start()
    while True:
        n += 1
        engine.write(numbered(n))
        if n % 100 == 0:
            engine.flush()
            print(n, flush=True)


def flush_always(engine: RocksEngine) -> None:
    while True:
        engine.flush()


@pytest.mark.timeout(120)
def test_kill_leaves_exactly_a_prefix(tmp_path: Path) -> None:
    path, rng, flushed = str(tmp_path / "engine"), random.Random(3), 0
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.test_crash", path],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.random() * 0.5)
        process.kill()
        for line in process.communicate()[0].split("\n")[:-1]:
            flushed = int(line)
        engine = RocksEngine(path, memtable_bytes=256 * 1024)
        found = engine.get(b"count")
        n = int(found) if found else 0
        assert n >= flushed
        assert dict(engine.scan(b"", None)) == prefix(n)
        engine.close()


if __name__ == "__main__":
    child(sys.argv[1])
