"""A process that commits from several threads is killed; all that it had acknowledged must be there."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from kivi.log import Entry, Kind
from tests.log.faults import append, open_log


def child(path: str, seed: int) -> None:
    log = open_log(Path(path), segment_bytes=256 * 1024)
    out = threading.Lock()
    print("open", log.last, flush=True)

    def work(name: int) -> None:
        rng = random.Random(seed * 100 + name)
        while True:
            size = rng.choice([10, 100, 1000, 100_000])
            head = b"%d;" % size
            if name == 0:
                ticket, error = append(log, head + bytes(size), head + bytes(size))
                assert error is None
                with out:
                    print(ticket.last, flush=True)
                log.truncate(log.durable - 500)
                continue

            def done(error: BaseException | None) -> None:
                assert error is None
                with out:
                    print(log.durable, flush=True)

            with log.leading() if rng.random() < 0.5 else nullcontext():
                log.append([Entry(Kind.COMMIT, [head, bytes(size)])], done)
            time.sleep(0.0005)

    for name in range(4):
        threading.Thread(target=work, args=(name,), daemon=True).start()
    time.sleep(60)


@pytest.mark.timeout(120)
def test_every_acknowledged_record_is_there_after_a_kill(tmp_path: Path) -> None:
    path, rng = tmp_path / "log", random.Random(11)
    highest = 0
    for round_ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.log.test_kill", str(path), str(round_)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        process.stdout.readline()
        first = process.stdout.readline()  # something is acknowledged, however slow the disk is
        time.sleep(0.1 + rng.random() * 0.5)
        process.kill()
        lines = (first + process.communicate()[0]).split("\n")
        acknowledged = [int(line) for line in lines[:-1] if line.strip().isdigit()]
        assert acknowledged, lines[:5]
        log = open_log(path, segment_bytes=256 * 1024)
        assert log.last >= max(acknowledged) > highest
        highest = log.last
        sequences = []
        for record in log.replay(log.first - 1 if log.first == 1 else log._segments[0].header.previous):
            size, _, rest = bytes(record.body).partition(b";")
            assert int(size) == len(rest)
            sequences.append(record.sequence)
        assert sequences[-1] == log.last
        assert set(range(max(acknowledged[0], log.first), acknowledged[-1] + 1)) <= set(sequences)
        if round_ % 2:
            log.close()
        else:
            log.abandon()


if __name__ == "__main__":
    child(sys.argv[1], int(sys.argv[2]))
